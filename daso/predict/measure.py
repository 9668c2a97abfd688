"""What the machine at hand does, measured."""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from daso.checks import NONE, Rule, check, either, instance_of, validate_call
from daso.comm.topology import STALL_SECONDS, Topology, default
from daso.environment import read_launch
from daso.predict.link_trials import link_rate
from daso.predict.throttle_plan import Machine
from daso.predict.throttles.disk import DiskRates, disk_rates
from daso.predict.throttles.memory import memory_bytes_per_second

__all__ = ["measure_machine", "world_of_launch"]

SIZE = 1024  # of matrices that are multiplied
PRODUCTS = 3  # at least, of a try
TRY_SECONDS = 0.05
TRIES = 5
COPIED_BYTES = 64 << 20  # between host and device
FOLDER = Rule(
    "a folder that is there", lambda one: isinstance(one, str | Path) and Path(one).is_dir()
)


@validate_call
def measure_machine(
    topology: Topology | None = None, *, folder: str | os.PathLike[str] | None = None
) -> Machine:
    """Measure what `ThrottlePlan` counts of the machine at hand.

    Computing: products of matrices, on the device if there is one, in FLOP/s of a node, by all its
    ranks at once and the threads that torch has now. Memory: a copy of 96 MiB by each rank. The
    link and its latency: exchanges between nodes. Copies: pinned memory to the device and back.
    The disk: a file of 16 MiB, until it is there, and from there.

    Args:
        topology: Whose ranks take part; None: those of the launcher, or this process alone.
        folder: Whose disk is measured; None: that of temporary files.

    Returns:
        The slowest rank's machine; what there is not is None: a link with one node, copies without
        a device, a disk that cannot be written.

    Collective over the world; blocking, for some seconds.
    """
    check("topology", topology, either(instance_of(Topology), NONE))
    check("folder", folder, either(FOLDER, NONE))
    world = world_of_launch() if topology is None else topology
    _rendezvous(world)
    disk = _disk(Path(tempfile.gettempdir() if folder is None else folder))
    _rendezvous(world)  # who had the disk last is late
    rates: dict[str, Any] = {
        "compute": _flops() * (1 if world is None else world.local_size),
        "memory_bytes_per_second": memory_bytes_per_second(),
        "copy_bytes_per_second": _copy_rate() if torch.cuda.is_available() else None,
        "disk_write_bytes_per_second": None if disk is None else disk.write,
        "disk_read_bytes_per_second": None if disk is None else disk.read,
    }
    if world is None:
        return Machine(**rates)
    told = world.world_comm.allgather(rates)
    slowest: dict[str, Any] = {
        name: None if any(one[name] is None for one in told) else min(one[name] for one in told)
        for name in rates
    }
    if world.nodes == 1:
        return Machine(**slowest)
    bytes_per_second, latency_seconds = link_rate(world)
    return Machine(
        **slowest, link_bytes_per_second=bytes_per_second, latency_seconds=latency_seconds
    )


def _rendezvous(world: Topology | None) -> None:
    """Let all ranks measure at once."""
    if world is not None:
        world.rendezvous("measure the machine", STALL_SECONDS)


def world_of_launch() -> Topology | None:
    """Return the ranks that a launcher started; None: this process is alone."""
    return default() if read_launch().size > 1 else None


def _disk(folder: Path) -> DiskRates | None:
    """Return the rates of a folder's disk; None where it cannot be written, or is full."""
    try:
        return disk_rates(folder)
    except OSError:
        return None


def _flops() -> float:
    """Return the floating-point operations per second of products of matrices."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    matrix = torch.full((SIZE, SIZE), 1 / SIZE, device=device)
    product = torch.empty_like(matrix)
    _multiply(matrix, product, 1)
    times = max(PRODUCTS, round(TRY_SECONDS / _multiply(matrix, product, PRODUCTS) * PRODUCTS))
    seconds = statistics.median(_multiply(matrix, product, times) for _ in range(TRIES))
    return 2 * SIZE**3 * times / seconds


def _multiply(matrix: torch.Tensor, product: torch.Tensor, times: int) -> float:
    _wait_for(matrix)
    begun = time.perf_counter()
    for _ in range(times):
        torch.mm(matrix, matrix, out=product)
    _wait_for(matrix)
    return time.perf_counter() - begun


def _wait_for(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _copy_rate() -> float:
    """Return the bytes per second between pinned memory and the device: of the slower direction."""
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    seconds = []
    for target, source in ((there, host), (host, there)):
        tries = []
        for _ in range(TRIES + 1):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            tries.append(time.perf_counter() - begun)
        seconds.append(statistics.median(tries[1:]))
    return COPIED_BYTES / max(seconds)
