"""Versions of rows received from owners, kept until the training thread loads them."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from daso.server.partition import Partition
from daso.server.plan import Plan

RowState = tuple[int, float, int, float]  # version, clock, behind, taken_in


@dataclass(frozen=True, slots=True)
class Rows:
    """A version of one owner's rows of a layer."""

    version: int  # number of updates
    clock: float  # steps of every contributor they contain; infinity: no more will follow
    behind: int  # the contributor with the fewest steps
    taken_in: float  # steps of the reading rank that they contain
    tensors: tuple[torch.Tensor, ...]  # of each parameter of the layer; read-only


NO_UPDATE = Rows(0, 0.0, 0, 0.0, ())  # all ranks start with the same rows


class RowVersions:
    """Stores the versions of all owners' rows that one rank has received and may still read."""

    def __init__(self, partition: Partition, plan: Plan) -> None:
        self._is_synchronous = plan.is_synchronous  # then every version is loaded, in order
        # The last loaded version, and later ones; owners that do not wait for this rank may have
        # sent several.
        self._rows = [
            {owner: deque([NO_UPDATE]) for owner in owners} for owners in partition.owners
        ]

    def keep(self, owner: int, rows: Mapping[int, Rows]) -> None:
        """Add an owner's new rows, by layer."""
        for layer, update in rows.items():
            versions = self._rows[layer][owner]
            if self._is_synchronous:
                versions.append(update)  # in the order of their sends
            elif (update.version, update.clock) >= (versions[-1].version, versions[-1].clock):
                versions.append(update)
                versions.popleft()

    def newest(self, layer: int) -> dict[int, Rows]:
        """Return a layer's newest rows by owner."""
        return {owner: versions[-1] for owner, versions in self._rows[layer].items()}

    def take(self, layer: int, step: int) -> dict[int, Rows]:
        """Return each owner's newest version; in synchronous steps the version of the step."""
        return {owner: self._take(rows, step) for owner, rows in self._rows[layer].items()}

    def _take(self, versions: deque[Rows], step: int) -> Rows:
        if not self._is_synchronous:
            return versions[-1]
        while versions[0].clock < step:
            versions.popleft()
        return versions[0]

    def skip(self, layer: int, step: int) -> None:
        """Drop versions of a layer that a step did not use, except the newest."""
        if self._is_synchronous:
            for versions in self._rows[layer].values():
                while len(versions) > 1 and versions[0].clock < step:
                    versions.popleft()

    def begin(self) -> None:
        """Restart the count of steps: all ranks have synchronized, and have the newest rows."""
        for rows in chain.from_iterable(layer.values() for layer in self._rows):
            last = rows[-1]
            rows.clear()
            rows.append(replace(last, clock=0.0, taken_in=0.0))


def rows_in(
    partition: Partition,
    owner: int,
    layers: Sequence[int],
    states: Iterable[RowState],
    row: torch.Tensor,
) -> dict[int, Rows]:
    """Return an owner's rows of layers, as views of a message."""
    parts = iter(partition.unpack(owner, layers, row))
    return {
        layer: Rows(*state, tuple(next(parts)[1] for _ in partition.layers[layer]))
        for layer, state in zip(layers, states, strict=True)
    }


def load_rows(
    partition: Partition,
    layer: int,
    rows: Mapping[int, Rows],
    loaded: dict[int, int],
    *,
    pinned: bool = False,
) -> None:
    """Copy new rows of a layer into its parameters; ``loaded`` are the versions in them."""
    # Does not block if rows are in pinned memory.
    new = [owner for owner, version in rows.items() if version.version != loaded[owner]]
    with torch.no_grad():
        for at, index in enumerate(partition.layers[layer] if new else ()):
            tensor = partition.named[index][1]
            for owner in new:
                source = rows[owner].tensors[at]
                partition.of(owner, index, tensor).copy_(source, non_blocking=pinned)
    loaded.update({owner: version.version for owner, version in rows.items()})
