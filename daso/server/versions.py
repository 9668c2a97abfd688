"""Versions of rows that have come, of each layer and owner, until the training thread takes one."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from daso.server.partition import Partition
from daso.server.plan import Plan
from daso.server.shard import Rows

__all__ = ["RowVersions"]

NO_UPDATE = Rows(0, 0.0, 0, 0.0, ())  # of others, from whom nothing came


class RowVersions:
    """One rank's.

    Args:
        shares: Which rows are whose.
        plan: Whether every version is taken up, in its order, or the newest.
        first: This rank's own rows, by layer; all ranks start alike.
    """

    def __init__(self, shares: Partition, plan: Plan, first: Mapping[int, Rows]) -> None:
        self._together = plan.together
        # The version that was taken up last, and what came since; of owners that do not wait for
        # this rank more than one may have come.
        self._rows = [
            {owner: deque([first.get(layer, NO_UPDATE)]) for owner in owners}
            for layer, owners in enumerate(shares.owners)
        ]

    def keep(self, owner: int, rows: Mapping[int, Rows]) -> None:
        """Add an owner's new rows, by layer."""
        for layer, one in rows.items():
            versions = self._rows[layer][owner]
            if self._together:
                versions.append(one)  # in their order, as they were sent
            elif (one.version, one.clock) >= (versions[-1].version, versions[-1].clock):
                versions.append(one)
                versions.popleft()

    def newest(self, layer: int) -> dict[int, Rows]:
        """Return a layer's newest rows by owner."""
        return {owner: versions[-1] for owner, versions in self._rows[layer].items()}

    def take(self, layer: int, step: int) -> dict[int, Rows]:
        """Return the newest version by owner, or where all go together that of the step."""
        return {owner: self._take(rows, step) for owner, rows in self._rows[layer].items()}

    def _take(self, versions: deque[Rows], step: int) -> Rows:
        if not self._together:
            return versions[-1]
        while versions[0].clock < step:
            versions.popleft()
        return versions[0]

    def skip(self, layer: int, step: int) -> None:
        """Forget versions of a layer that a step had no use for; the newest stays."""
        if self._together:
            for versions in self._rows[layer].values():
                while len(versions) > 1 and versions[0].clock < step:
                    versions.popleft()

    def begin(self) -> None:
        """Count steps from here on: all ranks have met, and have the newest rows."""
        for rows in chain.from_iterable(layer.values() for layer in self._rows):
            last = rows[-1]
            rows.clear()
            rows.append(replace(last, clock=0.0, taken_in=0.0))
