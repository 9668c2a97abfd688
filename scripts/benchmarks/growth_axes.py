"""The axes of `scripts/bench growth`: their options, and a run for each."""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from daso.cli.bench.options import more_than_zero
from daso.errors import ConfigError
from daso.plan.options import Wire

__all__ = ["add_options", "run"]

GROWTH = (  # axis, what its numbers are, the usual ones and those of --quick
    ("parameters", "millions", ("1,3,10,30,100", "1,3,10,30")),
    ("tensors", "of one size", ("10,30,100,300,1000", "10,100,1000")),
    ("ranks", "each a node", ("2,3,4,6,8", "2,4,8")),
    ("chunks", "KiB on the wire", ("32,64,128,256,512", "64,256")),
    ("memory", "millions", ("10,50", "10,30")),
)
MILLIONS = ("parameters", "memory")
RANKS, TENSORS = 2, 10  # where they do not grow
WIRES: tuple[Wire, ...] = ("bf16", "int4", "fp32")  # whose memory is measured; --quick: the first


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for every axis.

    Args:
        parser: Of ``scripts/bench growth``.
    """
    for axis, text, usual in GROWTH:
        parser.add_argument(
            f"--{axis}", help=f"{text}, separated by commas ({'; quick '.join(usual)})"
        )
    parser.add_argument(
        "--size", type=more_than_zero, default=10, help="millions on other axes (10)"
    )
    parser.add_argument("--only", action="append", choices=[axis for axis, *_ in GROWTH])
    parser.add_argument("--plot", type=Path, help="draw costs to this PNG")


def run(
    chosen: argparse.Namespace, rounds: int
) -> Iterator[tuple[dict[str, Any], str, dict[str, dict[str, Any]]]]:
    """Measure along every axis; yield what was found, as text, and figures."""
    from benchmarks import growth, growth_memory

    sizes = {axis: _sizes(chosen, axis) for axis, *_ in GROWTH}
    wanted = [axis for axis, *_ in GROWTH if axis in (chosen.only or sizes)]
    if chosen.plot and wanted == ["memory"]:
        raise ConfigError("--plot needs an axis besides memory, not --only=memory; leave one out")
    for axis in wanted:
        if axis == "memory":
            for one in _memory(sizes[axis], WIRES[:1] if chosen.quick else WIRES):
                yield one, growth_memory.table(one) + "\n", growth_memory.figures(one)
        else:
            one = _grown(axis, sizes[axis], chosen.size, rounds)
            yield one, growth.table(one) + "\n", growth.figures(one)


def _sizes(chosen: argparse.Namespace, axis: str) -> list[float]:
    """Return the numbers of an axis: those asked for, or the usual ones."""
    usual = next(numbers for name, _, numbers in GROWTH if name == axis)
    text = getattr(chosen, axis) or usual[chosen.quick]
    try:
        found = sorted({float(word) for word in text.split(",")})
    except ValueError:
        found = []
    least = 2 if axis == "ranks" else 1
    fit = [
        0 < size < math.inf if axis in MILLIONS else size.is_integer() and size >= least
        for size in found
    ]
    if len(found) < 2 or not all(fit):
        what = "numbers above 0" if axis in MILLIONS else f"whole numbers from {least} up"
        raise ConfigError(f"--{axis} must be two {what} or more, as in {usual[1]}, not {text!r}")
    return found


def _grown(axis: str, sizes: Sequence[float], millions: float, rounds: int) -> dict[str, Any]:
    """Measure along one axis; another number of ranks is another run."""
    from benchmarks.growth import Plan, Point
    from daso.cli.bench.places import run_here
    from daso.plan.options import Exchange

    usual = Point(round(1e6 * millions), TENSORS, Exchange().chunk_bytes)
    points = {
        "parameters": [usual._replace(parameters=round(1e6 * size)) for size in sizes],
        "tensors": [usual._replace(tensors=int(size)) for size in sizes],
        "chunks": [usual._replace(chunk_bytes=int(1024 * size)) for size in sizes],
    }.get(axis, [usual])
    if any(point.parameters < point.tensors for point in points):
        raise ConfigError(
            f"every tensor must have a parameter, but {max(p.tensors for p in points)} tensors "
            f"share {min(p.parameters for p in points)}; raise --size or --parameters"
        )
    plan = asdict(Plan("chunk_bytes" if axis == "chunks" else axis, points, rounds))
    worlds = [int(size) for size in sizes] if axis == "ranks" else [RANKS]
    runs = [run_here("benchmarks.growth", plan, ranks=ranks, ranks_per_node=1) for ranks in worlds]
    return {**runs[-1], "rows": [row for run in runs for row in run["rows"]]}


def _memory(millions: Sequence[float], wires: Sequence[Wire]) -> Iterator[dict[str, Any]]:
    """Measure memory where every rank is a node, then in two nodes of two ranks."""
    from benchmarks.growth_memory import Plan
    from daso.cli.bench.places import run_here
    from daso.plan.options import Exchange

    sizes = [round(1e6 * size) for size in millions]
    plan = asdict(Plan(sizes, 2, wires, Exchange().chunk_bytes))
    for ranks_per_node in (1, 2):
        ranks = 2 * ranks_per_node
        yield run_here("benchmarks.growth_memory", plan, ranks=ranks, ranks_per_node=ranks_per_node)
