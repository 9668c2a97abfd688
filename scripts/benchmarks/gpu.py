"""A GPU under the toolkit: step time on one rank, exposed time on two, kernels, memory."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import daso
from benchmarks.gpu_models import MODELS, PRETENDED, Shape
from daso.cli.bench.names import size_of_nodes
from daso.cli.bench.rounds import over, take_turns
from daso.comm.emulation import CopyLink, pretend_device
from daso.comm.process_group import Backend, join_process_group
from daso.comm.topology import Topology
from daso.kernels import torch_kernels
from daso.kernels.choice import Kernels, describe_kernels, kernels_for
from daso.kernels.codecs import codec_named
from daso.kernels.rows import EncodeRows, FlatTensors, Mean, ShardRows

__all__ = ["MODELS", "PRETENDED", "Plan", "figures", "measure", "table"]

BARE, WRAPPED, DEFAULT, DDP = "bare", "wrapped", "default", "DDP"
TORCH, KERNELS = "torch", "kernels"
WIRES = ("bf16", "int4")
POLICY = daso.Fixed(8, 4)  # exchanges come in the rounds, whatever they measure


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Args:
        model: One of `MODELS`.
        rounds: Of the bare and of the wrapped optimizer, in turn.
        steps: Of a round.
    """

    model: str
    rounds: int
    steps: int


