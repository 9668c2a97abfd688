"""A program of the user's on a machine that is slowed down to imitate another one."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from daso.comm.emulation import LinkModel, throttled
from daso.comm.topology import Topology, default
from daso.errors import ConfigError
from daso.predict.link_trials import link_is_off_by
from daso.predict.measure import world_of_launch
from daso.predict.step_times import StepTimes
from daso.predict.throttle_plan import ThrottlePlan
from daso.predict.throttles.compute import ComputePadding
from daso.predict.throttles.copies import CopyDelay
from daso.predict.throttles.disk import DiskDelay, DiskRates
from daso.predict.throttles.memory import MemoryHog

__all__ = ["simulate_target"]

MOST_OFF = 0.05  # of what a throttle is to bring about
NOTHING = 1.005  # a factor below which a part is left as it is


@contextmanager
def simulate_target(plan: ThrottlePlan, topology: Topology | None = None) -> Iterator[StepTimes]:
    """Slow this machine down to imitate another one, for optimizers that are wrapped meanwhile.

    What the plan counts is held to its rates, each throttle tried out before: the link between
    nodes, for `daso.DASO` with any reducer and `ParameterServer`; computing, by pauses after
    operations on the CPU and at the end of steps; memory, by a thread that copies; copies to a
    device, by copying more; the disk, by standing still after steps. Step times that are taken then
    go to `daso.predict.estimate`.

    Args:
        plan: What is at hand, and what is imitated.
        topology: Whose ranks take part; found from MPI if None.

    Yields:
        The times of steps that optimizers take meanwhile: ``seconds``.

    Raises:
        ConfigError: The plan counts a link and there are no two nodes, or a throttle is more than
            5 % off what the plan asks (memory: 10 %): the current machine's link, say, is slower
            than it was given. On every rank.

    Collective over the world; blocking, for some seconds.
    """
    if plan.has_link:
        topology = topology or default()
        if topology.nodes < 2:
            raise ConfigError(
                "a target must have a link between nodes, but there is one node here; start 2 "
                "ranks at least, each a pretend node (--ranks-per-node=1), or leave the link out"
            )
    topology = topology or world_of_launch()
    with ExitStack() as throttles:
        steps = StepTimes(plan.compute_factor)
        mine = (_hog, _copies, _disk, _computing)
        # Before ranks try the link together.
        _refuse([_begun(one, plan, throttles, steps) for one in mine], topology)
        _refuse([_link(plan, throttles, steps, topology)], topology)
        throttles.enter_context(steps)
        yield steps


def _begun(
    begin: Callable[[ThrottlePlan, ExitStack, StepTimes], str],
    plan: ThrottlePlan,
    throttles: ExitStack,
    steps: StepTimes,
) -> str:
    """Begin a throttle of this rank's own; return what is wrong with it."""
    try:
        return begin(plan, throttles, steps)
    except (OSError, RuntimeError) as error:  # a full disk, or what a driver says
        return f"one fails here: {error}"


def _refuse(found: Sequence[str], topology: Topology | None) -> None:
    """Raise what is wrong with throttles, on every rank. Collective over the world; blocking."""
    problem, problems = None, [one for one in found if one]
    if problems:
        rule = f"a throttle must be right to {MOST_OFF:.0%}"
        problem = (
            f"{rule}, but {'; '.join(problems)}; correct what `current` is said to be, or let "
            f"nothing else run here"
        )
    if topology is not None:
        topology.raise_on_all_ranks(problem, ConfigError)
    elif problem is not None:
        raise ConfigError(problem)


def _problem(what: str, off: float, most: float = MOST_OFF) -> str:
    return f"{what} takes {1 + off:.2f} of what the plan asks" if abs(off) > most else ""


def _link(
    plan: ThrottlePlan, throttles: ExitStack, steps: StepTimes, topology: Topology | None
) -> str:
    link = None
    if plan.link_bytes_per_second is not None and topology is not None:
        # The plan's link is a node's, which all lanes share.
        link = LinkModel(plan.link_bytes_per_second / topology.lanes, plan.latency_seconds)
    throttles.enter_context(throttled(link, plan.compute_factor, steps.padded_seconds))
    if link is None or topology is None:
        return ""
    return _problem("the link", link_is_off_by(link, topology))


def _computing(plan: ThrottlePlan, throttles: ExitStack, steps: StepTimes) -> str:
    # A device computes beside the thread that could pause: there steps end later.
    if plan.compute_factor < NOTHING or torch.cuda.is_available():
        return ""
    steps.padding = ComputePadding(plan.compute_factor)
    throttles.enter_context(steps.padding)
    return _problem("computing", steps.padding.off())


def _hog(plan: ThrottlePlan, throttles: ExitStack, steps: StepTimes) -> str:  # noqa: ARG001 - as all
    rate = plan.rate("memory_bytes_per_second")
    if rate is None or plan.factor("memory_bytes_per_second") < NOTHING:
        return ""
    hog = throttles.enter_context(MemoryHog(rate))
    return _problem("a copy in memory", hog.off(), hog.most_off)


def _copies(plan: ThrottlePlan, throttles: ExitStack, steps: StepTimes) -> str:  # noqa: ARG001 - as all
    factor = plan.factor("copy_bytes_per_second")
    if factor < NOTHING:
        return ""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here whose copies could be slowed down"
    delay = throttles.enter_context(CopyDelay(factor))
    return _problem("a copy to the device", delay.off())


def _disk(plan: ThrottlePlan, throttles: ExitStack, steps: StepTimes) -> str:
    names = "disk_write_bytes_per_second", "disk_read_bytes_per_second"
    if max(map(plan.factor, names)) < NOTHING:
        return ""
    current = [getattr(plan.current, name) or 1.0 for name in names]
    target = [plan.rate(name) or rate for name, rate in zip(names, current, strict=True)]
    steps.disk = throttles.enter_context(DiskDelay(DiskRates(*current), DiskRates(*target)))
    return _problem("a write", steps.disk.off(Path(tempfile.gettempdir())))
