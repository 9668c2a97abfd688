"""What the toolkit holds of a model, in bytes per parameter: counted, and as the process grows."""

import ctypes
import functools
import gc
import re
import statistics
import types
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import daso
from daso.cli.bench.names import size_of_nodes
from daso.comm.node.shm import SharedWindow
from daso.comm.topology import Topology
from daso.plan.options import Wire

__all__ = [
    "Plan",
    "figures",
    "held",
    "measure",
    "resident",
    "table",
]

MMAP_THRESHOLD = -3  # option of mallopt, bytes
SMAPS = Path("/proc/self/smaps_rollup")
WIRE = "bf16"  # the one that the figure is about
FOLLOWED = ("daso.", "torch.optim.")  # objects of these packages are looked into
STEPS = 6  # with the toolkit: three exchanges, the last one merged
EXCHANGING = daso.Fixed(2, 1)
SYNCHRONOUS = daso.Fixed(2, 1, warmup=10 * STEPS)  # buffers of exchanges of parameters rest
ROUNDS = 3  # an allocator keeps more in one run than in another; what is held is always the same
MiB = 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Args:
        parameters: Of two models; what both have in common does not count per parameter.
        tensors: Of each.
        wires: One after the other.
        chunk_bytes: Of exchanges.
    """

    parameters: Sequence[int]
    tensors: int
    wires: Sequence[Wire]
    chunk_bytes: int


def held(root: object, user: Iterable[torch.Tensor], local_rank: int) -> dict[str, int]:
    """Count the bytes of all tensors that an object holds, each memory once.

    Args:
        root: Where to start.
        user: Tensors that would be there without the toolkit; what they take does not count.
        local_rank: This rank in its node; segments of other ranks do not count.

    Returns:
        Bytes by name: the last words of how the memory is reached, of all indices together.
    """
    foreign: set[int] = set()
    found: dict[int, tuple[str, int]] = {}
    for name, one in _reach(root):
        if isinstance(one, SharedWindow):
            others = [s for rank, s in enumerate(one.segments) if rank != local_rank]
            foreign |= {segment.untyped_storage().data_ptr() for segment in others}
        elif isinstance(one, torch.Tensor) and not hasattr(one, "_local_tensor"):
            storage = one.untyped_storage()
            found.setdefault(storage.data_ptr(), (name, storage.nbytes()))
    taken: dict[int, int] = defaultdict(int)
    for tensor in {one.data_ptr(): one for one in user if one.numel()}.values():
        taken[tensor.untyped_storage().data_ptr()] += tensor.nbytes
    total: dict[str, int] = defaultdict(int)
    for place, (name, nbytes) in found.items():
        if place not in foreign and nbytes > taken[place]:
            total[_short(name)] += nbytes - taken[place]
    return dict(total)


def _short(name: str) -> str:
    return ".".join(name.strip(".").split(".")[-2:])


def _reach(root: object) -> Iterator[tuple[str, object]]:
    """Yield every object that can be reached, with the names on the way; places have none."""
    seen: dict[int, object] = {}  # holds them: the id of what is gone may come again
    waiting = [("", root)]
    while waiting:
        name, one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        yield name, one
        for key, value in _inside(one):
            waiting.append((f"{name}.{key}" if isinstance(key, str) else name, value))


def _inside(one: Any) -> Iterable[tuple[object, object]]:
    """Return the parts of an object, each with its name or place."""
    if isinstance(one, Mapping):
        return one.items()
    if isinstance(one, list | tuple | set | frozenset | deque):
        return enumerate(one)
    if isinstance(one, torch.Tensor):
        part = getattr(one, "_local_tensor", None)  # of a sharded one, which has no memory itself
        inside = [] if part is None else [("_local_tensor", part)]
        return [*inside, ("grad", one.grad)] if one.is_leaf else inside
    if type(one).__module__.startswith(FOLLOWED) and not isinstance(one, type):
        slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
        known = {name: getattr(one, name) for name in slots if hasattr(one, name)}
        return {**known, **getattr(one, "__dict__", {})}.items()
    return enumerate(_bound(one))


def _bound(one: Any) -> Iterable[object]:
    """Return what something callable holds."""
    if isinstance(one, functools.partial):
        return one.func, one.args, one.keywords
    if isinstance(one, types.MethodType):
        return one.__self__, one.__func__
    if isinstance(one, types.FunctionType):
        return [cell.cell_contents for cell in one.__closure__ or ()]
    return ()


def resident() -> int:
    """Return the bytes that this process has in memory; what n processes share counts 1/n."""
    rows = dict(re.findall(r"^(\w+): +(\d+) kB", SMAPS.read_text(encoding="ascii"), re.MULTILINE))
    return 1024 * int(rows["Pss"])


@contextmanager
def _freed_at_once() -> Iterator[None]:
    """Let glibc give freed tensors back at once, so that the size of the process tells."""
    set_option = ctypes.CDLL(None).mallopt
    set_option(MMAP_THRESHOLD, 2**16)
    try:
        yield
    finally:
        set_option(MMAP_THRESHOLD, 2**25)  # where glibc's own threshold goes in time


def _train(
    params: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: int, rank: int
) -> None:
    """Take steps that bring every parameter a gradient, another on every rank.

    Collective over the world in the sense of the optimizer.
    """
    for _ in range(steps):
        optimizer.zero_grad()
        for param in params:
            (1e-3 * (rank + 1) * param.sum()).backward()
        optimizer.step()


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Train models of two sizes over every wire.

    Returns:
        Rows for JSON, the same on every rank: of the rank that holds most.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    with _freed_at_once():
        rows = [_row(wire, plan, topology) for wire in plan.wires]
    return {"plan": asdict(plan), "nodes": list(topology.node_sizes), "rows": rows}


def _row(wire: Wire, plan: Plan, topology: Topology) -> dict[str, Any]:
    sizes = sorted(plan.parameters)
    _one(wire, sizes[0], plan, topology)  # what is made once for all models
    rounds = [[_one(wire, numel, plan, topology) for numel in sizes] for _ in range(ROUNDS)]
    found = [_typical(runs) for runs in zip(*rounds, strict=True)]
    more = sizes[-1] - sizes[0]
    names = {name for one in found for name in one["held"]}
    each = {
        name: (found[-1]["held"].get(name, 0) - found[0]["held"].get(name, 0)) / more
        for name in names
    }
    kept = {name: value for name, value in each.items() if abs(value) > 1e-3}
    resting = [_one(wire, numel, plan, topology, SYNCHRONOUS)["held"] for numel in sizes]
    least, most = (sum(names.values()) for names in (resting[0], resting[-1]))
    return {
        "wire": wire,
        "bytes_per_parameter": sum(each.values()),
        "resting_bytes_per_parameter": (most - least) / more,
        "resident_bytes_per_parameter": (found[-1]["resident"] - found[0]["resident"]) / more,
        "fixed_mib": (sum(found[0]["held"].values()) - sum(each.values()) * sizes[0]) / MiB,
        "each": dict(sorted(kept.items(), key=lambda item: -item[1])),
        "sizes": found,
    }


def _typical(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the last of runs that hold the same, with the median of their growth."""
    return {**runs[-1], "resident": statistics.median_low([one["resident"] for one in runs])}


