"""Checksums of the messages of all-reduces: a payload that changes on its way is detected.

Means that return to all ranks need none: ranks that receive other bits than the rest differ in
their reference, which the next exchange compares.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from daso.comm.reduction import CPU
from daso.kernels.choice import kernels_for
from daso.plan.exchange import CHECKSUMS


class PeerSums(NamedTuple):
    """Checksums of one rank's messages so far, by the other rank.

    Args:
        sent: Of the payloads that this rank sent to it.
        received: Of the payloads that it received from it.
    """

    sent: dict[int, int]
    received: dict[int, int]


class MessageSums:
    """Adds up checksums of one rank's messages in host memory.

    The balances of all ranks add up to 0 modulo `CHECKSUMS`, unless a payload changed on its way. A
    single changed bit always shows.
    """

    def __init__(self) -> None:
        self.of_peers = PeerSums({}, {})
        self._kernels = kernels_for(CPU)
        self._sum = torch.zeros(1, dtype=torch.int64, device="cpu")

    def send(self, peer: int, payload: torch.Tensor, index: int) -> None:
        """Count a payload (nbytes) of chunk ``index`` that is about to be sent."""
        self._add(self.of_peers.sent, peer, payload, index)

    def receive(self, peer: int, payload: torch.Tensor, index: int) -> None:
        """Count a payload (nbytes) of chunk ``index`` that has arrived."""
        self._add(self.of_peers.received, peer, payload, index)

    def _add(self, sums: dict[int, int], peer: int, payload: torch.Tensor, index: int) -> None:
        self._kernels.fingerprint(payload, self._sum)
        # Odd factors keep every bit, and tell chunks apart.
        sums[peer] = (sums.get(peer, 0) + int(self._sum) * (2 * index + 1)) % CHECKSUMS

    def balance(self) -> int:
        """Return the sums of sent payloads minus those of received ones, modulo `CHECKSUMS`."""
        sent, received = self.of_peers
        return (sum(sent.values()) - sum(received.values())) % CHECKSUMS


def find_damage(sums: Sequence[PeerSums]) -> tuple[int, int] | None:
    """Return the sender and the receiver of a payload that changed on its way; None if none did.

    Args:
        sums: Of each rank of one communicator, by rank.
    """
    for sender, own in enumerate(sums):
        for receiver, value in own.sent.items():
            if sums[receiver].received.get(sender, 0) != value:
                return sender, receiver
    return None
