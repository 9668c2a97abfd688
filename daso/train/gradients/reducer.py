"""Gradients in flat buckets that are averaged while backward goes on.

A hook on every parameter tells when its gradient is ready. A full bucket is started at once;
whenever a hook runs, buckets for which every rank of the node is ready are added. What is left is
finished before ``backward()`` returns, so that ``.grad`` then is the mean, as with DDP. One such
pass over all buckets is a *round*.

Where every rank is a node of its own, gradients stay where autograd put them until a phase that
averages them between nodes.

Where gradients lie, and how they are cut, `daso.train.gradients.buckets` says.

Where a background reducer takes them (`daso.train.gradients.background`), buckets start in the
order in which they fill, other threads average them, and each is collected by itself. Where
gradients cross in portions (`daso.train.gradients.priority`), every portion is a bucket of its own,
a large tensor several.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch._compile import _disable_dynamo

from daso.comm.node.base import NodeTransport
from daso.errors import ConfigError, LayoutError
from daso.plan.layout import Span, split
from daso.train.gradients.background import BackgroundReducer
from daso.train.gradients.buckets import Bucket, Cuts, Finish, FlatGradients
from daso.train.model.params import Named

__all__ = ["BackwardCallbacks", "Between", "GradientReducer", "ReducePlan"]

OURS = "made_in_a_backward_that_daso_saw"  # attribute of a gradient that is in no bucket

# Hands a part's sum over this node, and the bucket it is of, to the exchange between nodes. The
# call it gives back blocks until the sum is replaced by the mean over the world.
Between = Callable[[torch.Tensor, Bucket], Finish]


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """Where gradients are averaged."""

    local_size: int  # ranks of the node
    parts: int  # first local ranks of the node that add a part each
    between: Between | None = None  # where parts go from there; None: nowhere, the node's mean
    end_round: Callable[[], Finish] | None = None  # starts what `between` left, behind all parts
    # Averages in other threads; `between` is not used then.
    background: BackgroundReducer | None = None
    world: bool = False  # whether the background reducer averages over the world
    whole: bool = True  # a backward ends only when it is through
    stay: bool = False  # sums that go between nodes are left on the device
    alone: bool = False  # every rank of the world is a node, and nothing goes between: no averages


@dataclass(slots=True)
class Round:
    """How far this round is."""

    ready: dict[int, None] = field(default_factory=dict)  # parameters, in the order they came
    moved: set[int] = field(default_factory=set)  # parameters whose gradient lies in its row
    started: int = 0  # buckets filled and started; buckets go in order
    added: int = 0  # of them, added
    behind: bool = False  # another reducer may be at work until this backward is over
    backward: Callable[[], object] = object  # returns None once it is over, come what may

    @property
    def aborted(self) -> bool:
        """Whether its backward raised."""
        return bool(self.ready) and self.backward() is None


class FinishCallback:
    """What autograd calls when a backward is over, and forgets when it raised."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        """Do what is due then."""
        self._call()


@dataclass(frozen=True, slots=True)
class BackwardCallbacks:
    """What is asked as a backward begins.

    Args:
        begin: Called where its gradients will be averaged.
        behind: Tells whether another reducer may average the same gradients first (DDP): then
            nothing starts before it is through.
        outdated: Tells whether parameters are laid out anew: then gradients are left to the step,
            before which the caller sets up anew.
        absorbs: Tells whether an error is left to the step to come: then nothing is averaged until
            it has come.
        made: Called when the gradient of a parameter, or of all (None), is what a step will have
            if the program leaves it alone.
        joins: Called where a step begins a round in which this rank made no gradients.
    """

    begin: Callable[[], None]
    behind: Callable[[], bool]
    outdated: Callable[[], bool]
    absorbs: Callable[[Exception], bool]
    made: Callable[[int | None], None] = lambda _: None
    joins: Callable[[], None] = lambda: None


class GradientHook:
    """Tells that a gradient is ready; offers who makes gradients without autograd their memory.

    Args:
        ready: Called with the parameter.
        memory: Returns where its gradient is averaged, laid out as the parameter, or None.
    """

    def __init__(
        self,
        ready: Callable[[torch.Tensor], None],
        memory: Callable[[], torch.Tensor | None],
    ) -> None:
        self._ready, self.memory = ready, memory

    def __call__(self, tensor: torch.Tensor) -> None:
        """Tell that the gradient of a parameter is ready."""
        self._ready(tensor)


class GradientReducer:
    """Averages the gradients of a model's parameters.

    Args:
        named: Names and parameters.
        node: The node in which gradients are averaged.
        reduce_plan: Where they are averaged; may be replaced between two rounds.
        bucket_bytes: Bytes from which a bucket counts as full; see `cut`.
        same_order: Replaces an order (list of indices) by world rank 0's; collective over it.
        callbacks: Called as a backward begins.
        cuts: Which tensors may lie in several buckets.
    """

    def __init__(
        self,
        named: Named,
        node: NodeTransport,
        reduce_plan: ReducePlan,
        *,
        bucket_bytes: int,
        same_order: Callable[[list[int]], list[int]],
        callbacks: BackwardCallbacks,
        cuts: Cuts = "none",
    ) -> None:
        self.named, self.node, self.reduce_plan = named, node, reduce_plan
        self._callbacks = callbacks
        self.bucket_bytes, self._same_order = bucket_bytes, same_order
        self.fresh = False  # a round was finished since somebody set this to False
        self.piled_up = False  # in `no_sync`, since the last round
        self.order: list[int] = []  # of parameters in rows, once these are made
        self._paused = False
        self.rows = FlatGradients(named, node, cuts=cuts)
        self._round = Round()
        self._versions: list[int] = []  # of rows, when the last round was handed over
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(
                GradientHook(partial(self._on_ready, index), partial(self._memory_of, index))
            )
            for index, (_, tensor) in enumerate(named)
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients pile up on this rank; the next backward outside averages their sum."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
            self.fresh, self.piled_up = False, True  # what piled up is not averaged yet

    def _memory_of(self, index: int) -> torch.Tensor | None:
        """Return where a gradient of this rank may be written; None: where autograd would."""
        free = not (self._paused or self.reduce_plan.alone or self._round.aborted)
        buckets = self.rows.buckets_of.get(index, [])
        if not free or index in self._round.ready or any(one.under_way for one in buckets):
            return None
        return self.rows.view_of(index)

    @_disable_dynamo
    def _on_ready(self, index: int, tensor: torch.Tensor) -> None:
        try:
            self._take(index, tensor)
        except Exception as error:
            self._absorb(error)

    def _absorb(self, error: Exception) -> None:
        """Average nothing more, where the step to come takes care of an error; or raise it."""
        if not self._callbacks.absorbs(error):
            raise error
        self.reduce_plan = replace(self.reduce_plan, alone=True)

    def _take(self, index: int, tensor: torch.Tensor) -> None:
        """Take a gradient that is ready."""
        if self._paused:
            return
        if self._round.aborted:
            self._discard_aborted_round()
        now, ready = self._round, self._round.ready
        _check_gradient(self.named[index][0], tensor, again=index in ready)
        if self.reduce_plan.alone:
            setattr(tensor.grad, OURS, True)
            self._callbacks.made(index)
            return
        if not ready:
            if self._callbacks.outdated():
                return
            self._begin(now)
        ready[index] = None
        if not now.behind:
            self._fill(index)

    def _fill(self, index: int) -> None:
        """Start what is full now that this gradient is there."""
        buckets = self.rows.buckets_of.get(index, [])
        for bucket in buckets:
            bucket.missing.discard(index)
        if self.reduce_plan.background is not None:
            self._start_carried(buckets)
        elif buckets:
            self._start_filled()
            self._add_started()

    def _begin(self, now: Round) -> None:
        """Begin a round, which ends with this backward."""
        self._callbacks.begin()
        # Called by autograd when this backward is over, as DDP and FSDP do it.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        # DDP queues its own last: queue behind it, from a callback.
        now.behind = self._callbacks.behind()
        finish = self._end_backward
        ending = FinishCallback(partial(queue, finish) if now.behind else finish)
        now.backward = weakref.ref(ending)
        queue(ending)
        self._begin_background()

    def _begin_background(self) -> None:
        """Begin a round of the background reducer's; all of the last one was collected."""
        if self.reduce_plan.background is not None and self.rows:
            if self.under_way():
                raise ConfigError(
                    "a step must follow each backward where no step waits for all gradients, but "
                    "another backward came first; put all but the last under optimizer.no_sync(), "
                    "or use Gradients(step='model')"
                )
            portions = [(one.portion, one.memory) for one in self.rows.buckets]
            self.reduce_plan.background.begin(portions, world=self.reduce_plan.world)

    def _start_carried(self, buckets: Sequence[Bucket], *, all_of_them: bool = False) -> None:
        """Hand over buckets that are filled."""
        assert self.reduce_plan.background is not None
        for bucket in buckets:
            if not bucket.under_way and (all_of_them or not bucket.missing):
                self._start(bucket)
                bucket.under_way = True
                self.reduce_plan.background.ready(bucket.place)

    def under_way(self) -> bool:
        """Return whether buckets were handed over to a background reducer and not collected."""
        return any(bucket.under_way for bucket in self.rows.buckets)

    def collect(self, params: Iterable[int]) -> None:
        """Block until the means of parameters are there, where a background reducer takes them."""
        background = self.reduce_plan.background
        buckets = [one for index in params for one in self.rows.buckets_of.get(index, [])]
        for bucket in buckets:
            if bucket.under_way:
                assert background is not None, "a reduce plan is replaced between two rounds"
                background.wait(bucket.place)
                bucket.under_way = False
                self.rows.settle(bucket)

    def give_back(self, params: Iterable[int]) -> None:
        """Let parameters have their means again that were reset since these were collected."""
        lacking = {index for index in params if self.rows.named[index][1].grad is None}
        buckets = {b.place: b for index in lacking for b in self.rows.buckets_of.get(index, [])}
        for bucket in buckets.values():
            self.rows.give_back(bucket, lacking)

    def arrived(self, params: Iterable[int]) -> set[int]:
        """Return those of these parameters (indices) whose means are there. Does not block."""
        background, missing = self.reduce_plan.background, set[int]()
        for bucket in self.rows.buckets:
            if bucket.under_way and background is not None and not background.is_back(bucket.place):
                missing.update(bucket.params)
        return set(params) - missing

    def _start_filled(self, *, all_of_them: bool = False) -> None:
        """Start buckets in order, as far as they are filled."""
        for bucket in self.rows.buckets[self._round.started :]:
            if bucket.missing and not all_of_them:
                return
            self._start(bucket)
            self._round.started += 1

    def _start(self, bucket: Bucket) -> None:
        self.rows.fill(bucket, self._round.moved)
        parts = split(bucket.memory.flat.numel(), self.reduce_plan.parts)
        nothing = [Span(0, 0)] * (self.reduce_plan.local_size - self.reduce_plan.parts)
        onward = self.reduce_plan.between is not None or self.reduce_plan.world
        bucket.memory.start([*parts, *nothing], onward=onward, stay=self.reduce_plan.stay)

    def _add_started(self, *, block: bool = False) -> None:
        """Add started buckets in order, as far as all ranks of the node are ready."""
        for bucket in self.rows.buckets[self._round.added : self._round.started]:
            if block:
                bucket.memory.wait_filled()
            total = bucket.memory.add()
            if total is None:
                return
            if self.reduce_plan.between is None:
                bucket.memory.deliver(self.reduce_plan.local_size)
            else:  # delivered behind all others, in one order on every rank
                bucket.finish = (
                    self.reduce_plan.between(total, bucket) if total.numel() else _nothing
                )
            self._round.added += 1

    @_disable_dynamo
    def _end_backward(self) -> None:
        try:
            self.finish_round()
        except Exception as error:
            self._absorb(error)

    @_disable_dynamo
    def finish_round(self) -> None:
        """Average what is left, with zeros for parameters without a gradient.

        Collective over the node, and over the world where parts go between nodes; blocking.
        """
        if self.reduce_plan.alone:
            self.fresh = True
            return
        if not self._round.ready:
            self._callbacks.joins()
        begun = bool(self._round.ready) and bool(self.rows)
        if not self.rows:
            self._make_rows(list(self._round.ready))
        if self.reduce_plan.background is not None:
            self._finish_background(begun=begun)
        else:
            self._finish_buckets()
        self._round, self.fresh, self.piled_up = Round(), True, False
        self._callbacks.made(None)

    def _finish_background(self, *, begun: bool) -> None:
        """Hand over what is left; where steps are whole, collect everything."""
        if not begun:
            self._begin_background()
        self._start_carried(self.rows.buckets, all_of_them=True)
        self._versions = self.rows.versions()
        if self.reduce_plan.whole:
            self.collect(range(len(self.named)))

    def _finish_buckets(self) -> None:
        self._start_filled(all_of_them=True)
        self._add_started(block=True)
        end_round = self.reduce_plan.end_round
        finish_round = _nothing if end_round is None else end_round()
        sent = [bucket for bucket in self.rows.buckets if bucket.finish is not None]
        for bucket in sent:
            assert bucket.finish is not None
            bucket.finish()
            bucket.finish = None
        finish_round()
        for bucket in sent:
            bucket.memory.deliver(1)
        for bucket in self.rows.buckets:
            bucket.memory.wait()
            self.rows.settle(bucket)

    def finish_aborted_round(self) -> None:
        """Finish the round of a backward that raised, where one is left.

        The other ranks' backward raised too, or waits for these gradients. Collective as
        `finish_round`; blocking.
        """
        if self._round.aborted:
            self.finish_round()
            self.collect(range(len(self.named)))
            self.fresh = False

    def _discard_aborted_round(self) -> None:
        """Finish the round of a backward that raised without the gradients that are there now."""
        grads = [tensor.grad for _, tensor in self.named]
        if any(grad is not None and self.owns(grad) for grad in grads):
            raise ConfigError(
                "after a backward that raised gradients must be reset by optimizer.zero_grad(), or "
                "set to None (they may be on their way to other ranks), but they were not"
            )
        for _, tensor in self.named:
            tensor.grad = None
        self.finish_aborted_round()
        for (_, tensor), grad in zip(self.named, grads, strict=True):
            tensor.grad = grad

    def cut(self, bucket_bytes: int) -> None:
        """Cut rows into buckets of another size; between two rounds.

        Does not communicate.
        """
        self.bucket_bytes = bucket_bytes
        self.rows.cut(bucket_bytes)

    def _make_rows(self, ready: Sequence[int]) -> None:
        """Make rows in the order in which gradients became ready; the others last, from behind.

        Collective over the world; blocking.
        """
        rest = [index for index in reversed(range(len(self.named))) if index not in set(ready)]
        order = self._same_order([*ready, *rest])
        self.order = self.order or order
        self.rows.make(self.order, self.bucket_bytes)

    def arrangement(self) -> tuple[list[int], int]:
        """Return what `arrange` takes to lay gradients as here: their order, bytes of a bucket."""
        return self.order, self.bucket_bytes

    def arrange(self, order: Sequence[int], bucket_bytes: int) -> None:
        """Lay gradients as in an earlier run; between two rounds.

        Does not communicate, but all ranks must do it alike.
        """
        moved = bool(order) and list(order) != self.order
        if moved or not self.rows.has_room_for(bucket_bytes):
            self.rows.release()
        if moved:
            self.order = list(order)
        if bucket_bytes != self.bucket_bytes:
            self.cut(bucket_bytes)

    def untouched(self) -> bool:
        """Return whether nobody wrote to gradients since the last round was handed over."""
        return self.rows.in_place() and self._versions == self.rows.versions()

    def owns(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient lies in a bucket, or was left where a backward made it."""
        return getattr(gradient, OURS, False) or self.rows.holds(gradient)

    def close(self) -> None:
        """Take the hooks off and give gradients memory of their own; idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.rows.release()


def _nothing() -> None: ...


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
