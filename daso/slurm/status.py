"""`daso status` and `daso logs`: the states and logs of submitted jobs."""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from daso.environment import expand
from daso.errors import ConfigError
from daso.paths import path_of
from daso.slurm.sites import read_site
from daso.slurm.slurm_commands import NoAnswerError, ask, is_there
from daso.slurm.submit import RECORDS, Record

POLL_SECONDS = 0.2  # between reads of the log
TAIL_BYTES = 1 << 16
NEWEST = 20  # jobs shown by default: each costs the controller a request
ASK_SECONDS = 5.0  # between requests to the controller, which all users share
END_SECONDS = 1.0  # the same after the script's last line
FORGOTTEN = "SLURM has forgotten it"
PLAIN = ("None", "NonZeroExitCode")  # reasons less specific than the exit code
# The script's last line; the program's last words may stand before it, without a line's end.
END = r"daso: job \d+ ended with exit code (\d+)$"
# A job in one of these states will not run again; all others may (COMPLETING, REQUEUED, ...).
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of one job, or of one task of an array."""

    job: str
    name: str
    state: str
    nodes: str = "-"
    elapsed: str = "-"
    restarts: str = "-"
    reason: str = "-"

    @property
    def ended(self) -> bool:
        """Return whether the job will not run again."""
        return self.state in ENDED


def read_jobs(text: str) -> list[State]:
    """Parse the output of ``scontrol show job -o``."""
    jobs = [_read_job(line) for line in text.splitlines() if line.startswith("JobId=")]
    return sorted(jobs, key=lambda state: [int(word) for word in re.findall(r"\d+", state.job)])


def _read_job(line: str) -> State:
    words = re.split(r" (?=[A-Z][\w:/]*=)", line.strip())
    values = dict(word.partition("=")[::2] for word in words)
    number = values["JobId"]
    if "ArrayJobId" in values and "ArrayTaskId" in values:
        number = f"{values['ArrayJobId']}_{values['ArrayTaskId']}"
    nodes = values.get("NodeList", "(null)")
    code = values.get("ExitCode", "0:0")
    reason = values.get("Reason", "None")
    return State(
        job=number,
        name=values.get("JobName", "-"),
        state=values.get("JobState", "UNKNOWN"),
        nodes=values.get("NumNodes", "-") if nodes in ("", "(null)") else nodes,
        elapsed=values.get("RunTime", "-"),
        restarts=values.get("Restarts", "-"),
        reason=f"exit code {_code(code)}" if code != "0:0" and reason in PLAIN else reason,
    )


def _code(text: str) -> str:
    """Return ``code:signal`` in words."""
    code, _, number = text.partition(":")
    return code if number in ("", "0") else f"{code}, signal {number}"


def read_accounting(text: str) -> list[State]:
    """Parse the output of ``sacct -nPX -o JobID,JobName,State,NodeList,Elapsed,ExitCode``."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 5]
    return [
        State(
            job=job,
            name=name,
            state=state.split()[0],  # "CANCELLED by 1000"
            nodes=nodes,
            elapsed=elapsed,
            reason="None" if code == "0:0" else f"exit code {_code(code)}",
        )
        for job, name, state, nodes, elapsed, code in rows
    ]


def read_log_end(text: str, *, job: str, name: str) -> State | None:
    """Return the final state of a job from the last line of its log."""
    lines = text.strip().splitlines()
    end = re.search(END, lines[-1]) if lines else None
    if end is None:
        return None
    state = "COMPLETED" if end[1] == "0" else "FAILED"
    begun = re.findall(r"^daso: job \d+ on \S+, restart (\d+)$", text, re.MULTILINE)
    restarts = begun[-1] if begun else "-"
    reason = "None" if end[1] == "0" else f"exit code {end[1]}"
    return State(job=job, name=name, state=state, restarts=restarts, reason=reason)


