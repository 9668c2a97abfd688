"""Which gradients of a step wait for which owner, and when they leave."""

import math
from collections.abc import Callable, Mapping, Sequence

from daso.server.plan import FLOOR_BYTES, Moment, Pace, leaving, next_pace

__all__ = ["Departures"]

ByOwner = dict[int, tuple[int, ...]]  # layers, in order


class Departures:
    """One rank's gradients, grouped by who owns the rows and by when they leave.

    Args:
        owners: Of each layer, the ranks to which its gradients go.
        nbytes: Returns the bytes of an owner's rows of a layer.
        pace: After how many finished layers gradients leave.
    """

    def __init__(
        self, owners: Sequence[Sequence[int]], nbytes: Callable[[int, int], int], pace: Pace
    ) -> None:
        self.pace = pace
        self._owners, self._nbytes = owners, nbytes
        self._largest_share = [
            max((nbytes(owner, layer) for owner in who), default=0)
            for layer, who in enumerate(owners)
        ]
        self._remaining: Mapping[int, float] = {}  # seconds of backward after a layer, last time
        self._small_left_at = -math.inf  # when a message below the floor left
        self._finished_at: dict[int, float] = {}  # of this step's layers, in order
        self._waiting: dict[int, list[int]] = {}  # by owner: layers that have not left
        self._layers = 0  # finished since gradients left

    @property
    def began(self) -> bool:
        """Whether a layer of this step is finished."""
        return bool(self._finished_at)

    def finish(self, layer: int, *, backlog_bytes: int, now: float) -> ByOwner:
        """Note that a layer is finished; return what leaves now."""
        self._finished_at[layer] = now
        self._layers += 1
        for owner in self._owners[layer]:
            self._waiting.setdefault(owner, []).append(layer)
        share = self._largest_share[layer]
        self.pace = next_pace(self.pace, backlog_bytes=backlog_bytes, layer_bytes=share)
        quiet, remaining = now - self._small_left_at, self._remaining.get(layer, 0.0)
        nbytes = {owner: self._bytes_to(owner) for owner in self._waiting}
        chosen = leaving(self.pace, Moment(self._layers, quiet, remaining), nbytes)
        if any(nbytes[owner] < FLOOR_BYTES for owner in chosen):
            self._small_left_at = now
        return self._leave(chosen)

    def _bytes_to(self, owner: int) -> int:
        return sum(self._nbytes(owner, layer) for layer in self._waiting[owner])

    def _leave(self, owners: Sequence[int]) -> ByOwner:
        if owners:
            self._layers = 0
        return {owner: tuple(sorted(self._waiting.pop(owner))) for owner in owners}

    def end(self) -> ByOwner:
        """End a step; return all that has not left, layers without a gradient too."""
        for layer, owners in enumerate(self._owners):
            if layer not in self._finished_at:
                for owner in owners:
                    self._waiting.setdefault(owner, []).append(layer)
        ended = max(self._finished_at.values(), default=0.0)
        self._remaining = {layer: ended - at for layer, at in self._finished_at.items()}
        rest = self._leave(sorted(self._waiting))
        self._finished_at, self._layers = {}, 0
        return rest