class Trainer:
    """One model on a device, and what takes its steps."""

    def __init__(self, name: str, shape: Shape, device: torch.device, topology: Topology) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model: nn.Module = shape.build().to(device)
        self.numels = [p.numel() for p in self.model.parameters()]
        self._inputs, self._targets = shape.inputs().to(device), shape.targets().to(device)
        self.optimizer = shape.optimizer(list(self.model.parameters()))
        if name == DDP:
            self.model = DistributedDataParallel(self.model)
        if name in (WRAPPED, DEFAULT):
            chosen: dict[str, Any] = {"policy": POLICY, "wire": "bf16"} if name == WRAPPED else {}
            self.optimizer = daso.DASO(
                self.optimizer, module=self.model, topology=topology, **chosen
            )

    def round(self, steps: int) -> float:
        """Take steps; return the seconds of one, by the clock of the host once all are over."""
        settle(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            with torch.autocast(self.device.type, torch.bfloat16):
                found = self.model(self._inputs)
            cross_entropy(found.float().flatten(0, -2), self._targets.flatten()).backward()
            self.optimizer.step()
        settle(self.device)
        return (time.perf_counter() - start) / steps


def settle(device: torch.device) -> None:
    """Wait until a device has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Train bare, wrapped and with DDP in turn; encode and copy the model's numbers.

    Returns:
        Rows for JSON, the same on every rank: of the slowest.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    shape, device = MODELS[plan.model], torch.device("cpu")
    emulated: AbstractContextManager[None] = pretend_device(CopyLink(10e9, 1e-5))
    if plan.model != PRETENDED:
        device, emulated = topology.device, nullcontext()
        torch.cuda.set_device(device)
    with emulated, _process_group(topology, device) as backend:
        names = [BARE, WRAPPED, *([DEFAULT] if topology.world_size > 1 else [])]
        names += [DDP] if backend else []
        ways = {name: Trainer(name, shape, device, topology) for name in names}
        wrapped = ways[WRAPPED].optimizer
        assert isinstance(wrapped, daso.DASO)
        for one in ways.values():
            one.round(plan.steps)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        exposed = wrapped.report()["exposed_seconds"]
        for name in take_turns(list(ways), plan.rounds):
            topology.world_comm.Barrier()
            seconds[name].append(ways[name].round(plan.steps))
        report = wrapped.report()
        parameters = sum(ways[BARE].numels)
        held = _held(shape, device, topology, plan.steps)
        default = _end(ways)
    mine = {
        "seconds": seconds,
        "exposed_seconds": (report["exposed_seconds"] - exposed) / (plan.rounds * plan.steps),
        "bytes_per_parameter": held / parameters,
        "over_copy": _over_copy(ways[BARE].numels, device, plan.rounds),
    }
    ranks = topology.world_comm.allgather(mine)
    slowest = max(ranks, key=lambda one: statistics.median(one["seconds"][WRAPPED]))
    return {
        "plan": asdict(plan),
        "device": _name(device),
        "ddp_backend": backend,
        "nodes": list(topology.node_sizes),
        "parameters": parameters,
        "packing": describe_kernels(device),
        "node_transport": report["node_transport"],
        "exchanges": report["exchanges"],
        "default": default,
        **slowest,
    }


def _end(ways: Mapping[str, Trainer]) -> dict[str, Any]:
    """Close the optimizers; return what the default one did."""
    done: dict[str, Any] = {}
    for name, one in ways.items():
        if isinstance(one.optimizer, daso.DASO):
            report = one.optimizer.report()
            if name == DEFAULT:
                batch, skip, wait = report["skip_history"][-1]
                done = {"skip": skip, "wait": wait, "gradient_wire": report["gradient_wire"]}
                done |= {"wire": report["wire"], "since_batch": batch}
            one.optimizer.close()
    return done


@contextmanager
def _process_group(topology: Topology, device: torch.device) -> Iterator[str | None]:
    """Yield DDP's backend: NCCL on a rank alone; gloo, since NCCL refuses ranks on one GPU."""
    if device.type == "cuda" and torch.version.cuda is None:
        yield None  # gloo of a torch without CUDA crashes on a simulated device's tensors
        return
    alone_on_gpu = device.type == "cuda" and topology.world_size == 1 and dist.is_nccl_available()
    backend: Backend = "nccl" if alone_on_gpu else "gloo"
    join_process_group(topology, backend)
    try:
        yield backend
    finally:
        dist.destroy_process_group()


def _held(shape: Shape, device: torch.device, topology: Topology, steps: int) -> float:
    """Return the bytes that the toolkit adds to the most that a device holds in training."""
    if device.type != "cuda":
        return 0.0
    most = []
    for name in (BARE, WRAPPED):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        trainer = Trainer(name, shape, device, topology)
        trainer.round(max(steps, 2 * POLICY.skip))
        most.append(torch.cuda.max_memory_allocated(device) - before)
        if isinstance(trainer.optimizer, daso.DASO):
            trainer.optimizer.close()
        del trainer
    return float(most[1] - most[0])


def _over_copy(numels: list[int], device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Return the rates at which a model is encoded for a wire, and a mean accepted.

    Args:
        numels: Of the model's tensors.
        device: Where they lie.
        rounds: Of everything, in turn.

    Returns:
        Over the rate of a copy, in bytes that must cross the device's memory: by torch's
        operations and by the kernels of the device.
    """
    values = FlatTensors([torch.randn(numel, device=device) for numel in numels])
    source = torch.randn(values.numel, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    nbytes: dict[str, float] = {"copy": 8}
    every: dict[str, Any] = {TORCH: torch_kernels, KERNELS: kernels_for(device)}
    for name, kernels in every.items():
        for wire in WIRES:
            encode, accept = _kernel_calls(kernels, wire, values, device)
            sent = codec_named(wire).nbytes(1 << 20) / (1 << 20)
            # Parameters and reference are read, a payload is written; mean and own payload and
            # reference are read, reference and what is merged written.
            calls |= {f"{name}, {wire} encode": encode, f"{name}, {wire} accept": accept}
            nbytes |= {f"{name}, {wire} encode": 8 + sent, f"{name}, {wire} accept": 12 + 2 * sent}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            settle(device)
            start = time.perf_counter()
            call()
            settle(device)
            seconds[name].append(time.perf_counter() - start)
    rate = {name: nbytes[name] / statistics.median(one[1:]) for name, one in seconds.items()}
    return {
        f"{name}, {wire}": {
            what: rate[f"{name}, {wire} {what}"] / rate["copy"] for what in ("encode", "accept")
        }
        for name in every
        for wire in WIRES
    }


def _kernel_calls(
    kernels: Kernels, wire: str, values: FlatTensors, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what encodes a model's deltas, and what accepts their mean."""
    codec, numel = codec_named(wire), values.numel
    reference, shown = (torch.zeros(numel, device=device) for _ in range(2))
    rows, before = ShardRows(reference, shown=shown), EncodeRows(reference=reference)
    payload = torch.empty(codec.nbytes(numel), dtype=torch.uint8, device=device)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    span = (0, numel)
    return (
        lambda: kernels.encode(codec, values, [span], payload, before),
        lambda: kernels.accept(Mean(codec, [payload]), payload, *span, rows, sums),
    )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "pretended, on a CPU"


def table(found: Mapping[str, Any]) -> str:
    """Return what was found, line by line."""
    ms = {name: 1e3 * statistics.median(one) for name, one in found["seconds"].items()}
    return "\n".join(
        [
            _conditions(found),
            *(
                f"  {_way(found, name)}: {one:.2f} ms a step, {_ratio(found, name):.4f} of bare"
                for name, one in ms.items()
            ),
            f"  exposed {1e3 * found['exposed_seconds']:.3f} ms a step, "
            f"{found['exchanges']} exchanges, {found['node_transport']}",
            f"  {found['bytes_per_parameter']:.2f} bytes per parameter more at the most",
            f"  packing: {found['packing']}",
            *(
                f"    {name}: encoded at {one['encode']:.2f} of a copy's rate, accepted at "
                f"{one['accept']:.2f}"
                for name, one in found["over_copy"].items()
            ),
        ]
    )


def _way(found: Mapping[str, Any], name: str) -> str:
    if name == DEFAULT:
        return (
            f"{name} (Auto, {', '.join(f'{key} {one}' for key, one in found['default'].items())})"
        )
    return f"{name} ({found['ddp_backend']})" if name == DDP else name


def _ratio(found: Mapping[str, Any], name: str = WRAPPED) -> float:
    """Return a contender's step time over the bare one's, round by round."""
    return statistics.median(over(found["seconds"][name], found["seconds"][BARE]))


def _conditions(found: Mapping[str, Any]) -> str:
    plan = found["plan"]
    return (
        f"{plan['model']}, {found['parameters'] / 1e6:.1f} M parameters, bf16 autocast, "
        f"{found['device']}, {size_of_nodes(found['nodes'])} that share it, "
        f"{POLICY!r}, medians of {plan['rounds']} alternating rounds of {plan['steps']} steps"
    )


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of one run: others on one rank than on several; none where pretended."""
    if found["plan"]["model"] == PRETENDED:
        return {}
    model, told = found["plan"]["model"], _conditions(found)
    if len(found["nodes"]) == 1:
        rates = {
            f"gpu_{wire}_{what}_over_copy": (
                found["over_copy"][f"{KERNELS}, {wire}"][what],
                "ratio of rates, over a device copy",
            )
            for wire in WIRES
            for what in ("encode", "accept")
        }
        named = {
            "gpu_overhead_world_1": (_ratio(found), "ratio of step times, over the bare optimizer"),
            **rates,
        }
    else:
        step = statistics.median(found["seconds"][WRAPPED])
        beside = f"; {_way(found, DDP)} {_ratio(found, DDP):.3f}" if DDP in found["seconds"] else ""
        named = {
            "gpu_step_over_bare_two_nodes": (
                _ratio(found),
                f"ratio of step times, over the bare optimizer{beside}",
            ),
            "gpu_exposed_share": (found["exposed_seconds"] / step, "of a step"),
            "gpu_peak_bytes_per_parameter": (
                found["bytes_per_parameter"],
                "bytes per parameter at the most, beside the bare training's",
            ),
        }
    return {
        f"{name}_{model}": {"value": value, "unit": unit, "conditions": told}
        for name, (value, unit) in named.items()
    }
