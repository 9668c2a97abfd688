"""Runs a program on this machine, slowed down to emulate another machine."""

import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from daso import trace
from daso.comm.control import gather
from daso.comm.emulation import LinkModel, sleep_for, throttled
from daso.comm.topology import Topology, default
from daso.errors import ConfigError
from daso.predict.copy_sweep import MOST_OFF, CopyDelay
from daso.predict.measure import link_is_off_by, world_of_launch
from daso.predict.throttle_plan import LABELS, NOTHING, ThrottlePlan, without
from daso.predict.throttles import (
    MOST_MEMORY_OFF,
    DiskDelay,
    DiskRates,
    MemoryRates,
    OperationPadding,
)

LEAST_USE = 0.01  # of the steps' time, in which slowed parts are used: below, none was slowed


class StepTimes:
    """Durations of this thread's steps: of daso's optimizers, or of the first torch optimizer.

    It also throttles the part of a torch optimizer's steps that no padding covers.
    """

    def __init__(self, plan: ThrottlePlan) -> None:
        self.plan = plan
        self.seconds: list[float] = []  # of steps, in order
        self.left_out: list[str] = []  # sentences on parts that cannot be slowed down
        self.padding: OperationPadding | None = None
        self.disk: DiskDelay | None = None
        # By throttle: seconds so far in which the program used the slowed part.
        self.used: dict[str, Callable[[], float]] = {}
        self._factor, self._thread = plan.compute_factor, 0
        self._optimizer: int | None = None  # id of the optimizer whose steps count, once known
        self._of_daso = self._settled = False
        self._ended = self._own = 0.0  # end of the last step, and seconds computed until then
        self._used_before = 0.0  # seconds of use before the steps that count

    def __enter__(self) -> "StepTimes":
        """Start recording the steps of this thread."""
        self._thread = threading.get_ident()
        self._hook = register_optimizer_step_post_hook(self._after_any_step)
        trace.watch(self._after_span)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop recording."""
        self._hook.remove()
        trace.watch(None)

    @property
    def use(self) -> float:
        """Return the share of the steps' time in which the program used the slowed parts."""
        total = sum(self.seconds)
        return (self._used_seconds() - self._used_before) / total if total else 0.0

    @property
    def is_slowed(self) -> bool:
        """Return whether the program used the slowed parts for 1 % of the steps' time."""
        return self.use >= LEAST_USE

    def _used_seconds(self) -> float:
        return sum(seconds() for seconds in self.used.values())

    def padded_seconds(self) -> float:
        """Return the seconds added inside steps; their code then stretches the steps itself.

        A pause for memory is neither computing nor added to it. Of each second of it, 1 / factor
        is left out here: then a stretch by the factor adds nothing for it.
        """
        self._settled = True
        if self.padding is None:
            return 0.0
        return self.padding.seconds - self.padding.memory_seconds / self._factor

    def _after_any_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._of_daso or threading.get_ident() != self._thread:
            return
        self._optimizer = self._optimizer or id(optimizer)
        if self._optimizer == id(optimizer):
            self._end_step()

    def _after_span(self, kind: int) -> None:
        if kind != trace.STEP or threading.get_ident() != self._thread:
            return
        if not self._of_daso:  # so far the inner optimizer's steps were recorded
            self._of_daso, self._ended = True, 0.0
            self.seconds.clear()
        self._end_step()

    def _end_step(self) -> None:
        own = self._own_seconds()
        if self._ended and not self._settled:
            sleep_for((self._factor - 1) * (own - self._own))
        if self.disk is not None:
            self.disk.settle()
        self._settled, self._own = False, self._own_seconds()
        now = time.perf_counter()
        if self._ended:
            self.seconds.append(now - self._ended)
        else:
            self._used_before = self._used_seconds()
        self._ended = now

    def _own_seconds(self) -> float:
        """Return this thread's computing time so far that no padding covers."""
        padding = self.padding
        if torch.cuda.is_available():  # a device also computes while its thread waits
            return time.perf_counter() - (0.0 if padding is None else padding.slept)
        if padding is None:
            return time.thread_time()
        return time.thread_time() - padding.in_operations - (padding.seconds - padding.slept)


class _WatchedLink(LinkModel):
    """An emulated link that records the seconds of its use."""

    used = 0.0

    def seconds(self, nbytes: int, messages: int = 1) -> float:
        """Return the minimum seconds that the link is occupied."""
        seconds = super().seconds(nbytes, messages)
        self.used += seconds
        return seconds


@contextmanager
def simulate_target(plan: ThrottlePlan, topology: Topology | None = None) -> Iterator[StepTimes]:
    """Slow this machine down to emulate another, for optimizers that are wrapped meanwhile.

    Each part in the plan is limited to its rate, and each throttle is tested first: the link
    between nodes, for `daso.DASO` with any reducer and `ParameterServer`; computing, by pauses
    after operations on the CPU and at the end of steps; memory, by pauses after operations on large
    tensors; copies to a device, by additional bytes; the disk, by pauses after steps. Pass the
    recorded step times to `daso.predict.estimate`, if ``is_slowed`` is true.

    Args:
        plan: The current machine and the target.
        topology: Topology of the ranks; None: MPI's world.

    Yields:
        The recorded steps; ``seconds`` are their durations, ``is_slowed`` is whether the program
        used the slowed parts for 1 % of that time.

    Raises:
        ConfigError: The plan has a link but the world has one node, or a throttle is more than 5 %
            off its rate (memory: 10 %), for example because the current machine's link is slower
            than stated. On every rank.

    Collective over the world; blocking, for some seconds.
    """
    with emulated(plan, topology) as steps:
        yield steps


