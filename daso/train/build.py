"""Builds the parts of one model: checks and equalizes it, and starts its threads."""

import logging
from collections.abc import Callable, Container
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TypeVar

from daso.comm.control import gather_unlike
from daso.comm.device.cuda_aware import trial
from daso.comm.device.staging import DeviceStaging
from daso.comm.emulation import emulated_link
from daso.comm.health.step_watchdog import StepWatchdog
from daso.comm.health.survivors import is_loss
from daso.comm.node.base import NodeTransport
from daso.comm.node.select import check_device, choose_node, staging_of
from daso.comm.topology import Topology, lane_topology
from daso.errors import ConfigError, DasoError, ExchangeError
from daso.kernels.choice import slow_kernels
from daso.plan.bucket_search import BucketSizeSearch, bucket_search
from daso.plan.cost_model import efficient_portion_bytes
from daso.plan.options import MiB, Settings
from daso.train.channels import Channels, Communicators
from daso.train.coordinator import Coordinator
from daso.train.deltas.exchange import DeltaExchange
from daso.train.deltas.outer import MakeOuter
from daso.train.gradients.averaging import GradientAveraging
from daso.train.gradients.background import BackgroundReducer
from daso.train.gradients.host_reducer import HostReducer
from daso.train.gradients.priority import PriorityReducer
from daso.train.gradients.step import GradientStep
from daso.train.inner.step_restoration import Restorations, make_restorations
from daso.train.metrics import Metrics
from daso.train.model.changes import GradientScaleMeter, ParameterChanges, ParameterWrites
from daso.train.model.params import Trained, check_same_layout, check_sharding, start_equal
from daso.train.parts import Parts
from daso.train.simulated.channels import EmulatedChannels

logger = logging.getLogger("daso")
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class SessionCallbacks:
    """Callbacks to the session, and to all sessions.

    Args:
        absorbs: Returns whether the next step handles an error that a backward raised.
        elsewhere: Returns the ids of parameters that wrapped optimizers train.
    """

    absorbs: Callable[[Exception], bool]
    elsewhere: Callable[[], Container[int]]


def build_parts(
    trained: Trained,
    topology: Topology,
    settings: Settings,
    metrics: Metrics,
    *,
    outer: MakeOuter | None,
    callbacks: SessionCallbacks,
    first_step_checked: bool,
) -> Parts:
    """Build the parts of one model; a failure on any rank releases them on all ranks.

    Args:
        trained: The optimizer and what it trains.
        topology: The ranks and nodes; more than one rank.
        settings: How to exchange.
        metrics: Counters of the session.
        outer: Creates an optimizer for the reference.
        callbacks: Callbacks to the session.
        first_step_checked: Earlier parts of the same training did the checks of the first step.

    Collective over the world; blocking.
    """
    replicas = start_alike(trained, topology, settings)
    with ExitStack() as stack:
        build = _Builder(topology, settings.exchange.timeout_seconds, stack)
        comms = build(lambda: Communicators(topology), Communicators.free, frees_together=True)
        build(lambda: comms.open_lane(settings))
        watchdog = build(
            lambda: StepWatchdog(topology.world_comm), StepWatchdog.free, frees_together=True
        )
        channels = build(
            lambda: open_channels(topology, settings, replicas, comms, watchdog), Channels.stop
        )
        writes = build(lambda: ParameterWrites(trained), ParameterWrites.close)
        coordinator = build(
            lambda: Coordinator(
                trained,
                topology,
                replicas,
                channels,
                metrics,
                callbacks.elsewhere,
                first_step_checked=first_step_checked,
            )
        )
        background = build(lambda: _background(channels, metrics), _close_background)
        buckets = build(lambda: _first_buckets(coordinator))
        copies = build(lambda: staging_of(trained.device))
        node = build(
            lambda: _node(coordinator, replicas, copies),
            lambda transport: transport.free(),
            frees_together=True,
        )
        averaging = build(
            lambda: GradientAveraging(channels, metrics, trained.device, node, background)
        )
        restorations = build(lambda: _restorations(coordinator))
        clipping = build(lambda: _clipping(coordinator, restorations))
        changes = build(lambda: ParameterChanges(trained))
        gradients = build(
            lambda: GradientStep(
                coordinator,
                averaging,
                changes,
                clipping,
                callbacks.absorbs,
                buckets=buckets,
            ),
            GradientStep.close,
        )
        deltas = None
        if topology.nodes > 1:
            build(lambda: _try_device_and_links(coordinator, node))
            deltas = build(
                lambda: DeltaExchange(coordinator, node, outer, writes, restorations, clipping)
            )
        stack.pop_all()  # kept until `Parts.close`
    return Parts(
        trained,
        topology,
        metrics,
        changes,
        writes,
        channels,
        coordinator,
        node,
        averaging,
        gradients,
        deltas,
    )


