"""`daso status` and `daso logs`: what became of submitted jobs."""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from daso.environment import expand, path_of
from daso.errors import ConfigError
from daso.slurm.job_state import END, State, read_accounting, read_jobs, read_log_end, render
from daso.slurm.sites import read_site
from daso.slurm.slurm_commands import NoAnswerError, ask, is_there
from daso.slurm.submit import RECORDS, Record

__all__ = ["add_logs", "add_status"]

LOOK_SECONDS = 0.2  # from one look into the log to the next
TAIL_BYTES = 1 << 16
NEWEST = 20  # jobs that are shown when none is named: each costs the controller a question
ASK_SECONDS = 5.0  # from one question to the controller, which all users share, to the next
END_SECONDS = 1.0  # the same once the script has written its last line
FORGOTTEN = "SLURM has forgotten it"


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
    parser.add_argument("--follow", action="store_true", help="go on until the job has ended")
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
            f"line (a full disk may have cut it off)"
        ) from error


def _number(text: str) -> str:
    """Return the job id without the number in an array."""
    if not re.fullmatch(r"\d+(_\d+)?", text):
        raise ConfigError(f"a job must be a number, such as 12 or 12_3, not {text!r}")
    return text.partition("_")[0]


def status(chosen: argparse.Namespace, _: Sequence[str]) -> int:
    """Run ``daso status``."""
    records = _records(chosen.logs)
    if chosen.job is None and not records:
        raise ConfigError(
            f"{chosen.logs / RECORDS} must list jobs, but there is none; submit one, go where you "
            f"submitted, or give a job id"
        )
    wanted: list[str] = [chosen.job] if chosen.job else list(records)[-NEWEST:]
    site = read_site(chosen.site).client
    found = [_look_up(one, records.get(_number(one)), site) for one in wanted]
    states = [state for several in found for state in several]
    as_json = json.dumps([asdict(state) for state in states], indent=2) if chosen.json else ""
    print(as_json or render(states))
    return 0


def _look_up(job: str, record: Record | None, site: Mapping[str, str]) -> list[State]:
    """Return what the controller knows, else the accounting, else the log."""
    client = dict(site) or (record.client if record else {})
    said = ask(["scontrol", "show", "job", "-o", job], client=client)
    if states := read_jobs(said.stdout.decode("utf-8", "replace")):
        return states
    if is_there("sacct"):
        form = "JobID,JobName,State,NodeList,Elapsed,ExitCode"
        kept = ask(["sacct", "-nPX", "-j", job, "-o", form], client=client)
        if states := read_accounting(kept.stdout.decode("utf-8", "replace")):
            return states
    if record is None:
        why = said.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ConfigError(
            f"a job must be known to SLURM or submitted from here, but {job} is not: "
            f"{why[-1] if why else 'no answer'}; `daso status` lists those submitted from here"
        )
    logs_of = [
        read_log_end(_tail(path), job=_job_of(path, job, record), name=record.name)
        for path in _files(job, record)
    ]
    why = said.stderr.decode("utf-8", "replace").strip().splitlines() or ["no answer"]
    forgotten = said.returncode == 0 or "Invalid job id" in why[-1]
    return [end for end in logs_of if end] or [
        State(
            job=job,
            name=record.name,
            state="UNKNOWN",
            reason=FORGOTTEN if forgotten else " ".join(why[-1].split()),
        )
    ]


def _files(job: str, record: Record) -> list[Path]:
    """Return a job's log files; those that are there, for a whole array."""
    path = Path(record.log)
    task = job.partition("_")[2]
    if task or "%a" not in path.name:
        return [path.with_name(path.name.replace("%a", task))]
    head, _, tail = path.name.partition("%a")
    return sorted(path.parent.glob(f"{head}*{tail}"), key=lambda one: (len(one.name), one.name))


def _is_array(record: Record) -> bool:
    return "%a" in Path(record.log).name  # a folder may be called so, too


def _job_of(path: Path, job: str, record: Record) -> str:
    """Return the id of the job of an array that a log is of."""
    return f"{record.job}_{path.stem.rpartition('_')[2]}" if _is_array(record) else job


def _tail(path: Path) -> str:
    """Return the end of a file, of which there may be much; nothing where there is none."""
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
            f"list {chosen.job}; go where you submitted, or give its folder with --logs"
        )
    files = _files(chosen.job, record)
    if chosen.follow:
        if _is_array(record) and "_" not in chosen.job:
            raise ConfigError(
                f"--follow must be given one job of an array, not {chosen.job}; such as "
                f"{chosen.job}_0"
            )
        return _follow(chosen.job, record, files[0])
    there = [path for path in files if path.exists()]
    if not there:
        state = _look_up(chosen.job, record, {})[0]
        raise ConfigError(
            f"a job must have begun to have a log, but {chosen.job} has none yet: {state.state}, "
            f"{state.reason}; wait for it with --follow"
        )
    for path in there:
        if len(there) > 1:
            print(f"==> {path.name} <==", flush=True)  # what follows goes past this buffer
        _copy(path, 0)
    return 0


def _follow(job: str, record: Record, path: Path) -> int:
    def look_up() -> State:
        try:
            return _look_up(job, record, {})[0]
        except NoAnswerError as error:  # a controller that is away for a while
            return State(job=job, name=record.name, state="UNKNOWN", reason=str(error))

    with suppress(KeyboardInterrupt):
        for _ in _until_ended(look_up, path):
            time.sleep(LOOK_SECONDS)
        return 0
    return 130


def _until_ended(look_up: Callable[[], State], path: Path) -> Iterator[None]:
    """Print a log as it grows, across requeues; yields when there is nothing to do but wait.

    The script's last line is no proof of the end: SLURM may have killed the job to start it again,
    or an older job of the same number may have written it.
    """
    at, asked, waiting = 0, float("-inf"), ""
    while True:
        over = False
        seconds = END_SECONDS if re.search(rf"{END}\n\Z", _tail(path), re.M) else ASK_SECONDS
        if time.monotonic() - asked >= seconds:
            state, asked = look_up(), time.monotonic()
            over = state.ended or state.reason == FORGOTTEN
            if state.state not in (waiting, "RUNNING") and not over and not path.exists():
                waiting = state.state
                print(f"daso: job {state.job}: {waiting}, {state.reason}", file=sys.stderr)
        # What was written before the job was seen to have ended is there by now.
        at = _copy(path, at)
        if over:
            _copy(path, at)
            return
        yield


def _copy(path: Path, at: int) -> int:
    """Print a file from a place on, and return where it ends; a file not there is empty."""
    if not path.exists():
        return at
    with path.open("rb") as file:
        file.seek(at)
        while block := file.read(1 << 16):
            sys.stdout.buffer.write(block)
        at = file.tell()
    sys.stdout.flush()
    return at
