import errno
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from expected_errors import raises

from daso.cli.train.report import SCHEMA, Progress, RunFolder, closing_table, commit_of, versions
from daso.errors import ConfigError

SUMMARY = {
    "data": "digits",
    "world": 4,
    "nodes": 2,
    "epochs": 3,
    "steps": 132,
    "seconds": 2.345,
    "samples_per_second": 1800.4,
    "test_accuracy": 0.97654,
    "exchanges": 33,
    "skip_history": [[0, 1, 1], [9, 4, 1]],
    "skip_because": "an exchange takes that many batches",
    "step_restoration": "none",
    "gain": 1.0,
    "global_bytes_sent": 12_345_678,
    "exposed_seconds": 0.126,
    "identical": True,
}


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path / "runs" / "one")
    yield made
    made.close()


def strict(line):
    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def logged(made):
    return [strict(line) for line in (made.path / "log.jsonl").read_text().splitlines()]


def test_a_run_folder_is_made_with_its_parents(folder):
    assert [path.name for path in folder.path.iterdir()] == ["log.jsonl"]


def test_two_runs_do_not_write_to_one_folder(folder):
    folder.event("start")
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"another writes to .*log.jsonl; choose another"):
            RunFolder(folder.path, resume=resume)
    assert len(logged(folder)) == 1
    folder.close()
    RunFolder(folder.path, resume=True).close()
    assert len(logged(folder)) == 1


def test_unwritable_log_warns_once_and_prints_the_summary(folder, caplog, capsys, monkeypatch):
    class Full:
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder, "_log", Full())
    for step in range(3):
        folder.event("epoch", step=step)
    monkeypatch.setattr(folder, "path", folder.path / "gone")
    folder.summary(SUMMARY)
    folder.close()
    (told,) = caplog.messages
    assert told.endswith("No space left on device; training continues without its log")
    assert strict(capsys.readouterr().err) == SUMMARY


def test_every_event_is_one_line_with_the_schema_a_time_and_its_name(folder):
    folder.event("start", world=4, config={"name": "a\nb", "data": {"name": "ä"}})
    folder.event("epoch", step=7, loss=0.5)
    lines = logged(folder)  # before it is closed: a killed run leaves what it wrote
    assert [line["event"] for line in lines] == ["start", "epoch"]
    assert [line["schema"] for line in lines] == [SCHEMA, SCHEMA]
    assert lines[0]["time"] <= lines[1]["time"]
    assert lines[0]["config"] == {"name": "a\nb", "data": {"name": "ä"}}
    assert (lines[1]["step"], lines[1]["loss"]) == (7, 0.5)


def test_an_event_of_the_optimizer_is_logged_as_it_is(folder):
    event = {"kind": "dropped", "epoch": 2, "why": "nan"}  # as DASO.report()["events"] has it
    folder.event(**event)
    (line,) = logged(folder)
    assert (line["event"], line["epoch"], line["why"]) == ("dropped", 2, "nan")


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_leaves_a_line_that_is_json(folder, loss):
    folder.event("epoch", step=1, loss=loss)
    assert [line["event"] for line in logged(folder)] == ["epoch"]


def test_the_summary_is_json_and_nothing_else_stays(folder):
    folder.summary(SUMMARY)
    assert strict((folder.path / "summary.json").read_text()) == SUMMARY
    assert {path.name for path in folder.path.iterdir()} == {"log.jsonl", "summary.json"}
    folder.summary({"world": 1})
    assert strict((folder.path / "summary.json").read_text()) == {"world": 1}


def test_a_summary_that_cannot_be_json_leaves_the_old_one(folder):
    folder.summary(SUMMARY)
    with pytest.raises(TypeError):
        folder.summary({"world": object()})
    assert strict((folder.path / "summary.json").read_text()) == SUMMARY


