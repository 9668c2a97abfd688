"""Benchmark of one exchange between nodes, against the limit of the link."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from daso.cli.bench.names import WIRES
from daso.cli.bench.rounds import sent_bytes, take_turns
from daso.comm.allreduce.direct import deterministic_allreduce
from daso.comm.allreduce.message_sums import MessageSums
from daso.comm.control import barrier, gather
from daso.comm.engine import Engine
from daso.comm.link_probe import link_rates
from daso.comm.process_group import join_process_group
from daso.comm.reduction import Row
from daso.comm.topology import Topology
from daso.kernels.choice import Kernels
from daso.kernels.codecs import codec_named
from daso.kernels.rows import FlatTensors
from daso.plan.allreduce_plan import Algorithm
from daso.plan.cost_model import choose_plan
from daso.plan.exchange import KEEP
from daso.plan.options import Exchange
from daso.plan.routes import plan_routes
from daso.train.deltas.shard import DeltaShard, MergeOptions, message_numel

NAMES = ("fp32", "bf16", "int4")  # rows that are figures
CORE_ROUNDS = 5  # exchanges whose CPU time is measured
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Plan:
    """Case of the benchmark.

    Args:
        numel: Elements of the buffer, fp32.
        rounds: Exchanges of each kind.
        link: Label of the link in tables.
        bits_per_second: Of every link; 0 where there is no limit.
        rivals: Whether MPI's Allreduce and gloo are measured too.
        algorithms: Algorithms of the mean, measured in turn; see `daso.Exchange`.
        wires: Wires, measured in turn.
        racks: Groups of hosts; a label in tables, like the two below.
        uplink: Rate of each group's link to the others.
        slow_link: Rate of the link of one host.
    """

    numel: int
    rounds: int
    link: str
    bits_per_second: float
    rivals: bool = True
    algorithms: Sequence[Algorithm] = ("auto",)
    wires: Sequence[str] = WIRES
    racks: int = 1
    uplink: str = "none"
    slow_link: str = "none"

    @property
    def links(self) -> str:
        """All links, in words."""
        racks = f", in {self.racks} racks with uplinks of {self.uplink}" if self.racks > 1 else ""
        slow = f", one host's {self.slow_link}" if self.slow_link != "none" else ""
        return f"{self.link}{racks}{slow}"


def limit_seconds(nbytes: float, nodes: int, bits_per_second: float) -> float:
    """Return the minimum seconds that a link needs for a mean over nodes.

    Every node sends and receives 2 (n - 1) / n times the buffer (Patarasuk & Yuan 2009).
    """
    return 2 * (nodes - 1) / nodes * 8 * nbytes / bits_per_second


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Exchange a buffer over all wires in turn, one rank on every node.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    world, size = topology.world_comm, topology.world_size
    engine = Engine(Exchange().timeout_seconds, lambda: "a rank is missing")
    comm = world.Dup()
    kinds: dict[str, Callable[[], float | None]] = {
        wire if algorithm == "auto" else f"{wire}, {algorithm}": _ordered(
            wire, plan.numel, engine, comm, size, algorithm
        )
        for wire in plan.wires
        for algorithm in plan.algorithms
    }
    if plan.rivals:
        join_process_group(topology, "gloo")
        values, sums = torch.zeros(plan.numel), torch.empty(plan.numel)  # sums stay finite
        kinds["fp32, MPI Allreduce"] = lambda: world.Allreduce(values.numpy(), sums.numpy())
        kinds["fp32, gloo"] = lambda: dist.all_reduce(values)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    packing: dict[str, list[float]] = {name: [] for name in kinds}
    nbytes: dict[str, float | None] = {}
    for name in [*kinds, *take_turns(list(kinds), plan.rounds)]:  # first exchange: warmup
        before = sent_bytes(topology)
        barrier(topology)
        start = time.perf_counter()
        packed = kinds[name]() or 0.0
        elapsed = time.perf_counter() - start
        seconds[name].append(max(gather(topology, elapsed)))
        packing[name].append(max(gather(topology, packed)))
        after = sent_bytes(topology)
        nbytes[name] = None if after is None or before is None else after - before
    core = {
        wire: gather(topology, core_seconds(wire, plan.numel, engine, comm, topology))
        for wire in plan.wires
        if wire in NAMES and "auto" in plan.algorithms
    }
    engine.close()
    comm.Free()
    if plan.rivals:
        dist.destroy_process_group()
    rows = [
        _row(name, seconds[name][1:], nbytes[name], plan, size)
        | {"packing_ms": 1e3 * statistics.median(packing[name][1:])}
        | {"core_ms": _slowest(core[name]) if name in core else None}
        for name in kinds
    ]
    return {"plan": asdict(plan), "nodes": list(topology.node_sizes), "rows": rows}


def _ordered(
    wire: str,
    numel: int,
    engine: Engine,
    comm: Any,
    size: int,
    algorithm: Algorithm,
) -> Callable[[], float | None]:
    """Return a function that exchanges a row and returns the seconds of encoding it."""
    codec = codec_named(wire)
    plan = choose_plan(algorithm, size, codec.nbytes(numel))
    if algorithm == "planned":
        plan = plan_routes(engine.run(link_rates(comm, comm, comm.Get_rank(), size)))
    chunks = plan.chunks(numel, message_numel(codec, Exchange().chunk_bytes))
    exchange = deterministic_allreduce(comm, codec, [1] * size, size, {}, plan=plan)
    exchange.count_messages(MessageSums())  # as in training
    if codec.exact:
        row = Row(torch.ones(numel))

        def run_exact() -> None:
            engine.run(exchange.run(row, chunks))

        return run_exact
    part, params = DeltaShard(torch.ones(numel), MergeOptions()), torch.ones(numel)
    values = FlatTensors([params])
    spans = [span for parts in chunks for span in parts]

    def run() -> float:
        start = time.perf_counter()
        part.encode(codec, spans, values, keeps=True)
        packed = time.perf_counter() - start
        engine.run(exchange.run(part, chunks))
        return packed

    return run


class TimedKernels:
    """Kernels whose CPU time is counted, by function.

    Args:
        kernels: Kernels to time.
        seconds: Receives the seconds, by function.
    """

    def __init__(self, kernels: Kernels, seconds: dict[str, float]) -> None:
        self._kernels, self._seconds = kernels, seconds

    def __getattr__(self, name: str) -> Any:
        """Return a timed function."""
        function = getattr(self._kernels, name)

        def timed(*words: Any, **named: Any) -> None:
            begun = time.thread_time()
            function(*words, **named)
            self._seconds[name] = self._seconds.get(name, 0.0) + time.thread_time() - begun

        return timed


def core_seconds(
    wire: str, numel: int, engine: Engine, comm: Any, topology: Topology
) -> dict[str, float]:
    """Return the CPU seconds of one exchange of a row on this rank, by part.

    It counts encoding, the engine's thread and the merge into the parameters. ``mpi_and_python`` is
    the time outside kernels. Collective over ``comm``; blocking.
    """
    codec, seconds = codec_named(wire), dict[str, float]()
    size = topology.world_size
    plan = choose_plan("auto", size, codec.nbytes(numel))
    chunks = plan.chunks(numel, message_numel(codec, Exchange().chunk_bytes))
    spans = [span for parts in chunks for span in parts]
    exchange = deterministic_allreduce(comm, codec, [1] * size, size, {}, plan=plan)
    exchange.count_messages(MessageSums())  # as in training
    generator = torch.Generator().manual_seed(comm.Get_rank())
    params = torch.randn(numel, generator=generator)
    part, values = DeltaShard(torch.zeros(numel), MergeOptions()), FlatTensors([params])
    part.reference.copy_(params)
    timed: Any = TimedKernels(part.kernels, seconds)
    part.kernels = exchange.adder.kernels = timed
    total = 0.0
    for turn in range(CORE_ROUNDS + 1):
        params.add_(torch.randn(numel, generator=generator), alpha=1e-3)
        barrier(topology)
        begun, busy = time.thread_time(), engine.busy_seconds
        part.encode(codec, spans, values, keeps=True)
        handle = engine.submit(exchange.run(part, chunks))
        handle.finished.wait(engine.timeout_seconds)  # the engine polls rarely, as during batches
        engine.wait(handle)
        part.finish()
        part.publish(KEEP)
        part.kernels.merge(values, part.published, 1.0, add=True)
        total += time.thread_time() - begun + engine.busy_seconds - busy
        if turn == 0:  # warmup: allocates buffers
            seconds.clear()
            total = 0.0
    parts = {name: total_seconds / CORE_ROUNDS for name, total_seconds in seconds.items()}
    return parts | {"mpi_and_python": total / CORE_ROUNDS - sum(parts.values())}


def _slowest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the milliseconds by part of the rank with the highest total."""
    most = max(ranks, key=lambda parts: sum(parts.values()))
    return {name: 1e3 * seconds for name, seconds in most.items()}