@contextmanager
def emulated(
    plan: ThrottlePlan, topology: Topology | None = None, optional: Collection[str] = ()
) -> Iterator[StepTimes]:
    """Slow this machine down like `simulate_target`; skip optional rates that cannot be held."""
    if plan.has_link:
        topology = topology or default()
        if topology.nodes < 2:
            raise ConfigError(
                "a target must have a link between nodes, but there is one node here; start 2 "
                "ranks at least, each a pretend node (--ranks-per-node=1), or leave the link out",
                code="target-without-link",
            )
    topology = topology or world_of_launch()
    steps = StepTimes(plan)
    with ExitStack() as throttles:
        problems = []
        for names, slow in THROTTLES.items():
            if max(map(plan.factor, names)) < NOTHING:
                continue
            throttle = throttles.enter_context(ExitStack())
            try:
                problem = slow(throttle, steps)
            except (OSError, RuntimeError) as error:  # for example a full disk or a driver error
                problem = f"one fails here: {error}"
            if set(names) <= {*optional}:
                problem = _first_of_any_rank(problem, topology)
                if problem:
                    throttle.close()
                    _leave_out(names, problem, steps)
            else:
                problems.append(problem)
        _refuse("; ".join(filter(None, problems)), topology)  # before ranks test the link together
        _refuse(_slow_link(throttles, steps, topology), topology)
        throttles.enter_context(steps)
        yield steps


def _first_of_any_rank(problem: str, topology: Topology | None) -> str:
    problems = [problem] if topology is None else gather(topology, problem)
    return next(filter(None, problems), "")


def _leave_out(names: tuple[str, ...], problem: str, steps: StepTimes) -> None:
    """Remove rates that cannot be held from the plan."""
    parts = " and ".join(LABELS[name] for name in names)
    steps.left_out.append(
        f"{parts} cannot be slowed down here ({problem}), and an estimate assumes "
        f"{steps.plan.ratio:.3g} times the rate on the target; let nothing else run here, or "
        f"correct [current]"
    )
    for name in names:
        steps.used.pop(name, None)
    steps.plan = without(steps.plan, names)


def _refuse(problem: str, topology: Topology | None) -> None:
    """Raise `ConfigError` for a problem with throttles on every rank. Collective; blocking."""
    refusal = None
    if problem:
        refusal = ConfigError(
            f"a throttle must be right to {MOST_OFF:.0%}, but {problem}; correct what `current` is "
            f"set to, or let nothing else run here",
            code="throttle-not-exact",
        )
    if topology is not None:
        topology.raise_on_all_ranks(refusal)
    elif refusal is not None:
        raise refusal


def _problem(part: str, off: float, most: float = MOST_OFF) -> str:
    return f"{part} takes {1 + off:.2f} of the plan's time" if abs(off) > most else ""


def _slow_link(throttles: ExitStack, steps: StepTimes, topology: Topology | None) -> str:
    plan, link = steps.plan, None
    if plan.link_bytes_per_second is not None and topology is not None:
        # All lanes share a node's link.
        link = _WatchedLink(plan.link_bytes_per_second / topology.lanes, plan.latency_seconds)
    throttles.enter_context(throttled(link, plan.compute_factor, steps.padded_seconds))
    if link is None or topology is None:
        return ""
    off = link_is_off_by(link, topology)
    link.used = 0.0
    # A rank without a lane sends nothing itself, and waits for those that do.
    has_lane = topology.rank_info.lane is not None
    steps.used["link_bytes_per_second"] = lambda: link.used if has_lane else time.perf_counter()
    return _problem("the link", off)


def _slow_computing(throttle: ExitStack, steps: StepTimes) -> str:
    steps.used["compute"] = time.perf_counter  # all the time
    if torch.cuda.is_available():  # computes concurrently: the end of steps is delayed instead
        return ""
    if steps.padding is None:
        steps.padding = throttle.enter_context(OperationPadding())
    steps.padding.factor = steps.plan.compute_factor
    return _problem("computing", steps.padding.off())


def _slow_memory(throttle: ExitStack, steps: StepTimes) -> str:
    name = "memory_bytes_per_second"
    rates = MemoryRates(getattr(steps.plan.current, name), steps.plan.rate(name) or 1.0)
    padding = throttle.enter_context(OperationPadding(memory=rates))
    problem = _problem("a copy in memory", padding.memory_off(), MOST_MEMORY_OFF)
    if not problem:
        steps.padding, steps.used[name] = padding, lambda: padding.memory_seconds
    return problem


def _slow_copies(throttle: ExitStack, steps: StepTimes) -> str:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here whose copies could be slowed down"
    delay = throttle.enter_context(CopyDelay(steps.plan.factor("copy_bytes_per_second")))
    rate = steps.plan.rate("copy_bytes_per_second") or 1.0
    steps.used["copy_bytes_per_second"] = lambda: sum(delay.bytes) / rate
    return _problem("a copy to the device", delay.off())


def _slow_disk(throttle: ExitStack, steps: StepTimes) -> str:
    plan = steps.plan
    current = [getattr(plan.current, name) or 1.0 for name in DISK]
    target = [plan.rate(name) or rate for name, rate in zip(DISK, current, strict=True)]
    delay = throttle.enter_context(DiskDelay(DiskRates(*current), DiskRates(*target)))
    steps.disk, steps.used[DISK[0]] = delay, lambda: delay.seconds
    return _problem("a write", delay.off(Path(tempfile.gettempdir())))


DISK = "disk_write_bytes_per_second", "disk_read_bytes_per_second"
THROTTLES: Mapping[tuple[str, ...], Callable[[ExitStack, StepTimes], str]] = {
    ("memory_bytes_per_second",): _slow_memory,
    ("copy_bytes_per_second",): _slow_copies,
    DISK: _slow_disk,
    ("compute",): _slow_computing,
}
