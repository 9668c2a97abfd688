"""What became of a job: read from what SLURM's commands print, and from the job's own log."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["END", "State", "read_accounting", "read_jobs", "read_log_end", "render"]

# A job in one of these states will not run again; all others may (COMPLETING, REQUEUED, ...).
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is known of one job, or of one task of an array."""

    job: str
    name: str
    state: str
    nodes: str = "-"
    elapsed: str = "-"
    restarts: str = "-"
    reason: str = "-"

    @property
    def ended(self) -> bool:
        """Whether it will not run again."""
        return self.state in ENDED


def read_jobs(text: str) -> list[State]:
    """Read what ``scontrol show job -o`` prints."""
    jobs = [_read_job(line) for line in text.splitlines() if line.startswith("JobId=")]
    return sorted(jobs, key=lambda one: [int(word) for word in re.findall(r"\d+", one.job)])


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


PLAIN = ("None", "NonZeroExitCode")  # reasons that say less than the exit code


def _code(text: str) -> str:
    """Return ``code:signal`` in words."""
    code, _, number = text.partition(":")
    return code if number in ("", "0") else f"{code}, signal {number}"


def read_accounting(text: str) -> list[State]:
    """Read what ``sacct -nPX -o JobID,JobName,State,NodeList,Elapsed,ExitCode`` prints."""
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
    """Read how a job ended from what its script wrote last."""
    lines = text.strip().splitlines()
    found = re.search(END, lines[-1]) if lines else None
    if found is None:
        return None
    state = "COMPLETED" if found[1] == "0" else "FAILED"
    begun = re.findall(r"^daso: job \d+ on \S+, restart (\d+)$", text, re.MULTILINE)
    restarts = begun[-1] if begun else "-"
    reason = "None" if found[1] == "0" else f"exit code {found[1]}"
    return State(job=job, name=name, state=state, restarts=restarts, reason=reason)


# The script's last line; before it may stand what a program printed last, without a line's end.
END = r"daso: job \d+ ended with exit code (\d+)$"


def render(states: Sequence[State]) -> str:
    """Return jobs as a table for a terminal."""
    names = ("job", "name", "state", "nodes", "elapsed", "restarts", "reason")
    rows = [names, *(tuple(str(getattr(one, name)) for name in names) for one in states)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    lines = [
        "  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
