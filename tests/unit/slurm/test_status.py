import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from daso.cli.main import main
from daso.slurm import status
from daso.slurm.slurm_commands import NoAnswerError
from daso.slurm.status import State, read_accounting, read_jobs, read_log_end, table
from daso.slurm.submit import Record

# As SLURM 22.05 prints them.
RUNNING = (
    "JobId=39 JobName=usr1-mpirun UserId=root(0) GroupId=root(0) MCS_label=N/A "
    "Priority=4294901723 Nice=0 Account=(null) QOS=(null) JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:21 "
    "TimeLimit=00:01:00 TimeMin=N/A NodeList=mini[0-1] BatchHost=mini0 NumNodes=2 NumCPUs=2 "
    "NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* NtasksPerN:B:S:C=1:0:*:* Command=(null) "
    "WorkDir=/var/my work StdErr=/var/my work/a b=c.out Power= "
)
PENDING = (
    "JobId=3 JobName=hello UserId=root(0) JobState=PENDING Reason=PartitionConfig Restarts=0 "
    "ExitCode=0:0 RunTime=00:00:00 Partition=mini NodeList= NumNodes=9-9 NumCPUs=9 "
)
FAILED = (
    "JobId=36 JobName=rc3 JobState=FAILED Reason=NonZeroExitCode Restarts=0 ExitCode=3:0 "
    "RunTime=00:00:01 NodeList=mini0 NumNodes=1 "
)
ARRAY = "\n".join(
    f"JobId={number} ArrayJobId=33 ArrayTaskId={task} JobName=arr JobState=COMPLETED Reason=None "
    f"Restarts=0 ExitCode=0:0 RunTime=00:00:01 NodeList=mini0 NumNodes=1"
    for number, task in [(33, 10), (36, 2), (35, 1), (34, 0)]
)


INVALID = b"slurm_load_jobs error: Invalid job id specified\n"


def record(folder=Path("runs/slurm"), job="12", array=False, **client):
    return Record(
        job=job,
        name="train",
        log=str(folder / f"train-{job}{'_%a' if array else ''}.out"),
        script=str(folder / f"train-{job}.sbatch"),
        site="",
        submitted="2026-11-21T12:00:00+00:00",
        client=client,
    )


# --- reading --------------------------------------------------------------------------------------


def test_jobs_are_read_as_scontrol_prints_them():
    assert read_jobs(f"{RUNNING}\n{PENDING}\n{FAILED}\n") == [
        State(
            job="3",
            name="hello",
            state="PENDING",
            nodes="9-9",
            elapsed="00:00:00",
            restarts="0",
            reason="PartitionConfig",
        ),
        State(
            job="36",
            name="rc3",
            state="FAILED",
            nodes="mini0",
            elapsed="00:00:01",
            restarts="0",
            reason="exit code 3",
        ),
        State(
            job="39",
            name="usr1-mpirun",
            state="RUNNING",
            nodes="mini[0-1]",
            elapsed="00:00:21",
            restarts="2",
            reason="None",
        ),
    ]


def test_the_jobs_of_an_array_come_by_their_numbers():
    assert [one.job for one in read_jobs(ARRAY)] == ["33_0", "33_1", "33_2", "33_10"]


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified\n"])
def test_no_answer_is_no_job(text):
    assert read_jobs(text) == []


def test_a_killed_job_is_told_with_its_signal():
    killed = FAILED.replace("ExitCode=3:0", "ExitCode=0:9").replace("NonZeroExitCode", "None")
    assert read_jobs(killed)[0].reason == "exit code 0, signal 9"


