"""A flat row of parameters that nodes exchange: the agreed reference, and deltas from it.

Parameters of one accumulation type (fp32, or fp64 for fp64 parameters) make one row; with
fragments, those of one fragment. Lane l owns part l of it on every node, so the state of a
`DeltaShard` exists once per node, not per rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from daso.comm.allreduce.direct import DeterministicAllReduce, iallreduce
from daso.comm.allreduce.ordered import DeviceContext
from daso.comm.engine import Work
from daso.comm.node.base import NodeShare, NodeTransport
from daso.comm.rank_info import RankInfo
from daso.comm.reduction import Chunks, whole
from daso.kernels.codecs import Codec, codec_named, dense_codec, exact_codec
from daso.kernels.rows import NOWHERE, FlatTensors
from daso.plan.allreduce_plan import AllReducePlan
from daso.plan.exchange import ADOPT, KEEP, Merge
from daso.plan.layout import Layout, Piece, Span, pieces, split
from daso.train.channels import Channels
from daso.train.coordinator import Coordinator
from daso.train.deltas.outer import MakeOuter
from daso.train.deltas.shard import EVEN, MergeOptions, cut_row
from daso.train.deltas.staging import make_shard
from daso.train.model.params import Named, flat_view, layout_of


@dataclass(frozen=True, slots=True)
class RowSharding:
    """Sharding of a row over the ranks of a node."""

    whole: Layout  # of all shards together, the same on every rank
    parts: int = 1  # ranks that hold a shard each; 1: it is not sharded
    copies: int = 1  # ranks that exchange a copy each


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one exchange of one row, on this rank."""

    nbytes: int = 0  # sent by this rank
    distance: float = 0.0  # squared, of this rank's part from the mean of all nodes
    norm: float = 0.0  # squared, of this rank's part of the reference
    moved: float = 0.0  # squared length of this rank's part of the mean delta

    def __add__(self, other: "Measured") -> "Measured":
        """Return the sums of the measurements of two rows."""
        return Measured(
            self.nbytes + other.nbytes,
            self.distance + other.distance,
            self.norm + other.norm,
            self.moved + other.moved,
        )


@dataclass(frozen=True, slots=True)
class Means:
    """All-reduces of a row over the lane, by wire."""

    plan: AllReducePlan  # one plan and cut for all wires: rounding errors lie in its parts
    by_wire: Mapping[str, DeterministicAllReduce]
    dense: DeterministicAllReduce | None  # after which nodes agree, where the wire is sparse
    summed: Codec | None  # of the payloads that MPI adds
    chunks: Chunks
    spans: Sequence[tuple[int, int]]  # that have a payload each

    @property
    def first(self) -> DeterministicAllReduce:
        """Of the wire with which exchanges begin."""
        return next(iter(self.by_wire.values()))

    @property
    def codecs(self) -> list[Codec]:
        """Codecs of all exchanges."""
        if self.summed is not None:
            return [self.summed]
        means = [*self.by_wire.values(), *([] if self.dense is None else [self.dense])]
        return [mean.codec for mean in means]


class RowViews:
    """Views of parameters as the tensors of a row.

    Args:
        named: Names and parameters, in row order.
    """

    def __init__(self, named: Named) -> None:
        self.params = [param for _, param in named]
        self.layout = layout_of(named)
        self._cuts: dict[Span, list[Piece]] = {}  # parts of tensors that lie in a span
        self._known: dict[Span, tuple[list[Any], FlatTensors]] = {}  # by the addresses of these

    def flat(self, span: Span) -> FlatTensors:
        """Return the elements of a span; made again when a parameter's memory was replaced."""
        if span not in self._cuts:
            self._cuts[span] = list(pieces(self.layout, span))
        cut = self._cuts[span]
        params = [self.params[piece.slot] for piece in cut]
        places = [(param.data_ptr(), param.dtype) for param in params]
        known = self._known.get(span)
        if known is None or known[0] != places:
            tensors = [flat_view(self.params[piece.slot])[slice(*piece.inside)] for piece in cut]
            known = self._known[span] = places, FlatTensors(tensors)
        return known[1]

    def forget(self) -> None:
        """Release memory of parameters that was replaced since it was read."""
        self._known.clear()


@dataclass(frozen=True, slots=True)
class SharedRow:
    """Memory of a row that the whole node reads; lane l owns the l-th span."""

    spans: Sequence[Span]
    memory: NodeShare


def share_row(
    named: Named, dtype: torch.dtype, node: NodeTransport, rank_info: RankInfo
) -> SharedRow:
    """Return shared memory for these parameters, accumulated in ``dtype``.

    Collective over the node; blocking.
    """
    even = 1 if node.copies is None else EVEN
    spans = split(layout_of(named).numel, rank_info.lanes, even)
    return SharedRow(spans, node.share(spans, dtype))


