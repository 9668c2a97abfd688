"""`daso train --resume`: a run that was killed goes on, and ends where it would have ended."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import HANG_SECONDS

SCHEDULE = [
    "--schedule.policy=fixed",
    "--schedule.skip=4",
    "--schedule.wait=1",
    "--exchange.algorithm=direct",
]
EPOCHS = 16  # long enough to be asked in the middle of it, on any machine
COMMON = ["--data.name=digits", f"--epochs={EPOCHS}", *SCHEDULE]
RANKS = ["-n", "4", "--ranks-per-node=2"]


def start(*words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "daso", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )


def train(*words: str) -> tuple[int, str]:
    """Train to the end; return the exit code and what was said."""
    job = start(*words)
    out, err = job.communicate(timeout=HANG_SECONDS)
    return job.returncode, out + err


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def events(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def saved(folder: Path) -> list[int]:
    """List the steps of complete checkpoints, oldest first."""
    found = (folder / "checkpoints").glob("step-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def processes(marker: str) -> list[int]:
    """List processes with the marker in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def kill_at(step: int, job: subprocess.Popen[str], folder: Path) -> None:
    """Kill all ranks, and their launcher, once a checkpoint of that step is there."""
    deadline = time.monotonic() + 250
    while (saved(folder) or [0])[-1] < step:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    # One that is gone already has ended on the death of another.
    while left := processes(f"--runs={folder.parent}"):
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        job.poll()
        time.sleep(0.01)
    job.communicate()
    assert job.returncode != 0
    assert not (folder / "summary.json").exists()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Train a run to its end, and another that is killed at a random step."""
    made = tmp_path_factory.mktemp("runs")
    code, said = train(*RANKS, *COMMON, f"--runs={made}", "--name=whole")
    assert code == 0, said
    every = "--checkpoint.every=4"  # with skip=4, an exchange is often in flight
    job = start(*RANKS, *COMMON, f"--runs={made}", "--name=killed", every)
    kill_at(random.randrange(12, 60), job, made / "killed")
    return made


def stop_at(step: int, job: subprocess.Popen[str], folder: Path) -> str:
    """Send SIGUSR1 to the launcher once that step is in the log; return what was said."""
    deadline = time.monotonic() + 250
    while not (folder / "log.jsonl").exists() or len(events(folder, "epoch")) * 11 < step:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    job.send_signal(signal.SIGUSR1)
    out, err = job.communicate(timeout=HANG_SECONDS)
    assert job.returncode == 75, out + err
    return out + err


@pytest.mark.slow("starts ranks again and again")
@pytest.mark.later("starts ranks again and again")
@pytest.mark.parametrize("by", ["--resume", "SLURM"])
def test_a_run_that_is_asked_to_end_saves_and_goes_on_to_the_same_bits(runs, tmp_path, by) -> None:
    words = [*RANKS, *COMMON, f"--runs={tmp_path}"]
    folder = tmp_path / "asked"
    queued = {"DASO_MAX_RESTARTS": "3", "SLURM_RESTART_COUNT": "1"} if by == "SLURM" else {}
    job = start(*words, "--name=asked", env={"SLURM_JOB_ID": "7", **queued})
    said = stop_at(22, job, folder)
    assert "asked to end, and saved" in said
    assert ("continue with --resume" in said) == (not queued)
    assert ("the job is queued again and continues by itself" in said) == bool(queued)
    (stopped,) = events(folder, "stopped")
    assert (stopped["signal"], saved(folder)) == ("SIGUSR1", [stopped["step"]])
    assert not (folder / "summary.json").exists()
    if by == "SLURM":  # a job that was put back into the queue is the same command once more
        anew = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
        out, err = start(*words, "--name=asked", env=anew).communicate(timeout=HANG_SECONDS)
        assert "SLURM restarted job 7: restart 2" in out, err
        assert events(folder, "resume")[0]["restarts"] == 2
    else:
        code, said = train(*words, "--name=asked", "--resume")
        assert code == 0, said
    assert events(folder, "resume")[0]["step"] == stopped["step"]
    assert summary_of(folder)["model"] == summary_of(runs / "whole")["model"]


@pytest.mark.slow("starts ranks again and again")
@pytest.mark.later("starts ranks again and again")
def test_a_job_that_slurm_starts_anew_without_a_checkpoint_begins_anew(tmp_path) -> None:
    words = ["--data.name=digits", "--epochs=1", f"--runs={tmp_path}"]
    anew = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    out, err = start(*words, env=anew).communicate(timeout=HANG_SECONDS)
    assert "restart 1" in out, err
    assert summary_of(tmp_path / "train")["resumed_at"] is None


def copy(runs: Path, to: Path) -> Path:
    return Path(shutil.copytree(runs / "killed", to / "killed"))


def resume(folder: Path, *words: str) -> tuple[int, str]:
    return train(*COMMON, *words, f"--runs={folder.parent}", f"--name={folder.name}", "--resume")


@pytest.mark.slow("starts ranks again and again")
@pytest.mark.later("starts ranks again and again")
def test_a_killed_run_ends_like_one_that_was_not(runs, tmp_path) -> None:
    folder = copy(runs, tmp_path)
    (step,) = saved(folder)[-1:]
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"schema": 1, "half a li')
    code, said = resume(folder, *RANKS)
    assert code == 0, said
    assert f"resumed at step {step}" in said
    (event,) = events(folder, "resume")
    assert (event["step"], event["saved_by"], event["same_world"]) == (step, 4, True)
    assert summary_of(folder)["resumed_at"] == step
    assert len(events(folder, "start")) == 1
    assert {event["epoch"] for event in events(folder, "epoch")} == set(range(1, EPOCHS + 1))
    there, wanted = summary_of(folder), summary_of(runs / "whole")
    for key in ("model", "loss", "test_accuracy", "steps", "identical", "exchanges", "dropped"):
        assert there[key] == wanted[key], key
    assert there["skip_history"] == wanted["skip_history"]


@pytest.mark.slow("starts ranks again and again")
@pytest.mark.later("starts ranks again and again")
def test_requeued_job_continues_after_a_killed_rank(runs, tmp_path) -> None:
    folder = tmp_path / "again"
    words = [*RANKS, *COMMON, f"--runs={tmp_path}", "--name=again", "--checkpoint.every=3"]
    job = start(*words, "--restarts=1")
    deadline = time.monotonic() + 250
    while not any(step >= 15 for step in saved(folder)):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    ranks = [pid for pid in processes(f"--runs={tmp_path}") if is_a_rank(pid)]
    os.kill(max(ranks), signal.SIGKILL)
    out, err = job.communicate(timeout=HANG_SECONDS)
    assert job.returncode == 0, err
    assert "daso: the job starts again: restart 1 of at most 1" in err
    assert "the job was restarted: restart 1" in out
    (event,) = events(folder, "resume")
    assert (event["restarts"], event["same_world"]) == (1, True)
    assert event["step"] >= 12
    assert summary_of(folder)["model"] == summary_of(runs / "whole")["model"]


def is_a_rank(process: int) -> bool:
    """Whether mpi4py runs a program in it."""
    return b"mpi4py" in Path(f"/proc/{process}/cmdline").read_bytes()


@pytest.mark.slow("starts ranks again and again")
@pytest.mark.later("starts ranks again and again")
def test_the_one_before_is_taken_when_the_newest_is_damaged(runs, tmp_path) -> None:
    folder = copy(runs, tmp_path)
    before, newest = saved(folder)[-2:]
    path = folder / f"checkpoints/step-{newest:08d}/rank-00000.pt"
    path.write_bytes(path.read_bytes()[:1000])
    code, said = resume(folder)  # on one rank, which starts faster
    assert code == 0, said
    assert said.count(f"checkpoint refused: step {newest}: {path} must have") == 1
    (event,) = events(folder, "resume")
    assert event["step"] == before
    # The kill may have left one more, newer and not finished.
    assert event["refused"][-1].startswith(f"step {newest}: ")
    assert summary_of(folder)["test_accuracy"] > 0.95


@pytest.mark.slow("starts ranks again and again")
@pytest.mark.later("starts ranks again and again")
def test_fewer_ranks_go_on_with_what_rank_0_saved(runs, tmp_path) -> None:
    folder = copy(runs, tmp_path)
    (step,) = saved(folder)[-1:]
    code, said = resume(folder, "-n", "2", "--ranks-per-node=1", "--checkpoint.every=100")
    assert code == 0, said
    (event,) = events(folder, "resume")
    assert (event["step"], event["saved_by"], event["same_world"]) == (step, 4, False)
    summary = summary_of(folder)
    assert (summary["world"], summary["identical"]) == (2, True)
    assert summary["test_accuracy"] > 0.95
    # 11 steps an epoch on 4 ranks and 22 on 2, where a batch is half as large.
    assert summary["steps"] == step + EPOCHS * 22 - (step // 11 * 22 + step % 11 * 2)
    assert saved(folder)[-1] == summary["steps"]


@pytest.mark.slow("starts ranks again and again")
@pytest.mark.later("starts ranks again and again")
def test_what_cannot_go_on_says_why_and_changes_nothing(runs, tmp_path) -> None:
    folder = copy(runs, tmp_path)
    log = (folder / "log.jsonl").read_bytes()
    refused = {
        "optimizer.lr was 0.05 and is now 0.5": ["--name=killed", "--resume", "--optimizer.lr=0.5"],
        "save it with --checkpoint.every=N": ["--name=another", "--resume"],
        "go on from it with --resume": ["--name=killed"],
    }
    same = [*COMMON, f"--runs={tmp_path}"]
    program = (
        "import sys; from daso.cli.main import main; print([main(eval(w)) for w in sys.argv[1:]])"
    )
    lines = [str(["train", *same, *words]) for words in refused.values()]
    run = subprocess.run(  # one process for all of them: starting takes the time
        [sys.executable, "-c", program, *lines], capture_output=True, text=True, check=False
    )
    assert run.stdout == "[2, 2, 2]\n", run.stderr
    for says, line in zip(refused, run.stderr.splitlines(), strict=True):
        assert says in line
    assert (folder / "log.jsonl").read_bytes() == log
    assert not (tmp_path / "another").exists()
