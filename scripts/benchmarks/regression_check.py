"""Ratios of a short run against the recorded ones: `scripts/bench guard`."""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minicluster.processes import ClusterError
from minicluster.start import check_machine

from benchmarks.hosts import hosts
from daso.cli.bench import exchange, node, train
from daso.cli.bench.command import PARAMETERS
from daso.cli.bench.names import DDP, OURS
from daso.cli.bench.places import run_here
from daso.errors import ExchangeError

__all__ = ["Verdict", "broken", "judge", "measure", "pace", "refuse", "table", "verdicts"]

LINK, BITS_PER_SECOND = "1gbit", 1e9
BENCHES = {"train": train, "exchange": exchange, "node": node}
MARGIN = 1.15  # times the recorded ratio
WORST = 2.0  # times the recorded ratio, where a figure is guarded
# Ratios to a rival of the same round: at most 1, and not twice what they were. Noise hits both.
GUARDED = (f"step_ratio_over_ddp_{LINK}", "node_average_8mib_over_mpi")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a figure's ratios say, over rounds."""

    figure: str
    recorded: tuple[float, ...]  # empty: not recorded
    now: tuple[float, ...]
    word: str


def judge(figure: str, recorded: Sequence[float], now: Sequence[float]) -> Verdict:
    """Return what a figure's ratios of now say, held against recorded ones.

    A ratio is another one when the ranges over rounds do not meet and the medians are more than
    15 % apart.

    Args:
        figure: Its name.
        recorded: A ratio of every round, less is better; none where nothing is recorded.
        now: The same, of this run.
    """
    word = "as recorded"
    if not recorded:
        word = "not recorded"
    elif min(now) > max(recorded) and _median(now) > MARGIN * _median(recorded):
        word = "slower"
    elif max(now) < min(recorded) and MARGIN * _median(now) < _median(recorded):
        word = "faster"
    return Verdict(figure, tuple(recorded), tuple(now), word)


def broken(found: Iterable[Verdict], slowdown: float = 1.0) -> list[Verdict]:
    """Return guarded verdicts in which a rival beat us, or we lost half of what we were ahead."""
    guarded = [one for one in found if one.figure in GUARDED]
    return [one for one in guarded if _median(one.now) > _most(one, slowdown)]


def _most(verdict: Verdict, slowdown: float) -> float:
    """Return the limit of the median: where ranges over rounds meet, the rival's.

    On a slower machine the same communication is a smaller part of a rival's step.
    """
    if verdict.word != "slower":
        return 1.0
    return min(1.0, WORST * _median(verdict.recorded) * max(1.0, slowdown))


def refuse(found: Iterable[Verdict], slowdown: float = 1.0) -> None:
    """Pass over noise.

    Args:
        found: Verdicts.
        slowdown: A step of compute only over the recorded one.

    Raises:
        ExchangeError: A ratio is beyond it.
    """
    if worst := broken(found, slowdown):
        ratios = "; ".join(f"{one.figure} was {_spread(one.now)}" for one in worst)
        raise ExchangeError(
            f"the median ratio to a rival must be at most 1, and at most {WORST:g} times the "
            f"recorded one on a machine as fast, but {ratios}; run `scripts/bench train`, "
            f"`exchange` or `node` for all rows"
        )


def verdicts(folder: Path, taken: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """Hold what was measured against what is recorded on the same nodes and link.

    Args:
        folder: Holds what ``scripts/bench NAME --json NAME.json`` wrote; a file may be missing.
        taken: What each bench found now.
    """
    return [
        judge(figure, recorded.get(figure, ()), now)
        for kind, found in taken.items()
        for recorded in [_read(folder, kind, found)]
        for figure, now in BENCHES[kind].ratios(found).items()
    ]


def pace(folder: Path, found: Mapping[str, Any]) -> tuple[str, float]:
    """Return a line on how fast this machine computes, since ratios depend on it, and a ratio.

    The ratio is a step of compute only over the recorded one; 1 if none is recorded.

    Args:
        folder: As in `verdicts`.
        found: What the bench of training found now.
    """
    now = found["rows"][0]["step_ms"]
    *_, before = None, *(run["rows"][0]["step_ms"] for run in _runs(folder, "train", found))
    recorded, slowdown = ("-", 1.0) if before is None else (f"{before:.1f} ms", now / before)
    return f"a step of compute only: recorded {recorded}, now {now:.1f} ms", slowdown


def _runs(folder: Path, kind: str, like: Mapping[str, Any]) -> list[dict[str, Any]]:
    path = folder / f"{kind}.json"
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    return [run for run in runs if _conditions(run) == _conditions(like)]


def _read(folder: Path, kind: str, like: Mapping[str, Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for run in _runs(folder, kind, like):
        found |= BENCHES[kind].ratios(run)
    return found


def _conditions(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return run["nodes"], run["plan"].get("link"), run["plan"].get("model")


def measure(
    rounds: int, *, seconds: float = 2, settle: float = 8
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run short benches, on hosts where they can be had; yield each with its kind; blocking.

    Args:
        rounds: Of every contender.
        seconds: That a round of training lasts.
        settle: Seconds of training before the first.
    """

    def training(link: str) -> dict[str, Any]:
        names = (OURS, DDP)
        return asdict(train.Plan("cnn", names, rounds, seconds, settle, link))

    swap = asdict(exchange.Plan(PARAMETERS, rounds, LINK, BITS_PER_SECOND, rivals=False))
    with ExitStack() as stack:
        try:
            check_machine()
        except ClusterError as reason:
            print(f"no hosts, so no link and no exchange between nodes: {reason}", flush=True)
            here = {"ranks": 2, "ranks_per_node": 1}
            yield "train", run_here(BENCHES["train"].__name__, training("here"), **here)
        else:
            cluster = stack.enter_context(hosts(2))
            for kind, plan in (("train", training(LINK)), ("exchange", swap)):
                module = BENCHES[kind].__name__
                yield kind, cluster.run(module, plan, link=LINK, nodes=2, ranks=1)
    plan = asdict(node.Plan(mebibytes=8, rounds=10 * rounds))
    yield "node", run_here(BENCHES["node"].__name__, plan, ranks=2, ranks_per_node=2)


def table(found: Iterable[Verdict]) -> str:
    """Return a line for every verdict: medians, and the least and the most over rounds of each."""
    lines = [f"{'':<30}{'recorded':>10}{'least, most':>16}{'now':>10}{'least, most':>16}"]
    for one in found:
        cells = "".join(
            f"{_median(ratios):>10.3f}{_spread(ratios):>16}" if ratios else f"{'-':>10}{'-':>16}"
            for ratios in (one.recorded, one.now)
        )
        lines.append(f"{one.figure:<30}{cells}  {one.word}")
    return "\n".join(lines)


def _median(ratios: Sequence[float]) -> float:
    return statistics.median(ratios)


def _spread(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.3f}, {max(ratios):.3f}"
