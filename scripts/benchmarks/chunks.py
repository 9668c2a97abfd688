"""How large chunks should be that go to the host, are added and come back, and what they take.

Layers take a known time and no core, and copies cross a link of a known rate and latency, as with
a device. Sums are real. So a model of three machines one after the other (`daso.plan.cost_model`)
can be held against what was measured, and the size that was found by search against the best one.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

import daso
from benchmarks.timed_models import CASES, EVEN, Paced, paced
from daso.cli.bench.baselines import Contender, Daso, Plain, start
from daso.cli.bench.models import Batch, Case
from daso.cli.bench.names import COMPUTE
from daso.cli.bench.rounds import over, take_turns
from daso.comm.emulation import CopyLink, pretend_device
from daso.comm.node.host import HostNode
from daso.comm.node.shm import ShmNode
from daso.comm.topology import Topology
from daso.plan.cost_model import flow_shop_seconds
from daso.plan.layout import fit_buckets, split

__all__ = ["SIZES", "Plan", "figures", "measure", "predicted_seconds", "steps_off", "table"]

MODEL, SEARCH = "device-even", "search"
FIRST = 1 << 16  # bytes: where a search begins
SIZES = tuple(FIRST << at for at in range(8))
SETTLED = 20  # steps after which times of a size are taken
MOST = 2000  # steps that a search may take


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Args:
        rounds: Turns of each size.
        steps: Of a turn.
        gigabytes_per_second: Of the link to the host, each way.
        latency_ms: Of every copy.
    """

    rounds: int
    steps: int
    gigabytes_per_second: float
    latency_ms: float


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Train with chunks of every size in turn, and let one search.

    Returns:
        Rows for JSON, the same on every rank.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    link = CopyLink(plan.gigabytes_per_second * 1e9, plan.latency_ms / 1e3)
    case = CASES[MODEL]
    batches = case.batches(topology.rank)
    batch = next(batches)
    contenders: dict[str, Contender] = {COMPUTE: Plain(*start(case))}
    with pretend_device(link):
        for size in SIZES:
            contenders[str(size)] = _host(case, topology, size)
        contenders[SEARCH] = searching = _host(case, topology, "search")
    found = _search(searching, topology, batch)
    for contender in contenders.values():
        _step_seconds(contender, topology, batch, SETTLED)
    costs = [_costs(topology, batch)]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    bases: dict[str, list[float]] = {name: [] for name in contenders}
    seconds[COMPUTE].append(_step_seconds(contenders[COMPUTE], topology, batch, plan.steps))
    for name in take_turns([name for name in contenders if name != COMPUTE], plan.rounds):
        seconds[name].append(_step_seconds(contenders[name], topology, batch, plan.steps))
        seconds[COMPUTE].append(_step_seconds(contenders[COMPUTE], topology, batch, plan.steps))
        bases[name].append(statistics.mean(seconds[COMPUTE][-2:]))
    costs.append(_costs(topology, batch))
    per_chunk, per_byte, add = map(statistics.mean, zip(*costs, strict=True))
    layers = _layers(contenders[COMPUTE].model)
    backward = sum(seconds for _, seconds in layers)
    filled = [(nbytes, seconds + per_byte * nbytes) for nbytes, seconds in layers]
    model = partial(
        predicted_seconds, filled, link=link, per_chunk=per_chunk, add_seconds_per_byte=add
    )
    rows = [
        {
            "bytes": size,
            "ms": 1e3 * statistics.median(seconds[str(size)]),
            "seconds": seconds[str(size)],
            # Beside compute only right before and after, for the machine changes its speed.
            "predicted_seconds": [model(size, aside=base - backward) for base in bases[str(size)]],
        }
        for size in SIZES
    ]
    for contender in contenders.values():
        contender.close()
    return {
        "plan": asdict(plan),
        "nodes": list(topology.node_sizes),
        "compute_ms": 1e3 * statistics.median(seconds[COMPUTE]),
        "chunk_us": 1e6 * per_chunk,
        "fill_ns_per_byte": 1e9 * per_byte,
        "add_ns_per_byte": 1e9 * add,
        "found": {**found, "ms": 1e3 * statistics.median(seconds[SEARCH])},
        "rows": rows,
    }


