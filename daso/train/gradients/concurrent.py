"""A few means between nodes at a time, so that the link does not stand still between two."""

import torch

from daso.comm.engine import NestedWork
from daso.train.channels import Channels

__all__ = ["ConcurrentReductions"]


class ConcurrentReductions:
    """Means of gradients over the world, each on a communicator of its own; on the engine's thread.

    Args:
        channels: What runs between nodes. Every rank of a lane starts the same means in the same
            order; they may end in another.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._slots: list[tuple[int, NestedWork[int]] | None] = [None] * channels.abreast
        self._started = 0
        self.nbytes = 0  # sent by this rank

    @property
    def free(self) -> bool:
        """Whether one more may be started."""
        return self._slots[self._started % len(self._slots)] is None

    def start(self, place: int, total: torch.Tensor) -> None:
        """Start to replace a sum over this node by the mean over the world. Does not block."""
        slot = self._started % len(self._slots)
        self._slots[slot] = place, NestedWork(self._channels.gradient_mean(total, slot))
        self._started += 1

    def finished(self) -> list[int]:
        """Carry all on as far as they go; return those that are over now. Does not block."""
        over = []
        for slot, under_way in enumerate(self._slots):
            if under_way is not None and under_way[1].go_on():
                place, work = under_way
                self.nbytes += work.result or 0
                self._slots[slot] = None
                over.append(place)
        return over