def _row(
    name: str, seconds: list[float], nbytes: float | None, plan: Plan, nodes: int
) -> dict[str, Any]:
    wire = codec_named(name.partition(",")[0]).nbytes(plan.numel)
    row: dict[str, Any] = {
        "name": name,
        "ms": 1e3 * statistics.median(seconds),
        "mbytes": None if nbytes is None else nbytes / 1e6,
        "over_limit": None,
        "limit_ms": None,
        "seconds": seconds,
    }
    if plan.bits_per_second:
        row["limit_ms"] = 1e3 * limit_seconds(wire, nodes, plan.bits_per_second)
        row["over_limit"] = row["ms"] / row["limit_ms"]
    return row


def table(result: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    plan = Plan(**result["plan"])
    lines = [
        f"{4 * plan.numel / 1e6:.1f} MB of fp32 over {len(result['nodes'])} nodes, link "
        f"{plan.links}, medians of {plan.rounds} alternating rounds",
        f"{'wire':<22}{'ms':>10}{'packing':>10}{'limit ms':>10}{'x limit':>9}{'MB by all':>11}",
    ]
    for row in result["rows"]:
        limit, over, sent = (
            "-" if row[key] is None else f"{row[key]:.{digits}f}"
            for key, digits in (("limit_ms", 1), ("over_limit", 3), ("mbytes", 2))
        )
        packing = f"{row.get('packing_ms', 0.0):>10.1f}"  # older recordings have none
        lines.append(f"{row['name']:<22}{row['ms']:>10.1f}{packing}{limit:>10}{over:>9}{sent:>11}")
    for row in result["rows"]:
        if parts := row.get("core_ms"):
            listed = ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
            lines.append(f"core of {row['name']}: {sum(parts.values()):.2f} ms ({listed})")
    return "\n".join(lines)


def figures(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of this link and number of nodes, by name."""
    head = table(result).splitlines()[0]
    plan = Plan(**result["plan"])
    if plan.racks > 1 or plan.slow_link != "none":
        where = "racks" if plan.racks > 1 else "slow"
        return {
            f"exchange_planned_over_{over}_{where}_{wire}": {
                "value": ratio,
                "unit": "ratio of seconds of an exchange",
                "conditions": head,
            }
            for (wire, over), ratio in _planned_over(result).items()
        }
    nodes, rows = len(result["nodes"]), [row for row in result["rows"] if row["name"] in NAMES]
    limits = {
        f"exchange_{row['name']}_over_limit_{nodes}": {
            "value": row["over_limit"],
            "unit": "ratio of seconds, over what the link can carry",
            "conditions": head,
        }
        for row in rows
        if row["over_limit"] is not None
    }
    return limits | {
        f"exchange_core_ms_per_million_{row['name']}_{nodes}": {
            "value": sum(row["core_ms"].values()) / (plan.numel / MILLION),
            "unit": "ms of a core for a million numbers, of the slowest rank",
            "conditions": head,
        }
        for row in rows
        if row.get("core_ms")
    }


def _planned_over(result: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Return the time of the planned algorithm over that of each other, by wire and name."""
    ms = {row["name"]: row["ms"] for row in result["rows"]}
    others = {"": "direct", ", ring": "ring", ", MPI Allreduce": "mpi", ", gloo": "gloo"}
    return {
        (wire, name): ms[f"{wire}, planned"] / ms[f"{wire}{words}"]
        for wire in ("fp32", "bf16")
        for words, name in others.items()
        if f"{wire}, planned" in ms and f"{wire}{words}" in ms
    }


def ratios(result: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the per-round ratios behind the figures."""
    return {
        f"exchange_{row['name']}_over_limit_{len(result['nodes'])}": [
            1e3 * seconds / row["limit_ms"] for seconds in row["seconds"]
        ]
        for row in result["rows"]
        if row["name"] in ("fp32", "bf16")
    }
