"""What a step and an exchange cost as models, ranks and chunks grow."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

import daso
from daso.cli.bench.rounds import take_turns
from daso.comm.topology import Topology

__all__ = ["AXES", "GROWS", "Plan", "Point", "exponent", "exponents", "figures", "measure", "table"]

AXES = ("parameters", "tensors", "ranks", "chunk_bytes")
GROWS = {  # what is held against linear growth: column, what it is
    "quiet_cpu_ms": "CPU ms of a step between exchanges",
    "exchange_cpu_ms": "CPU ms of an exchange",
    "exposed_ms": "ms exposed by an exchange",
}
QUIET, WAIT = 10, 1  # steps of a round without an exchange; batches an exchange may take
BUSY = WAIT + 1  # steps from the one that sends to the one that merges


class Point(NamedTuple):
    """A model of parameters in tensors of one size, and how its exchange is cut."""

    parameters: int
    tensors: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Args:
        axis: Which of `AXES` grows.
        points: Parameters, tensors and chunk_bytes of every model.
        rounds: Of every model.
    """

    axis: str
    points: Sequence[Sequence[int]]
    rounds: int


class Touch(torch.autograd.Function):
    """A loss that costs nothing and gives every parameter a gradient that is there already."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        """Return zero."""
        ctx.gradients = gradients
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Return the gradients; autograd takes a tensor that nobody else holds without a copy."""
        return None, *(gradient.detach() for gradient in ctx.gradients)


class Spent(NamedTuple):
    """What steps took beside the inner optimizer's own work, in seconds."""

    wall: float
    cpu: float  # of all threads

    def per(self, steps: int) -> "Spent":
        """Return what one of so many steps took."""
        return Spent(self.wall / steps, self.cpu / steps)

    def __sub__(self, other: "Spent") -> "Spent":
        return Spent(self.wall - other.wall, self.cpu - other.cpu)


class Trainer:
    """A model with next to no compute, and its optimizer.

    Args:
        point: The model.
        seed: Of the gradients; another on every rank.
        wrap: Makes the optimizer of the inner one.
    """

    def __init__(
        self, point: Point, seed: int, wrap: Callable[[torch.optim.Optimizer], Any] = lambda o: o
    ) -> None:
        size, longer = divmod(point.parameters, point.tensors)
        sizes = [size + (at < longer) for at in range(point.tensors)]
        self.params = [torch.nn.Parameter(torch.ones(numel)) for numel in sizes]
        self._gradients = [torch.full((numel,), 1e-3 * (seed + 1)) for numel in sizes]
        inner = torch.optim.SGD(self.params, lr=0.1)
        inner.register_step_pre_hook(lambda *_: self._enter())
        inner.register_step_post_hook(lambda *_: self._leave())
        self._entered, self._inside = (0.0, 0.0), [0.0, 0.0]
        self.optimizer = wrap(inner)

    def _enter(self) -> None:
        self._entered = time.perf_counter(), time.thread_time()

    def _leave(self) -> None:
        now = time.perf_counter(), time.thread_time()
        for at, (end, begin) in enumerate(zip(now, self._entered, strict=True)):
            self._inside[at] += end - begin

    def run(self, steps: int) -> Spent:
        """Take steps."""
        self._inside = [0.0, 0.0]
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = Touch.apply(self._gradients, *self.params)  # type: ignore[no-untyped-call]
            loss.backward()
            self.optimizer.step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return Spent(wall - self._inside[0], cpu - self._inside[1])

    @property
    def inner_seconds(self) -> float:
        """Wall seconds of the inner optimizer in the last run."""
        return self._inside[0]


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Take steps with and without the toolkit in turn.

    Returns:
        Rows for JSON, the same on every rank.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    rows = [_row(Point(*point), plan.rounds, topology) for point in plan.points]
    return {"plan": asdict(plan), "nodes": list(topology.node_sizes), "rows": rows}


def _row(point: Point, rounds: int, topology: Topology) -> dict[str, Any]:
    def wrap(inner: torch.optim.Optimizer) -> daso.DASO:
        return daso.DASO(
            inner,
            topology=topology,
            policy=daso.Fixed(QUIET + BUSY, WAIT),
            exchange=daso.Exchange(chunk_bytes=point.chunk_bytes),
        )

    rank = topology.rank
    bare, ours = Trainer(point, rank), Trainer(point, rank, wrap)
    bare.run(QUIET)
    ours.run(QUIET + BUSY + WAIT)  # until the first exchange, which makes buffers, is merged
    taken = [_round(bare, ours, topology, names) for names in _orders(rounds)]
    exchanges = ours.optimizer.report()["exchanges"]
    assert exchanges == rounds + 1, "a round holds one exchange"
    ours.optimizer.close()
    del bare, ours
    gc.collect()  # the next model needs the memory
    medians = {name: statistics.median(one[name] for one in taken) for name in taken[0]}
    return {**point._asdict(), "ranks": topology.world_size, **medians, "rounds": taken}


