"""Gradients on their way from a device to the host; the thread that computed them goes on."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from daso.comm.device.staging import Arrived, DeviceStaging
from daso.server.partition import Partition
from daso.server.shard import Contribution

__all__ = ["Staged", "Staging", "sound"]


@dataclass(frozen=True, slots=True)
class Staged:
    """Gradients of which copies to the host have begun."""

    owner: int
    urgency: int
    contribution: Contribution  # whose row and base are being filled
    finite: torch.Tensor  # (layers,) bool, likewise
    copies: tuple[Arrived, ...]

    def arrived(self) -> bool:
        """Return whether all is on the host."""
        return all([arrived() for arrived in self.copies])  # each is asked


class Staging:
    """Gradients that leave a device, in the order in which they left.

    Args:
        copies: Between the device and its host.
    """

    def __init__(self, copies: DeviceStaging) -> None:
        self._copies = copies
        self._under_way: deque[Staged] = deque()

    def begin(
        self, owner: int, urgency: int, contribution: Contribution, finite: torch.Tensor
    ) -> None:
        """Start copies of what lies on the device. Does not block.

        Args:
            owner: To whom it goes.
            urgency: Of the message.
            contribution: Its row and base lie on the device; nobody else writes to them.
            finite: Of each of its layers, whether its gradient is (layers,), there.
        """
        one = contribution
        arrivals: list[Arrived] = []

        def out(source: torch.Tensor) -> torch.Tensor:
            target = self._copies.memory(source.nbytes).view(source.dtype)
            arrivals.append(self._copies.out(source, target))
            return target

        base = None if one.base is None else out(one.base)
        there, flags = replace(one, row=out(one.row), base=base), out(finite)
        self._under_way.append(Staged(owner, urgency, there, flags, tuple(arrivals)))

    def came(self) -> bool:
        """Return whether the first of them is on the host."""
        return bool(self._under_way) and self._under_way[0].arrived()

    def take(self) -> Iterator[Staged]:
        """Yield those that are on the host, each once."""
        while self.came():
            yield self._under_way.popleft()

    def __len__(self) -> int:
        return len(self._under_way)

    def backlog_bytes(self) -> int:
        """Return the bytes under way, to the rank to which there are most."""
        nbytes: dict[int, int] = {}
        for one in [*self._under_way]:
            nbytes[one.owner] = nbytes.get(one.owner, 0) + one.contribution.row.nbytes
        return max(nbytes.values(), default=0)


def sound(
    shares: Partition, owner: int, contribution: Contribution, finite: torch.Tensor
) -> Contribution:
    """Return a contribution on the host without the gradients of layers that are not finite."""
    one = contribution
    flags = dict(zip(one.layers, finite.tolist(), strict=True))
    if all(flags.values()):
        return one
    kept = [flags[layer] for layer in one.layers for _ in shares.layers[layer]]
    for keeps, (_, rows) in zip(kept, shares.unpack(owner, one.layers, one.row), strict=True):
        if not keeps:
            rows.zero_()
    has = tuple(keeps and has for keeps, has in zip(kept, one.has, strict=True))
    return replace(one, has=has)
