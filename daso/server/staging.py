"""Copies gradients from a device to the host without blocking the training thread."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from daso.comm.device.staging import Arrived, DeviceStaging
from daso.server.partition import Partition
from daso.server.shard import Contribution


@dataclass(frozen=True, slots=True)
class Staged:
    """Gradients being copied to the host."""

    owner: int
    urgency: int
    contribution: Contribution  # its row is being filled
    finite: torch.Tensor  # (layers,) bool, being filled
    copies: tuple[Arrived, ...]

    def arrived(self) -> bool:
        """Return whether all copies are complete."""
        return all([arrived() for arrived in self.copies])  # a list: every copy must be polled


class Staging:
    """Queue of gradients that are copied from a device, in order."""

    def __init__(self, copies: DeviceStaging) -> None:
        self._copies = copies
        self._in_flight: deque[Staged] = deque()

    def begin(
        self, owner: int, urgency: int, contribution: Contribution, finite: torch.Tensor
    ) -> None:
        """Start copying a contribution, and flags (layers,), from the device. Does not block."""
        arrivals: list[Arrived] = []

        def out(source: torch.Tensor) -> torch.Tensor:
            target = self._copies.host_memory(source.nbytes).view(source.dtype)
            arrivals.append(self._copies.to_host(source, target))
            return target

        host_copy = replace(contribution, row=out(contribution.row))
        flags = out(finite)
        self._in_flight.append(Staged(owner, urgency, host_copy, flags, tuple(arrivals)))

    def has_arrived(self) -> bool:
        """Return whether the first contribution is on the host."""
        return bool(self._in_flight) and self._in_flight[0].arrived()

    def take(self) -> Iterator[Staged]:
        """Yield the contributions that are on the host, each once."""
        while self.has_arrived():
            yield self._in_flight.popleft()

    def __len__(self) -> int:
        return len(self._in_flight)

    def backlog_bytes(self) -> int:
        """Return the bytes in flight to the rank with most of them."""
        nbytes: dict[int, int] = {}
        for staged in [*self._in_flight]:
            nbytes[staged.owner] = nbytes.get(staged.owner, 0) + staged.contribution.row.nbytes
        return max(nbytes.values(), default=0)


def without_nonfinite(
    partition: Partition, owner: int, contribution: Contribution, finite: torch.Tensor
) -> Contribution:
    """Return a contribution on the host without gradients of non-finite layers."""
    flags = dict(zip(contribution.layers, finite.tolist(), strict=True))
    if all(flags.values()):
        return contribution
    layers = contribution.layers
    keeps = [flags[layer] for layer in layers for _ in partition.layers[layer]]
    unpacked = partition.unpack(owner, layers, contribution.row)
    for is_kept, (_, rows) in zip(keeps, unpacked, strict=True):
        if not is_kept:
            rows.zero_()
    has = tuple(is_kept and has for is_kept, has in zip(keeps, contribution.has, strict=True))
    return replace(contribution, has=has)
