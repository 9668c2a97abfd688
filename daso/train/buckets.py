"""Gradients in flat buckets that are averaged while backward goes on.

A hook on every parameter tells when its gradient is ready. A full bucket is started at once;
whenever a hook runs, buckets for which every rank of the node is ready are added. What is left is
finished before ``backward()`` returns, so that ``.grad`` then is the mean, as with DDP. One such
pass over all buckets is a *round*.

Where every rank is a node of its own, gradients stay where autograd put them until a phase that
averages them between nodes.

Gradients of a type lie in one row, made at the end of the first backward, in the order in which
they became ready on world rank 0, the same on every rank. Behind each is one number, its flag: 1
where this rank had a gradient. Its mean tells whether any rank had one; where none had, ``.grad``
stays None, and the optimizer leaves the parameter alone as it would without daso. A bucket is a
part of a row, so rows can be cut anew between two rounds: nothing moves, and no bit of a sum in
rank order changes.

Where a carrier takes them (`daso.train.carrier`), buckets start in the order in which they fill,
other threads average them, and each is collected by itself. Where gradients cross in portions
(`daso.train.priority`), every portion is a bucket of its own, a large tensor several.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch._compile import _disable_dynamo

from daso.comm.node import NodeBucket, NodeGroup, NodeRow
from daso.errors import ConfigError, LayoutError
from daso.plan.layout import Span, fit_buckets, flagged, split
from daso.plan.slices import Portion, cut_portions
from daso.train.carrier import Carrier
from daso.train.params import Named, view_like

__all__ = ["Between", "Finish", "GradientBuckets", "Route"]

OURS = "made_in_a_backward_that_daso_saw"  # attribute of a gradient that is in no bucket

# Hands a part's sum over this node to the exchange between nodes. The call it gives back blocks
# until the sum is replaced by the mean over the world.
Finish = Callable[[], None]
Between = Callable[[torch.Tensor], Finish]


@dataclass(frozen=True, slots=True)
class Route:
    """Where gradients are averaged."""

    local_size: int  # ranks of the node
    parts: int  # first local ranks of the node that add a part each
    between: Between | None = None  # where parts go from there; None: nowhere, the node's mean
    carrier: Carrier | None = None  # averages in other threads; then between is not used
    world: bool = False  # whether the carrier does so over the world
    whole: bool = True  # a backward ends only when it is through
    alone: bool = False  # every rank of the world is a node, and nothing goes between: no averages


@dataclass(frozen=True, slots=True)
class Row:
    """Gradients of one type."""

    params: tuple[int, ...]  # indices of the parameters
    nbytes: tuple[int, ...]  # of each
    spans: tuple[Span, ...]  # of each; its flag lies at stop
    memory: NodeRow


@dataclass(slots=True)
class Bucket:
    """One bucket: its memory, and how far it is in this round."""

    portion: Portion
    place: int  # in the order in which buckets fill
    params: tuple[int, ...]  # indices of the parameters that lie in it, wholly or in part
    memory: NodeBucket
    ending: tuple[int, ...]  # indices of those whose flag lies in it
    flags: torch.Tensor  # where these are in the memory (ending parameters,)
    under_way: bool = False  # started, and not collected
    missing: set[int] = field(default_factory=set)  # parameters without a gradient yet
    finish: Finish | None = None


@dataclass(slots=True)
class Round:
    """How far this round is."""

    ready: dict[int, None] = field(default_factory=dict)  # parameters, in the order they came
    moved: set[int] = field(default_factory=set)  # parameters whose gradient lies in its row
    started: int = 0  # buckets filled and started; buckets go in order
    added: int = 0  # of them, added


class GradientBuckets:
    """Averages the gradients of a model's parameters.

    Args:
        named: Names and parameters.
        node: The node in which gradients are averaged.
        route: Where they are averaged; may be replaced between two rounds.
        bucket_bytes: Bytes from which a bucket counts as full; see `cut`.
        same_order: Replaces an order (list of indices) by world rank 0's; collective over it.
        begin: Called when a backward begins whose gradients will be averaged.
        behind_ddp: DDP averages the same gradients first: nothing starts before it is through.
        in_portions: Buckets are portions (see `daso.plan.slices`), which may cut a tensor.
    """

    def __init__(
        self,
        named: Named,
        node: NodeGroup,
        route: Route,
        *,
        bucket_bytes: int,
        same_order: Callable[[list[int]], list[int]],
        begin: Callable[[], None],
        behind_ddp: bool = False,
        in_portions: bool = False,
    ) -> None:
        self.named, self.node, self.route = named, node, route
        self._begin, self._behind_ddp, self._in_portions = begin, behind_ddp, in_portions
        self.bucket_bytes, self._same_order = bucket_bytes, same_order
        self.fresh = False  # a round was finished since somebody set this to False
        self._paused = False
        self._rows: list[Row] = []  # made at the end of the first backward
        self._views: dict[int, torch.Tensor] = {}  # in them, of each parameter's gradient
        self._place_of: dict[int, int] = {}  # of each parameter in the order of readiness
        self._buckets: list[Bucket] = []
        self._round = Round()
        self._versions: list[int] = []  # of rows, when the last round was handed over
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(partial(self._on_ready, index))
            for index, (_, tensor) in enumerate(named)
        ]
        self._buckets_of: dict[int, list[Bucket]] = {}  # several where a parameter is cut

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients pile up on this rank; the next backward outside averages their sum."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
            self.fresh = False  # what piled up is not averaged yet

    @_disable_dynamo
    def _on_ready(self, index: int, tensor: torch.Tensor) -> None:
        if self._paused:
            return
        ready = self._round.ready
        _check_gradient(self.named[index][0], tensor, again=index in ready)
        if self.route.alone:
            setattr(tensor.grad, OURS, True)
            return
        if not ready:
            self._begin()
            # Called by autograd when this backward is over, as DDP and FSDP do it.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            # DDP queues its own last: queue behind it, from a callback.
            queue(partial(queue, self.finish_round) if self._behind_ddp else self.finish_round)
            self._begin_carrying()
        ready[index] = None
        buckets = self._buckets_of.get(index, [])
        if self._behind_ddp or not buckets:
            return
        for bucket in buckets:
            bucket.missing.discard(index)
        if self.route.carrier is None:
            self._start_filled()
            self._add_started()
        else:
            self._start_carried(buckets)

    def _begin_carrying(self) -> None:
        """Begin a round of the carrier's; all of the last one was collected."""
        if self.route.carrier is not None and self._rows:
            if self.under_way():
                raise ConfigError(
                    "a step must follow each backward where no step waits for all gradients, but "
                    "another backward came first; put all but the last under optimizer.no_sync(), "
                    "or use Gradients(update='whole')"
                )
            portions = [(one.portion, one.memory) for one in self._buckets]
            self.route.carrier.begin(portions, world=self.route.world)

    def _start_carried(self, buckets: Sequence[Bucket], *, all_of_them: bool = False) -> None:
        """Hand over buckets that are filled."""
        assert self.route.carrier is not None
        for bucket in buckets:
            if not bucket.under_way and (all_of_them or not bucket.missing):
                self._start(bucket)
                bucket.under_way = True
                self.route.carrier.ready(bucket.place)

    def under_way(self) -> bool:
        """Return whether buckets were handed over to a carrier and not collected."""
        return any(bucket.under_way for bucket in self._buckets)

    def collect(self, params: Iterable[int]) -> None:
        """Block until the means of parameters are there, where a carrier takes them.

        Args:
            params: Their indices.
        """
        carrier = self.route.carrier
        buckets = [one for index in params for one in self._buckets_of.get(index, [])]
        for bucket in buckets:
            if bucket.under_way:
                assert carrier is not None, "a route is replaced between two rounds"
                carrier.wait(bucket.place)
                bucket.under_way = False
                self._settle(bucket)

    def arrived(self, params: Iterable[int]) -> set[int]:
        """Return those of these parameters (indices) whose means are there. Does not block."""
        carrier, missing = self.route.carrier, set[int]()
        for bucket in self._buckets:
            if bucket.under_way and carrier is not None and not carrier.is_back(bucket.place):
                missing.update(bucket.params)
        return set(params) - missing

    def _start_filled(self, *, all_of_them: bool = False) -> None:
        """Start buckets in order, as far as they are filled."""
        for bucket in self._buckets[self._round.started :]:
            if bucket.missing and not all_of_them:
                return
            self._start(bucket)
            self._round.started += 1

    def _start(self, bucket: Bucket) -> None:
        self._fill(bucket)
        parts = split(bucket.memory.flat.numel(), self.route.parts)
        nothing = [Span(0, 0)] * (self.route.local_size - self.route.parts)
        bucket.memory.start([*parts, *nothing])

    def _add_started(self, *, block: bool = False) -> None:
        """Add started buckets in order, as far as all ranks of the node are ready."""
        for bucket in self._buckets[self._round.added : self._round.started]:
            if block:
                bucket.memory.wait_filled()
            total = bucket.memory.add()
            if total is None:
                return
            if self.route.between is None:
                bucket.memory.deliver(self.route.local_size)
            elif total.numel():
                bucket.finish = self.route.between(total)
            else:
                bucket.memory.deliver(1)
            self._round.added += 1

    @_disable_dynamo
    def finish_round(self) -> None:
        """Average what is left, with zeros for parameters without a gradient.

        Collective over the node, and over the world where parts go between nodes; blocking.
        """
        if self.route.alone:
            self.fresh = True
            return
        begun = bool(self._round.ready) and bool(self._rows)
        if not self._rows:
            self._make_rows(list(self._round.ready))
        if self.route.carrier is not None:
            self._finish_carrying(begun=begun)
        else:
            self._finish_buckets()
        self._round, self.fresh = Round(), True

    def _finish_carrying(self, *, begun: bool) -> None:
        """Hand over what is left; where steps are whole, collect everything."""
        if not begun:
            self._begin_carrying()
        self._start_carried(self._buckets, all_of_them=True)
        self._versions = [row.memory.flat._version for row in self._rows]
        if self.route.whole:
            self.collect(range(len(self.named)))

    def _finish_buckets(self) -> None:
        self._start_filled(all_of_them=True)
        self._add_started(block=True)
        for bucket in self._buckets:
            if bucket.finish is not None:
                bucket.finish()
                bucket.finish = None
                bucket.memory.deliver(1)
        for bucket in self._buckets:
            bucket.memory.wait()
            self._settle(bucket)

    def _fill(self, bucket: Bucket) -> None:
        """Copy gradients that autograd made elsewhere into the bucket; make them views of it."""
        params = [index for index in bucket.params if index not in self._round.moved]
        self._round.moved.update(params)
        tensors = [self.named[index][1] for index in params]
        views = [self._views[index] for index in params]
        have = [tensor.grad is not None for tensor in tensors]
        moves = [
            (tensor, tensor.grad, view)
            for tensor, view in zip(tensors, views, strict=True)
            if tensor.grad is not None and tensor.grad.data_ptr() != view.data_ptr()
        ]
        flat = bucket.memory.flat
        flags = [self.named[index][1].grad is not None for index in bucket.ending]
        with torch.no_grad():
            if all(flags):
                flat.index_fill_(0, bucket.flags, 1)
            else:
                flat.index_copy_(0, bucket.flags, torch.tensor(flags, dtype=flat.dtype))
            for there, view in zip(have, views, strict=True):
                if not there:
                    view.zero_()
            if moves:
                torch._foreach_copy_([view for *_, view in moves], [grad for _, grad, _ in moves])
        for tensor, _, view in moves:
            tensor.grad = view

    def _settle(self, bucket: Bucket) -> None:
        """Give parameters that only other ranks used their gradient; get ready for a new round."""
        for at, index in enumerate(bucket.ending):
            tensor = self.named[index][1]
            if tensor.grad is None and bucket.memory.flat[bucket.flags[at]] > 0:
                tensor.grad = self._views[index]
        bucket.missing = set(bucket.params)

    # --- memory ------------------------------------------------------------------------------

    def _make_rows(self, ready: Sequence[int]) -> None:
        """Make rows in the order in which gradients became ready; the others last, from behind.

        Collective over the world; blocking.
        """
        rest = [index for index in reversed(range(len(self.named))) if index not in set(ready)]
        order = self._same_order([*ready, *rest])
        self._place_of = {index: at for at, index in enumerate(order)}
        for dtype in dict.fromkeys(tensor.dtype for _, tensor in self.named):
            params = tuple(index for index in order if self.named[index][1].dtype == dtype)
            tensors = [self.named[index][1] for index in params]
            spans = flagged([tensor.numel() for tensor in tensors])
            numel, most = spans[-1].stop + 1, len(params)
            if self._in_portions:  # each tensor in as many as it fills, rounded
                most = 2 * len(params) + numel // self._elements(dtype)
            memory = self.node.row(numel, dtype, most)
            self._rows.append(Row(params, tuple(t.nbytes for t in tensors), spans, memory))
            for index, tensor, span in zip(params, tensors, spans, strict=True):
                self._views[index] = view_like(memory.flat[slice(*span)], tensor)
        self.cut(self.bucket_bytes)

    def cut(self, bucket_bytes: int) -> None:
        """Cut rows into buckets of another size; between two rounds.

        Args:
            bucket_bytes: Bytes from which a bucket counts as full; the same on every rank.

        Does not communicate.
        """
        self.bucket_bytes = bucket_bytes
        buckets = [bucket for row in self._rows for bucket in self._cut(row)]
        # Buckets of several types start in the order in which they fill.
        buckets.sort(key=lambda bucket: max(self._place_of[index] for index in bucket.params))
        for place, bucket in enumerate(buckets):
            bucket.place = place
        self._buckets = buckets
        self._buckets_of = {}
        for bucket in buckets:
            for index in bucket.params:
                self._buckets_of.setdefault(index, []).append(bucket)

    def groups(self, bucket_bytes: int) -> list[tuple[tuple[int, ...], ...]]:
        """Return which parameters of each row share a bucket of a size, where none is cut."""
        return [fit_buckets(row.nbytes, bucket_bytes) for row in self._rows]

    def _elements(self, dtype: torch.dtype) -> int:
        """Return from how many numbers a bucket counts as full."""
        return max(1, self.bucket_bytes // dtype.itemsize)

    def _cut(self, row: Row) -> list[Bucket]:
        """Return a row's buckets."""
        if self._in_portions:
            # What became ready last belongs to the first layers.
            layers = [len(self.named) - 1 - self._place_of[index] for index in row.params]
            elements = self._elements(row.memory.flat.dtype)
            portions: Sequence[Portion] = cut_portions(row.spans, layers, elements)
        else:
            portions = _whole_tensors(row, self.bucket_bytes)
        memories = row.memory.cut([portion.span for portion in portions])
        return [
            _bucket(row, portion, memory)
            for portion, memory in zip(portions, memories, strict=True)
        ]

    def first_nonfinite(self) -> str | None:
        """Return the name of the first parameter whose gradient is not finite, None if all are."""
        for bucket in self._buckets:
            if not bool(bucket.memory.flat.sum().isfinite()):  # flags are
                for index in bucket.params:
                    grad = self.named[index][1].grad
                    if grad is not None and not bool(grad.isfinite().all()):
                        return self.named[index][0]
        return None

    def nonfinite_of(self, params: Sequence[int]) -> list[int]:
        """Return those of these parameters (indices), all there, whose gradient is not finite."""
        places = {bucket.place for index in params for bucket in self._buckets_of[index]}
        # A sum is cheaper, but may overflow.
        if all(bool(self._buckets[at].memory.flat.sum().isfinite()) for at in places):
            return []
        grads = [(index, self.named[index][1].grad) for index in params]
        return [
            index for index, grad in grads if grad is not None and not bool(grad.isfinite().all())
        ]

    def untouched(self) -> bool:
        """Return whether nobody wrote to gradients since the last round was handed over.

        What the node and the engine write does not count: their tensors have versions of their own.
        """
        moved = any(
            tensor.grad is not None and tensor.grad.data_ptr() != self._views[index].data_ptr()
            for index, (_, tensor) in enumerate(self.named)
        )
        return not moved and self._versions == [row.memory.flat._version for row in self._rows]

    def owns(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient lies in a bucket, or was left where a backward made it."""
        made = getattr(gradient, OURS, False)
        views = self._views.values()
        return made or any(view.data_ptr() == gradient.data_ptr() for view in views)

    def close(self) -> None:
        """Take the hooks off and give gradients memory of their own; idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for index, view in self._views.items():
            tensor = self.named[index][1]
            if tensor.grad is not None and tensor.grad.data_ptr() == view.data_ptr():
                tensor.grad = tensor.grad.clone()
        self._rows, self._views, self._buckets, self._buckets_of = [], {}, [], {}


def _check_gradient(name: str, tensor: torch.Tensor, *, again: bool) -> None:
    if tensor.grad is not None and tensor.grad.is_sparse:
        raise LayoutError(
            f"gradients must be dense, but {name} got a sparse one; make its layer with "
            f"sparse=False"
        )
    if again:
        raise LayoutError(
            f"a parameter must get its gradient once in a backward, but {name} got two; use "
            f"checkpoint(..., use_reentrant=False)"
        )


def _whole_tensors(row: Row, bucket_bytes: int) -> list[Portion]:
    """Cut a row so that every tensor is in one bucket."""
    groups = fit_buckets(row.nbytes, bucket_bytes)
    spans = [Span(row.spans[group[0]].start, row.spans[group[-1]].stop + 1) for group in groups]
    return [Portion(span, group, 0) for span, group in zip(spans, groups, strict=True)]


def _bucket(row: Row, portion: Portion, memory: NodeBucket) -> Bucket:
    start, stop = portion.span
    params = tuple(row.params[at] for at in portion.params)
    ending = [at for at in portion.params if start <= row.spans[at].stop < stop]
    return Bucket(
        portion=portion,
        place=0,
        params=params,
        memory=memory,
        ending=tuple(row.params[at] for at in ending),
        flags=torch.tensor([row.spans[at].stop - start for at in ending], dtype=torch.int64),
        missing=set(params),
    )
