"""Says where a step's gradients are averaged, and takes their means between nodes."""

from typing import Any

import torch

from daso.comm.engine import Work, WorkHandle
from daso.comm.node.base import NodeTransport
from daso.plan.layout import split
from daso.plan.schedule import State
from daso.train.coordinator import Coordinator
from daso.train.gradients.background import BackgroundReducer
from daso.train.gradients.buckets import Bucket, Finish
from daso.train.gradients.compression import Averaged
from daso.train.gradients.host_reducer import HostReducer
from daso.train.gradients.reducer import ReducePlan

__all__ = ["GradientAveraging"]


class GradientAveraging:
    """How gradients are averaged now: in the node or over the world, by whom, on which wire.

    Args:
        coordinator: Whose engine carries means between nodes.
        node: The node whose ranks add gradients.
        background: Averages in other threads, where there is one.
    """

    def __init__(
        self, coordinator: Coordinator, node: NodeTransport, background: BackgroundReducer | None
    ) -> None:
        self.coordinator, self.channels = coordinator, coordinator.channels
        self.rank_info, self.node, self.background = self.channels.rank_info, node, background
        wire = self.channels.settings.gradient_wire(hidden=True)
        self.compressor = self.channels.compressor(wire, node, coordinator.trained.device)
        self.synchronous = False  # gradients are averaged between nodes
        self._compresses = False  # on a narrow wire
        self.by_layers = False  # steps are taken layer by layer: none waits for all of them

    @property
    def wire(self) -> str:
        """The wire on which gradients cross."""
        return self.compressor.wire if self._compresses else "fp32"

    def enter(self, state: State, *, by_layers: bool) -> None:
        """Take over the schedule's state; tell whether steps are taken layer by layer."""
        self.synchronous = state.synchronous and self.rank_info.nodes > 1
        wire = self.channels.settings.gradient_wire(hidden=state.hidden, wide=state.sync.wide)
        self._compresses = wire != "fp32"
        if self._compresses:
            self.compressor.change(wire)
        self.by_layers = by_layers
        if not (self.synchronous and self._compresses):
            self.compressor.forget()

    def plan(self, *, between: bool) -> ReducePlan:
        """Return how gradients are averaged in the node, or over the world too."""
        rank_info, background, whole = self.rank_info, self.background, not self.by_layers
        if between and background is not None:
            return ReducePlan(
                rank_info.local_size,
                rank_info.lanes,
                background=background,
                world=True,
                whole=whole,
            )
        if between:
            stay = self._by_device and self.node.sums_stay
            end_round = self._average_flags if self._compresses else None
            return ReducePlan(
                *(rank_info.local_size, rank_info.lanes, self._average_between, end_round),
                stay=stay,
            )
        alone = rank_info.largest_node == 1
        inside = background if isinstance(background, HostReducer) else None
        return ReducePlan(
            rank_info.local_size, rank_info.local_size, background=inside, whole=whole, alone=alone
        )

    @property
    def _by_device(self) -> bool:
        """Whether sums go on between nodes in messages of devices, which some may be left on."""
        return not self.channels.settings.by_mpi and self.node.copies is not None

    def _average_between(self, total: torch.Tensor, bucket: Bucket) -> Finish:
        """Start the mean over the world of a part that holds the sum over this node."""
        handle: WorkHandle[Any]
        if self._compresses or self._by_device:
            handle = self.channels.engine.submit(self._mean_of(total, bucket))
        else:
            handle = self.channels.engine.submit(self.channels.gradient_mean(total))

        def finish() -> None:
            sent = self.coordinator.wait(handle)
            nbytes = sent if isinstance(sent, int) else sent.nbytes
            self.coordinator.metrics.global_bytes_sent += nbytes

        return finish

    def _average_flags(self) -> Finish:
        """Start the means of the flags of a round, which no narrow wire carries."""
        handle = self.channels.engine.submit(self.compressor.mean_of_flags())

        def finish() -> None:
            nbytes = self.coordinator.wait(handle).nbytes
            self.coordinator.metrics.global_bytes_sent += nbytes

        return finish

    def _mean_of(self, total: torch.Tensor, bucket: Bucket) -> Work[Averaged]:
        """Return the mean of a bucket's part, on a narrow wire or left on its device, as work."""
        memory, rank_info = bucket.memory, self.rank_info
        start, stop = split(memory.flat.numel(), rank_info.lanes)[rank_info.local_rank]
        flags = [at - start for at in bucket.places if start <= at < stop]
        key = memory.flat.dtype, bucket.portion.span.start + start
        return self.compressor.mean(total, key, flags, memory.left, exact=not self._compresses)

    # --- threads of its own --------------------------------------------------------------------

    def check(self) -> None:
        """Raise what went wrong in other threads since, if anything."""
        (self.background or self.channels.engine).check()

    def finish(self) -> None:
        """Wait for what is under way in other threads. Collective over the world; blocking."""
        if self.background is not None:
            self.background.finish()

    def close(self) -> bool:
        """Stop other threads; return whether all work ended well."""
        return self.background is None or self.background.close()

    def abandon(self) -> None:
        """Stop all threads whatever is under way; for the end of the process."""
        (self.background or self.channels.engine).abandon()
        self.node.abandon()