class _Builder:
    """Builds the parts in order on all ranks, and releases them if one fails on any rank.

    Each part is one step. Either its construction communicates, and fails on all ranks or on none,
    or neither its construction nor its release communicates. A resource that needs both is two
    parts.

    Args:
        topology: The ranks.
        timeout_seconds: Limit of each wait for the other ranks.
        stack: Receives the releases.
    """

    def __init__(self, topology: Topology, timeout_seconds: float, stack: ExitStack) -> None:
        self._topology, self._timeout_seconds, self._stack = topology, timeout_seconds, stack
        self._agreed = True  # all ranks know how the last step ended

    def __call__(
        self,
        make: Callable[[], Part],
        free: Callable[[Part], object] = lambda _: None,
        *,
        frees_together: bool = False,
    ) -> Part:
        """Return a part; raise on every rank if its construction fails on any.

        Args:
            make: Creates the part.
            free: Releases it.
            frees_together: The release is collective: call it only if all ranks do.

        Collective over the world; blocking.
        """
        error: Exception | None = None
        self._agreed = False
        try:
            part = make()
            self._stack.callback(self._give_back, free, part, frees_together)
        except Exception as caught:
            if is_loss(caught):  # the other ranks do not reach the meeting below
                raise
            error = caught
        problem = None if error is None else f"{type(error).__name__}: {error}"
        try:
            problems = gather_unlike(self._topology, problem, self._timeout_seconds)
        except Exception:  # the other ranks still wait inside this step
            if error is None:
                raise
            raise error  # noqa: B904 - the stall is its context
        self._agreed = True
        if error is not None:
            try:
                raise error
            finally:  # it holds this frame, and with it the parts, until garbage collection
                error = None
        for rank, text in enumerate(problems):
            if text is not None:
                raise ExchangeError(
                    f"all ranks must be able to wrap an optimizer, but rank {rank} is not: {text}",
                    code="wrapping-failed-elsewhere",
                )
        return part

    def _give_back(self, free: Callable[[Part], object], part: Part, frees_together: bool) -> None:
        """Release a part; an error of the release does not hide the original error."""
        if self._agreed or not frees_together:
            with suppress(DasoError):
                free(part)


def start_alike(trained: Trained, topology: Topology, settings: Settings) -> Topology:
    """Check a model and give all ranks the same initial parameters.

    Returns:
        The replica group of the trained parameters: all ranks; for shards, those of this lane.

    Collective over the world; blocking.
    """
    exchange, limit = settings.exchange, settings.exchange.timeout_seconds
    lane = lane_topology(topology) if check_sharding(trained, topology, limit) else topology
    _refuse_reducers(trained, settings)
    check_same_layout(trained, topology, limit)
    check_device(topology, trained.device, limit, gpu_direct=exchange.gpu_direct)
    start_equal(trained, topology, limit, lane, exchange.keeps_own)
    return lane if trained.is_sharded else topology


def _refuse_reducers(trained: Trained, settings: Settings) -> None:
    """Refuse reducers that cannot average gradients of shards."""
    if trained.is_sharded and (settings.gradients.reducer != "bucketed" or not settings.whole):
        raise ConfigError(
            f"gradients of sharded parameters must go in buckets and steps be whole, but "
            f"{settings.gradients!r} has them otherwise; leave Gradients(reducer=, step=) out",
            code="sharded-gradients-not-bucketed",
        )


