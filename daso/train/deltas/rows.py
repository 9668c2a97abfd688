"""Cuts a model into the flat rows that nodes exchange."""

from collections.abc import Sequence

import torch

from daso.comm.node.base import NodeTransport
from daso.comm.reduction import accumulator
from daso.plan.layout import fragments
from daso.train.coordinator import Coordinator
from daso.train.deltas.buffer import DeltaBuffer, RowSharding, share_row
from daso.train.deltas.outer import MakeOuter
from daso.train.model.params import Named, layout_of
from daso.train.model.shards import parts_of, split_axes

Kind = tuple[bool, torch.dtype, tuple[bool, ...]]  # small tensors; added in; how they are sharded


def make_rows(
    coordinator: Coordinator, node: NodeTransport, outer: MakeOuter | None, *, may_select: bool
) -> dict[int, list[DeltaBuffer]]:
    """Make the rows of each fragment: one for each accumulation type and sharding.

    Ranks that hold copies of a row lay it out alike, and get the same bits on every wire. Small
    tensors that may be exchanged alone have separate rows, behind the others.

    Collective over the node; blocking.
    """
    named, local = coordinator.trained.named, coordinator.trained.local
    channels, ranks = coordinator.channels, coordinator.topology.local_size
    # Shards differ in length between ranks of a node: all cut by the whole parameters.
    numels = [p.numel() for _, p in named]
    cuts = fragments(numels, channels.settings.exchange.fragments)
    small = set(channels.settings.small_tensors(numels)) if may_select else set()
    fragments_by_kind = [_by_kind(cut, named, small) for cut in cuts]
    groups = [(number, *kind) for number, kinds in enumerate(fragments_by_kind) for kind in kinds]
    # All shared memory of the node comes first: a rank that runs out of memory for its separate
    # rows then keeps no other rank waiting in the next collective.
    shared = [
        share_row([local[at] for at in members], kind[1], node, channels.rank_info)
        for _, kind, members in groups
    ]
    rows: dict[int, list[DeltaBuffer]] = {number: [] for number in range(len(cuts))}
    for (number, kind, members), share in zip(groups, shared, strict=True):
        parts = parts_of(named[members[0]][1])
        copies = ranks // parts if coordinator.is_sharded else 1
        row = DeltaBuffer(
            [local[at] for at in members],
            RowSharding(layout_of([named[at] for at in members]), parts, copies),
            share,
            node=node,
            channels=channels,
            outer=outer,
            is_small=kind[0],
        )
        rows[number].append(row)
    return rows


def _by_kind(cut: Sequence[int], named: Named, small: set[int]) -> list[tuple[Kind, list[int]]]:
    """Return the kinds of tensors of a fragment, and the indices of each kind."""
    members: dict[Kind, list[int]] = {}
    for at in cut:
        kind = at in small, accumulator(named[at][1].dtype), split_axes(named[at][1])
        members.setdefault(kind, []).append(at)
    return sorted(members.items(), key=lambda entry: _width(entry[0]))


def _width(kind: Kind) -> tuple[bool, int, tuple[bool, ...]]:
    """Order rows: large tensors before small ones, fp32 before fp64."""
    return kind[0], kind[1].itemsize, kind[2]