class DeltaBuffer:
    """Reference, exchange and merge of one row of parameters.

    Args:
        named: Names and parameters, all accumulated in one type; this rank's parts.
        sharding: Sharding of the row over the ranks of a node.
        shared: From `share_row`.
        node: The node whose ranks read each other's parts.
        channels: Carries exchanges over this rank's lane.
        outer: Makes an optimizer for the reference.
        is_small: Whether the row has the small tensors of the model.

    Does not communicate.
    """

    def __init__(
        self,
        named: Named,
        sharding: RowSharding,
        shared: SharedRow,
        *,
        node: NodeTransport,
        channels: Channels,
        outer: MakeOuter | None = None,
        is_small: bool = False,
    ) -> None:
        self.views, self.sharding, rank_info = RowViews(named), sharding, channels.rank_info
        self.is_small, self.numel = is_small, sharding.whole.numel  # of the whole row
        self.spans, self.shared = shared.spans, shared.memory
        self.span = self.spans[rank_info.lane] if rank_info.lane is not None else Span(0, 0)
        self.rounded: dict[int, torch.Tensor] = {}  # this lane's rounding errors of means
        share = rank_info.local_size / rank_info.world_size
        options, copies = MergeOptions(channels.settings.eager, share, outer), node.copies
        self._channels, self.where = channels, None
        if copies is not None:
            staged = not channels.settings.exchange.gpu_direct
            self.where = DeviceContext(self.shared.own.device, copies, staged)
        self.part = make_shard(self.shared.own, options, self.where, self.rounded)
        self.means = self._means()
        self.mean = self.means.first  # of the exchange that was started last
        self._rests = False  # without memory, until it is anchored
        self._warm_up()

    def _means(self) -> "Means":
        """Return the all-reduces of this row by the current plan."""
        channels, span, dtype = self._channels, self.spans[0], self.part.dtype
        settings, codec = channels.settings, codec_named(channels.settings.wires[0], dtype)
        plan = channels.plan(codec.nbytes(span.numel))
        ordered = partial(channels.ordered, rounded=self.rounded, where=self.where, plan=plan)
        on_device = self.where is not None
        chunks = cut_row(
            plan, codec, self.span.numel, settings.exchange.chunk_bytes, on_device=on_device
        )
        if settings.by_mpi:  # it adds rows in full precision, in whole chunks
            chunks = tuple((Span(*whole(parts)),) for parts in chunks)
        return Means(
            plan,
            {wire: ordered(codec_named(wire, dtype)) for wire in settings.wires},
            ordered(dense_codec(settings.wires[0], dtype)) if settings.sparse else None,
            exact_codec(dtype) if settings.by_mpi else None,
            chunks,
            [span for parts in chunks for span in parts],
        )

    def take_plan(self) -> None:
        """Use the current plan if it changed; no exchange may be under way."""
        means = self._means()
        if means.plan != self.means.plan:
            self.means, self.mean = means, means.first
            self.rounded.clear()  # of other parts

    def _warm_up(self) -> None:
        """Launch the kernels of a device once for each use in training."""
        if self.part.published.is_cuda:
            self.part.warm_up(self.means.codecs, self.means.spans, self._values)

    @property
    def _values(self) -> FlatTensors:
        """The parameters of this lane's part."""
        return self.views.flat(self.span)

    def anchor(self) -> float:
        """Take the parameters, equal on all nodes, as the reference.

        Returns:
            Its squared norm; where ranks of a node hold parts, about that.
        """
        self._wake()
        self.part.kernels.gather(self._values, 0, self.span.numel, self.part.reference)
        self.part.anchor()
        self.rounded.clear()
        norm = sum(float(flat_view(p).double().square().sum()) for p in self.views.params)
        return norm * self.sharding.parts

    @property
    def unmade_bytes(self) -> int:
        """Bytes that the next exchange allocates: those of its payload."""
        codecs = [codec for codec in self.means.codecs if not codec.exact]
        most = max((codec.nbytes(self.span.numel) for codec in codecs), default=0)
        return max(0, most - self.part.outbox.memory.numel())

    def rest(self) -> None:
        """Release memory until `anchor`; no exchange may be under way.

        Shared memory of a node stays.
        """
        if self._rests:
            return
        self._rests = True
        self.views.forget()
        self.part.anchor()
        self.part.outbox.release()
        self.rounded.clear()
        for row in self._owned():
            row.untyped_storage().resize_(0)

    def _wake(self) -> None:
        """Allocate the memory that `rest` released."""
        if not self._rests:
            return
        self._rests = False
        for row in self._owned():
            row.untyped_storage().resize_(row.nbytes)
            row.zero_()

    def _owned(self) -> list[torch.Tensor]:
        """Return the rows that belong to this rank alone: on a device, all of them."""
        return [self.part.reference, *([] if self.where is None else self.shared.parts)]

    def encode(self, wire: str, *, dense: bool, keeps: bool) -> None:
        """Encode the payload of the exchange that starts."""
        means, values = self.means, self._values
        self.shared.wait_released()
        self.mean = means.dense if dense and means.dense is not None else means.by_wire[wire]
        codec = means.summed or self.mean.codec
        self.part.encode(codec, means.spans, values, keeps=keeps)

    def go_ahead(self) -> None:
        """Move the parameters to the predicted result of the exchange.

        Collective over the node; blocking.
        """
        self.part.go_ahead(self._values)
        self._merge_published(ADOPT)
        self.part.seal()

    def merge(self, rule: Merge, *, applies: bool = True) -> None:
        """Merge the new reference g into the parameters, if it applies on this rank.

        Each lane's owner publishes its span once, and all ranks of the node read it.

        Collective over the node; blocking.
        """
        self.shared.wait_released()
        if rule == ADOPT:
            self.part.settle(self._values)
        self.part.publish(rule)
        self._merge_published(rule, applies=applies)

    def _merge_published(self, rule: Merge, *, applies: bool = True) -> None:
        parts = zip(self.spans, self.shared.parts, strict=True) if applies else ()
        pairs = [(self.views.flat(span), part) for span, part in parts]
        self.shared.publish()
        self.shared.wait()
        for values, part in pairs:
            self.part.kernels.merge(values, part, rule.pull, add=rule.since_send)
        self.shared.release()

    def turn_back(self) -> None:
        """Undo `go_ahead`. Collective over the node; blocking."""
        self.shared.wait_released()
        self.part.turn_back()
        self._merge_published(KEEP)

    def restore(self) -> None:
        """Set the parameters back to the reference. Collective over the node; blocking."""
        self.shared.wait_released()
        self.part.publish(ADOPT)
        self._merge_published(ADOPT)

    def collect(self) -> Work[tuple[int | None, int]]:
        """Return the first element of the whole row that is not finite, and a fingerprint.

        The fingerprint is that of this lane's reference. As work for the engine.
        """
        first, fingerprint = yield from self.part.collect()
        if first == NOWHERE:
            return None, fingerprint
        whole, at = self.sharding.whole, self.span.start + first
        return whole.element_of(self.views.layout, at), fingerprint

    def fingerprints(self) -> list[tuple[str, int]]:
        """Return the names of parameters in this rank's part, and fingerprints of their reference.

        Does not communicate. It launches a kernel for each parameter, and waits for a device.
        """
        prints, out = [], torch.zeros(1, dtype=torch.int64, device=self.part.reference.device)
        for piece in pieces(self.views.layout, self.span):
            self.part.kernels.fingerprint(self.part.reference[slice(*piece.at)], out)
            prints.append((self.views.layout.slots[piece.slot].name, int(out)))
        return prints

    def exchange(self) -> Work[Measured]:
        """Move the reference by the mean delta of all nodes.

        Collective over the lane; non-blocking, as work for the engine.
        """
        mean, chunks = self.mean, self.means.chunks
        if self.means.summed is None:
            nbytes = yield from mean.run(self.part, chunks)
        else:
            weight, total = mean.adder.weights[mean.comm.Get_rank()], mean.adder.total
            nbytes = yield from iallreduce(
                *(mean.comm, self.part, chunks, weight, total, mean.mpi_buffers, mean.where)
            )
        copies = self.sharding.copies  # each reports the same measurements
        return Measured(nbytes, *(value / copies for value in (yield from self.part.conclude())))

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; no exchange may be under way."""
        if self._rests:
            return {"rounded": {}} | self.part.outer_state()
        rounded = {start: tensor.clone() for start, tensor in self.rounded.items()}
        return {**self.part.state(), "rounded": rounded}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned on the same rank of a world of the same shape."""
        if "reference" not in state:
            self.rest()
            self.part.load_outer(state)
            return
        self._wake()
        self.shared.wait_released()
        self.part.load(state)
        self.rounded.clear()
        loaded, device = state["rounded"].items(), self.mean.adder.device
        self.rounded.update({start: row.to(device, copy=True) for start, row in loaded})


def anchor_rows(rows: Sequence[DeltaBuffer], coordinator: Coordinator) -> float:
    """Take the parameters as the reference; return their squared norm on rank 0.

    Nodes whose parameters differ, because a program or another kind of processor changed them,
    start from their mean, with a warning.

    Collective over the world; blocking.
    """
    norms, channels, differs = [row.anchor() for row in rows], coordinator.channels, 0.0
    if channels.world_info.lane is not None:
        own = float(sum(value for row in rows for _, value in row.fingerprints()))
        differs = own - coordinator.run(channels.first_of_lane(own))
    if coordinator.extremes(differs) != (0.0, 0.0) and not coordinator.equalize():
        norms = [row.anchor() for row in rows]
    return coordinator.first(sum(norms))