def test_accounting_is_read_as_sacct_prints_it():
    text = (
        "12|train|COMPLETED|mini[0-1]|00:01:00|0:0\n"
        "13_4|x|CANCELLED by 1000|None assigned|00:00:00|0:0\n"
        "14|y|FAILED|n1|00:00:05|2:0\n"
        "Slurm accounting storage is disabled\n"
    )
    found = [(one.job, one.state, one.reason, one.ended) for one in read_accounting(text)]
    assert found == [
        ("12", "COMPLETED", "None", True),
        ("13_4", "CANCELLED", "None", True),
        ("14", "FAILED", "exit code 2", True),
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "daso: job 12 on n1, restart 3\nx\ndaso: job 12 ended with exit code 0\n",
            ("COMPLETED", "3", "None"),
        ),
        (
            "daso: job 12 on n1, restart 0\nx\ndaso: job 12 on n2, restart 1\nx\n"
            "daso: job 12 ended with exit code 0\n",
            ("COMPLETED", "1", "None"),
        ),
        ("half a line daso: job 12 ended with exit code 0\n", ("COMPLETED", "-", "None")),
        ("daso: job 12 ended with exit code 7\n", ("FAILED", "-", "exit code 7")),
        ("daso: job 12 on n1, restart 0\nTraceback\n", None),
        ("daso: job 12 ended with exit code 0\ndaso: job 12 on n1, restart 1\n", None),
        ("", None),
    ],
)
def test_the_end_of_a_log_tells_how_a_job_ended(text, found):
    state = read_log_end(text, job="12", name="train")
    assert (state and (state.state, state.restarts, state.reason)) == found


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        *(("PENDING", False), ("RUNNING", False), ("COMPLETING", False), ("REQUEUED", False)),
        *(("COMPLETED", True), ("TIMEOUT", True), ("NODE_FAIL", True), ("SUSPENDED", False)),
    ],
)
def test_only_a_job_that_will_not_run_again_has_ended(state, ended):
    assert State(job="1", name="x", state=state).ended == ended


def test_the_table_has_its_columns_one_below_the_other():
    states = [
        State(job="1", name="long-name", state="RUNNING"),
        State(job="12", name="x", state="Y"),
    ]
    assert table(states).splitlines() == [
        "job  name       state    nodes  elapsed  restarts  reason",
        "1    long-name  RUNNING  -      -        -         -",
        "12   x          Y        -      -        -         -",
    ]


# --- commands -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A folder with a job's record, and a machine without SLURM."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "DASO_", "PMI", "OMPI_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    path = tmp_path / "runs" / "slurm"
    path.mkdir(parents=True)
    return path


