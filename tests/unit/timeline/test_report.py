"""Recording spans of a process, and what `daso trace` makes of a recording."""

import json
import os
import threading
import time

import pytest
from jobs import typed

from daso import trace
from daso.cli.trace import newest
from daso.errors import DataError
from daso.timeline.chrome import chrome_events
from daso.timeline.report import late_ranks, read_timeline, shares
from daso.trace import (
    EXCHANGE,
    FORWARD,
    KINDS,
    MERGE,
    SEND,
    STEP,
    WAIT_INTER_NODE,
    WAIT_INTRA_NODE,
    Recorder,
)


@pytest.fixture
def recorder():
    made = Recorder(capacity=8)
    trace.start(made)
    yield made
    trace.stop()


def test_nothing_is_kept_where_nobody_records():
    trace.record(STEP, 1.0)
    made = Recorder(4)
    assert made.take() == ([], 0)


def test_spans_of_all_threads_are_kept_in_order(recorder):
    begins = time.perf_counter()
    trace.record(SEND, begins, key=3)
    other = threading.Thread(target=trace.record, args=(EXCHANGE, begins), name="other")
    other.start()
    other.join()
    trace.record(MERGE, begins, key=3, nbytes=70)
    spans, lost = recorder.take()
    assert [(span.kind, span.thread, span.key, span.nbytes) for span in spans] == [
        (SEND, 0, 3, 0),
        (EXCHANGE, 1, -1, 0),
        (MERGE, 0, 3, 70),
    ]
    assert all(span.begins == begins <= span.ends for span in spans)
    assert recorder.threads == [threading.current_thread().name, "other"]
    assert lost == 0
    assert recorder.take() == ([], 0)


def test_where_there_is_no_room_the_oldest_are_lost_and_counted(recorder):
    for key in range(11):
        trace.record(STEP, 1.0, key=key)
    spans, lost = recorder.take()
    assert [span.key for span in spans] == list(range(3, 11))
    assert lost == 3


def test_threads_do_not_lose_each_others_spans():
    made = Recorder(capacity=40_000)

    def add(number):
        for key in range(10_000):
            made.add(STEP, 1.0, 2.0, key, number)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    spans, lost = made.take()
    assert (len(spans), lost) == (40_000, 0)
    for number in range(4):
        assert [s.key for s in spans if s.nbytes == number] == list(range(10_000))


# --- what a recording shows -----------------------------------------------------------------------


def written(tmp_path, *lines, ranks=2, half=""):
    head = {
        "schema": 1,
        "kinds": KINDS,
        "ranks": [{"node": rank, "host": f"host{rank}"} for rank in range(ranks)],
    }
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)) + half)
    return path


def of_rank(rank, *spans, threads=("MainThread", "daso-exchange"), since=0.0, lost=0):
    spans = [list(span) + [0] * (6 - len(span)) for span in spans]
    return {"rank": rank, "since": since, "threads": threads, "lost": lost, "spans": spans}


def clocks(ahead, trip=1e-6):
    """Say that rank 1's clock is so many seconds ahead of rank 0's."""
    return {"clocks": [[0.0, ahead, trip], [ahead, -ahead, trip]]}


def test_a_step_is_parted_into_computing_waiting_and_what_went_on_beside(tmp_path):
    spans = [
        (STEP, 0, 1, 0.0, 1.0),
        (STEP, 0, 2, 1.0, 3.0),
        (WAIT_INTRA_NODE, 0, -1, 0.5, 0.7),
        (WAIT_INTER_NODE, 0, 1, 2.0, 2.4),
        (SEND, 0, 1, 1.0, 1.1),
        (MERGE, 0, 1, 2.4, 2.5),
        (EXCHANGE, 1, 1, 1.1, 2.4),
        (WAIT_INTER_NODE, 0, 1, 5.0, 6.0),  # outside of steps: at the end of an epoch
    ]
    path = written(tmp_path, of_rank(0, *spans), of_rank(1, *spans), clocks(0.0))
    one, other = shares(read_timeline(path))
    assert one.steps == 2
    assert one.step_seconds == pytest.approx(1.5)
    assert one.node_seconds == pytest.approx(0.1)
    assert one.exposed_seconds == pytest.approx(0.2)
    assert one.send_seconds == pytest.approx(0.1)
    assert one.computing_seconds == pytest.approx(1.1)
    assert one.exchange_seconds == pytest.approx(0.65)
    assert one.hidden == pytest.approx(1 - 0.4 / 1.3)
    assert other.step_seconds == one.step_seconds


