"""Jobs: a model and its training costs, given or read from a run's log. Pure except for that."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daso.checks import Rule, check, number, positive, validated_record
from daso.errors import ConfigError
from daso.plan.layout import SMALL_SHARE

MOST_PARAMETERS, MOST_RATE = 1e15, 1e6
LEAST_EXCHANGES = 4
MOST_JITTER = 0.5


@validated_record
@dataclass(frozen=True, slots=True)
class Job:
    """A model, and its training costs per node.

    Args:
        parameters: Number of parameter elements.
        step_seconds: Computing a batch, including the average of gradients inside the node.
        host_seconds: The host's work on an exchange, per parameter; it overlaps the transfer, so
            the longer of both counts.
        own_seconds: The training thread's work, per parameter and exchange: half of it packs the
            payload, half merges the result; it overlaps nothing.
        small_parameters: Elements of small tensors, which `Auto` also exchanges alone; 0: it does
            not.
        small_seconds: The training thread's work for each of these exchanges, as ``own_seconds``.
        message_seconds: The host's work for each message sent or received.
        gradient_seconds: As ``host_seconds``, for gradients averaged in a synchronous step.
        jitter: Spread of step times: standard deviation of their logarithm.
        lr: Learning rate.
        drift: Mean square distance of many nodes from their mean after one batch, relative to the
            parameters' mean square, at ``lr``; 0: unknown, and `Auto` keeps its skip.
        normalizes: Whether the inner optimizer divides by the size of gradients, as Adam and
            similar do: `Auto` begins synchronously, and stays so while that is cheap.
    """

    parameters: float
    step_seconds: float
    host_seconds: float = 0.0
    own_seconds: float = 0.0
    small_parameters: float = 0.0
    small_seconds: float = 0.0
    message_seconds: float = 0.0
    gradient_seconds: float = 0.0
    jitter: float = 0.0
    lr: float = 0.1
    drift: float = 0.0
    normalizes: bool = False

    def __post_init__(self) -> None:
        check("parameters", self.parameters, positive(MOST_PARAMETERS))
        check("step_seconds", self.step_seconds, positive())
        check("small_parameters", self.small_parameters, number(0, self.parameters))
        for name in (
            *("host_seconds", "own_seconds", "small_seconds"),
            *("message_seconds", "gradient_seconds"),
        ):
            check(name, getattr(self, name), number(0, 1))
        for name in ("lr", "drift"):
            check(name, getattr(self, name), number(0, MOST_RATE))
        below_one = Rule("a part of a step from 0 to 1", lambda part: number(0, 0.999).holds(part))
        check("jitter", self.jitter, below_one)


def read_run(folder: Path) -> tuple[Job, tuple[str, ...]]:
    """Return the job of a run of ``daso train``, and sentences on the origin of its numbers."""
    path = folder / "log.jsonl"
    try:
        # An active or killed run may have written half a line.
        complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
        events = [json.loads(line) for line in complete.splitlines()]
        starts = [at for at, event in enumerate(events) if event["event"] in ("start", "resume")]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"--from needs the folder of a run of daso train, but {path}: {error}",
            code="run-not-readable",
        ) from error
    start = events[starts[-1]] if starts else {}
    if "parameters" not in start:
        raise ConfigError(
            f"--from needs a run of this version of daso train, but {path} has no number of "
            f"parameters; train again",
            code="run-of-other-version",
        )
    latest = events[starts[-1] :]  # the run may have resumed on other nodes
    exchanges = [
        event
        for event in latest
        if event["event"] == "exchange"
        and event["step_seconds"] > 0
        and event["exchange_seconds"] > 0
    ]
    if len(exchanges) >= LEAST_EXCHANGES:
        return _job_of_exchanges(start, exchanges, folder)
    measured = [event for event in latest if event["event"] == "measured"]
    if len(measured) >= LEAST_EXCHANGES:
        return _job_of_synchronous(start, measured, folder)
    raise ConfigError(
        f"--from needs a run with at least {LEAST_EXCHANGES} exchanges that were timed, but {path} "
        f"has {len(exchanges)}; train longer, on 2 nodes at least (--ranks-per-node=1)",
        code="run-with-few-exchanges",
    )


def _job_of_exchanges(
    start: Mapping[str, Any], exchanges: Sequence[Mapping[str, Any]], folder: Path
) -> tuple[Job, tuple[str, ...]]:
    """Return the job of a run with exchanges of parameters."""
    latter = exchanges[len(exchanges) // 2 :]  # the first ones are not representative
    parameters, nodes = start["parameters"], start["nodes"]
    # Each exchange of a fragment carried only some of the parameters.
    carried = parameters / (1 + max(event.get("fragment") or 0 for event in latter))
    small = [event["small_seconds"] for event in latter if event.get("small_seconds")]
    small_seconds = statistics.median(small) if small else 0
    job = Job(
        parameters=parameters,
        host_seconds=statistics.median(event["exchange_seconds"] for event in latter) / carried,
        # Logs from before 2026-11-22 do not contain it.
        own_seconds=statistics.median(event.get("own_seconds", 0.0) for event in latter) / carried,
        small_parameters=parameters / SMALL_SHARE if small else 0,
        small_seconds=small_seconds,
        drift=statistics.median(event["drift"] for event in latter) / (1 - 1 / nodes),
        normalizes=any(event.get("required_gain", 0) > 0 for event in latter),
        **_steps(latter, "sent"),
    )
    return job, (
        f"step times, their spread, exchange times and drift: medians of the last {len(latter)} "
        f"exchanges of {folder}, on {nodes} nodes",
        "exchange times there are taken as the host's own work, which is less if a link slowed "
        "them down; averaged gradients were not measured, and cost nothing here",
        f"small tensors were also exchanged alone there, for {1e3 * small_seconds:.3g} ms each, "
        f"including waits"
        if small
        else "no small tensors were exchanged alone there, nor are they here",
    )


def _job_of_synchronous(
    start: Mapping[str, Any], measured: Sequence[Mapping[str, Any]], folder: Path
) -> tuple[Job, tuple[str, ...]]:
    """Return the job of a run with averaged gradients, as from `Auto` with Adam and similar."""
    latter = measured[len(measured) // 2 :]
    job = Job(parameters=start["parameters"], normalizes=True, **_steps(latter, "batch"))
    return job, (
        f"step times and their spread: medians of the last {len(latter)} measurements of {folder}, "
        f"whose nodes averaged gradients; it has no data on exchanges",
    )


def _steps(events: Sequence[Mapping[str, Any]], batch: str) -> dict[str, Any]:
    """Return step time, jitter and learning rate of events; `batch` is the key of their batch."""
    steps = [event["step_seconds"] for event in events]
    batches = (events[-1][batch] - events[0][batch]) / (len(events) - 1)
    logs = [math.log(seconds) for seconds in steps]
    middle = statistics.median(logs)
    spread = 1.4826 * statistics.median(abs(log - middle) for log in logs)
    return {
        "step_seconds": statistics.median(steps),
        # A log contains medians over batches, which spread less than single batches.
        "jitter": min(MOST_JITTER, spread * math.sqrt(max(1.0, 2 * batches / math.pi))),
        "lr": events[-1]["lr"],
    }