def keep(folder, *records):
    from dataclasses import asdict

    lines = [json.dumps(asdict(one)) for one in records]
    (folder / "jobs.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def answers(monkeypatch):
    """Answer in SLURM's place, as it answers of job 12; the last answer stays."""
    given = [State(job="12", name="train", state="RUNNING")]
    monkeypatch.setattr(
        status, "_look_up", lambda *_: [given.pop(0) if len(given) > 1 else given[0]]
    )
    monkeypatch.setattr(status, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(status, "POLL_SECONDS", 0.001)
    return given


def refused(capsys, *words):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("daso: ")
    assert err.count("\n") == 1
    return err


def test_commands_without_slurm_or_records_are_refused_in_one_line(capsys, folder):
    assert "submit one" in refused(capsys, "status")
    assert "scontrol must be on PATH" in refused(capsys, "status", "12")
    assert "does not list 12" in refused(capsys, "logs", "12")
    assert "'twelve'" in refused(capsys, "status", "twelve")
    assert "'1;2'" in refused(capsys, "logs", "1;2")
    assert "horeka" in refused(capsys, "status", "12", "--site=mars")


@pytest.mark.parametrize("line", ['{"job": "13", "na', '{"job": "13"}', "[]", "3"])
def test_a_record_that_is_none_is_named_with_its_line(capsys, folder, line):
    keep(folder, record(folder))
    with (folder / "jobs.jsonl").open("a") as file:
        file.write(f"{line}\n")
    for words in (["status"], ["logs", "12"]):
        assert "jobs.jsonl:2: " in refused(capsys, *words)


def test_records_that_are_not_text_are_refused_in_one_line(capsys, folder):
    (folder / "jobs.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "jobs.jsonl:1: " in refused(capsys, "status")


def test_variables_of_a_profile_are_looked_up_when_they_are_needed(folder, monkeypatch):
    """A token is not kept in the records of jobs."""
    monkeypatch.setenv("SLURM_JWT_HERE", "secret")
    keep(folder, record(folder, SLURM_JWT="${SLURM_JWT_HERE}"))
    assert status._records(folder)["12"].client == {"SLURM_JWT": "secret"}


def test_status_lists_what_was_submitted_from_here(capsys, folder, answers):
    keep(folder, record(folder))
    assert main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["12", "train", "RUNNING"]
    assert main(["status", "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)
    assert (job["job"], job["state"]) == ("12", "RUNNING")


def test_status_lists_the_newest_jobs_of_many(capsys, folder, monkeypatch):
    jobs = [str(job) for job in range(100, 100 + status.NEWEST + 5)]
    keep(folder, *(record(folder, job) for job in jobs))
    monkeypatch.setattr(status, "_look_up", lambda job, *_: [State(job=job, name="x", state="Y")])
    assert main(["status"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == jobs[5:]


def test_logs_prints_the_log(capfdbinary, folder, answers):
    keep(folder, record(folder))
    (folder / "train-12.out").write_bytes(b"one\ntwo \xff\n")
    assert main(["logs", "12"]) == 0
    assert capfdbinary.readouterr().out == b"one\ntwo \xff\n"


def test_a_job_that_has_not_begun_has_no_log(capsys, folder, answers):
    keep(folder, record(folder))
    answers[0] = State(job="12", name="train", state="PENDING", reason="Resources")
    err = refused(capsys, "logs", "12")
    assert "PENDING, Resources" in err
    assert "--follow" in err


def test_logs_of_an_array_come_one_after_the_other(capfdbinary, folder, answers):
    keep(folder, record(folder, array=True))
    for task in (10, 2):
        (folder / f"train-12_{task}.out").write_text(f"task {task}\n")
    assert main(["logs", "12"]) == 0
    out = capfdbinary.readouterr().out.decode()
    assert out == "==> train-12_2.out <==\ntask 2\n==> train-12_10.out <==\ntask 10\n"
    assert main(["logs", "12_10"]) == 0
    assert capfdbinary.readouterr().out == b"task 10\n"


def test_follow_wants_one_job_of_an_array(capsys, folder, answers):
    keep(folder, record(folder, array=True))
    assert "12_0" in refused(capsys, "logs", "--follow", "12")


def state(word):
    return State(job="12", name="train", state=word, reason="because")


def test_follow_goes_on_until_the_job_has_ended_also_when_it_is_requeued(
    capfdbinary, folder, answers, monkeypatch
):
    keep(folder, record(folder))
    log = folder / "train-12.out"
    answers[:] = [state(word) for word in ("PENDING", "PENDING", "RUNNING", "COMPLETING")]
    answers += [state(word) for word in ("REQUEUED", "PENDING", "RUNNING", "TIMEOUT")]
    lines = iter(["", "", "first\n", "requeueing\n", "", "", "second", " half\n"])

    def wait(_):
        if text := next(lines):
            with log.open("a") as file:
                file.write(text)

    monkeypatch.setattr(time, "sleep", wait)
    assert main(["logs", "--follow", "12"]) == 0
    out, err = capfdbinary.readouterr()
    assert out == b"first\nrequeueing\nsecond"  # what came before the end was seen
    assert err == b"daso: job 12: PENDING, because\n"


def test_follow_continues_past_the_scripts_last_line(capfdbinary, folder, answers, monkeypatch):
    """SLURM killed the job to start it again; or an older job had the same number."""
    keep(folder, record(folder))
    log = folder / "train-12.out"
    log.write_text("x\ndaso: job 12 ended with exit code 143\n")
    monkeypatch.setattr(status, "END_SECONDS", 0.0)
    answers[:] = [state(word) for word in ("COMPLETING", "PENDING", "RUNNING", "COMPLETED")]
    lines = iter(["", "", "y\n"])

    def wait(_):
        with log.open("a") as file:
            file.write(next(lines))

    monkeypatch.setattr(time, "sleep", wait)
    assert main(["logs", "--follow", "12"]) == 0
    out, err = capfdbinary.readouterr()
    assert out.endswith(b"code 143\ny\n")
    assert err == b""


def test_follow_asks_again_soon_after_the_last_line(capfdbinary, folder, answers, monkeypatch):
    monkeypatch.setattr(status, "ASK_SECONDS", 100.0)
    monkeypatch.setattr(status, "END_SECONDS", 0.01)
    keep(folder, record(folder))
    text = "x\ndaso: job 12 ended with exit code 0\n"
    (folder / "train-12.out").write_text(text)
    answers.append(state("COMPLETED"))
    assert main(["logs", "--follow", "12"]) == 0
    assert capfdbinary.readouterr() == (text.encode(), b"")


def test_follow_goes_on_while_the_controller_gives_no_answer(capfdbinary, folder, monkeypatch):
    from subprocess import CompletedProcess

    away = b"slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    said = [CompletedProcess([], 1, b"", away), CompletedProcess([], 0, FAILED.encode(), b"")]
    monkeypatch.setattr(status, "ask", lambda *_, **__: said.pop(0))
    monkeypatch.setattr(status, "is_there", lambda _: False)
    monkeypatch.setattr(status, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(status, "POLL_SECONDS", 0.0)
    keep(folder, record(folder))
    assert main(["logs", "--follow", "12"]) == 0
    _, err = capfdbinary.readouterr()
    assert err.startswith(b"daso: job 12: UNKNOWN, slurm_load_jobs error: Unable to contact")
    assert said == []


def test_follow_goes_on_without_any_answer(capfdbinary, folder, monkeypatch):
    from subprocess import CompletedProcess

    said = [NoAnswerError("scontrol must answer"), CompletedProcess([], 0, FAILED.encode(), b"")]

    def ask(*_, **__):
        answer = said.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(status, "ask", ask)
    monkeypatch.setattr(status, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(status, "POLL_SECONDS", 0.0)
    keep(folder, record(folder))
    assert main(["logs", "--follow", "12"]) == 0
    assert capfdbinary.readouterr().err == b"daso: job 12: UNKNOWN, scontrol must answer\n"
    assert said == []


def test_follow_does_not_wait_for_commands_that_are_not_there(capsys, folder):
    keep(folder, record(folder))
    assert "scontrol must be on PATH" in refused(capsys, "logs", "--follow", "12")


def test_ctrl_c_ends_follow_quietly(capfdbinary, folder, answers, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    keep(folder, record(folder))
    (folder / "train-12.out").write_text("x\n")
    assert main(["logs", "--follow", "12"]) == 130
    assert capfdbinary.readouterr() == (b"x\n", b"")


def test_a_job_that_slurm_has_forgotten_is_told_by_its_log(capsys, folder, monkeypatch):
    from subprocess import CompletedProcess

    monkeypatch.setattr(status, "ask", lambda *_, **__: CompletedProcess([], 1, b"", INVALID))
    monkeypatch.setattr(status, "is_there", lambda _: False)
    keep(folder, record(folder), record(folder, "13"))
    (folder / "train-12.out").write_text("daso: job 12 ended with exit code 4\n")
    assert main(["status"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows[0] == ["12", "train", "FAILED", "-", "-", "-", "exit", "code", "4"]
    assert rows[1] == ["13", "train", "UNKNOWN", "-", "-", "-", "SLURM", "has", "forgotten", "it"]
    assert "14 is not: slurm_load_jobs error: Invalid job id" in refused(capsys, "status", "14")


def test_the_logs_of_an_array_tell_of_its_jobs_one_by_one(capsys, folder, monkeypatch):
    from subprocess import CompletedProcess

    monkeypatch.setattr(status, "ask", lambda *_, **__: CompletedProcess([], 1, b"", INVALID))
    monkeypatch.setattr(status, "is_there", lambda _: False)
    keep(folder, record(folder, array=True))
    for task, code in ((10, 0), (2, 1)):
        end = f"daso: job 9 ended with exit code {code}\n"
        (folder / f"train-12_{task}.out").write_text(end)
    assert main(["status", "12"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["12_2", "train", "FAILED"], ["12_10", "train", "COMPLETED"]]


def test_headers_stand_above_their_logs_in_a_pipe(folder, answers):
    keep(folder, record(folder, array=True))
    for task in (10, 2):
        (folder / f"train-12_{task}.out").write_text(f"task {task}\n")
    words = [sys.executable, "-m", "daso", "logs", "12", "--logs", str(folder)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(words, capture_output=True, env=env, check=True, timeout=60)
    assert done.stdout == b"==> train-12_2.out <==\ntask 2\n==> train-12_10.out <==\ntask 10\n"


def test_a_folder_may_have_the_sign_of_arrays_in_its_name(capfdbinary, tmp_path, answers):
    folder = tmp_path / "50%acc"
    folder.mkdir()
    keep(folder, record(folder))
    (folder / "train-12.out").write_text("all\n")
    assert main(["logs", "12", "--logs", str(folder)]) == 0
    assert capfdbinary.readouterr().out == b"all\n"


def test_logs_takes_no_site(capsys, folder, answers):
    with pytest.raises(SystemExit):
        main(["logs", "--site", "nonsense", "12"])
