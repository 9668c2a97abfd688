"""Gradients in flat buckets that are averaged while backward goes on.

A hook on every parameter tells when its gradient is ready. A full bucket is started at once;
whenever a hook runs, buckets for which every rank of the node is ready are added. What is left is
finished before ``backward()`` returns, so that ``.grad`` then is the mean, as with DDP. One such
pass over all buckets is a *round*.

Buckets are made at the end of the first backward, in the order in which gradients became ready on
world rank 0, the same on every rank. Behind the gradients each bucket has one number per parameter:
1 where this rank had a gradient. Its mean tells whether any rank had one; where none had, ``.grad``
stays None, and the optimizer leaves the parameter alone as it would without daso.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from daso.comm.node import NodeBucket, NodeGroup
from daso.errors import LayoutError
from daso.plan.layout import Span, fit_buckets, split
from daso.train.params import Named, view_like

__all__ = ["Between", "Finish", "GradientBuckets"]

# Hands a part's sum over this node to the exchange between nodes. The call it gives back blocks
# until the sum is replaced by the mean over the world.
Finish = Callable[[], None]
Between = Callable[[torch.Tensor], Finish]


@dataclass(slots=True)
class Bucket:
    """One bucket: its memory, and how far this round is."""

    params: tuple[int, ...]  # indices of the parameters
    memory: NodeBucket
    views: list[torch.Tensor]  # gradient of each parameter, in the memory
    used: torch.Tensor  # (parameters of the bucket,), behind the gradients
    missing: set[int] = field(default_factory=set)  # parameters without a gradient yet
    finish: Finish | None = None

    @property
    def gradients(self) -> torch.Tensor:
        """The gradients without the numbers behind them (numel)."""
        return self.memory.flat[: self.memory.flat.numel() - len(self.params)]


class GradientBuckets:
    """Averages the gradients of a model's parameters.

    Args:
        named: Names and parameters.
        node: The node in which gradients are averaged.
        node_size: Ranks of the node.
        bucket_bytes: Bytes from which a bucket counts as full.
        same_order: Replaces an order (list of indices) by world rank 0's; collective over it.
    """

    def __init__(
        self,
        named: Named,
        node: NodeGroup,
        *,
        node_size: int,
        bucket_bytes: int,
        same_order: Callable[[list[int]], list[int]],
    ) -> None:
        self.named = named
        self.node, self.node_size, self.bucket_bytes = node, node_size, bucket_bytes
        self.same_order = same_order
        # Set by the owner before backward: where the parts of this node go, None = nowhere else;
        # and how many local ranks hand over a part.
        self.between: Between | None = None
        self.lanes = node_size
        self.rounds = 0  # finished since the start
        self.paused = False
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._ready: dict[int, None] = {}  # parameters of this round, in the order they came
        self._started = 0  # buckets started and added in this round; both go in order
        self._added = 0
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(lambda _, index=index: self._on_ready(index))
            for index, (_, tensor) in enumerate(named)
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients pile up on this rank; the next backward outside averages their sum."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def _on_ready(self, index: int) -> None:
        if self.paused:
            return
        name, tensor = self.named[index]
        if tensor.grad is not None and tensor.grad.is_sparse:
            raise LayoutError(
                f"gradients must be dense, but {name} got a sparse one; make its layer with "
                f"sparse=False"
            )
        if index in self._ready:
            raise LayoutError(
                f"a parameter must get its gradient once in a backward, but {name} got two; use "
                f"checkpoint(..., use_reentrant=False)"
            )
        if not self._ready:
            # Called by autograd when this backward is over, as DDP and FSDP do it.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_round)
        self._ready[index] = None
        bucket = self._bucket_of.get(index)
        if bucket is not None:
            bucket.missing.discard(index)
            self._start_full()
            self._add_filled()

    def _start_full(self) -> None:
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self._start(self._buckets[self._started])

    def _start(self, bucket: Bucket) -> None:
        tensors = [self.named[index][1] for index in bucket.params]
        with torch.no_grad():
            if all(tensor.grad is not None for tensor in tensors):
                bucket.used.fill_(1)
            else:
                bucket.gradients.zero_()
                have = [float(tensor.grad is not None) for tensor in tensors]
                bucket.used.copy_(torch.tensor(have))
            self._fill(bucket, tensors)
        parts = split(bucket.memory.flat.numel(), self.lanes)
        bucket.memory.start([*parts, *[Span(0, 0)] * (self.node_size - self.lanes)])
        self._started += 1

    def _fill(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """Copy gradients that autograd made elsewhere into the bucket, and make them views."""
        moves = [
            (tensor, view)
            for tensor, view in zip(tensors, bucket.views, strict=True)
            if tensor.grad is not None and tensor.grad.data_ptr() != view.data_ptr()
        ]
        if moves:
            grads = [tensor.grad for tensor, _ in moves if tensor.grad is not None]
            torch._foreach_copy_([view for _, view in moves], grads)
        for tensor, view in moves:
            tensor.grad = view

    def _add_filled(self, *, block: bool = False) -> None:
        """Add started buckets in order, as far as all ranks of the node are ready."""
        while self._added < self._started:
            bucket = self._buckets[self._added]
            if block:
                bucket.memory.wait_filled()
            total = bucket.memory.add()
            if total is None:
                return
            if self.between is None:
                bucket.memory.deliver(self.node_size)
            elif total.numel():
                bucket.finish = self.between(total)
            else:
                bucket.memory.deliver(1)
            self._added += 1

    def finish_round(self) -> None:
        """Average what is left, with zeros for parameters without a gradient.

        Collective over the node, and over the world where parts go between nodes; blocking.
        """
        if not self._buckets:
            self._make_buckets()
        while self._started < len(self._buckets):
            self._start(self._buckets[self._started])
        self._add_filled(block=True)
        for bucket in self._buckets:
            if bucket.finish is not None:
                bucket.finish()
                bucket.finish = None
                bucket.memory.deliver(1)
        for bucket in self._buckets:
            bucket.memory.wait()
            self._settle(bucket)
        self._ready = {}
        self._started = self._added = 0
        self.rounds += 1

    def _settle(self, bucket: Bucket) -> None:
        """Give parameters that only other ranks used their gradient; get ready for a new round."""
        for at, index in enumerate(bucket.params):
            tensor = self.named[index][1]
            if tensor.grad is None and bucket.used[at] > 0:
                tensor.grad = bucket.views[at]
        bucket.missing = set(bucket.params)

    def first_nonfinite(self) -> str | None:
        """Return the name of the first parameter whose gradient is not finite, None if all are."""
        for bucket in self._buckets:
            if not bool(bucket.gradients.sum().isfinite()):
                for index in bucket.params:
                    grad = self.named[index][1].grad
                    if grad is not None and not bool(grad.isfinite().all()):
                        return self.named[index][0]
        return None

    def _make_buckets(self) -> None:
        rest = [index for index in reversed(range(len(self.named))) if index not in self._ready]
        order = self.same_order([*self._ready, *rest])
        for dtype in dict.fromkeys(tensor.dtype for _, tensor in self.named):
            members = [index for index in order if self.named[index][1].dtype == dtype]
            nbytes = [self.named[index][1].nbytes for index in members]
            groups = [
                tuple(members[at] for at in group)
                for group in fit_buckets(nbytes, self.bucket_bytes)
            ]
            sizes = [sum(self.named[index][1].numel() + 1 for index in group) for group in groups]
            memories = self.node.buckets(sizes, dtype)
            self._buckets += [
                self._bucket(group, memory) for group, memory in zip(groups, memories, strict=True)
            ]
        # Buckets of several types start in the order in which they fill.
        position = {index: at for at, index in enumerate(order)}
        self._buckets.sort(key=lambda bucket: max(position[index] for index in bucket.params))
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.params}

    def _bucket(self, params: tuple[int, ...], memory: NodeBucket) -> Bucket:
        tensors = [self.named[index][1] for index in params]
        rows = torch.split(memory.flat, [*(t.numel() for t in tensors), len(params)])
        views = [view_like(row, tensor) for row, tensor in zip(rows, tensors, strict=False)]
        return Bucket(params, memory, views, used=rows[-1], missing=set(params))

    def close(self) -> None:
        """Take the hooks off and give gradients memory of their own; idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for bucket in self._buckets:
            for index, view in zip(bucket.params, bucket.views, strict=True):
                tensor = self.named[index][1]
                if tensor.grad is not None and tensor.grad.data_ptr() == view.data_ptr():
                    tensor.grad = tensor.grad.clone()
        self._buckets, self._bucket_of = [], {}