def _one(
    wire: Wire, numel: int, plan: Plan, topology: Topology, policy: daso.Fixed = EXCHANGING
) -> dict[str, Any]:
    """Train one model, and say what the toolkit holds of it once nothing is on its way."""
    gc.collect()
    rank_info, world = topology.rank_info, topology.world_comm
    params = [torch.nn.Parameter(torch.ones(numel // plan.tensors)) for _ in range(plan.tensors)]
    inner = torch.optim.SGD(params, lr=0.1)
    _train(params, inner, 2, rank_info.rank)
    world.Barrier()
    before = resident()
    exchange = daso.Exchange(chunk_bytes=plan.chunk_bytes)
    optimizer = daso.DASO(inner, topology=topology, policy=policy, wire=wire, exchange=exchange)
    _train(params, optimizer, STEPS + 1, rank_info.rank)
    world.Barrier()
    after = resident()
    world.Barrier()  # nobody gives back memory that others count their share of
    user = [*params, *(p.grad for p in params if p.grad is not None)]
    mine = {
        "parameters": numel,
        "held": held(optimizer, user, rank_info.local_rank),
        "resident": after - before,
        "exchanges": optimizer.report()["exchanges"],
    }
    optimizer.close()
    everyones = world.allgather(mine)
    most = max(everyones, key=lambda one: sum(one["held"].values()))
    return {**most, "resident": max(one["resident"] for one in everyones)}


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    lines = [
        _conditions(found),
        f"{'wire':<8}{'bytes/parameter':>16}{'of the process':>16}{'+ MiB':>8}{'resting':>9}"
        "  of them",
    ]
    for row in found["rows"]:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in row["each"].items())
        lines.append(
            f"{row['wire']:<8}{row['bytes_per_parameter']:>16.2f}"
            f"{row['resident_bytes_per_parameter']:>16.2f}{row['fixed_mib']:>8.1f}"
            f"{row['resting_bytes_per_parameter']:>9.2f}  {parts}"
        )
    return "\n".join(lines)


def _conditions(found: Mapping[str, Any]) -> str:
    plan = found["plan"]
    sizes = " and ".join(f"{numel / 1e6:g}" for numel in sorted(plan["parameters"]))
    return (
        f"{size_of_nodes(found['nodes'])}, difference between {sizes} M "
        f"parameters in {plan['tensors']} tensors, SGD, chunks of "
        f"{plan['chunk_bytes'] / MiB:g} MiB, after {STEPS // 2} exchanges, the rank that holds most"
    )


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figure, where every rank is a node."""
    rows = [row for row in found["rows"] if row["wire"] == WIRE]
    if not rows or max(found["nodes"]) > 1:
        return {}
    (row,) = rows
    told = (
        f"{WIRE} wire, {row['resident_bytes_per_parameter']:.2f} by growth of the process, "
        f"{row['fixed_mib']:.1f} MiB more whatever the size"
    )
    return {
        "toolkit_bytes_per_parameter": {
            "value": row["bytes_per_parameter"],
            "unit": "bytes per parameter, beside parameter, gradient and the inner optimizer's",
            "conditions": f"{told}: {_conditions(found)}",
        },
        "toolkit_buffer_bytes_saved": {
            "value": row["bytes_per_parameter"] - row["resting_bytes_per_parameter"],
            "unit": "bytes per parameter that buffers of exchanges give back while nodes average "
            "gradients at every batch",
            "conditions": f"{WIRE} wire: {_conditions(found)}",
        },
    }
