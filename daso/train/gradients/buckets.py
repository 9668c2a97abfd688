"""Gradients of a model in flat rows, and the buckets into which these are cut.

Gradients of a type lie in one row, in an order that is the same on every rank. Behind each is one
number, its flag: 1 where this rank had a gradient. Its mean tells whether any rank had one; where
none had, ``.grad`` stays None, and the optimizer leaves the parameter alone as it would without
daso. A bucket is a part of a row, so rows can be cut anew between two rounds: nothing moves, and no
bit of a sum in rank order changes. A portion (`daso.plan.portions`) is a bucket too; a large tensor
lies in several.

``.grad`` becomes a tensor over the row, which spares a copy. Where the program holds the memory of
a gradient (a flat buffer, a list of gradients, a graph of them), ``.grad`` stays, and the mean is
copied into it, as DDP does.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from daso.comm.node.base import NodeBucket, NodeRow, NodeTransport
from daso.errors import LayoutError
from daso.plan.layout import LEAST_BUCKET_BYTES, Span, fit_buckets, flagged, last_layer
from daso.plan.portions import Portion, cut_portions
from daso.train.gradients.memory import gradient_dtype, is_held, is_kept, second_storage
from daso.train.model.params import Named, view_like

__all__ = ["Bucket", "Cuts", "Finish", "FlatGradients"]

Finish = Callable[[], None]
Cuts = Literal["none", "last", "all"]


@dataclass(frozen=True, slots=True)
class Row:
    """Gradients of one type."""

    params: tuple[int, ...]  # indices of the parameters
    nbytes: tuple[int, ...]  # of each
    spans: tuple[Span, ...]  # of each; its flag lies at stop
    memory: NodeRow
    seen: torch.Tensor  # the same memory in another storage: ``.grad`` lies in it


@dataclass(slots=True)
class Kept:
    """A gradient that stays in the memory of the program."""

    grad: Callable[[], torch.Tensor | None]  # a weak reference
    left: int  # buckets of it whose mean is not there yet


@dataclass(slots=True)
class Bucket:
    """One bucket: its memory, and how far it is in this round."""

    portion: Portion
    place: int  # in the order in which buckets fill
    params: tuple[int, ...]  # indices of the parameters that lie in it, wholly or in part
    memory: NodeBucket
    ending: tuple[int, ...]  # indices of those whose flag lies in it
    places: tuple[int, ...]  # where these are in the memory
    flags: torch.Tensor  # the same (ending parameters,), where the memory is
    under_way: bool = False  # started, and not collected
    missing: set[int] = field(default_factory=set)  # parameters without a gradient yet
    finish: Finish | None = None


class FlatGradients:
    """The rows of a model, made once, and their buckets.

    Args:
        named: Names and parameters.
        node: The node in which gradients are averaged.
        cuts: Which tensors may lie in several buckets: all (portions), or the last layer's.
    """

    def __init__(self, named: Named, node: NodeTransport, *, cuts: Cuts = "none") -> None:
        self.named, self.node, self._cuts = named, node, cuts
        self.buckets: list[Bucket] = []  # in the order in which they fill
        self.buckets_of: dict[int, list[Bucket]] = {}  # several where a parameter is cut
        self._rows: list[Row] = []
        self._least_bytes = 0  # of buckets, for which rows have room
        # In them, of each parameter's gradient. ``.grad`` has a storage of its own over the same
        # memory: a program may replace it (``.data``, ``double()``, ``share_memory()``).
        self._views: dict[int, torch.Tensor] = {}
        self._grads: dict[int, torch.Tensor] = {}
        self._kept: dict[int, Kept] = {}
        self._place_of: dict[int, int] = {}  # of each parameter in the order of readiness

    def __bool__(self) -> bool:
        """Return whether rows were made."""
        return bool(self._rows)

    def make(self, order: Sequence[int], bucket_bytes: int) -> None:
        """Make rows and cut them.

        Collective over the node; blocking.
        """
        self._place_of = {index: at for at, index in enumerate(order)}
        self._least_bytes = min(bucket_bytes, LEAST_BUCKET_BYTES)  # a run that is resumed had less
        types = [gradient_dtype(tensor) for _, tensor in self.named]
        for dtype in dict.fromkeys(types):
            params = tuple(index for index in order if types[index] == dtype)
            tensors = [self.named[index][1] for index in params]
            spans = flagged([tensor.numel() for tensor in tensors])
            numel, most = spans[-1].stop + 1, len(params)
            if self._cuts != "none":  # each tensor in as many as it fills, rounded
                most = 2 * len(params) + numel // _elements(self._least_bytes, dtype)
            memory = self.node.row(numel, dtype, most)
            nbytes = tuple(tensor.numel() * dtype.itemsize for tensor in tensors)
            self._rows.append(Row(params, nbytes, spans, memory, second_storage(memory.flat)))
            for index, tensor, span in zip(params, tensors, spans, strict=True):
                self._views[index] = view_like(memory.flat[slice(*span)], tensor)
        self.cut(bucket_bytes)

    def has_room_for(self, bucket_bytes: int) -> bool:
        """Return whether rows can be cut into buckets of a size."""
        return self._cuts == "none" or bucket_bytes >= self._least_bytes

    def cut(self, bucket_bytes: int) -> None:
        """Cut rows into buckets of another size; between two rounds.

        Does not communicate.
        """
        buckets = [bucket for row in self._rows for bucket in self._cut(row, bucket_bytes)]
        # Buckets of several types start in the order in which they fill.
        buckets.sort(key=lambda bucket: max(self._place_of[index] for index in bucket.params))
        for place, bucket in enumerate(buckets):
            bucket.place = place
        self.buckets, self.buckets_of = buckets, {}
        for bucket in buckets:
            for index in bucket.params:
                self.buckets_of.setdefault(index, []).append(bucket)

    def groups(self, bucket_bytes: int) -> list[tuple[tuple[int, ...], ...]]:
        """Return which parameters of each row share a bucket of a size, where none is cut."""
        return [self._fit(row, bucket_bytes) for row in self._rows]

    def _fit(self, row: Row, bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
        last = last_layer([self.named[index][0] for index in row.params])
        return fit_buckets(row.nbytes, bucket_bytes, last=last)

    def _cut(self, row: Row, bucket_bytes: int) -> list[Bucket]:
        """Return a row's buckets."""
        # What became ready last belongs to the first layers.
        layers = [len(self.named) - 1 - self._place_of[index] for index in row.params]
        elements = _elements(bucket_bytes, row.memory.flat.dtype)
        if self._cuts == "all":
            portions: Sequence[Portion] = cut_portions(row.spans, layers, elements)
        else:
            portions = _whole_tensors(row, self._fit(row, bucket_bytes))
        if self._cuts == "last":
            least = _elements(LEAST_BUCKET_BYTES, row.memory.flat.dtype)
            portions = _with_last_cut(row, portions, layers, max(elements, least))
        memories = row.memory.cut([portion.span for portion in portions])
        return [
            _bucket(row, portion, memory)
            for portion, memory in zip(portions, memories, strict=True)
        ]

    # --- gradients ---------------------------------------------------------------------------

    def view_of(self, index: int) -> torch.Tensor | None:
        """Return where in its row a parameter's gradient lies; None before rows are made."""
        return self._views.get(index)

    def fill(self, bucket: Bucket, moved: set[int]) -> None:
        """Copy gradients that autograd made elsewhere into the bucket."""
        params = [index for index in bucket.params if index not in moved]
        moved.update(params)
        flat = bucket.memory.flat
        flags = [self.named[index][1].grad is not None for index in bucket.ending]
        with torch.no_grad():
            flat.index_fill_(0, bucket.flags, 1)
            if not all(flags):
                for at, there in zip(bucket.places, flags, strict=True):
                    flat[at] *= there
            self._copy_in(params)

    def _copy_in(self, params: Sequence[int]) -> None:
        """Copy gradients into their rows; zeros where a parameter has none."""
        views, grads, given = [], [], []
        for index in params:
            tensor, view = self.named[index][1], self._views[index]
            self._kept.pop(index, None)
            self._separate_kept(index)
            if tensor.grad is None:
                view.zero_()
            elif tensor.grad.data_ptr() != view.data_ptr():
                held = is_held(tensor)
                grad = tensor.grad
                _check_type(self.named[index][0], grad, view)
                views.append(view)
                grads.append(grad.detach())
                if held:
                    left = len(self.buckets_of[index])
                    self._kept[index] = Kept(weakref.ref(grad), left)
                else:
                    given.append(index)
        if views:
            torch._foreach_copy_(views, grads)
        for index in given:
            self.named[index][1].grad = self._grad_of(index)

    def _separate_kept(self, index: int) -> None:
        """Give a gradient of an earlier round memory of its own where the program kept it."""
        if index not in self._grads or self.named[index][1].grad is self._grads[index]:
            return
        if is_kept(self._grads, index):
            grad = self._grads.pop(index)
            grad.data = grad.detach().clone()

    def _grad_of(self, index: int) -> torch.Tensor:
        """Return the tensor over its row that becomes a parameter's gradient."""
        view, grad = self._views[index], self._grads.get(index)
        if grad is None or grad.data_ptr() != view.data_ptr() or grad.dtype != view.dtype:
            grad = self._grads[index] = self._new_grad(index)
        return grad

    def _new_grad(self, index: int) -> torch.Tensor:
        at = next(at for at, row in enumerate(self._rows) if index in row.params)
        row = self._rows[at]
        if row.seen.data_ptr() != row.memory.flat.data_ptr():  # torch replaced that storage
            self._rows[at] = row = replace(row, seen=second_storage(row.memory.flat))
        span = row.spans[row.params.index(index)]
        return view_like(row.seen[slice(*span)], self.named[index][1]).detach()

    def settle(self, bucket: Bucket) -> None:
        """Give parameters that only other ranks used their gradient; get ready for a new round."""
        bucket.missing = set(bucket.params)
        self._copy_out(bucket.params)
        self.give_back(bucket, bucket.missing)

    def _copy_out(self, params: Iterable[int]) -> None:
        """Copy means to gradients in the memory of the program, once they are whole."""
        for index in self._kept.keys() & set(params):
            kept = self._kept[index]
            kept.left -= 1
            grad = kept.grad()
            if not kept.left and grad is not None:
                grad.data.copy_(self._views[index])  # .data: a graph of it stays valid

    def give_back(self, bucket: Bucket, params: set[int]) -> None:
        """Give these parameters the bucket's mean where they have no gradient, and a rank had."""
        lacking = [index for index in bucket.ending if self.named[index][1].grad is None]
        if not lacking or params.isdisjoint(lacking):
            return
        flags = bucket.memory.flat[bucket.flags].tolist()  # read once
        for index, flag in zip(bucket.ending, flags, strict=True):
            tensor = self.named[index][1]
            if tensor.grad is None and flag > 0 and index in params:
                tensor.grad = self._grad_of(index)

    def first_nonfinite(self) -> str | None:
        """Return the name of the first parameter whose gradient is not finite, None if all are."""
        if self._rows and self._all_finite(self.buckets):
            return None
        order = [index for bucket in self.buckets for index in bucket.params]
        for index in order or range(len(self.named)):
            name, tensor = self.named[index]
            if tensor.grad is not None and not bool(tensor.grad.isfinite().all()):
                return name
        return None

    def _all_finite(self, buckets: Iterable[Bucket]) -> bool:
        """Return whether sums are finite, flags among them; read once. Large ones may overflow."""
        sums = [bucket.memory.flat.sum().isfinite() for bucket in buckets]
        kept = [grad for one in self._kept.values() if (grad := one.grad()) is not None]
        sums += [grad.detach().sum().isfinite() for grad in kept]
        return not sums or bool(torch.stack(sums).all())

    def nonfinite_of(self, params: Sequence[int]) -> list[int]:
        """Return those of these parameters (indices), all there, whose gradient is not finite."""
        places = {bucket.place for index in params for bucket in self.buckets_of[index]}
        if self._all_finite(self.buckets[at] for at in places):
            return []
        grads = [(index, self.named[index][1].grad) for index in params]
        return [
            index for index, grad in grads if grad is not None and not bool(grad.isfinite().all())
        ]

    def versions(self) -> list[int]:
        """Return numbers that grow whenever the program writes to gradients.

        Writes of the node and the engine do not count: their tensors have versions of their own.
        """
        kept = [grad._version for one in self._kept.values() if (grad := one.grad()) is not None]
        return [row.seen._version for row in self._rows] + kept

    def in_place(self) -> bool:
        """Return whether every gradient is that of the last round."""
        return all(
            tensor.grad is None or self._is_own(index, tensor.grad)
            for index, (_, tensor) in enumerate(self.named)
        )

    def _is_own(self, index: int, grad: torch.Tensor) -> bool:
        kept = self._kept.get(index)
        own = grad.data_ptr() == self._views[index].data_ptr()
        return own or (kept is not None and kept.grad() is grad)

    def holds(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient lies in a row, or took a mean from there."""
        if not gradient.numel():  # all that is empty has one address
            return False
        if any(kept.grad() is gradient for kept in self._kept.values()):
            return True
        return any(view.data_ptr() == gradient.data_ptr() for view in self._views.values())

    def release(self) -> None:
        """Give gradients memory of their own; idempotent."""
        for index, view in self._views.items():
            kept = index in self._grads and is_kept(self._grads, index)
            for grad in (self.named[index][1].grad, self._grads.get(index) if kept else None):
                # In place: lists of gradients that the program made keep what they refer to.
                if grad is not None and grad.data_ptr() == view.data_ptr():
                    grad.data = grad.detach().clone()
        self._rows, self._views, self.buckets, self.buckets_of = [], {}, [], {}
        self._grads, self._kept = {}, {}


def _check_type(name: str, grad: torch.Tensor, view: torch.Tensor) -> None:
    """Refuse a gradient of another type than its row: it would be rounded in silence."""
    if grad.dtype != view.dtype:
        kind, row = (str(one.dtype).removeprefix("torch.") for one in (grad, view))
        raise LayoutError(
            f"gradients must have one type, but that of {name} is {kind} and is averaged in {row}; "
            f"set its grad_dtype to torch.{kind} before daso.DASO(...)"
        )


def _elements(bucket_bytes: int, dtype: torch.dtype) -> int:
    """Return from how many numbers a bucket counts as full."""
    return max(1, bucket_bytes // dtype.itemsize)


def _whole_tensors(row: Row, groups: Sequence[tuple[int, ...]]) -> list[Portion]:
    """Cut a row so that every tensor is in one bucket."""
    spans = [Span(row.spans[group[0]].start, row.spans[group[-1]].stop + 1) for group in groups]
    return [Portion(span, group, 0) for span, group in zip(spans, groups, strict=True)]


def _with_last_cut(
    row: Row, portions: Sequence[Portion], layers: Sequence[int], elements: int
) -> list[Portion]:
    """Cut the last bucket: its stages have no backward to hide behind, but can hide each other."""
    first = portions[-1].params[0]
    parts = cut_portions(row.spans[first:], layers[first:], elements)
    moved = [replace(part, params=tuple(first + at for at in part.params)) for part in parts]
    return [*portions[:-1], *moved]


def _bucket(row: Row, portion: Portion, memory: NodeBucket) -> Bucket:
    start, stop = portion.span
    params = tuple(row.params[at] for at in portion.params)
    ending = [at for at in portion.params if start <= row.spans[at].stop < stop]
    places = tuple(row.spans[at].stop - start for at in ending)
    return Bucket(
        portion=portion,
        place=0,
        params=params,
        memory=memory,
        ending=tuple(row.params[at] for at in ending),
        places=places,
        flags=torch.tensor(places, dtype=torch.int64, device=memory.flat.device),
        missing=set(params),
    )
