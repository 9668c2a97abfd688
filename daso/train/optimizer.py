"""`daso.DASO`: wraps a torch optimizer and keeps its model in step with the other ranks.

It holds the user's optimizer and delegates everything to it; only `step` does more.
``param_groups``, ``state`` and ``defaults`` are the inner optimizer's own objects, always.

Coquelin et al., "Accelerating neural network training with distributed asynchronous and selective
optimization (DASO)", J. Big Data 9:14 (2022), doi 10.1186/s40537-021-00556-1.
"""

import atexit
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch

from daso.comm.mpi import library
from daso.comm.topology import Topology, default
from daso.plan.options import Exchange, Gradients, Settings
from daso.plan.schedule import Act, Fixed, Policy, State, after_batch, after_epoch, drain
from daso.train.meeting import agree_options
from daso.train.metrics import Counts
from daso.train.params import Trained
from daso.train.sync import Sync

__all__ = ["DASO"]

# Where torch keeps hooks on state_dict and load_state_dict.
STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
logger = logging.getLogger("daso")


class DASO(torch.optim.Optimizer):
    """Averages gradients inside a node at every batch, and parameters between nodes seldom.

    Wrapping makes all ranks start from world rank 0's parameters and changes nothing else. With one
    rank it is the inner optimizer, bit for bit.

    Args:
        inner: The optimizer to wrap; make it after moving the model to its device.
        module: The model; gives parameter names and the buffers that `synchronize` averages.
        topology: Who is where; found from MPI if None.
        policy: Chooses how many batches lie between exchanges (skip) and how many an exchange may
            take (wait).
        wire: What crosses between nodes: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"`` or
            ``"int4"``; what rounding loses is kept and sent later.
        merge: How a node takes in a mean that is some batches old: ``"daso"`` weighs its own work
            by the batches waited, ``"delta"`` keeps it whole.
        exchange: How nodes exchange.
        gradients: How gradients are averaged.

    Raises:
        ConfigError: A keyword has no such value.
        LayoutError: Parameters cannot be exchanged, or differ between ranks.
        TopologyError: MPI, launcher and ranks do not fit together.

    Collective over the world; blocking.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        module: torch.nn.Module | None = None,
        topology: Topology | None = None,
        policy: Policy | None = None,
        wire: str = "bf16",
        merge: str = "daso",
        exchange: Exchange | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: it would copy groups and state, and let them drift.
        self.inner = inner
        self._module = module
        self._policy: Policy = Fixed() if policy is None else policy
        self._settings = Settings(
            wire=wire,
            merge=merge,
            exchange=Exchange() if exchange is None else exchange,
            gradients=Gradients() if gradients is None else gradients,
        )
        self._topology = default() if topology is None else topology
        if self._topology.place.size > 1:
            trained = Trained.by(inner, module)
            agree_options(trained, self._topology, self._settings, repr(self._policy))
        self._state = self._policy.start()
        self._history = [(self._state.batch, self._state.skip, self._state.wait)]
        self._sync: Sync | None = None
        self._open(Counts(), log=True)
        # Hooks on state_dict are the inner optimizer's, which makes and loads it.
        for name in STATE_HOOKS:
            setattr(self, name, getattr(inner, name))
        # Step hooks registered here run around the whole step, communication included.
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()

    def _open(self, counts: Counts, *, log: bool = False) -> None:
        if self._topology.place.size == 1:
            return
        trained = Trained.by(self.inner, self._module)
        groups = self.inner.param_groups
        self._trainable = sum(p.requires_grad for group in groups for p in group["params"])
        self._sync = Sync(trained, self._topology, self._settings, counts)
        _open_syncs.add(self._sync)
        acts = () if self._state.synchronous else (Act.ANCHOR,)
        self._sync.perform(acts, self._state)
        if log and self._topology.place.rank == 0:
            logger.info("chosen: %s", self._choices())

    # --- the inner optimizer's own ---------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups, the same object."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state, the same object."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults, the same object."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the inner optimizer's parameters."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state_dict."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state_dict."""
        self.inner.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"DASO({self.inner!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; all ranks must add the same.

        Args:
            param_group: As for the inner optimizer.

        Collective over the world; blocking: exchanges are drained and set up anew.
        """
        if self._sync is None:
            self.inner.add_param_group(param_group)
            return
        self.synchronize()
        self.inner.add_param_group(param_group)
        self._reopen(self._sync)

    def _reopen(self, sync: Sync) -> None:
        """Set up anew for other parameters; nothing may be in flight."""
        sync.counts.exposed_seconds += sync.buckets.node.waited_seconds
        sync.close()
        self._open(sync.counts)

    # --- training --------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the inner optimizer, and start or finish an exchange when one is due.

        Args:
            closure: As for the inner optimizer.

        Returns:
            What the inner optimizer returns.

        Raises:
            NonFiniteError: Too many exchanges in a row met NaN or infinity; on every rank.
            ExchangeError: An exchange failed since the last step.

        Collective over the world in the sense of the schedule.
        """
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (), {"closure": closure})
        self._follow_freezing()
        loss = None
        if self._sync is None or self._sync.before_step(has_closure=closure is not None):
            loss = self.inner.step(closure)
        acts, state = after_batch(self._policy, self._state)
        try:
            if self._sync is not None:
                self._sync.after_step(acts, state)
        finally:  # an error that all ranks got leaves them in step
            self._take(state)
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, (), {"closure": closure})
        return loss

    def _follow_freezing(self) -> None:
        """Take up parameters that were frozen or unfrozen since the last step."""
        if self._sync is None:
            return
        trainable = sum(p.requires_grad for group in self.param_groups for p in group["params"])
        if trainable != self._trainable:
            self.synchronize()
            self._reopen(self._sync)

    def _take(self, state: State) -> None:
        if (state.skip, state.wait) != (self._state.skip, self._state.wait):
            self._history.append((state.batch, state.skip, state.wait))
        self._state = state

    def _perform(self, acts: Sequence[Act], state: State) -> None:
        try:
            if self._sync is not None:
                self._sync.perform(acts, state)
        finally:
            self._take(state)

    def end_epoch(self, loss: float | torch.Tensor) -> float:
        """Tell the schedule that an epoch is over; all nodes agree afterwards.

        Args:
            loss: This rank's mean loss of the epoch.

        Returns:
            The mean over all ranks, the same everywhere.

        Collective over the world; blocking.
        """
        mean = float(loss)
        if self._sync is not None:
            self._sync.meeting.agree_batch(self._state.batch)
            mean = self._sync.meeting.mean(mean)
        self._perform(*after_epoch(self._policy, self._state, mean))
        return mean

    def synchronize(self) -> None:
        """Finish what is in flight, and make parameters and buffers bit-identical on all ranks.

        Call it before evaluating, saving, and at the end. Parameters become the mean of all nodes,
        the module's floating buffers (BatchNorm statistics) the mean of all ranks.

        Collective over the world; blocking.
        """
        if self._sync is not None:
            self._sync.meeting.agree_batch(self._state.batch)
        self._perform(*drain(self._state))
        if self._sync is not None:
            self._sync.meeting.average_buffers()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients pile up on this rank, for accumulation over several backward passes.

        The first backward outside, or `step`, averages the sum.
        """
        if self._sync is None:
            yield
            return
        with self._sync.buckets.no_sync():
            yield

    def close(self) -> None:
        """Stop communicating and give memory back; the optimizer cannot step afterwards.

        What is in flight is finished but not merged: call `synchronize` first to agree. Gradients
        get memory of their own; do not use tensors kept from an earlier ``p.grad``.

        Collective over the world; blocking; idempotent.
        """
        if self._sync is not None:
            self._sync.close()
            _open_syncs.discard(self._sync)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:  # after an error the other ranks may not come: nothing collective
            self.synchronize()
            self.close()

    def report(self) -> dict[str, Any]:
        """Return what was chosen and what happened so far, on this rank.

        Returns:
            Plain values: ``batches``, ``exchanges``, ``dropped``, ``global_bytes_sent`` (bytes, by
            this rank), ``exposed_seconds`` (training thread stood still for other ranks),
            ``skip_history`` (batch, skip, wait), ``events``, and the choices.
        """
        report = {**self._choices(), "batches": self._state.batch, "skip_history": self._history}
        if self._sync is None:
            nothing = {"exchanges": 0, "dropped": 0, "global_bytes_sent": 0, "exposed_seconds": 0.0}
            return {**report, **nothing, "events": []}
        counts = self._sync.counts
        return {
            **report,
            "exchanges": counts.exchanges,
            "dropped": counts.dropped,
            "global_bytes_sent": counts.global_bytes_sent,
            "exposed_seconds": counts.exposed_seconds + self._sync.buckets.node.waited_seconds,
            "events": list(counts.events),
        }

    def _choices(self) -> dict[str, Any]:
        place = self._topology.place
        return {
            "mpi": library(),
            "world": place.size,
            "nodes": place.nodes,
            "node_sizes": list(place.node_sizes),
            "lanes": place.lanes,
            "node_transport": "none" if place.size == 1 else "shared memory",
            "wire": self._settings.wire,
            "merge": self._settings.merge,
            "delta_reduce": self._settings.delta_reduce,
            "gradient_reduce": self._settings.gradient_reduce,
            "policy": repr(self._policy),
        }


_open_syncs: "weakref.WeakSet[Sync]" = weakref.WeakSet()


@atexit.register
def _stop_engines() -> None:
    """Stop the threads before MPI is finalized; nothing collective: ranks may be missing."""
    for sync in list(_open_syncs):
        sync.links.engine.abandon()
