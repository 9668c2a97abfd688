"""Measured rates of this machine: computing, memory, copies, disk, link between nodes."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from daso.checks import NONE, Rule, check, either, instance_of, validate_call
from daso.comm.control import STALL_SECONDS, gather
from daso.comm.emulation import LinkModel
from daso.comm.health.step_watchdog import StepWatchdog
from daso.comm.topology import Topology, default
from daso.environment import read_launch
from daso.plan.options import Exchange, Gradients, Settings
from daso.predict.throttle_plan import Machine
from daso.predict.throttles import DiskRates, disk_rates, memory_bytes_per_second
from daso.train.build import open_channels
from daso.train.channels import Channels, Communicators

SIZE = 1024  # of the multiplied matrices
PRODUCTS = 3  # minimum per try
TRY_SECONDS = 0.05
TRIES = 5
COPIED_BYTES = 64 << 20  # between host and device
LINK_SECONDS = 0.1  # of a try of the link
MOST_LINK_BYTES = 64 << 20
SMALL, LARGE = 256, 4 << 20  # elements of exchanges that measure a link
FOLDER = Rule(
    "an existing folder", lambda name: isinstance(name, str | Path) and Path(name).is_dir()
)


@validate_call
def measure_machine(
    topology: Topology | None = None, *, folder: str | os.PathLike[str] | None = None
) -> Machine:
    """Measure the rates of this machine that a `ThrottlePlan` uses.

    Computing: matrix products, on the device if the rank has one, in FLOP/s of a node, by all its
    ranks at once with torch's current number of threads. Memory: a copy of 96 MiB by each rank. The
    link and its latency: exchanges between nodes. Copies: pinned memory to the device and back. The
    disk: a file of 16 MiB, synced, and read back uncached.

    Args:
        topology: Topology of the ranks; None: the launcher's ranks, or this process alone.
        folder: Folder on the disk to measure; None: the folder of temporary files.

    Returns:
        The slowest rank's rates; missing parts are None: the link with one node, copies without a
        device, a disk that cannot be written.

    Collective over the world; blocking, for some seconds.
    """
    check("topology", topology, either(instance_of(Topology), NONE))
    check("folder", folder, either(FOLDER, NONE))
    world = world_of_launch() if topology is None else topology
    _rendezvous(world)
    disk = _disk(Path(tempfile.gettempdir() if folder is None else folder))
    _rendezvous(world)  # ranks finish with the disk at different times
    rates: dict[str, Any] = {
        "compute": _flops() * (1 if world is None else world.local_size),
        "memory_bytes_per_second": memory_bytes_per_second(),
        "copy_bytes_per_second": _copy_rate() if torch.cuda.is_available() else None,
        "disk_write_bytes_per_second": None if disk is None else disk.write,
        "disk_read_bytes_per_second": None if disk is None else disk.read,
    }
    if world is None:
        return Machine(**rates)
    by_rank = gather(world, rates)
    for name in rates:
        values = [of_rank[name] for of_rank in by_rank]
        rates[name] = None if None in values else min(values)
    if world.nodes > 1:
        rates["link_bytes_per_second"], rates["latency_seconds"] = link_rate(world)
    return Machine(**rates)


def _rendezvous(world: Topology | None) -> None:
    """Wait for all ranks, so that they measure at the same time."""
    if world is not None:
        world.rendezvous("measure the machine", STALL_SECONDS)


def world_of_launch() -> Topology | None:
    """Return the topology of the launcher's ranks; None for a single process."""
    return default() if read_launch().size > 1 else None


def _disk(folder: Path) -> DiskRates | None:
    """Return the rates of a folder's disk; None if it cannot be written, or is full."""
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
    """Return the bytes per second between pinned memory and the device, in the slower direction."""
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    device = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    seconds = []
    for target, source in ((device, host), (host, device)):
        tries = []
        for _ in range(TRIES + 1):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            tries.append(time.perf_counter() - begun)
        seconds.append(statistics.median(tries[1:]))
    return COPIED_BYTES / max(seconds)


def link_is_off_by(link: LinkModel, topology: Topology) -> float:
    """Exchange over an emulated link; return the relative error. Collective; blocks for 0.6 s."""
    nodes = topology.nodes
    sent = min(MOST_LINK_BYTES, LINK_SECONDS * link.bytes_per_second)
    numel = max(1, int(sent / 4 / (2 * (nodes - 1) / nodes)))
    with _channels(topology) as channels:
        parts = []
        for _ in range(TRIES + 1):
            elapsed, nbytes, rounds = _exchange(channels, numel)
            parts.append(elapsed / link.seconds(nbytes, rounds) - 1 if nbytes else 0.0)
    return min(parts[1:])  # the first is warmup; other load only adds


def link_rate(topology: Topology) -> tuple[float, float]:
    """Return bytes per second of a node's link, and seconds per message, of the slowest rank.

    They are the rates of gradient exchanges, including CPU time. Collective; blocking.
    """
    with _channels(topology) as channels:
        (small, few, rounds), (large, many, _) = (_usual(channels, n) for n in (SMALL, LARGE))
    seconds_of_a_byte = max(0.0, large - small) / (many - few) if many > few else 0.0
    latency = max(0.0, small - few * seconds_of_a_byte) / rounds if rounds else 0.0
    by_rank = gather(topology, (seconds_of_a_byte, latency))
    slowest, latency = (max(column) for column in zip(*by_rank, strict=True))
    return topology.lanes / slowest, latency


@contextmanager
def _channels(topology: Topology) -> Iterator[Channels]:
    settings = Settings(wire="fp32", merge="auto", exchange=Exchange(), gradients=Gradients())
    comms = Communicators(topology)
    comms.open_lane(settings)
    watchdog = StepWatchdog(topology.world_comm)
    channels = open_channels(topology, settings, topology, comms, watchdog)
    try:
        yield channels
    finally:
        channels.close()


def _usual(channels: Channels, numel: int) -> tuple[float, int, int]:
    """Return the median duration of an exchange, its bytes sent, and its rounds."""
    tries = [_exchange(channels, numel) for _ in range(2 * TRIES + 1)][1:]
    return statistics.median(elapsed for elapsed, *_ in tries), *tries[0][1:]


def _exchange(channels: Channels, numel: int) -> tuple[float, int, int]:
    """Return the seconds, bytes and rounds of an exchange; zeros on ranks without a lane."""
    channels.engine.run(channels.gather(0.0))  # so that all ranks begin together
    if channels.rank_info.lane is None:
        return 0.0, 0, 0
    handle = channels.engine.submit(channels.gradient_mean(torch.ones(numel, device="cpu")))
    nbytes = channels.engine.wait(handle)
    return handle.seconds, nbytes, channels.plan(nbytes).rounds
