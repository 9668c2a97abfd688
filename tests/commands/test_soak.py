"""`scripts/soak`: draws the same jobs from a seed, sees broken promises, and ends cleanly."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import soak_hours
from jobs import HANG_SECONDS, outside
from soak_hours import KINDS, Record, job_of, rss_growth, throughput_drift
from soak_jobs import Ended, Training, Trainings, judge, processes

from daso.testing.faults import parse

WELL = Training("adamw", 3, 1, 80, "stop rank 1 at step 3 for 1 s")
KILLED = Training("adamw", 3, 1, 80, "kill rank 1 at step 3")
MET = "daso: fault: kill rank 1 at step 3\n"


def test_a_number_draws_the_same_job_of_each_kind() -> None:
    drawn = [job_of(1, number) for number in range(700)]
    assert drawn[13] == job_of(1, 13) != job_of(2, 13)
    counts = Counter(getattr(job, "kind", "elastic") for job in drawn)
    assert counts == dict.fromkeys(KINDS, 100)
    faults = [job.faults if kind == "elastic" else job.fault for job, kind in of_kinds(drawn)]
    kinds = {fault.kind for text in faults for fault in parse(text)}
    assert kinds == {"kill", "stop", "slow", "raise", "full", "hang", "jump", "flip"}
    trains = [job for job, kind in of_kinds(drawn) if kind == "daso train"]
    assert all(bool(job.stops_at) != bool(job.fault) for job in trains)
    assert {bool(job.stops_at) for job in trains} == {True, False}


def of_kinds(drawn):
    return [(job, KINDS[number % len(KINDS)]) for number, job in enumerate(drawn)]


@pytest.mark.parametrize(
    ("job", "ended", "problem"),
    [
        (WELL, Ended(0, "", ("a", "a", "a")), None),
        (WELL, Ended(1, "", ()), "nothing was lost, and"),
        (WELL, Ended(0, "", ("a", "a")), "2 of 3 ranks"),
        (WELL, Ended(0, "", ("a", "b", "a")), "ranks differ"),
        (WELL, Ended(0, "", ("b", "b", "b")), "not those of an unbroken job"),
        (replace(WELL, kind="stale server"), Ended(0, "", ("b", "b", "b")), None),
        (KILLED, Ended(9, f"{MET}daso: rank 1 ended first", ()), None),
        (KILLED, Ended(0, MET, ("a", "a", "a")), "the job ended well"),
        (KILLED, Ended(9, f"{MET}daso: rank 2 ended first", ()), "no error has 'rank 1'"),
        (KILLED, Ended(0, "", ("a", "a", "a")), None),
    ],
)
def test_a_broken_promise_is_seen(job, ended, problem) -> None:
    verdict = judge(job, ended, "a")
    assert verdict is None if problem is None else problem in verdict


def sample(minute: float, *rss: float, rate: float = 50.0) -> dict:
    ranks = [{"rss_mb": one, "batches_per_second": rate} for one in rss]
    return {"minute": minute, "identical": True, "ranks": ranks}


def test_figures_leave_the_warm_up_out() -> None:
    samples = [
        sample(minute, 100.0 + (minute < 3) * 50, 100.0 + minute / 6) for minute in range(30)
    ]
    assert rss_growth(samples) == pytest.approx(10.0)
    slower = [sample(minute, 1.0, rate=100.0 if minute < 15 else 50.0) for minute in range(30)]
    assert throughput_drift(slower) == pytest.approx(0.5)
    assert rss_growth(samples[:2]) is None
    assert throughput_drift(samples[:2]) is None


class Job:
    """A watched training, by its exit code."""

    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


def test_the_watched_training_is_held_against_its_promise(tmp_path, monkeypatch) -> None:
    path = tmp_path / "soak.json"
    record, job = Record(path, 1, ""), Job()
    watch = soak_hours.Watch(tmp_path, job, record)
    watch.look()
    for digests in ("aa", "bb", "ab"):
        for rank, digest in enumerate(digests):
            row = {"at": record.begun, "batch": 5, "digest": digest, "rss_mb": 1.0}
            with (tmp_path / f"{rank}.jsonl").open("a") as file:
                file.write(json.dumps({**row, "batches_per_second": 1.0}) + "\n")
    with (tmp_path / "0.jsonl").open("a") as file:
        file.write('{"half a li')
    watch.look()
    watch.look()
    assert [one["identical"] for one in record.samples] == [True, True, False]
    assert record.problems == ["ranks differ at batch 5"]
    content = json.loads(path.read_text())
    assert content["samples"] == record.samples
    (tmp_path / "log").write_text("why")
    job.returncode = 0
    watch.look((0,))
    assert len(record.problems) == 1
    watch.look()
    watch.look()
    assert record.problems[1:] == ["it ended with exit code 0"]
    assert record.figures()["soak_violations"]["value"] == 2


@pytest.mark.later("starts ranks for each job")
@pytest.mark.slow("starts ranks for each job")
@pytest.mark.parametrize(
    "job",
    [
        Training("adamw", 3, 1, 80, "flip rank 2 at merge 4"),
        Training("fsdp2", 4, 2, 60, "hang rank 1 at step 4 for 0.5 s"),
        Training("server", 3, 1, 80, "kill rank 1 at step 9"),
        Training("flow", 2, 1, 40, "slow rank 1 at every forward for 0.05 s during 1 s"),
        Training("daso train", 2, 1, 176, "kill rank 1 at step 12"),
    ],
    ids=str,
)
def test_a_job_of_each_kind_keeps_its_promise(job) -> None:
    assert Trainings().run(job) is None


@pytest.mark.later("makes an environment with another MPI library")
@pytest.mark.slow("makes an environment with another MPI library")
def test_an_interrupted_soak_leaves_its_results_and_no_process(tmp_path) -> None:
    path = tmp_path / "soak.json"
    words = ("--hours=1", "--every=2", f"--json={path}", f"--plot={tmp_path / 'soak.png'}")
    env = {**outside(), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    soak = subprocess.Popen(
        [sys.executable, soak_hours.__file__, *words], env=env, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + HANG_SECONDS
    while not path.exists() or not json.loads(path.read_text())["jobs"]:
        assert soak.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    while len(processes(str(tmp_path))) < 3:
        time.sleep(0.01)
    soak.send_signal(signal.SIGINT)
    text = soak.communicate(timeout=60)[0]
    assert soak.returncode == 0, text
    assert "interrupted; the results so far" in text
    assert processes(str(tmp_path)) == []
    content = json.loads(path.read_text())
    assert content["figures"]["soak_hours"]["value"] > 0
    assert Path(tmp_path / "soak.png").stat().st_size > 10_000
