"""Cuts a model into the flat rows that nodes exchange."""

import torch

from daso.comm.dtypes import accumulator
from daso.comm.node.base import NodeTransport
from daso.plan.layout import fragments
from daso.train.coordinator import Coordinator
from daso.train.deltas.buffer import DeltaBuffer, RowSharding
from daso.train.deltas.outer import MakeOuter
from daso.train.model.params import layout_of
from daso.train.model.shards import parts_of, split_axes

__all__ = ["make_rows"]

Kind = tuple[bool, torch.dtype, tuple[bool, ...]]  # small tensors; added in; how they are sharded


def make_rows(
    coordinator: Coordinator, node: NodeTransport, outer: MakeOuter | None, *, may_select: bool
) -> dict[int, list[DeltaBuffer]]:
    """Make the rows of each fragment: one for each type they are added in, and way to be sharded.

    Ranks that hold copies of a row lay it out alike, and get the same bits on every wire. Where
    small tensors may be exchanged alone, they have rows of their own, behind the others.

    Collective over the node; blocking.
    """
    named, local = coordinator.trained.named, coordinator.trained.local
    channels, ranks = coordinator.channels, coordinator.topology.local_size
    # Shards differ in length between ranks of a node: all cut by the whole parameters.
    numels = [p.numel() for _, p in named]
    cuts = fragments(numels, channels.settings.exchange.fragments)
    small = set(channels.settings.small_tensors(numels)) if may_select else set()
    rows: dict[int, list[DeltaBuffer]] = {}
    for number, cut in enumerate(cuts):
        members: dict[Kind, list[int]] = {}
        for at in cut:
            kind = at in small, accumulator(named[at][1].dtype), split_axes(named[at][1])
            members.setdefault(kind, []).append(at)
        rows[number] = []
        for kind in sorted(members, key=_width):
            parts = parts_of(named[members[kind][0]][1])
            copies = ranks // parts if coordinator.is_sharded else 1
            layout = layout_of([named[at] for at in members[kind]])
            row = DeltaBuffer(
                [local[at] for at in members[kind]],
                RowSharding(layout, parts, copies),
                kind[1],
                node=node,
                channels=channels,
                outer=outer,
                is_small=kind[0],
            )
            rows[number].append(row)
    return rows


def _width(kind: Kind) -> tuple[bool, int, tuple[bool, ...]]:
    """Order rows: large tensors before small ones, fp32 before fp64."""
    return kind[0], kind[1].itemsize, kind[2]
