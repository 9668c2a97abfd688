"""Packets over a link between nodes that is slower than the real one."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from daso.comm.emulation import LinkModel

if TYPE_CHECKING:
    from daso.comm.p2p.packets import Packets

__all__ = ["LinkedPackets"]


class LinkedPackets:
    """Hands packets on when a link would have carried them, one after the other.

    Args:
        packets: What carries them.
        link: Of this rank, to all others behind it.
    """

    def __init__(self, packets: "Packets", link: LinkModel) -> None:
        self._packets, self._link = packets, link
        self._held: deque[_HeldPacket] = deque()  # in the order in which the link carries them

    def start(self, to: int, packet: torch.Tensor) -> Callable[[], bool]:
        """Begin to send a packet; it takes the link after those before it."""
        held = _HeldPacket(to, packet, self._link.occupy(packet.numel(), 1))
        self._held.append(held)
        return lambda: self._hand_on() or held.has_left()

    def arrived(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what has arrived."""
        self._hand_on()
        yield from self._packets.arrived()

    def free(self) -> None:
        """Give everything back."""
        self._packets.free()

    def _hand_on(self) -> bool:
        """Hand on what the link has carried by now; return False."""
        while self._held and self._held[0].start(self._packets):
            self._held.popleft()
        return False


class _HeldPacket:
    """A packet on its way over the link."""

    def __init__(self, to: int, packet: torch.Tensor, crosses_at: float) -> None:
        self._to, self._packet, self._crosses_at = to, packet, crosses_at
        self._left: Callable[[], bool] | None = None

    def start(self, packets: "Packets") -> bool:
        """Hand it on, if it has crossed; return whether it was taken."""
        if time.perf_counter() < self._crosses_at:
            return False
        self._left = packets.start(self._to, self._packet)
        return self._left is not None

    def has_left(self) -> bool:
        """Return whether it was handed on and left."""
        return self._left is not None and self._left()