def table(states: Sequence[State]) -> str:
    """Return jobs as a table for a terminal."""
    names = ("job", "name", "state", "nodes", "elapsed", "restarts", "reason")
    rows = [names, *(tuple(str(getattr(state, name)) for name in names) for state in states)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    lines = [
        "  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def add_status(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``daso status``."""
    parser.add_argument(
        "job", nargs="?", help=f"job id; default: the newest {NEWEST} submitted from here"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, a list of jobs")
    _add_logs_folder(parser)
    parser.add_argument("--site", help="site profile, for jobs not submitted from here")
    parser.set_defaults(run=status)


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``daso logs``."""
    parser.add_argument("job", help="job id, such as 12, or 12_3 for one of an array")
    parser.add_argument("--follow", action="store_true", help="print until the job has ended")
    _add_logs_folder(parser)
    parser.set_defaults(run=logs)


def _add_logs_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--logs", type=path_of, default=Path("runs/slurm"), help="folder of logs")


def _records(folder: Path) -> dict[str, Record]:
    path = folder / RECORDS
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records = [_record(line, f"{path}:{at}") for at, line in enumerate(lines, 1) if line.strip()]
    return {record.job: record for record in records}


def _record(line: str, where: str) -> Record:
    try:
        record = Record(**json.loads(line))
        return replace(record, client={key: expand(text) for key, text in record.client.items()})
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"every line must be the record of a job, but {where}: {error}; mend or remove that "
            f"line (a full disk may have cut it off)",
            code="job-record-damaged",
        ) from error


def _number(text: str) -> str:
    """Return the job id without the number in an array."""
    if not re.fullmatch(r"\d+(_\d+)?", text):
        raise ConfigError(
            f"a job must be a number, such as 12 or 12_3, not {text!r}", code="job-not-a-number"
        )
    return text.partition("_")[0]


def status(chosen: argparse.Namespace, _: Sequence[str]) -> int:
    """Run ``daso status``."""
    records = _records(chosen.logs)
    if chosen.job is None and not records:
        raise ConfigError(
            f"{chosen.logs / RECORDS} must list jobs, but there is none; submit one, go where you "
            f"submitted, or give a job id",
            code="no-recorded-jobs",
        )
    jobs: list[str] = [chosen.job] if chosen.job else list(records)[-NEWEST:]
    site = read_site(chosen.site).client
    states = [state for job in jobs for state in _look_up(job, records.get(_number(job)), site)]
    as_json = json.dumps([asdict(state) for state in states], indent=2) if chosen.json else ""
    print(as_json or table(states))
    return 0


def _look_up(job: str, record: Record | None, site: Mapping[str, str]) -> list[State]:
    """Return a job's states from the controller, else the accounting, else the log."""
    client = dict(site) or (record.client if record else {})
    controller = ask(["scontrol", "show", "job", "-o", job], client=client)
    if states := read_jobs(controller.stdout.decode("utf-8", "replace")):
        return states
    if is_there("sacct"):
        form = "JobID,JobName,State,NodeList,Elapsed,ExitCode"
        accounting = ask(["sacct", "-nPX", "-j", job, "-o", form], client=client)
        if states := read_accounting(accounting.stdout.decode("utf-8", "replace")):
            return states
    if record is None:
        why = controller.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ConfigError(
            f"a job must be known to SLURM or submitted from here, but {job} is not: "
            f"{why[-1] if why else 'no answer'}; `daso status` lists those submitted from here",
            code="job-not-known",
        )
    logs_of = [
        read_log_end(_tail(path), job=_job_of(path, job, record), name=record.name)
        for path in _files(job, record)
    ]
    why = controller.stderr.decode("utf-8", "replace").strip().splitlines() or ["no answer"]
    forgotten = controller.returncode == 0 or "Invalid job id" in why[-1]
    return [end for end in logs_of if end] or [
        State(
            job=job,
            name=record.name,
            state="UNKNOWN",
            reason=FORGOTTEN if forgotten else " ".join(why[-1].split()),
        )
    ]


def _files(job: str, record: Record) -> list[Path]:
    """Return a job's log files; for a whole array, those that exist."""
    path = Path(record.log)
    task = job.partition("_")[2]
    if task or "%a" not in path.name:
        return [path.with_name(path.name.replace("%a", task))]
    head, _, tail = path.name.partition("%a")
    return sorted(path.parent.glob(f"{head}*{tail}"), key=lambda log: (len(log.name), log.name))


def _is_array(record: Record) -> bool:
    return "%a" in Path(record.log).name  # folder names may contain %a too


def _job_of(path: Path, job: str, record: Record) -> str:
    """Return the id of the job that wrote a log, also in an array."""
    return f"{record.job}_{path.stem.rpartition('_')[2]}" if _is_array(record) else job


def _tail(path: Path) -> str:
    """Return the last 64 KiB of a file; nothing if it does not exist."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode("utf-8", "replace")


def logs(chosen: argparse.Namespace, _: Sequence[str]) -> int:
    """Run ``daso logs``."""
    record = _records(chosen.logs).get(_number(chosen.job))
    if record is None:
        raise ConfigError(
            f"a job must be one that was submitted from here, but {chosen.logs / RECORDS} does not "
            f"list {chosen.job}; go where you submitted, or give its folder with --logs",
            code="job-not-recorded",
        )
    files = _files(chosen.job, record)
    if chosen.follow:
        if _is_array(record) and "_" not in chosen.job:
            raise ConfigError(
                f"--follow must be given one job of an array, not {chosen.job}; such as "
                f"{chosen.job}_0",
                code="follow-needs-one-job",
            )
        return _follow(chosen.job, record, files[0])
    existing = [path for path in files if path.exists()]
    if not existing:
        state = _look_up(chosen.job, record, {})[0]
        raise ConfigError(
            f"a job must have begun to have a log, but {chosen.job} has none yet: {state.state}, "
            f"{state.reason}; wait for it with --follow",
            code="job-without-log",
        )
    for path in existing:
        if len(existing) > 1:
            print(f"==> {path.name} <==", flush=True)  # _copy bypasses this buffer
        _copy(path, 0)
    return 0


def _follow(job: str, record: Record, path: Path) -> int:
    def look_up() -> State:
        try:
            return _look_up(job, record, {})[0]
        except NoAnswerError as error:  # a controller that is temporarily unavailable
            return State(job=job, name=record.name, state="UNKNOWN", reason=str(error))

    with suppress(KeyboardInterrupt):
        for _ in _until_ended(look_up, path):
            time.sleep(POLL_SECONDS)
        return 0
    return 130


def _until_ended(look_up: Callable[[], State], path: Path) -> Iterator[None]:
    """Print a log as it grows, across requeues; yield when only waiting is left.

    The script's last line is no proof of the end: SLURM may have killed the job to restart it, or
    an older job with the same number may have written it.
    """
    at, asked_at, waiting = 0, float("-inf"), ""
    while True:
        over = False
        seconds = END_SECONDS if re.search(rf"{END}\n\Z", _tail(path), re.M) else ASK_SECONDS
        if time.monotonic() - asked_at >= seconds:
            state, asked_at = look_up(), time.monotonic()
            over = state.ended or state.reason == FORGOTTEN
            if state.state not in (waiting, "RUNNING") and not over and not path.exists():
                waiting = state.state
                print(f"daso: job {state.job}: {waiting}, {state.reason}", file=sys.stderr)
        # Output written before the job's end was seen is complete by now.
        at = _copy(path, at)
        if over:
            _copy(path, at)
            return
        yield


def _copy(path: Path, at: int) -> int:
    """Print a file from an offset on; return its size. A missing file is empty."""
    if not path.exists():
        return at
    with path.open("rb") as file:
        file.seek(at)
        while block := file.read(1 << 16):
            sys.stdout.buffer.write(block)
        at = file.tell()
    sys.stdout.flush()
    return at