def test_what_began_before_the_last_mark_begins_there(tmp_path):
    path = written(tmp_path, of_rank(0, (STEP, 0, 1, 0.0, 3.0), since=2.0), ranks=1)
    (one,) = shares(read_timeline(path))
    assert one.step_seconds == pytest.approx(1.0)


def test_lost_spans_of_all_marks_are_added(tmp_path):
    lines = [of_rank(0, lost=3), of_rank(1, lost=1), of_rank(0, lost=2), of_rank(1), of_rank(0)]
    assert [rank.lost for rank in read_timeline(written(tmp_path, *lines)).ranks] == [5, 1]


@pytest.mark.parametrize("last", ["trace.jsonl", "trace-70.jsonl", "trace-9.jsonl"])
def test_a_run_folder_stands_for_its_newest_recording(tmp_path, last):
    for at, name in enumerate(("trace.jsonl", "trace-70.jsonl", "trace-9.jsonl", "log.jsonl")):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (1000 + at, 1000 + at))
    os.utime(tmp_path / last, (1500, 1500))
    os.utime(tmp_path / "log.jsonl", (2000, 2000))
    assert newest(tmp_path) == tmp_path / last


def test_who_is_late_is_told_on_one_clock(tmp_path):
    """Rank 1's clock is 100 s ahead; it sends 0.2 s after rank 0, three times of four."""
    mine = [(SEND, 0, key, key - 0.01, float(key)) for key in range(1, 5)]
    others = [(SEND, 0, key, 100.0 + key, 100.2 + key) for key in range(1, 4)]
    others += [(SEND, 0, 4, 103.8, 103.9), (SEND, 0, 5, 105.0, 105.1)]
    path = written(tmp_path, clocks(100.0), of_rank(0, *mine), of_rank(1, *others), clocks(100.0))
    timeline = read_timeline(path)
    late = late_ranks(timeline)
    assert [(one.rank, one.exchanges, one.last) for one in late] == [(1, 4, 3), (0, 4, 1)]
    assert late[0].behind_seconds == pytest.approx(0.2)
    assert late[1].behind_seconds == pytest.approx(0.0)
    assert all(loop.sound for loop in timeline.loops)


def test_nothing_is_merged_before_all_have_sent(tmp_path):
    """By clocks that are wrong by 2 ms, rank 0 merges before rank 1 has sent."""
    mine = [(SEND, 0, 1, 0.0, 0.1), (MERGE, 0, 1, 1.0, 1.1)]
    others = [(SEND, 0, 1, 0.9, 1.002), (MERGE, 0, 1, 1.1, 1.2)]
    path = written(tmp_path, clocks(0.0), of_rank(0, *mine), of_rank(1, *others))
    timeline = read_timeline(path)
    assert timeline.moved == 1
    events = list(chrome_events(timeline))
    arrows = {}
    for event in events:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event
    assert len(arrows) == 3  # each to its own merge, and the last to the other's
    for arrow in arrows.values():
        assert arrow["s"]["ts"] <= arrow["f"]["ts"]
    bars = [event for event in events if event["ph"] == "X"]
    assert {(bar["pid"], bar["name"]) for bar in bars} == {
        (rank, name) for rank in (0, 1) for name in ("send", "merge")
    }
    assert all(bar["ts"] >= 0 and bar["dur"] > 0 for bar in bars)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0 on host0, node 0", "rank 1 on host1, node 1"}