def warn_of_slow_kernels(trained: Trained, topology: Topology, settings: Settings) -> None:
    """Warn if any rank uses the fallback implementation of the kernels.

    Collective over the world; blocking.
    """
    line, limit = slow_kernels(trained.device), settings.exchange.timeout_seconds
    lines = gather_unlike(topology, line, limit)  # a single line where all ranks have the same
    slow = [rank for rank, line in enumerate(lines) if line]
    if slow and topology.rank == 0:
        logger.warning(
            "%s encodes and adds with %s, which takes several times as long as C or Triton; every "
            "exchange waits for the slowest rank",
            "every rank" if len(lines) == 1 else f"rank {slow[0]} ({len(slow)} in all)",
            lines[slow[0]],
        )


def open_channels(
    topology: Topology,
    settings: Settings,
    replicas: Topology,
    comms: Communicators,
    watchdog: StepWatchdog,
) -> Channels:
    """Return the channels between nodes, over the emulated link if one is set; as `Channels`."""
    link = emulated_link()
    if link is None:
        return Channels(topology, settings, replicas, comms, watchdog)
    return EmulatedChannels(topology, settings, replicas, comms, watchdog, link)


def _background(channels: Channels, metrics: Metrics) -> BackgroundReducer | None:
    """Return the background reducer; None if the training thread averages gradients."""
    gradients = channels.settings.gradients
    if gradients.reducer == "host":
        return HostReducer(channels, metrics, channels.rank_info.local_size)
    if gradients.reducer == "prioritized":
        return PriorityReducer(channels, metrics, gradients.priority)
    return None


def _close_background(background: BackgroundReducer | None) -> None:
    if background is not None:
        background.close()


def _first_buckets(coordinator: Coordinator) -> tuple[int, BucketSizeSearch | None]:
    """Return the initial bucket size, and the search for a better size, if any.

    Collective over the world, and blocking, where the size follows from the cost of messages.
    """
    channels, trained = coordinator.channels, coordinator.trained
    gradients = channels.settings.gradients
    if gradients.sizes_portions and coordinator.topology.nodes > 1:
        costs, plan = channels.measured_costs(), channels.plan(MiB)
        return efficient_portion_bytes(gradients.link_efficiency, plan, costs), None
    size = gradients.first_bucket_bytes(on_gpu=trained.device.type == "cuda")
    if size is not None:
        return size, None
    search = bucket_search(sum(tensor.nbytes for _, tensor in trained.local))
    return search.least_bytes, search


def _node(
    coordinator: Coordinator, replicas: Topology, copies: DeviceStaging | None
) -> NodeTransport:
    """Return the transport inside this node. Collective over the world; blocking."""
    settings, device = coordinator.channels.settings, coordinator.trained.device
    limit, late = settings.exchange.timeout_seconds, coordinator.channels.late
    return choose_node(replicas, device, settings.gradients.reducer, limit, late, copies)


def _restorations(coordinator: Coordinator) -> Restorations:
    """Return the step restorations, equal on all ranks. Collective over the world; blocking."""
    topology = coordinator.topology
    if topology.nodes == 1:
        return Restorations()
    settings, inner = coordinator.channels.settings, coordinator.trained.inner
    restorations = make_restorations(inner, settings, warns=coordinator.leads)
    if topology.equal_on_all_ranks(restorations.traits, settings.exchange.timeout_seconds):
        return restorations
    if coordinator.leads:
        logger.warning(
            "the inner optimizer must be the same on every rank, but a few steps of a copy "
            "show others on some; steps are not restored"
        )
    return Restorations()


def _clipping(coordinator: Coordinator, restorations: Restorations) -> GradientScaleMeter | None:
    """Return the meter of gradient clipping; None if step restoration does not use it."""
    if restorations.clipped is None or coordinator.is_sharded:
        return None
    return GradientScaleMeter(coordinator.trained.named)


def _try_device_and_links(coordinator: Coordinator, node: NodeTransport) -> None:
    """Check GPU-direct on this rank, and measure links. Collective over the world; blocking."""
    channels, problem = coordinator.channels, None
    if channels.settings.exchange.gpu_direct:
        if channels.world_info.lane is not None and node.copies is not None:
            device = coordinator.trained.device
            problem = channels.engine.run(trial(channels.comms.lane, device, node.copies))
        limit = channels.settings.exchange.timeout_seconds
        coordinator.topology.raise_on_all_ranks(problem, limit)
    channels.measure_if_needed()
