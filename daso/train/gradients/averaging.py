"""Phases of gradient averaging, their plans, and the means between nodes."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from daso import trace
from daso.comm.engine import Work, WorkHandle
from daso.comm.node.base import NodeTransport
from daso.plan.layout import split
from daso.plan.schedule import State
from daso.train.channels import Channels
from daso.train.gradients.background import BackgroundReducer
from daso.train.gradients.compression import Averaged
from daso.train.gradients.cuts import Bucket, Finish
from daso.train.gradients.host_reducer import HostReducer
from daso.train.metrics import Metrics

# Starts the inter-node all-reduce of one bucket shard, which holds the sum over this node. The call
# it returns blocks until the sum is replaced by the mean over the world.
InterNodeReduce = Callable[[torch.Tensor, Bucket], Finish]


class Phase(Enum):
    """Ranks over which gradients are averaged."""

    NODE = "node"  # of this node
    WORLD = "world"  # all
    PAUSED = "paused"  # none: gradients stay on this rank


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """Averaging of gradients in one phase."""

    local_size: int  # ranks of the node
    num_shards: int  # shards of a bucket, each added by one of the first ranks of the node
    between: InterNodeReduce | None = None  # of shards, between nodes; None: the node's mean stays
    end_round: Callable[[], Finish] | None = None  # starts what `between` left, behind all shards
    # Averages in other threads; `between` is not used then.
    background: BackgroundReducer | None = None
    world: bool = False  # whether the background reducer averages over the world
    wait_in_backward: bool = True  # a backward ends only when all gradients are averaged
    keep_on_device: bool = False  # sums that are averaged between nodes stay on the device
    averages_nothing: bool = False  # nothing is averaged
    joined_by_all: bool = False  # every rank joins each round


@dataclass(frozen=True, slots=True)
class BackwardCallbacks:
    """Calls of the reducer in a backward.

    Args:
        runs_after_ddp: Returns whether DDP or FSDP2 may average the same gradients first; then no
            bucket starts before that reducer has finished. Called if torch has a process group.
        outdated: Returns whether the layout of parameters changed; then gradients are left to the
            step, before which the caller sets up again. Called if memory of parameters moved.
        absorbs: Returns whether the next step handles an error; then nothing is averaged until
            that step.
        begin: Called when a backward begins whose gradients are averaged.
        watched: A parameter (index), and a function that is called when its gradient is the one
            that a step uses, unless the program changes it.
    """

    runs_after_ddp: Callable[[], bool]
    outdated: Callable[[], bool]
    absorbs: Callable[[Exception], bool]
    begin: Callable[[], None] | None = None
    watched: tuple[int, Callable[[], None]] | None = None


class GradientAveraging:
    """Current averaging of gradients: over the node or the world, the reducer, the wire.

    Args:
        channels: The engine that carries means between nodes.
        metrics: Counts seconds and bytes.
        device: Device of the parameters.
        node: The node whose ranks add gradients.
        background: Averages in other threads; None: the training thread does.
    """

    def __init__(
        self,
        channels: Channels,
        metrics: Metrics,
        device: torch.device,
        node: NodeTransport,
        background: BackgroundReducer | None,
    ) -> None:
        self.channels, self._metrics = channels, metrics
        self.rank_info, self.node, self.background = channels.rank_info, node, background
        wire = channels.settings.gradient_wire(hidden=True)
        self.compressor = channels.compressor(wire, node, device)
        # Whether devices send sums between nodes; some sums may stay on their device.
        self._by_device = not channels.settings.by_mpi and node.copies is not None
        self.synchronous = False  # gradients are averaged between nodes
        self._compresses = False  # on a narrow wire
        self.by_layers = False  # steps are taken layer by layer: none waits for all of them

    @property
    def wire(self) -> str:
        """The wire that carries gradients."""
        return self.compressor.wire if self._compresses else "fp32"

    def enter(self, state: State, *, by_layers: bool) -> None:
        """Follow the state of the schedule, with steps for the whole model or layer by layer."""
        self.synchronous = state.synchronous and self.rank_info.nodes > 1
        wire = self.channels.settings.gradient_wire(hidden=state.hidden, wide=state.sync.wide)
        self._compresses = wire != "fp32"
        if self._compresses:
            self.compressor.change(wire)
        self.by_layers = by_layers
        if not (self.synchronous and self._compresses):
            self.compressor.forget()

    def plan(self, phase: Phase) -> ReducePlan:
        """Return how gradients are averaged in a phase."""
        rank_info, background = self.rank_info, self.background
        wait_in_backward = not self.by_layers
        between = phase is Phase.WORLD
        if between and background is not None:
            return ReducePlan(
                rank_info.local_size,
                rank_info.lanes,
                background=background,
                world=True,
                wait_in_backward=wait_in_backward,
                joined_by_all=True,
            )
        if between:
            keep_on_device = self._by_device and self.node.reduces_on_device
            end_round = self._average_flags if self._compresses else None
            return ReducePlan(
                rank_info.local_size,
                rank_info.lanes,
                between=self._average_between,
                end_round=end_round,
                keep_on_device=keep_on_device,
                joined_by_all=True,
            )
        averages_nothing = rank_info.largest_node == 1 or phase is Phase.PAUSED
        inside = background if isinstance(background, HostReducer) else None
        return ReducePlan(
            rank_info.local_size,
            rank_info.local_size,
            background=inside,
            wait_in_backward=wait_in_backward,
            averages_nothing=averages_nothing,
            joined_by_all=rank_info.nodes == 1 and not averages_nothing,
        )

    def _average_between(self, total: torch.Tensor, bucket: Bucket) -> Finish:
        """Start the mean over the world of a shard that holds the sum over this node."""
        if self._compresses or self._by_device:
            return self._started(self._mean_of(total, bucket))
        return self._started(self.channels.gradient_mean(total))

    def _average_flags(self) -> Finish:
        """Start the means of a round's flags, which always cross in full precision."""
        return self._started(self.compressor.mean_of_flags())

    def _started(self, mean: Work[Any]) -> Finish:
        """Start a mean between nodes; the call that is returned blocks until it is over."""
        handle: WorkHandle[Any] = self.channels.engine.submit(mean)

        def finish() -> None:
            with self._metrics.watch.waiting(trace.WAIT_INTER_NODE, handle.key):
                sent = self.channels.engine.wait(handle)
            self._metrics.global_bytes_sent += sent if isinstance(sent, int) else sent.nbytes

        return finish

    def _mean_of(self, total: torch.Tensor, bucket: Bucket) -> Work[Averaged]:
        """Return the mean of a bucket shard, compressed or from device memory, as work."""
        memory, rank_info = bucket.memory, self.rank_info
        start, stop = split(memory.flat.numel(), rank_info.lanes)[rank_info.local_rank]
        flags = [at - start for at in bucket.flag_offsets if start <= at < stop]
        key = memory.flat.dtype, bucket.portion.span.start + start
        return self.compressor.mean(
            total, key, flags, memory.device_ready, exact=not self._compresses
        )

    # --- other threads -------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the first error of other threads, if any."""
        (self.background or self.channels.engine).check()

    def finish(self) -> None:
        """Wait for the work of other threads. Collective over the world; blocking."""
        if self.background is not None:
            self.background.finish()

    def close(self) -> bool:
        """Stop other threads; return whether all work ended well."""
        return self.background is None or self.background.close()

    def abandon(self) -> None:
        """Stop all threads whatever is under way; for the end of the process."""
        (self.background or self.channels.engine).abandon()
        self.node.abandon()
