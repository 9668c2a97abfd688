"""What the log of a run of `daso train` tells of its job, for `daso predict`."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daso.errors import ConfigError
from daso.plan.layout import SMALL_SHARE
from daso.predict.cluster import Job

__all__ = ["Recorded", "read_run"]

LEAST = 4  # exchanges
MOST_JITTER = 0.5


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run tells of its job."""

    job: Job
    said: tuple[str, ...]  # where its numbers come from


def read_run(folder: Path) -> Recorded:
    """Read step times, exchange times and drift from the log of ``daso train``."""
    path = folder / "log.jsonl"
    try:
        # A run that goes on, or was killed, may have written half a line.
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
        lines = [json.loads(line) for line in whole.splitlines()]
        starts = [at for at, one in enumerate(lines) if one["event"] in ("start", "resume")]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"--from needs the folder of a run of daso train, but {path}: {error}"
        ) from error
    begun = lines[starts[-1]] if starts else {}  # maybe on other nodes than before
    if "parameters" not in begun:
        raise ConfigError(
            f"--from needs a run of this version of daso train, but {path} does not tell of its "
            f"parameters; train anew"
        )
    told = (one for one in lines[starts[-1] :] if one["event"] == "exchange")
    found = [one for one in told if one["step_seconds"] > 0 and one["exchange_seconds"] > 0]
    measured = [one for one in lines[starts[-1] :] if one["event"] == "measured"]
    if len(found) < LEAST <= len(measured):
        return _of_synchronous(begun["parameters"], measured, folder)
    if len(found) < LEAST:
        raise ConfigError(
            f"--from needs a run with at least {LEAST} exchanges that were timed, but {path} has "
            f"{len(found)}; train longer, on 2 nodes at least (--ranks-per-node=1)"
        )
    found = found[len(found) // 2 :]  # the first steps and exchanges are not like the others
    steps = [one["step_seconds"] for one in found]
    batches = (found[-1]["sent"] - found[0]["sent"]) / (len(found) - 1)
    parameters, nodes = begun["parameters"], begun["nodes"]
    taken = statistics.median(one["exchange_seconds"] for one in found)
    # Each exchange of a fragment carried a part of them.
    carried = parameters / (1 + max(one.get("fragment") or 0 for one in found))
    small = [one["small_seconds"] for one in found if one.get("small_seconds")]
    return Recorded(
        Job(
            parameters=parameters,
            step_seconds=statistics.median(steps),
            host_seconds=taken / carried,
            # Logs of before 2026-11-22 do not tell of it.
            own_seconds=statistics.median(one.get("own_seconds", 0.0) for one in found) / carried,
            small_parameters=parameters / SMALL_SHARE if small else 0,
            small_seconds=statistics.median(small) if small else 0,
            # A log has medians of so many batches, which spread less than batches do.
            jitter=min(MOST_JITTER, _spread(steps) * math.sqrt(max(1.0, 2 * batches / math.pi))),
            lr=found[-1]["lr"],
            drift=statistics.median(one["drift"] for one in found) / (1 - 1 / nodes),
            normalizes=any(one.get("required_gain", 0) > 0 for one in found),
        ),
        (
            f"step times, their spread, exchange times and drift: medians of the last "
            f"{len(found)} exchanges of {folder}, on {nodes} nodes",
            "what an exchange took there is taken for the host's own work: less, if a link made "
            "it slow there; of averaged gradients nothing is known, and none is counted",
            f"small tensors went alone there, too, for {1e3 * statistics.median(small):.3g} ms "
            f"each, what ranks waited for them included"
            if small
            else "no small tensors went alone there, nor do they here",
        ),
    )


def _of_synchronous(
    parameters: int, measured: Sequence[Mapping[str, Any]], folder: Path
) -> Recorded:
    """Return what a run tells whose nodes averaged gradients, as `Auto` does with Adam's kin."""
    found = measured[len(measured) // 2 :]
    steps = [one["step_seconds"] for one in found]
    batches = (found[-1]["batch"] - found[0]["batch"]) / (len(found) - 1)
    job = Job(
        parameters=parameters,
        step_seconds=statistics.median(steps),
        jitter=min(MOST_JITTER, _spread(steps) * math.sqrt(max(1.0, 2 * batches / math.pi))),
        lr=found[-1]["lr"],
        normalizes=True,
    )
    said = (
        f"step times and their spread: medians of the last {len(found)} measurements of {folder}, "
        f"whose nodes averaged gradients; of exchanges it tells nothing",
    )
    return Recorded(job, said)


def _spread(seconds: Sequence[float]) -> float:
    """Return the standard deviation of the logarithm, from its median absolute deviation."""
    logs = [math.log(one) for one in seconds]
    middle = statistics.median(logs)
    return 1.4826 * statistics.median(abs(one - middle) for one in logs)
