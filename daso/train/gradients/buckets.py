"""Gradients of a model in flat rows, and the buckets into which these are cut.

Gradients of a type lie in one row, in an order that is the same on every rank. Behind each is one
number, its flag: 1 where this rank had a gradient. Its mean shows whether any rank had one; where
none had, ``.grad`` stays None, and the optimizer leaves the parameter alone as it would without
daso. A bucket is a part of a row, so rows can be cut again between two rounds: nothing moves, no
bit of a sum in rank order changes. A portion (`daso.plan.portions`) is a bucket too; a large tensor
lies in several.

``.grad`` becomes a tensor over the row, which spares a copy. Where the program holds the memory of
a gradient (a flat buffer, a list of gradients, a graph of them), ``.grad`` stays, and the mean is
copied into it, as DDP does.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from daso.comm.node.base import NodeTransport
from daso.errors import LayoutError
from daso.plan.layout import MIN_BUCKET_BYTES, fit_buckets, flagged, last_layer
from daso.torch_private import foreach_copy, storage_key, storage_uses, version_of
from daso.train.gradients.cuts import (
    Bucket,
    Cuts,
    Row,
    cut_row,
    elements,
    gradient_dtype,
    second_storage,
)
from daso.train.model.params import Named, view_like


@dataclass(slots=True)
class ProgramGrad:
    """A gradient that stays in the memory of the program."""

    grad: Callable[[], torch.Tensor | None]  # a weak reference
    pending_buckets: int  # buckets of it whose mean did not arrive yet


class FlatGradients:
    """The rows of a model, made once, and their buckets.

    Args:
        named: Names and parameters.
        node: The node in which gradients are averaged.
        bucket_bytes: Bytes from which a bucket counts as full; see `cut`.
        cuts: Which tensors may lie in several buckets: all (portions), or the last layer's.
    """

    def __init__(
        self, named: Named, node: NodeTransport, bucket_bytes: int, *, cuts: Cuts = "none"
    ) -> None:
        self.named, self.node, self._cuts = named, node, cuts
        self.bucket_bytes = bucket_bytes
        self.order: list[int] = []  # of parameters in rows, once these are made
        self.buckets: list[Bucket] = []  # in the order in which they fill
        self.buckets_of: dict[int, list[Bucket]] = {}  # several where a parameter is cut
        self._rows: list[Row] = []
        self._least_bytes = 0  # of buckets, for which rows have room
        # Views of each parameter's gradient in its row. ``.grad`` has a separate storage over the
        # same memory: a program may replace it (``.data``, ``double()``, ``share_memory()``).
        self._views: dict[int, torch.Tensor] = {}
        self._grads: dict[int, torch.Tensor] = {}
        self._program_grads: dict[int, ProgramGrad] = {}
        self._noted: list[int] = []  # versions, when the last round was handed over
        self._place_of: dict[int, int] = {}  # of each parameter in the order of readiness

    def __bool__(self) -> bool:
        """Return whether rows were made."""
        return bool(self._rows)

    def make(self, order: Sequence[int]) -> None:
        """Make rows in an order, or in the one of an earlier run, and cut them.

        Collective over the node; blocking.
        """
        self.order = order = self.order or list(order)
        self._place_of = {index: at for at, index in enumerate(order)}
        self._least_bytes = min(self.bucket_bytes, MIN_BUCKET_BYTES)  # resumed runs had less
        types = [gradient_dtype(tensor) for _, tensor in self.named]
        for dtype in dict.fromkeys(types):
            params = tuple(index for index in order if types[index] == dtype)
            tensors = [self.named[index][1] for index in params]
            spans = flagged([tensor.numel() for tensor in tensors])
            numel, most = spans[-1].stop + 1, len(params)
            if self._cuts != "none":  # each tensor in as many as it fills, rounded
                most = 2 * len(params) + numel // elements(self._least_bytes, dtype)
            memory = self.node.row(numel, dtype, most)
            nbytes = tuple(tensor.numel() * dtype.itemsize for tensor in tensors)
            self._rows.append(Row(params, nbytes, spans, memory, second_storage(memory.flat)))
            for index, tensor, span in zip(params, tensors, spans, strict=True):
                self._views[index] = view_like(memory.flat[slice(*span)], tensor)
        self.cut(self.bucket_bytes)

    def arrangement(self) -> tuple[list[int], int]:
        """Return the arguments of `arrange` for this layout: parameter order, bytes of a bucket."""
        return self.order, self.bucket_bytes

    def arrange(self, order: Sequence[int], bucket_bytes: int) -> None:
        """Lay gradients as in an earlier run; between two rounds.

        Does not communicate, but all ranks must do it alike.
        """
        moved = bool(order) and list(order) != self.order
        if moved or not self.has_room_for(bucket_bytes):
            self.release()
        if moved:
            self.order = list(order)
        if bucket_bytes != self.bucket_bytes:
            self.cut(bucket_bytes)

    def has_room_for(self, bucket_bytes: int) -> bool:
        """Return whether rows can be cut into buckets of a size."""
        return self._cuts == "none" or bucket_bytes >= self._least_bytes

    def cut(self, bucket_bytes: int) -> None:
        """Cut rows into buckets of another size; between two rounds.

        Does not communicate.
        """
        self.bucket_bytes = bucket_bytes
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
        # Gradients of the first layers became ready last.
        layers = [len(self.named) - 1 - self._place_of[index] for index in row.params]
        return cut_row(row, self._cuts, bucket_bytes, layers, self._fit(row, bucket_bytes))

    # --- gradients ---------------------------------------------------------------------------

    def view_of(self, index: int) -> torch.Tensor | None:
        """Return the view of a parameter's gradient in its row; None before rows are made."""
        return self._views.get(index)

    def fill(self, bucket: Bucket, moved: set[int]) -> None:
        """Copy gradients that autograd made elsewhere into the bucket."""
        params = [index for index in bucket.params if index not in moved]
        moved.update(params)
        flat = bucket.memory.flat
        flags = [self.named[index][1].grad is not None for index in bucket.flag_params]
        with torch.no_grad():
            flat.index_fill_(0, bucket.flag_index, 1)
            if not all(flags):
                for at, has_grad in zip(bucket.flag_offsets, flags, strict=True):
                    flat[at] *= has_grad
            self._copy_in(params)

    def _copy_in(self, params: Sequence[int]) -> None:
        """Copy gradients into their rows; zeros where a parameter has none."""
        views, grads, replaced = [], [], []
        for index in params:
            tensor, view = self.named[index][1], self._views[index]
            self._program_grads.pop(index, None)
            self._separate_referenced(index)
            if tensor.grad is None:
                view.zero_()
            elif tensor.grad.data_ptr() != view.data_ptr():
                held = is_held(tensor)
                grad = tensor.grad
                _check_type(self.named[index][0], grad, view)
                views.append(view)
                grads.append(grad.detach())
                if held:
                    count = len(self.buckets_of[index])
                    self._program_grads[index] = ProgramGrad(weakref.ref(grad), count)
                else:
                    replaced.append(index)
        if views:
            foreach_copy(views, grads)
        for index in replaced:
            self.named[index][1].grad = self._grad_of(index)

    def _separate_referenced(self, index: int) -> None:
        """Move an earlier round's gradient to separate memory if the program refers to it."""
        if index not in self._grads or self.named[index][1].grad is self._grads[index]:
            return
        if is_referenced(self._grads, index):
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
        if row.grad_memory.data_ptr() != row.memory.flat.data_ptr():  # torch replaced that storage
            self._rows[at] = row = replace(row, grad_memory=second_storage(row.memory.flat))
        span = row.spans[row.params.index(index)]
        return view_like(row.grad_memory[slice(*span)], self.named[index][1]).detach()

    def deliver(self, bucket: Bucket) -> None:
        """Deliver a bucket's means, also to parameters that only other ranks used."""
        bucket.missing = set(bucket.params)
        self._copy_out(bucket.params)
        self.fill_missing_grads(bucket, bucket.missing)

    def _copy_out(self, params: Iterable[int]) -> None:
        """Copy means to gradients in the memory of the program, once they are whole."""
        for index in self._program_grads.keys() & set(params):
            program_grad = self._program_grads[index]
            program_grad.pending_buckets -= 1
            grad = program_grad.grad()
            if not program_grad.pending_buckets and grad is not None:
                grad.data.copy_(self._views[index])  # .data: a graph of it stays valid

    def fill_missing_grads(self, bucket: Bucket, params: set[int]) -> None:
        """Set the missing gradients of parameters to the bucket's mean, if any rank had one."""
        lacking = [index for index in bucket.flag_params if self.named[index][1].grad is None]
        if not lacking or params.isdisjoint(lacking):
            return
        flags = bucket.memory.flat[bucket.flag_index].tolist()  # read once
        for index, flag in zip(bucket.flag_params, flags, strict=True):
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
        sums += [grad.detach().sum().isfinite() for grad in self._live_program_grads()]
        return not sums or bool(torch.stack(sums).all())

    def nonfinite_of(self, params: Sequence[int]) -> list[int]:
        """Return the parameters (indices) whose gradient is not finite; all means arrived."""
        places = {bucket.place for index in params for bucket in self.buckets_of[index]}
        if self._all_finite(self.buckets[at] for at in places):
            return []
        grads = [(index, self.named[index][1].grad) for index in params]
        return [
            index for index, grad in grads if grad is not None and not bool(grad.isfinite().all())
        ]

    def restore_reset_grads(self, params: Iterable[int]) -> None:
        """Restore the means of parameters that were reset after these were collected."""
        lacking = {index for index in params if self.named[index][1].grad is None}
        buckets = {b.place: b for index in lacking for b in self.buckets_of.get(index, [])}
        for bucket in buckets.values():
            self.fill_missing_grads(bucket, lacking)

    def note_versions(self) -> None:
        """Record the versions of gradients when a round is handed over."""
        self._noted = self._versions()

    def untouched(self) -> bool:
        """Return whether the program wrote no gradients since the last round was handed over."""
        return self.in_place() and self._noted == self._versions()

    def _versions(self) -> list[int]:
        """Return numbers that grow whenever the program writes to gradients.

        Writes of the node and the engine do not count: their tensors have separate versions.
        """
        tensors = [row.grad_memory for row in self._rows] + self._live_program_grads()
        return [version_of(tensor) for tensor in tensors]

    def _live_program_grads(self) -> list[torch.Tensor]:
        """Return the gradients in the memory of the program that still exist."""
        grads = [program_grad.grad() for program_grad in self._program_grads.values()]
        return [grad for grad in grads if grad is not None]

    def in_place(self) -> bool:
        """Return whether every gradient is that of the last round."""
        return all(
            tensor.grad is None or self._is_own(index, tensor.grad)
            for index, (_, tensor) in enumerate(self.named)
        )

    def _is_own(self, index: int, grad: torch.Tensor) -> bool:
        program_grad = self._program_grads.get(index)
        own = grad.data_ptr() == self._views[index].data_ptr()
        return own or (program_grad is not None and program_grad.grad() is grad)

    def holds(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient lies in a row, or took a mean from there."""
        if not gradient.numel():  # all empty tensors have one address
            return False
        if any(known is gradient for known in self._live_program_grads()):
            return True
        return any(view.data_ptr() == gradient.data_ptr() for view in self._views.values())

    def release(self) -> None:
        """Move gradients to separate memory, and free the rows; idempotent."""
        for index, view in self._views.items():
            referenced = index in self._grads and is_referenced(self._grads, index)
            earlier = self._grads.get(index) if referenced else None
            for grad in (self.named[index][1].grad, earlier):
                # In place: lists of gradients that the program made stay valid.
                if grad is not None and grad.data_ptr() == view.data_ptr():
                    grad.data = grad.detach().clone()
        self._rows, self._views, self.buckets, self.buckets_of = [], {}, [], {}
        self._grads, self._program_grads = {}, {}


def check_gradient(name: str, tensor: torch.Tensor, *, again: bool) -> None:
    """Refuse a sparse gradient, and a second one in a backward."""
    if tensor.grad is not None and tensor.grad.is_sparse:
        raise LayoutError(
            f"gradients must be dense, but {name} got a sparse one; make its layer with "
            f"sparse=False",
            code="gradient-is-sparse",
        )
    if again:
        raise LayoutError(
            f"a parameter must get its gradient once in a backward, but {name} got two; use "
            f"checkpoint(..., use_reentrant=False)",
            code="gradient-came-twice",
        )


def _check_type(name: str, grad: torch.Tensor, view: torch.Tensor) -> None:
    """Refuse a gradient of another type than its row: it would be rounded in silence."""
    if grad.dtype != view.dtype:
        kind, row = (str(tensor.dtype).removeprefix("torch.") for tensor in (grad, view))
        raise LayoutError(
            f"gradients must have one type, but that of {name} is {kind} and is averaged in {row}; "
            f"set its grad_dtype to torch.{kind} before daso.DASO(...)",
            code="gradient-types-differ",
        )


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the references to the gradient of a tensor, and the uses of its storage."""
    grad = tensor.grad
    assert grad is not None, "the caller has looked"
    uses = storage_uses(storage_key(grad.untyped_storage())) if storage_uses else 0
    return sys.getrefcount(grad), uses


def _references(tensors: Mapping[int, torch.Tensor], index: int) -> int:
    """Return the references to a tensor that a dictionary has."""
    return sys.getrefcount(tensors[index])


def _least_counts() -> tuple[int, int, int]:
    """Return the counts where nothing else holds a gradient: interpreters differ."""
    with torch.inference_mode(mode=False):
        tensor = torch.zeros(1, device="cpu")
        tensor.grad = torch.zeros(1, device="cpu")
        return *_counts(tensor), _references({0: torch.zeros(1, device="cpu")}, 0)


_LEAST_REFERENCES, _LEAST_USES, _OWN_REFERENCES = _least_counts()


def is_referenced(tensors: Mapping[int, torch.Tensor], index: int) -> bool:
    """Return whether a tensor of the dictionary has references from elsewhere."""
    return _references(tensors, index) > _OWN_REFERENCES


def is_held(tensor: torch.Tensor) -> bool:
    """Return whether a parameter's gradient has references from elsewhere.

    Such a gradient lies in a buffer of the program, in a list, in a graph (``create_graph=True``),
    or in memory that processes share. The caller must hold no other reference.
    """
    if not isinstance(tensor, torch.Tensor):  # a shard, whose gradient FSDP2 makes and holds
        return False
    references, uses = _counts(tensor)
    if references > _LEAST_REFERENCES or uses > _LEAST_USES:
        return True
    return tensor.grad is not None and tensor.grad.requires_grad
