"""`daso train` as a user types it, on ranks of this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HANG_SECONDS, started

KEYS = {
    "data", "world", "nodes", "epochs", "steps", "seconds", "samples_per_second", "test_accuracy",
    "exchanges", "global_bytes_sent", "exposed_seconds", "skip_history", "identical", "versions",
}  # fmt: skip


def daso_train(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return started("daso", "train", *words, cwd=cwd, **env)


def test_training_writes_a_summary_and_one_line_per_event(tmp_path: Path) -> None:
    run = daso_train(
        "-n", "2", "--ranks-per-node=1", "--data.name=digits", "--epochs=6", cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    summary = json.loads((tmp_path / "runs/train/summary.json").read_text())
    assert summary.keys() >= KEYS
    assert (summary["world"], summary["nodes"], summary["data"]) == (2, 2, "digits")
    assert summary["identical"] is True
    assert summary["test_accuracy"] > 0.9
    assert summary["exposed_seconds"] < summary["seconds"]
    lines = (tmp_path / "runs/train/log.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert {event["schema"] for event in events} == {1}
    exchanges = [event for event in events if event["event"] == "exchange"]
    assert len(exchanges) == summary["exchanges"] > 6
    longest = max(wait for _, _, wait in summary["skip_history"])  # Auto goes by what it measures
    assert all(0 <= event["received"] - event["sent"] <= longest for event in exchanges)
    assert [event["event"] for event in events].count("epoch") == 6


@pytest.mark.later("starts ranks")
def test_a_recorded_run_is_told_by_daso_trace(tmp_path: Path) -> None:
    words = ["-n", "2", "--ranks-per-node=1", "--data.name=digits", "--epochs=3", "--trace=true"]
    run = daso_train(*words, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    command = [sys.executable, "-m", "daso", "trace", "runs/train", "--chrome=events.json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs/train/summary.json").read_text())
    rows = [line.split() for line in done.stdout.splitlines()]
    steps = [row for row in rows if row[:2] in (["0", "66"], ["1", "66"])]
    assert summary["steps"] == 66
    assert len(steps) == 2
    assert f"Last ranks in {summary['exchanges']} exchanges" in done.stdout
    assert "Clocks: compared 5 times" in done.stdout  # at both ends, and after each epoch
    events = json.loads((tmp_path / "events.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert names >= {"step", "send", "merge", "exchange", "messages"}


@pytest.mark.later("starts ranks")
@pytest.mark.slow("starts a program four times")
def test_a_run_that_goes_on_is_recorded_in_a_file_of_its_own(tmp_path: Path) -> None:
    words = ["-n", "2", "--ranks-per-node=1", "--data.name=digits", "--checkpoint.every=10"]
    begun = daso_train(*words, "--epochs=1", cwd=tmp_path)  # not recorded: that may change
    assert begun.returncode == 0, begun.stderr
    again = daso_train(*words, "--epochs=2", "--trace=true", "--resume", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert [path.name for path in (tmp_path / "runs/train").glob("trace*")] == ["trace-22.jsonl"]
    command = [sys.executable, "-m", "daso", "trace", "runs/train"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    words = ["--name=alone", "--data.name=digits", "--epochs=1", "--trace=true"]
    alone = daso_train(*words, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert "trace=true records several ranks" in alone.stderr


@pytest.mark.later("starts ranks")
def test_the_papers_schedule_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'name = "paper"\nepochs = 4\nmerge = "delta"\n[data]\nname = "digits"\n'
        '[schedule]\npolicy = "plateau"\nwarmup = 1\ncooldown = 1\n'
    )
    run = daso_train("-n", "3", "--ranks-per-node", "2,1", "run.toml", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    summary = json.loads((tmp_path / "runs/paper/summary.json").read_text())
    assert [entry[1:] for entry in summary["skip_history"]] == [[1, 0], [4, 1], [1, 0]]
    assert summary["node_sizes"] == [2, 1]
    assert summary["identical"] is True


@pytest.mark.later("starts ranks")
@pytest.mark.slow("starts ranks")
def test_the_same_seed_gives_the_same_model_on_any_cut_into_nodes(tmp_path: Path) -> None:
    accuracies = []
    for cut in ("1", "2", "4"):
        words = [
            "--data.name=digits",
            "--epochs=2",
            "--schedule.policy=fixed",
            "--schedule.skip=1",
            "--schedule.wait=0",
        ]
        run = daso_train("-n", "4", "--ranks-per-node", cut, *words, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        summary = json.loads((tmp_path / "runs/train/summary.json").read_text())
        accuracies.append(summary["test_accuracy"])
    assert max(accuracies) - min(accuracies) < 0.01  # sums in another order, nothing else


@pytest.mark.later("starts ranks")
@pytest.mark.parametrize(
    ("words", "env", "says"),
    [
        (["--data.name=fashion"], {"DASO_DATA": "/nowhere"}, "dataset-fashion-mnist"),
        (["--data.name=digits", "--runs=/dev/null"], {}, "--runs=FOLDER"),
        (["--data.name=digits", "--data.batch_size=9999"], {}, "lower batch_size"),
    ],
)
def test_trouble_on_ranks_is_one_line_and_an_exit_code(tmp_path, words, env, says) -> None:
    run = daso_train("-n", "3", *words, cwd=tmp_path, **env)
    assert run.returncode == 2, run.stdout + run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("daso: ")]
    assert says in lines[0]
    assert "Traceback" not in run.stderr
    assert sum(says in line for line in run.stderr.splitlines()) == 1


def test_a_typo_starts_nothing_and_lists_the_keys(tmp_path: Path) -> None:
    run = daso_train("-n", "4", "--epoch=3", cwd=tmp_path)
    assert run.returncode == 2
    assert "did you mean 'epochs'?" in run.stderr
    assert "valid keys: name, runs, epochs" in run.stderr
    assert not (tmp_path / "runs").exists()