def test_exchanges_of_two_optimizers_in_one_recording_are_refused(tmp_path):
    spans = [(SEND, 0, 1, 0.0, 0.1), (SEND, 0, 1, 0.2, 0.3)]
    with pytest.raises(DataError, match="must be of one optimizer's exchanges"):
        read_timeline(written(tmp_path, of_rank(0, *spans), ranks=1))


def test_a_recording_without_steps_has_events_all_the_same(tmp_path):
    written(tmp_path, of_rank(0, (FORWARD, 0, 1, 0.0, 1.0)), ranks=1)
    chrome = tmp_path / "t.json"
    done = typed("trace", tmp_path, f"--chrome={chrome}")
    assert done.returncode == 2
    assert "a recording must have steps" in done.stderr
    assert json.loads(chrome.read_text())["traceEvents"]


def test_the_thread_that_takes_steps_comes_first(tmp_path):
    spans = [(EXCHANGE, 0, -1, 0.0, 0.5), (STEP, 1, 1, 0.0, 1.0)]
    path = written(tmp_path, of_rank(0, *spans, threads=("daso-exchange", "MainThread")), ranks=1)
    (rank,) = read_timeline(path).ranks
    assert rank.threads == ("MainThread", "daso-exchange")
    assert [(span.kind, span.thread) for span in rank.spans] == [(STEP, 0), (EXCHANGE, 1)]


def test_half_a_line_of_a_killed_run_is_left(tmp_path):
    path = written(tmp_path, of_rank(0, (STEP, 0, 1, 0.0, 1.0)), ranks=1, half='{"rank": 0, "sp')
    assert len(shares(read_timeline(path))) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not; name a run folder"),
        ("no json\n", "is not; name a run folder"),
        ('{"schema": 9}\n', "must be of version 1, but"),
        ('{"schema": 1}\n', "is not; name a run folder"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path, text, says):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=says):
        read_timeline(path)


def test_the_command_prints_tables_and_writes_files(tmp_path):
    spans = [(STEP, 0, 1, 0.0, 1.0), (SEND, 0, 1, 0.1, 0.2), (MERGE, 0, 1, 0.5, 0.6)]
    written(tmp_path, clocks(0.0), of_rank(0, *spans), of_rank(1, *spans, lost=7), clocks(0.0))
    chrome, tables, plot = (tmp_path / name for name in ("t.json", "tables.json", "t.png"))
    done = typed("trace", tmp_path, f"--chrome={chrome}", f"--json={tables}", f"--plot={plot}")
    assert done.returncode == 0, done.stderr
    assert "Last ranks in 1 exchanges" in done.stdout
    assert "7 spans were lost" in done.stdout
    assert "Clocks: compared 2 times, right to 0.5 us" in done.stdout
    assert json.loads(chrome.read_text())["traceEvents"]
    found = json.loads(tables.read_text())
    assert [row["rank"] for row in found["steps"]] == [0, 1]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert f"{plot}: a picture of some steps\n" in done.stdout


def test_clocks_that_do_not_add_up_are_told(tmp_path):
    lopsided = {"clocks": [[0.0, 1e-3, 1e-6], [0.0, 0.0, 1e-6]]}
    spans = [(STEP, 0, 1, 0.0, 1.0)]
    written(tmp_path, lopsided, of_rank(0, *spans), of_rank(1, *spans))
    done = typed("trace", tmp_path)
    assert "1 of 1 comparisons of clocks do not add up" in done.stdout


@pytest.mark.parametrize("what", ["nothing", "no steps"])
def test_the_command_refuses_in_one_line(tmp_path, what):
    if what == "no steps":
        written(tmp_path, of_rank(0), ranks=1)
    done = typed("trace", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("daso: a recording must ")
    assert done.stderr.count("\n") == 1


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_read(tmp_path):
    for words in ([f"--plot={tmp_path}/t.jpg"], [f"--plot={tmp_path}/none/t.png"]):
        done = typed("trace", tmp_path, *words)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "must end in .png, .pdf, .svg" in done.stderr or "existing folder" in done.stderr
