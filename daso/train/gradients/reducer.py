"""Gradients in flat buckets that are averaged during backward.

A hook on every parameter runs when its gradient is ready. A full bucket is started at once;
whenever a hook runs, buckets for which every rank of the node is ready are added. The remaining
buckets are finished before ``backward()`` returns, so that ``.grad`` then is the mean, as with DDP.
One such pass over all buckets is a *round*.

If every node has a single rank, gradients stay where autograd put them until a phase that averages
them between nodes.

`daso.train.gradients.buckets` describes the memory of gradients and their buckets.

With a background reducer (`daso.train.gradients.background`), buckets start in the order in which
they fill, other threads average them, and each is collected separately. With portions
(`daso.train.gradients.priority`), every portion is a bucket, and a large tensor has several.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from daso.comm.node.base import NodeTransport
from daso.errors import ConfigError
from daso.plan.layout import Span, split
from daso.torch_private import disable_dynamo, queue_callback
from daso.train.gradients.averaging import BackwardCallbacks, Phase, ReducePlan
from daso.train.gradients.background import BackgroundReducer, CarriedBuckets
from daso.train.gradients.buckets import FlatGradients, check_gradient
from daso.train.gradients.cuts import Bucket, Cuts
from daso.train.model.params import Named

LOCAL_GRAD_MARK = "_daso_local_grad"  # attribute of a gradient that no bucket holds


@dataclass(slots=True)
class Round:
    """Progress of a round."""

    ready: dict[int, None] = field(default_factory=dict)  # parameters, in the order they came
    moved: set[int] = field(default_factory=set)  # parameters whose gradient lies in its row
    started: int = 0  # buckets filled and started; buckets go in order
    added: int = 0  # of them, added
    runs_after_ddp: bool = False  # another reducer may run until this backward is over
    backward: Callable[[], object] = object  # returns None once it is over, also if it raised

    @property
    def aborted(self) -> bool:
        """Return whether its backward raised."""
        return bool(self.ready) and self.backward() is None


class FinishCallback:
    """Callback at the end of a backward; autograd drops it if the backward raises."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        """Call the function."""
        self._call()


class GradientHook:
    """Hook that reports a ready gradient, and offers memory to code that writes gradients.

    Args:
        ready: Called with the parameter.
        memory: Returns the memory that its gradient is averaged in, shaped as the parameter, or
            None.
    """

    def __init__(
        self,
        ready: Callable[[torch.Tensor], None],
        memory: Callable[[], torch.Tensor | None],
    ) -> None:
        self._ready, self.memory = ready, memory

    def __call__(self, tensor: torch.Tensor) -> None:
        """Report that the gradient of a parameter is ready."""
        self._ready(tensor)


class GradientReducer:
    """Averages the gradients of a model's parameters.

    Args:
        named: Names and parameters.
        node: The node in which gradients are averaged.
        plan_of: Returns the plan of a phase.
        bucket_bytes: Bytes from which a bucket counts as full; see `FlatGradients.cut`.
        same_order: Replaces an order (list of indices) by world rank 0's; collective.
        callbacks: Called when a backward begins.
        cuts: Tensors that may lie in several buckets.
    """

    def __init__(
        self,
        named: Named,
        node: NodeTransport,
        plan_of: Callable[[Phase], ReducePlan],
        *,
        bucket_bytes: int,
        same_order: Callable[[list[int]], list[int]],
        callbacks: BackwardCallbacks,
        cuts: Cuts = "none",
    ) -> None:
        self.named, self.node, self._plan_of = named, node, plan_of
        self._phase, self._plan = Phase.NODE, plan_of(Phase.NODE)
        self._failed = False  # the next step handles an error: nothing is averaged until then
        # Gradients stay on this rank: nothing is averaged.
        self.averages_nothing = self._plan.averages_nothing
        self._callbacks = callbacks
        watched: tuple[int | None, Callable[[], None]] = callbacks.watched or (None, _nothing)
        self._watched, self._on_watched = watched
        self._same_order = same_order
        self.round_finished = False  # since the last step
        self.has_unreduced_grads = False  # of `no_sync`, since the last round
        self.rounds = 0  # that began, and that every rank joins
        self.backwards = 0  # that began a round
        self._addresses = _addresses(named)  # of parameters, at the last check of their layout
        self._paused = False
        self.rows = FlatGradients(named, node, bucket_bytes, cuts=cuts)
        self.carried = CarriedBuckets(self.rows)  # by a background reducer
        self._round = Round()
        with ExitStack() as hooks:
            for index, (_, tensor) in enumerate(named):
                ready, memory = partial(self._on_ready, index), partial(self._memory_of, index)
                handle = tensor.register_post_accumulate_grad_hook(GradientHook(ready, memory))
                hooks.callback(handle.remove)
            self._hooks = hooks.pop_all()

    # --- phases ------------------------------------------------------------------------------

    def set_phase(self, phase: Phase) -> None:
        """Set the ranks over which the next rounds average; between two rounds."""
        plan = self._plan_of(phase)
        if plan != self._plan:  # the last round was averaged otherwise
            self.round_finished = False
        self._phase, self._plan, self._failed = phase, plan, False
        self.averages_nothing = plan.averages_nothing

    def begin_step(self, phase: Phase) -> None:
        """Forget the round of the last step, and set the phase of the next."""
        if phase is not self._phase or self._failed:
            self.set_phase(phase)
        self.round_finished = False

    def begin_closure(self) -> None:
        """Forget the round that the last call of a closure used."""
        self.round_finished = False

    def skip_round(self, *, averaged: bool) -> None:
        """Set whether gradients count as averaged, since another reducer left them."""
        self.round_finished = averaged

    @property
    def in_round(self) -> bool:
        """Return whether a round began that no step has used yet."""
        return bool(self._round.ready) or self.round_finished

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank; the next backward outside averages their sum."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
            self.round_finished, self.has_unreduced_grads = False, True

    def _memory_of(self, index: int) -> torch.Tensor | None:
        """Return the memory for a gradient of this rank; None: autograd allocates it."""
        free = not (self._paused or self.averages_nothing or self._round.aborted)
        buckets = self.rows.buckets_of.get(index, [])
        if not free or index in self._round.ready or any(bucket.under_way for bucket in buckets):
            return None
        return self.rows.view_of(index)

    @disable_dynamo
    def _on_ready(self, index: int, tensor: torch.Tensor) -> None:
        try:
            self._take(index, tensor)
        except Exception as error:
            self._absorb(error)

    def _absorb(self, error: Exception) -> None:
        """Stop averaging if the next step handles an error; otherwise raise it."""
        if not self._callbacks.absorbs(error):
            raise error
        self._failed = self.averages_nothing = True

    def _take(self, index: int, tensor: torch.Tensor) -> None:
        """Take a gradient that is ready."""
        if self._paused:
            return
        if self._round.aborted:
            self._discard_aborted_round()
        now, ready = self._round, self._round.ready
        check_gradient(self.named[index][0], tensor, again=index in ready)
        if self.averages_nothing:
            setattr(tensor.grad, LOCAL_GRAD_MARK, True)
            if index == self._watched:
                self._on_watched()
            return
        if not ready:
            if self._is_outdated():
                return
            self._begin(now)
        ready[index] = None
        if not now.runs_after_ddp:
            self._fill(index)

    def _fill(self, index: int) -> None:
        """Start the buckets that this gradient has filled."""
        buckets = self.rows.buckets_of.get(index, [])
        for bucket in buckets:
            bucket.missing.discard(index)
        if self._plan.background is not None:
            self.carried.start(self._plan.background, buckets, self._start)
        elif buckets:
            self._start_filled()
            self._add_started()

    def _is_outdated(self) -> bool:
        """Return whether the layout of parameters changed since rows were made."""
        addresses = _addresses(self.named)
        if addresses == self._addresses:
            return False
        outdated = self._callbacks.outdated()
        if not outdated:
            self._addresses = addresses
        return outdated

    def _begin(self, now: Round) -> None:
        """Begin a round, which ends with this backward."""
        if self._callbacks.begin is not None:
            self._callbacks.begin()
        self.rounds += self._plan.joined_by_all
        self.backwards += 1
        # DDP queues its own last: queue behind it, from a callback.
        now.runs_after_ddp = _has_process_group() and self._callbacks.runs_after_ddp()
        finish = self._end_backward
        ending = FinishCallback(partial(queue_callback, finish) if now.runs_after_ddp else finish)
        now.backward = weakref.ref(ending)
        queue_callback(ending)  # called by autograd when it is over, as DDP and FSDP do it
        if self._plan.background is not None and self.rows:
            self.carried.begin(self._plan.background, world=self._plan.world)

    def _start_filled(self, *, all_of_them: bool = False) -> None:
        """Start buckets in order, as far as they are filled."""
        for bucket in self.rows.buckets[self._round.started :]:
            if bucket.missing and not all_of_them:
                return
            self._start(bucket)
            self._round.started += 1

    def _start(self, bucket: Bucket) -> None:
        self.rows.fill(bucket, self._round.moved)
        parts = split(bucket.memory.flat.numel(), self._plan.num_shards)
        nothing = [Span(0, 0)] * (self._plan.local_size - self._plan.num_shards)
        onward = self._plan.between is not None or self._plan.world
        bucket.memory.mark_ready([*parts, *nothing], onward=onward, stay=self._plan.keep_on_device)

    def _add_started(self, *, block: bool = False) -> None:
        """Add started buckets in order, as far as all ranks of the node are ready."""
        for bucket in self.rows.buckets[self._round.added : self._round.started]:
            if block:
                bucket.memory.wait_filled()
            total = bucket.memory.reduce()
            if total is None:
                return
            if self._plan.between is None:
                bucket.memory.publish(self._plan.local_size)
            else:  # delivered behind all others, in one order on every rank
                bucket.finish = self._plan.between(total, bucket) if total.numel() else _nothing
            self._round.added += 1

    @disable_dynamo
    def _end_backward(self) -> None:
        try:
            self.finish_round()
        except Exception as error:
            self._absorb(error)

    @disable_dynamo
    def finish_round(self) -> None:
        """Average the remaining buckets, with zeros for parameters without a gradient.

        Collective over the node, and over the world where parts go between nodes; blocking.
        """
        if self.averages_nothing:
            self.round_finished = True
            return
        if not self._round.ready:  # the step begins it
            self.rounds += self._plan.joined_by_all
        begun = bool(self._round.ready) and bool(self.rows)
        if not self.rows:
            self._make_rows(list(self._round.ready))
        if self._plan.background is not None:
            self._finish_background(self._plan.background, begun=begun)
        else:
            self._finish_buckets()
        self._round, self.round_finished, self.has_unreduced_grads = Round(), True, False
        self._on_watched()

    def _finish_background(self, background: BackgroundReducer, *, begun: bool) -> None:
        """Hand over the remaining buckets, and collect all if steps are whole."""
        if not begun and self.rows:
            self.carried.begin(background, world=self._plan.world)
        self.carried.start(background, self.rows.buckets, self._start, all_of_them=True)
        self.rows.note_versions()
        if self._plan.wait_in_backward:
            self.carried.collect(range(len(self.named)))

    def _finish_buckets(self) -> None:
        self._start_filled(all_of_them=True)
        self._add_started(block=True)
        end_round = self._plan.end_round
        finish_round = _nothing if end_round is None else end_round()
        sent = [bucket for bucket in self.rows.buckets if bucket.finish is not None]
        for bucket in sent:
            assert bucket.finish is not None
            bucket.finish()
            bucket.finish = None
        finish_round()
        for bucket in sent:
            bucket.memory.publish(1)
        for bucket in self.rows.buckets:
            bucket.memory.wait()
            self.rows.deliver(bucket)

    def finish_aborted_round(self) -> None:
        """Finish the round of a backward that raised, if it is not finished.

        The other ranks' backward raised too, or waits for these gradients. Collective as
        `finish_round`; blocking.
        """
        if self._round.aborted:
            self.finish_round()
            self.carried.collect(range(len(self.named)))
            self.round_finished = False

    def _discard_aborted_round(self) -> None:
        """Finish the round of a backward that raised, without the current gradients."""
        grads = [tensor.grad for _, tensor in self.named]
        if any(grad is not None and self.owns(grad) for grad in grads):
            raise ConfigError(
                "after a backward that raised gradients must be reset by optimizer.zero_grad(), or "
                "set to None (they may be on their way to other ranks), but they were not",
                code="gradients-kept-after-error",
            )
        for _, tensor in self.named:
            tensor.grad = None
        self.finish_aborted_round()
        for (_, tensor), grad in zip(self.named, grads, strict=True):
            tensor.grad = grad

    def _make_rows(self, ready: Sequence[int]) -> None:
        """Make rows in the order in which gradients became ready; the others last, in reverse.

        Collective over the world; blocking.
        """
        rest = [index for index in reversed(range(len(self.named))) if index not in set(ready)]
        self.rows.make(self._same_order([*ready, *rest]))

    def owns(self, gradient: torch.Tensor) -> bool:
        """Return whether this reducer averaged a gradient or left it on this rank."""
        return getattr(gradient, LOCAL_GRAD_MARK, False) or self.rows.holds(gradient)

    def close(self) -> None:
        """Remove the hooks and give gradients separate memory; idempotent."""
        self._hooks.close()
        self.rows.release()


def _nothing() -> None: ...


def _addresses(named: Named) -> list[int]:
    return [tensor.data_ptr() for _, tensor in named]


def _has_process_group() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()