def test_a_disk_that_fills_up_leaves_the_old_summary(folder, monkeypatch):
    folder.summary(SUMMARY)

    def half(path, text, **_):
        path.write_bytes(text.encode()[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        folder.summary({"world": 1})
    assert strict((folder.path / "summary.json").read_text()) == SUMMARY


def test_an_earlier_run_keeps_its_files_under_another_name(tmp_path, caplog):
    for seed in (1, 2, 3):
        made = RunFolder(tmp_path / "one", tensorboard=True)
        made.event("start", step=0, seed=seed, loss=1.0)
        made.summary(SUMMARY | {"seed": seed})
        made.close()
    for name, seed in {"one": 3, "one-1": 1, "one-2": 2}.items():
        folder = tmp_path / name
        assert strict((folder / "log.jsonl").read_text())["seed"] == seed
        assert strict((folder / "summary.json").read_text())["seed"] == seed
        assert len(list(folder.rglob("events.out.tfevents*"))) == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/one held an earlier run, which is {tmp_path}/one-{number} now"
        for number in (1, 2)
    ]


def test_a_start_that_is_refused_leaves_an_earlier_run_as_it_is(tmp_path, monkeypatch):
    made = RunFolder(tmp_path / "one")
    made.event("start", step=0)
    made.summary(SUMMARY)
    made.close()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for resume in (False, True):
        with pytest.raises(ConfigError, match="needs the tensorboard package"):
            RunFolder(tmp_path / "one", tensorboard=True, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert strict((tmp_path / "one" / "summary.json").read_text()) == SUMMARY


def test_a_folder_in_which_nothing_was_logged_is_taken_as_it_is(tmp_path):
    RunFolder(tmp_path / "one").close()
    (tmp_path / "one" / "notes.txt").write_text("mine")
    RunFolder(tmp_path / "one").close()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["log.jsonl", "notes.txt"]


@pytest.mark.parametrize("torn", ["", '{"schema": 1, "half a li', "x" * 5000])
def test_a_run_that_goes_on_adds_to_the_files_of_the_one_that_was_cut_off(tmp_path, torn):
    for seed in (1, 2):
        made = RunFolder(tmp_path, tensorboard=True, resume=seed == 2)
        made.event("start", step=0, seed=seed, loss=1.0)
        made.close()
        if seed == 1:
            with (tmp_path / "log.jsonl").open("a") as log:
                log.write(torn)
    assert [line["seed"] for line in logged(made)] == [1, 2]
    assert len(list(tmp_path.rglob("events.out.tfevents*"))) == 2


def test_a_run_may_go_on_where_the_log_was_lost(tmp_path):
    made = RunFolder(tmp_path, resume=True)
    made.event("resume", step=5)
    made.close()
    assert len(logged(made)) == 1


def test_new_run_removes_an_earlier_summary(tmp_path):
    first = RunFolder(tmp_path)
    first.summary(SUMMARY)
    first.close()
    RunFolder(tmp_path).close()
    assert not (tmp_path / "summary.json").exists()


def test_close_may_be_called_twice(tmp_path):
    made = RunFolder(tmp_path, tensorboard=True)
    made.event("start")
    made.close()
    made.close()
    assert len(logged(made)) == 1


@pytest.mark.parametrize(
    ("in_the_way", "wanted"),
    [("file", "file"), ("file", "file/below"), ("one/log.jsonl/x", "one")],
)
def test_a_folder_that_cannot_be_written_is_told_with_another_way(tmp_path, in_the_way, wanted):
    path = tmp_path / in_the_way
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("here first")
    with pytest.raises(ConfigError) as caught:
        RunFolder(tmp_path / wanted)
    message = str(caught.value)
    assert "must be writable" in message
    assert str(tmp_path / wanted) in message
    assert "--runs=FOLDER" in message
    assert path.read_text() == "here first"


def test_a_tensorboard_folder_that_cannot_be_written_is_told_too(tmp_path):
    (tmp_path / "tensorboard").write_text("here first")
    with raises("run-folder-not-writable"):
        RunFolder(tmp_path, tensorboard=True)


def test_tensorboard_that_is_not_installed_is_told_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with raises("tensorboard-not-installed"):
        RunFolder(tmp_path, tensorboard=True)


def test_tensorboard_files_hold_the_numbers_of_the_events_when_asked_for(tmp_path):
    made = RunFolder(tmp_path, tensorboard=True)
    made.event("start", data="digits")
    made.event("epoch", step=10, epoch=1, loss=0.5, test_accuracy=0.25)
    made.event("epoch", step=20, epoch=2, loss=0.125, test_accuracy=0.5)
    made.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert sorted(board.Tags()["scalars"]) == ["loss", "test_accuracy"]
    assert [(one.step, one.value) for one in board.Scalars("loss")] == [(10, 0.5), (20, 0.125)]
    assert len(logged(made)) == 3


def test_no_tensorboard_files_when_not_asked_for(folder):
    folder.event("epoch", step=1, loss=0.5)
    folder.close()
    assert not list(folder.path.rglob("*tfevents*"))


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys):
    with Progress(2, shown=True) as progress:
        progress.line("epoch 1: [bold] 0.5")
        progress.step()
        progress.step()
    assert capsys.readouterr() == ("epoch 1: [bold] 0.5\n", "")


def test_progress_says_nothing_on_the_other_ranks(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Progress(2, shown=False) as progress:
        progress.line("epoch 1")
        progress.step()
    assert capsys.readouterr() == ("", "")


def test_progress_is_plain_lines_on_a_terminal_without_rich(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with Progress(2, shown=True) as progress:
        progress.step()
        progress.line("epoch 1")
    assert capsys.readouterr().out == "epoch 1\n"


def test_progress_lets_errors_through(capsys):
    with pytest.raises(ZeroDivisionError), Progress(1, shown=True):
        raise ZeroDivisionError


ON_A_TERMINAL = """
from daso.cli.train.report import Progress
with Progress(3, shown=True) as progress:
    for epoch in (1, 2, 3):
        progress.step()
        progress.line(f"epoch {epoch}: [red] loss {epoch / 2}")
print("closing")
"""


def on_a_terminal(script):
    """Run a script whose output is a terminal, and return what it would show."""
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", script]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError as error:  # Linux says so when the other end is closed
            assert error.errno == errno.EIO
        os.close(ours)
    assert process.returncode == 0, shown
    return shown.decode()


def test_progress_is_a_bar_below_the_lines_on_a_terminal():
    shown = on_a_terminal(ON_A_TERMINAL)
    assert "3/3" in shown
    assert "\x1b[" in shown
    at = [shown.index(part) for part in ("epoch 1:", "epoch 2:", "epoch 3:", "closing")]
    assert at == sorted(at)
    assert shown.index("epoch 3:") < shown.rindex("3/3") < shown.index("closing")


def test_a_line_with_brackets_is_shown_as_it_is_on_a_terminal():
    assert "epoch 2: [red] loss 1.0" in on_a_terminal(ON_A_TERMINAL)


def test_the_closing_table_is_complete():
    rows = dict(line.strip().split("  ", 1) for line in closing_table(SUMMARY).splitlines())
    assert {name: value.strip() for name, value in rows.items()} == {
        "data": "digits",
        "ranks, nodes": "4 ranks on 2 nodes",
        "steps": "132 in 3 epochs",
        "time": "2.3 s, 1800 samples/s",
        "test accuracy": "0.9765",
        "global exchanges": "33",
        "sent between nodes": "12.3 MB by all ranks",
        "batches per exchange": "4: an exchange takes that many batches",
        "learning rate": "as given",
        "exposed": "0.13 s waiting for other ranks (worst rank)",
        "ranks identical": "yes, bit for bit",
    }


def test_the_closing_table_is_aligned():
    lines = closing_table(SUMMARY, Path("runs/one")).splitlines()
    assert lines[-1].split("  ")[-1] == "runs/one/"
    names = [line.strip().split("  ", 1)[0] for line in lines]
    values = [line.strip().split("  ", 1)[1].strip() for line in lines]
    starts = {line.index(value, 2 + len(name)) for line, name, value in zip(
        lines, names, values, strict=True)}  # fmt: skip
    assert len(starts) == 1
    assert all(line.startswith("  ") for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_a_gain_on_the_learning_rate_is_told():
    restored = SUMMARY | {"step_restoration": "a measured gain", "gain": 1.3789}
    (line,) = [line for line in closing_table(restored).splitlines() if "learning rate" in line]
    assert line.split(maxsplit=2)[2].startswith("times 1.38 between exchanges")


def test_ranks_that_differ_are_shouted():
    last = closing_table(SUMMARY | {"identical": False}).splitlines()[-1]
    assert last.split() == ["ranks", "identical", "NO"]


def test_the_versions_name_everything_a_result_depends_on():
    found = versions("MPICH 5.0.2")
    assert set(found) - {"commit"} == {"python", "mpi", "daso", "torch", "mpi4py", "numpy"}
    assert found["mpi"] == "MPICH 5.0.2"
    assert all(isinstance(value, str) and value for value in found.values())


def test_results_name_the_commit_of_a_checkout_and_of_nothing_else(tmp_path):
    assert commit_of(tmp_path) == {}
    folder = tmp_path / "project" / "package"
    folder.mkdir(parents=True)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    (folder / "module.py").touch()
    assert commit_of(folder) == {}  # not of this checkout
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "two"], check=True)
    clean = commit_of(folder)["commit"]
    assert re.fullmatch("[0-9a-f]{12}", clean)
    (folder / "module.py").write_text("changed")
    assert commit_of(folder) == {"commit": f"{clean}-dirty"}