def _host(case: Case, topology: Topology, nbytes: Any) -> Daso:
    gradients = daso.Gradients(reducer="host", bucket_bytes=nbytes)
    return Daso(*start(case), topology, policy=daso.Fixed(1, 0), gradients=gradients)


def _search(contender: Contender, topology: Topology, batch: Batch) -> dict[str, Any]:
    """Train until the search holds; return the size, and after how many steps."""
    for step in range(1, MOST + 1):
        contender.step(batch)
        events = contender.optimizer.report()["events"]  # type: ignore[attr-defined]
        held = [one for one in events if one["kind"] == "bucket_bytes" and one["holding"]]
        if held:
            return {"bytes": held[-1]["nbytes"], "steps": step}
    topology.world_comm.Barrier()
    return {"bytes": None, "steps": MOST}


def _step_seconds(contender: Contender, topology: Topology, batch: Batch, steps: int) -> float:
    """Return the median seconds of a step, of the slowest rank."""
    topology.world_comm.Barrier()
    taken = []
    for _ in range(steps):
        begun = time.perf_counter()
        contender.step(batch)
        taken.append(time.perf_counter() - begun)
    return float(max(topology.world_comm.allgather(statistics.median(taken))))


def _costs(topology: Topology, batch: Batch) -> tuple[float, float, float]:
    """Return seconds that each chunk and each byte take of the training thread, and sums of a byte.

    Found with layers and a link that take no time, from chunks of one layer and of all; with these
    sums come after backward, and are taken off.
    """
    add_seconds_per_byte = _add_seconds_per_byte(topology, torch.float32)
    case = replace(CASES[MODEL], build=lambda: paced(*((numel, 0.0, 0.0) for numel, *_ in EVEN)))
    with pretend_device(CopyLink(math.inf)):
        contenders: list[Contender] = [
            Plain(*start(case)),
            _host(case, topology, 1),
            _host(case, topology, SIZES[-1] << 2),
        ]
    taken: list[list[float]] = [[], [], []]
    for at in (0, 1, 2, *take_turns(range(3), 3)):
        taken[at].append(_step_seconds(contenders[at], topology, batch, SETTLED))
    alone, one_each, all_in_one = (statistics.median(seconds[1:]) for seconds in taken)
    for contender in contenders:
        contender.close()
    nbytes = 4 * sum(numel for numel, *_ in EVEN)
    per_byte = max(0.0, (all_in_one - alone) / nbytes - add_seconds_per_byte)
    per_chunk = max(0.0, one_each - all_in_one) / (len(EVEN) - 1)
    return per_chunk, per_byte, add_seconds_per_byte


def _add_seconds_per_byte(topology: Topology, dtype: torch.dtype) -> float:
    """Return what copies and sums take of a core for each byte, where the link takes nothing."""
    numel = SIZES[-1] // dtype.itemsize
    node = HostNode(ShmNode(topology, 60.0), torch.device("cpu"), CopyLink(math.inf))
    (bucket,) = node.row(numel, dtype, 1).cut([(0, numel)])
    parts, size = split(numel, topology.local_size), topology.local_size
    taken = []
    for _ in range(SETTLED):
        topology.world_comm.Barrier()
        begun = time.perf_counter()
        bucket.mark_ready(parts)
        bucket.wait_filled()
        bucket.reduce()
        bucket.publish(size)
        bucket.wait()
        taken.append(time.perf_counter() - begun)
    seconds = float(max(topology.world_comm.allgather(statistics.median(taken))))
    node.free()
    return seconds / (numel * dtype.itemsize)