def _orders(rounds: int) -> list[tuple[bool, ...]]:
    turns = list(take_turns((False, True), rounds))
    return [tuple(turns[at : at + 2]) for at in range(0, len(turns), 2)]


def _round(
    bare: Trainer, ours: Trainer, topology: Topology, order: Sequence[bool]
) -> dict[str, float]:
    """Take steps without an exchange, both ways, then those of one exchange."""
    world, spent, inner = topology.world_comm, {}, 0.0
    for wrapped in order:
        world.Barrier()
        trainer = ours if wrapped else bare
        spent[wrapped] = trainer.run(QUIET).per(QUIET)
        inner = inner if wrapped else trainer.inner_seconds / QUIET
        if wrapped:
            world.Barrier()
            before = ours.optimizer.report()["exposed_seconds"]
            busy = ours.run(BUSY)
            exposed = ours.optimizer.report()["exposed_seconds"] - before
    quiet = spent[True] - spent[False]
    exchange = busy - Spent(*(BUSY * one for one in spent[True]))
    mine = {
        "bare_ms": spent[False].wall + inner,
        "quiet_ms": quiet.wall,
        "quiet_cpu_ms": quiet.cpu,
        "exchange_ms": exchange.wall,
        "exchange_cpu_ms": exchange.cpu,
        "exposed_ms": exposed,
    }
    everyones = world.allgather(mine)
    waited = ("exchange_ms", "exposed_ms")  # by all ranks, for the slowest
    return {
        name: 1e3 * (max if name in waited else statistics.mean)(one[name] for one in everyones)
        for name in mine
    }


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return the least-squares slope of log y over log x: 1 is linear growth, 0 none.

    Args:
        xs: More than 0.
        ys: What is not more than 0 is left out.

    Returns:
        The slope; None where fewer than two points are left.
    """
    pairs = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True) if y > 0]
    if len({x for x, _ in pairs}) < 2:
        return None
    slope, _ = statistics.linear_regression(*zip(*pairs, strict=True))
    return slope


def exponents(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the exponent of everything in `GROWS` along this axis."""
    rows, axis = found["rows"], found["plan"]["axis"]
    xs = [row[axis] for row in rows]
    return {name: exponent(xs, [row[name] for row in rows]) for name in GROWS}


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    axis = found["plan"]["axis"]
    lines = [
        _conditions(found),
        f"{'':>12}{'bare step':>12}{'+ between exchanges':>28}{'+ per exchange':>34}",
        f"{axis:>12}{'ms':>12}{'ms':>14}{'CPU ms':>14}{'ms':>10}{'CPU ms':>12}{'exposed ms':>12}",
    ]
    for row in found["rows"]:
        lines.append(
            f"{row[axis]:>12}{row['bare_ms']:>12.3f}{row['quiet_ms']:>14.3f}"
            f"{row['quiet_cpu_ms']:>14.3f}{row['exchange_ms']:>10.1f}"
            f"{row['exchange_cpu_ms']:>12.1f}{row['exposed_ms']:>12.1f}"
        )
    return "\n".join([*lines, f"exponents: {_told(found)}"])


def _conditions(found: Mapping[str, Any]) -> str:
    axis, first = found["plan"]["axis"], found["rows"][0]
    fixed = {
        "parameters": f"{first['parameters'] / 1e6:g} M parameters",
        "tensors": f"{first['tensors']} tensors",
        "ranks": f"{first['ranks']} ranks of one machine, each a node",
        "chunk_bytes": f"chunks of {first['chunk_bytes'] / 2**20:g} MiB",
    }
    others = ", ".join(text for name, text in fixed.items() if name != axis)
    xs = [row[axis] for row in found["rows"]]
    return (
        f"{axis} {min(xs)} to {max(xs)}; {others}; SGD, bf16, one exchange in {QUIET + BUSY} steps "
        f"that compute next to nothing, merged {WAIT} step later, medians of "
        f"{found['plan']['rounds']} alternating rounds"
    )


def _told(found: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{GROWS[name]} {'not told' if slope is None else f'{slope:.2f}'}"
        for name, slope in exponents(found).items()
    )


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the largest exponent along this axis; chunks have none, more of them is less each."""
    axis = found["plan"]["axis"]
    slopes = [slope for slope in exponents(found).values() if slope is not None]
    if axis == "chunk_bytes" or not slopes:
        return {}
    return {
        f"growth_exponent_{axis}": {
            "value": max(slopes),
            "unit": "exponent, the largest of those in the conditions; 1 is linear growth",
            "conditions": f"{_told(found)}: {_conditions(found)}",
        }
    }