def _layers(model: torch.nn.Module) -> list[tuple[int, float]]:
    """Return bytes and seconds of backward of each layer, in the order of backward."""
    layers = [layer for layer in model.modules() if isinstance(layer, Paced)]
    return [(layer.weight.nbytes, layer.backward_seconds) for layer in reversed(layers)]


def predicted_seconds(
    layers: Sequence[tuple[int, float]],
    chunk_bytes: int,
    *,
    link: CopyLink,
    per_chunk: float,
    add_seconds_per_byte: float,
    aside: float,
) -> float:
    """Return how long a step takes by the model: backward, copy, sum and copy, chunk after chunk.

    Args:
        layers: Bytes of each, and seconds until its gradient is in its chunk, in the order of
            backward.
        chunk_bytes: From which a chunk counts as full.
        link: To the host and back.
        per_chunk: Seconds that a chunk takes of the training thread.
        add_seconds_per_byte: Of sums.
        aside: Seconds of a step beside backward: forward and update.
    """
    chunks = []
    for group in fit_buckets([nbytes for nbytes, _ in layers], chunk_bytes):
        nbytes = sum(layers[at][0] for at in group)
        copy = link.seconds(nbytes)
        backward = per_chunk + sum(layers[at][1] for at in group)
        chunks.append((backward, copy, add_seconds_per_byte * nbytes, copy))
    return aside + flow_shop_seconds(chunks)


def steps_off(found: Mapping[str, Any]) -> float | None:
    """Return how many doublings lie between the size found by search and the fastest one.

    None where the search did not end.
    """
    if found["found"]["bytes"] is None:
        return None
    best = min(found["rows"], key=lambda row: row["ms"])["bytes"]
    return abs(math.log2(found["found"]["bytes"] / best))


def _error(found: Mapping[str, Any]) -> float:
    """Return the largest relative distance of the model from what was measured."""
    return max(abs(_off(row)) for row in found["rows"])


def _off(row: Mapping[str, Any]) -> float:
    """Return how far the model is off, relative to what was measured; median over rounds."""
    ratios = over(row["predicted_seconds"], row["seconds"])
    return statistics.median(ratios) - 1


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    held = found["found"]
    lines = [
        _head(found),
        f"compute only {found['compute_ms']:.1f} ms; the training thread takes "
        f"{found['chunk_us']:.0f} us for a chunk and {found['fill_ns_per_byte']:.2f} ns for a "
        f"byte, sums {found['add_ns_per_byte']:.2f} ns for a byte",
        f"{'chunk':>10}{'ms/step':>10}{'model':>10}{'off':>8}",
    ]
    for row in found["rows"]:
        predicted = 1e3 * statistics.median(row["predicted_seconds"])
        lines.append(
            f"{row['bytes'] >> 10:>6} KiB{row['ms']:>10.2f}{predicted:>10.2f}{_off(row):>8.1%}"
        )
    size = "no size" if held["bytes"] is None else f"{held['bytes'] >> 10} KiB"
    lines.append(f"search: {size} after {held['steps']} steps, {held['ms']:.2f} ms a step")
    return "\n".join(lines)


def _head(found: Mapping[str, Any]) -> str:
    plan = found["plan"]
    return (
        f"{MODEL}, {found['nodes'][0]} ranks of a node, gradients to the host and back over an "
        f"emulated link of {plan['gigabytes_per_second']:g} GB/s and {plan['latency_ms']:g} ms, "
        f"medians of {plan['rounds']} alternating rounds of {plan['steps']} steps"
    )


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return how far the search was off the best size, and the model off what was measured."""
    head, off = _head(found), steps_off(found)
    error = {
        "value": _error(found),
        "unit": "largest relative error of the step time over all sizes",
        "conditions": head,
    }
    named = {"flow_shop_error": error}
    if off is not None:
        unit = "doublings between the size found by search and the fastest"
        named["chunk_optimum_steps_off"] = {"value": off, "unit": unit, "conditions": head}
    return named
