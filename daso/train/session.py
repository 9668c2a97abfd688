"""One model's training over all ranks: what `daso.DASO` and `daso.attach` have in common.

The two doors call `begin` before and `end` after the inner optimizer's step; everything else here
is what they offer beside it.

Coquelin et al., "Accelerating neural network training with distributed asynchronous and selective
optimization (DASO)", J. Big Data 9:14 (2022), doi 10.1186/s40537-021-00556-1.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any, TypeVar, cast

import torch

from daso.checks import Rule, check, format_value
from daso.comm.collectives import gather
from daso.comm.reclaim import count_open, forget, keep, reclaim
from daso.comm.topology import RankInfo, Topology, default
from daso.errors import CheckpointError, ConfigError
from daso.plan.header import Tally
from daso.plan.schedule import (
    Action,
    Measurements,
    State,
    after_batch,
    after_epoch,
    after_exchange,
    begin,
    drain,
)
from daso.train import registry
from daso.train.coordinator import check_same_options
from daso.train.deltas.exchange import Exchanges
from daso.train.inner.grad_scaler import Scaling, is_probe
from daso.train.inner.step_restoration import StepRestoration
from daso.train.listeners import Listener, Listeners
from daso.train.metrics import History, Metrics, Report
from daso.train.model.misfit import Misfit, misfit, remedy
from daso.train.model.one_copy import KEY, OneCopy, is_saving_one_copy, packed, refuse, unpacked
from daso.train.model.params import Trained, check_same_layout
from daso.train.setup import Setup, check_format
from daso.train.startup import warn_of_slow_kernels
from daso.train.synchronizer import SessionCallbacks, Synchronizer

__all__ = ["Session"]

logger = logging.getLogger("daso")
Closure = Callable[[], Any]
Result = TypeVar("Result")
LOSS = Rule(
    "a number, or a tensor of one",
    lambda one: (
        one.numel() == 1 and not one.is_complex()
        if isinstance(one, torch.Tensor)
        else isinstance(one, int | float) or hasattr(one, "__float__")
    ),
)
CLOSED = "was closed"
MANY = 10  # open optimizers of which something is said
PARTS = {"schedule", "history", "shape", "sync"}  # of a session's state

# Who evaluates may be in inference mode, where tensors are made that no other thread may write to.
_as_in_training = torch.inference_mode(mode=False)


class Session:
    """Keeps a model in step with the other ranks around the steps of an optimizer.

    Args:
        inner: The user's optimizer.
        setup: How.
        topology: Who is where; found from MPI if None.

    Collective over the world; blocking.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, setup: Setup, topology: Topology | None
    ) -> None:
        self.inner, self.setup, self._topology = inner, setup, topology
        self.schedule = setup.start()
        self._history = History.of(self.schedule)
        self._sync: Synchronizer | None = None
        self._stale = False  # parameters were loaded from elsewhere: set up anew before going on
        self._loaded = False  # a state, before it opened
        self._measured: tuple[Tally, int] | None = None  # by the original, where this is a copy
        self._probing = False
        self._over: str | None = None  # why nothing may be done any more
        # Choices and the reason for skip, as the report had them when this was closed.
        self._final_report: tuple[dict[str, Any], str] | None = None
        self._number = 0  # among those that are open
        self._joined = 0  # batch at which all nodes had the same optimizer state
        self._one_copy: OneCopy | None = None
        self._listeners = Listeners()

    @classmethod
    def opened(
        cls, inner: torch.optim.Optimizer, setup: Setup, topology: Topology | None
    ) -> "Session":
        """Return a session that has agreed with all ranks. Collective over the world; blocking."""
        session = cls(inner, setup, topology)
        if session.topology.reserve is not None and not setup.settings.exchange.elastic:
            raise ConfigError(
                "spare ranks take the place of lost ones under Exchange(elastic=True), but this "
                "optimizer does not go on without lost ranks; say so, or leave --spares out"
            )
        rank_info = session.topology.rank_info
        if rank_info.world_size == 1:
            return session
        session._meet()
        session._reclaim()
        trained = Trained.by(inner, setup.module)
        registry.take_over(trained, session.topology)
        check_same_options(trained, session.topology, setup.text())
        session._open(Metrics())
        warn_of_slow_kernels(trained, session.topology, setup.settings)
        if rank_info.rank == 0:
            session._tell_what_was_made()
        return session

    def _meet(self) -> None:
        """Wait for all ranks to come here. Collective over the world; blocking."""
        self.topology.rendezvous("wrap an optimizer", self.setup.settings.exchange.timeout_seconds)

    def _reclaim(self) -> None:
        """Close optimizers that were dropped on all ranks. Collective over the world; blocking."""
        limit = self.setup.settings.exchange.timeout_seconds
        self._number = reclaim(self.topology, lambda word: gather(self.topology, word, limit))
        number = 1 + count_open(self.topology)
        if number % MANY == 0 and self.topology.rank == 0:
            logger.warning(
                "%d optimizers are open, and each holds communicators, of which MPI has few, and a "
                "thread: close() those that are not used",
                number,
            )

    def _tell_what_was_made(self) -> None:
        rank_info = self.topology.rank_info
        logger.info(
            "%d ranks on %d nodes; chosen: %s",
            rank_info.world_size,
            rank_info.nodes,
            self._choices(),
        )
        if rank_info.nodes == 1:
            logger.warning(
                "%d ranks on 1 node: gradients are averaged at every batch, and nothing will cross "
                "between nodes",
                rank_info.world_size,
            )

    @classmethod
    def copied(
        cls,
        inner: torch.optim.Optimizer,
        setup: Setup,
        schedule: State,
        measured: tuple[Tally, int] | None,
        topology: Topology | None,
    ) -> "Session":
        """Return the session of a copy of an optimizer; it opens at the first step."""
        session = cls(inner, setup, topology)
        batch, session._measured = schedule.batch, measured
        session.schedule = replace(schedule, sent=None, last=batch, agreed=batch)
        session._stale = True
        return session

    @property
    def topology(self) -> Topology:
        """Who is where."""
        if self._topology is None:
            self._topology = default()
        return self._topology

    def warns(self) -> bool:
        """Return whether this rank says what is wrong with this training, which goes on."""
        sync = self._sync
        return sync is not None and sync.coordinator.leads and not (self._over or sync.over)

    @property
    def _place(self) -> RankInfo | None:
        """Who is where, if that was asked already."""
        return None if self._topology is None else self._topology.rank_info

    def _open(self, metrics: Metrics, *acts: Action, looked: bool = False) -> None:
        if self.topology.world_size == 1:
            return
        trained = Trained.by(self.inner, self.setup.module)
        settings = self.setup.settings
        self._sync = Synchronizer(
            trained,
            self.topology,
            settings,
            metrics,
            outer=self.setup.outer,
            callbacks=SessionCallbacks(
                absorbs=_weakly(weakref.WeakMethod(self._absorbs)),
                elsewhere=registry.trained_ids,
            ),
            looked=looked,
        )
        registry.add(self._sync)
        keep(self, self.topology, self._number, registry.closer_of(self._sync))
        try:
            self._start(self._sync, acts)
        except BaseException:  # its communicators are given back with the next wrap
            self._sync.unhook()
            raise

    def _start(self, sync: Synchronizer, acts: Sequence[Action]) -> None:
        """Do what comes first. Collective over the world; blocking."""
        if self._one_copy is None and self.setup.module is not None:
            self._one_copy = OneCopy(self.setup.module, self._differs, self.warns)
        self._begin()
        anchor = () if self.schedule.synchronous else (Action.ANCHOR,)
        sync.perform((*acts, *anchor), self.schedule)
        sync.start_watch()  # the first step does not hold the setup

    def _absorbs(self, _: Exception) -> bool:
        """Return whether the next step takes care of an error that a backward met."""
        return False

    def _begin(self) -> None:
        """Tell the schedule what the inner optimizer is like."""
        restoration = self.step_restoration
        memory = 0.0 if restoration is None else restoration.memory
        may_hide = restoration is not None and self.setup.settings.may_hide
        named = [] if self._sync is None else self._sync.trained.named
        began = begin(
            self.setup.policy,
            self.schedule,
            nodes=self.topology.rank_info.nodes,
            memory=memory,
            may_hide=may_hide,
            small_share=0.0 if self._exchanges is None else self._exchanges.small_share,
            numel=sum(tensor.numel() for _, tensor in named),
        )
        self._take(began)
        if began.batch == 0:
            self._history = History.of(self.schedule)

    def _reopen(self, sync: Synchronizer, *acts: Action) -> None:
        """Set up anew, as for other parameters; nothing may be in flight."""
        if self.setup.outer is not None and self.topology.rank == 0:
            logger.warning("parameters changed: the outer optimizer starts anew")
        sync.settle()
        sync.metrics.exposed_before += sync.buckets.node.idle_seconds
        looked = sync.looked
        fresh = sync.is_averaged_everywhere()
        registry.close(sync)
        forget(self)
        self._open(sync.metrics, *acts, looked=looked)
        if self._sync is not None:
            self._sync.writes.history = sync.writes.history
            self._sync.take_gradients_of(sync, averaged=fresh)

    # --- one step ----------------------------------------------------------------------------

    def begin(self, closure: Closure | None, scaling: Scaling) -> tuple[bool, Closure | None]:
        """Get ready for the inner optimizer's step.

        Collective over the world in the sense of the schedule.
        """
        self._check_open()
        probes = is_probe(self.inner) if self._sync is None else self._sync.is_probe()
        self._probing = closure is None and probes
        if self._probing:
            return True, closure
        self._freshen()
        self._follow_changes()
        if self._sync is None:
            return scaling.unscale(self.inner), closure
        if closure is not None:
            self._sync.before_closure()
            return True, self._averaged(closure)
        restoration = self.scaling
        try:
            if restoration is not None:  # layers may step in there, without hooks
                restoration.begin(self.schedule.step_gain)
            return self._sync.before_step(scaling), None
        finally:
            if restoration is not None:
                restoration.end()

    @property
    def step_restoration(self) -> StepRestoration | None:
        """What makes steps longer between exchanges; None where nothing does."""
        return None if self._exchanges is None else self._exchanges.restorations.always

    @property
    def scaling(self) -> StepRestoration | None:
        """The restoration that scales rates, also of a linear optimizer with clipped gradients."""
        found = self._exchanges
        return None if found is None else found.restorations.always or found.restorations.clipped

    @property
    def measured(self) -> tuple[Tally, int] | None:
        """What the next exchange will tell of the last one; a copy goes on from it."""
        return self._measured if self._exchanges is None else self._exchanges.measured

    @property
    def _exchanges(self) -> Exchanges | None:
        return None if self._sync is None else self._sync.exchanges

    def scaled_lr(self) -> AbstractContextManager[None]:
        """Let the inner optimizer step as much longer as the mean over nodes is too short."""
        restoration = self.scaling
        return restoration.scaled(self.schedule.step_gain) if restoration else nullcontext()

    @property
    def was_closed(self) -> bool:
        """Whether `close` was called."""
        return self._over == CLOSED

    def _check_open(self) -> None:
        """Refuse what comes after the end."""
        over = self._over or (self._sync is not None and self._sync.over)
        if over:
            raise ConfigError(
                f"an optimizer must be open to train and to synchronize, but this one {over}; wrap "
                f"the inner optimizer again"
            )

    def end(self) -> None:
        """Count a step, and start or finish an exchange when one is due.

        Collective over the world in the sense of the schedule; blocks for receives.
        """
        if self._probing:
            return
        acts, state = after_batch(self.setup.policy, self.schedule)
        measurements = None
        try:
            if self._sync is not None:
                measurements = self._sync.after_step(acts, state)
        finally:  # an error that all ranks got leaves them in step
            self._take(state)
        self._learn(measurements)
        self._follow_writes()
        if self._sync is not None:
            self._sync.mark_writes(has_modes=_has_modes(self.inner))

    def _averaged(self, closure: Closure) -> Closure:
        """Return a closure whose loss is the same on all ranks whose gradients are averaged.

        Optimizers that call it again depending on the loss (LBFGS) do so equally often then.
        """

        def averaged() -> Any:
            sync, restoration = self._sync, self.scaling
            assert sync is not None
            sync.buckets.fresh = False
            if restoration is not None:
                restoration.end()  # users see their own learning rate
            loss = closure()
            if restoration is not None:
                restoration.begin(self.schedule.step_gain)
            sync.after_closure()
            return loss if loss is None else sync.mean_loss(loss)

        return averaged

    def _follow_changes(self) -> None:
        """Take up parameters that were frozen, unfrozen or laid out anew since the last step."""
        changed = self._sync is not None and self._sync.changes.trainable_changed()
        self._follow_layout()
        if self._sync is not None and changed:
            for _, param in self._sync.trained.named:
                if not param.requires_grad:  # it would step by a gradient of each node's own
                    param.grad = None
            if not any(
                p.requires_grad for group in self.inner.param_groups for p in group["params"]
            ):
                return  # for a while: there is nothing to set up for
            self.synchronize()
            # What was frozen between exchanges has a state of each node's own.
            self._reopen(self._sync, *((Action.JOIN,) if self.schedule.synchronous else ()))

    def _follow_layout(self) -> None:
        """Take up parameters that got another shape, type or order in memory.

        What is in flight has the old one: it is left, and all ranks go on from their mean.
        """
        sync = self._sync
        if sync is None or not sync.changes.layout_changed():
            return
        sync.coordinator.check_same_batch(self.schedule.batch)
        sync.forget()
        check_same_layout(sync.trained, self.topology)
        self._go_on_from_the_mean(sync)

    def _follow_writes(self) -> None:
        """Start again from parameters that the program wrote between steps, with all nodes.

        An exchange said so, so all ranks are behind the same step. Collective over the world.
        """
        sync = self._sync
        if sync is None or sync.exchanges is None or not sync.exchanges.restart_due:
            return
        if self.topology.rank == 0:
            logger.warning(
                "the program wrote parameters between steps, up to batch %d: nodes start again "
                "from them, and leave what was exchanged meanwhile",
                self.schedule.batch,
            )
        self._go_on_from_the_mean(sync)

    def _go_on_from_the_mean(self, sync: Synchronizer) -> None:
        """Leave what is in flight, and let all ranks go on from the mean of their parameters."""
        sync.forget()
        sync.coordinator.equalize(expected=True)
        batch = self.schedule.batch
        self._take(replace(self.schedule, sent=None, last=batch, agreed=batch))
        self._reopen(sync)

    def flush(self) -> None:
        """Take what is left of a step that is taken layer by layer, or of a backward that raised.

        Collective over the world; blocking.
        """
        if self._sync is not None:
            self._sync.buckets.finish_aborted_round()
            self._sync.flush()

    def zero_grad(self, set_to_none: bool) -> None:
        """Reset gradients, those that a step still needs once it is taken."""
        if self._sync is not None:
            self._sync.buckets.finish_aborted_round()
        layers = None if self._sync is None else self._sync.layers
        if layers is None or not layers.zero_grad(set_to_none):
            self.inner.zero_grad(set_to_none)

    def _freshen(self) -> None:
        """Set up anew where a checkpoint of another world was loaded, or a copy was never open."""
        if not self._stale:
            return
        self._stale = False
        if self._sync is None:
            self._meet()
            self._reclaim()
            self._open(Metrics(), *((Action.JOIN,) if self._loaded else ()))
            if self._measured is not None and self._exchanges is not None:
                self._exchanges.measured = self._measured
        else:
            self._reopen(self._sync, Action.JOIN)

    def _take(self, state: State) -> None:
        self._history.take(self.schedule, state)
        before, self.schedule = self.schedule, state
        explains = self._exchanges is not None and hasattr(self.setup.policy, "why")
        if before.synchronous != state.synchronous and explains and self.warns():
            logger.info("from batch %d: %s", state.batch, self._why())

    def _perform(self, acts: Sequence[Action], state: State) -> None:
        measurements = None
        if self._exchanges is not None:
            self._exchanges.note_writes()
            if not acts and not state.synchronous:
                self._exchanges.agree_on_writes()
        try:
            if self._sync is not None:
                measurements = self._sync.perform(acts, state)
        finally:
            self._take(state)
        self._learn(measurements)
        self._follow_writes()
        if self._sync is not None:
            self._sync.mark_writes(has_modes=_has_modes(self.inner))

    def _learn(self, measurements: Measurements | None) -> None:
        """Let the policy choose by what an exchange told."""
        if measurements is not None:
            acts, state = after_exchange(self.setup.policy, self.schedule, measurements)
            try:
                if self._sync is not None:
                    self._sync.perform(acts, state)
            finally:
                self._take(state)
            if self._sync is not None:
                self._listeners.tell(
                    state, measurements, self._sync.metrics, self._sync.exposed_seconds
                )

    # --- beside steps ------------------------------------------------------------------------

    @_as_in_training
    def add_param_group(self, add: Callable[[], None]) -> None:
        """Add parameters; all ranks must add the same.

        Collective over the world; blocking: exchanges are drained and set up anew.
        """
        self._check_open()
        if self._sync is None:
            add()
            return
        self._follow_changes()  # or what was frozen or unfrozen would be taken for known
        self.synchronize()
        add()
        self._reopen(self._sync)

    @_as_in_training
    def end_epoch(self, loss: float | torch.Tensor) -> float:
        """Tell the schedule that an epoch is over; all nodes agree afterwards.

        Args:
            loss: This rank's mean loss of the epoch.

        Returns:
            The mean over all ranks, the same everywhere.

        Collective over the world; blocking.
        """
        check("loss", loss, LOSS)
        self._check_open()
        self._freshen()
        self.flush()
        self._follow_layout()
        mean = float(loss)
        if self._sync is not None:
            self._sync.coordinator.check_same_batch(self.schedule.batch)
            mean = self._sync.coordinator.mean(mean)
        self._perform(*after_epoch(self.setup.policy, self.schedule, mean))
        return mean

    @_as_in_training
    def synchronize(self, *, optimizer_state: bool = False) -> None:
        """Finish what is in flight, and make parameters and buffers bit-identical on all ranks.

        Call it before evaluating, saving, and at the end. Parameters become the mean of all nodes;
        the module's floating buffers (BatchNorm statistics), and frozen parameters that ranks
        changed differently, become the mean of all ranks.

        Args:
            optimizer_state: Make the inner optimizer's state (its moments) the mean of all ranks
                too, as `torch.distributed.checkpoint` needs, which saves one copy for all. Always
                with an optimizer that has ``eval()`` (schedule-free), which uses its state.

        Collective over the world; blocking.
        """
        self._check_open()
        self._freshen()
        self.flush()
        self._follow_layout()
        if self._sync is None:
            self._perform(*drain(self.schedule))
            return
        self._sync.coordinator.check_same_batch(self.schedule.batch)
        self._perform(*drain(self.schedule))
        if self._exchanges is not None and self.schedule.synchronous:
            self._sync.coordinator.look_for_slowest()  # no exchange of parameters tells it
        self._sync.equalize(self.schedule)
        self._sync.coordinator.others.equalize()
        self._sync.mark_writes(has_modes=_has_modes(self.inner))
        # `eval()` of a schedule-free optimizer makes parameters out of its state.
        if optimizer_state or _has_modes(self.inner):
            self._sync.coordinator.join()
            self._joined = self.schedule.batch

    def join(self) -> int:
        """Return the batches done; a spare waits before that until it is needed."""
        return self.schedule.batch

    def together(self, call: Callable[[], Result]) -> Result:
        """Call a function in which all ranks meet, again where a rank was lost meanwhile."""
        return call()

    def on_exchange(self, call: Listener) -> Callable[[], None]:
        """Call a function after each exchange; return what takes it off again."""
        remove = self._listeners.add(call)
        self._begin_telling()
        return remove

    def _begin_telling(self) -> None:
        if self._sync is not None:
            self._listeners.begin(self._sync.metrics, self._sync.exposed_seconds)

    def _differs(self) -> bool:
        """Return whether nodes hold different parameters now."""
        return self._exchanges is not None and (self._stale or not self.schedule.alike)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model be the mean of all ranks for a while; afterwards it is this rank's again.

        Collective over the world; blocking, both at its beginning and its end.
        """
        self._check_open()
        self._freshen()
        self.flush()
        self._follow_layout()
        if self._sync is None:
            yield
            return
        sync, coordinator = self._sync, self._sync.coordinator
        sync.note_agreed()
        if sync.exchanges is not None:
            sync.exchanges.note_writes(goes_on=True)
        # A context of its own: one object is not entered by several threads at a time.
        with torch.inference_mode(mode=False), ExitStack() as stack:
            coordinator.check_same_batch(self.schedule.batch)
            stack.enter_context(coordinator.averaged())
            until_the_end = stack.pop_all()
        with sync.writes.paused(), until_the_end:
            yield

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

    @_as_in_training
    def close(self) -> None:
        """Stop communicating and give memory back.

        What is in flight is finished but not merged: call `synchronize` first to agree. Gradients
        get memory of their own.

        Collective over the world; blocking; idempotent.
        """
        if self._over is None:
            self._final_report = self._choices(), self._why()
        self._over = CLOSED if self._over is None else self._over
        if self._one_copy is not None:
            self._one_copy.close()
        if self._sync is not None:
            try:
                self._sync.flush()
            finally:
                registry.close(self._sync)
                forget(self)

    def report(self) -> Report:
        """Return what was chosen and what happened so far, on this rank."""
        chooses = self.setup.settings.gradients.wire == "auto"
        report: dict[str, Any] = {
            **self._choices(),
            "batches": self.schedule.batch,
            "in_flight": self.schedule.sent is not None,
            "skip_history": list(self._history.skip),
            "small_history": list(self._history.small),
            "wide_history": list(self._history.wide) if chooses else [(0, False)],
            "skip_because": self._why(),
            "gain": self.schedule.gain,
            "measurements": asdict(self.schedule.measurements),
        }
        metrics = self._counted() or Metrics()
        exposed_seconds = metrics.exposed_seconds
        if self._sync is not None:
            report["bucket_bytes"] = self._sync.buckets.bucket_bytes
            exposed_seconds = self._sync.exposed_seconds
        report |= {
            "exchanges": metrics.exchanges,
            "small_exchanges": metrics.small_exchanges,
            "dropped": metrics.dropped,
            "global_bytes_sent": metrics.global_bytes_sent,
            "exposed_seconds": exposed_seconds,
            "slowest": metrics.slowest and asdict(metrics.slowest),
            "events": list(metrics.events),
        }
        return cast(Report, report)

    def _counted(self) -> Metrics | None:
        """Return what was counted; None where nothing is exchanged."""
        return None if self._sync is None else self._sync.metrics

    def _why(self) -> str:
        """Return why skip is what it is."""
        if self._final_report is not None:
            return self._final_report[1]
        if self._exchanges is None:
            return "nothing crosses between nodes"
        why = getattr(self.setup.policy, "why", None)
        return "the policy's" if why is None else str(why(self.schedule))

    def _choices(self) -> dict[str, Any]:
        """Return what was chosen, by the keywords and by what there is."""
        if self._final_report is not None:
            return self._final_report[0]
        chosen = {} if self._sync is None else self._sync.chosen()
        return {**self.setup.choices(self._place), **chosen}

    # --- checkpoint --------------------------------------------------------------------------

    def state_dict(self, inner: dict[str, Any]) -> dict[str, Any]:
        """Return the inner optimizer's state_dict with this rank's own part."""
        if not is_saving_one_copy():
            return {**inner, KEY: self.state()}
        joined = self.schedule.synchronous or self._joined == self.schedule.batch
        if self._exchanges is not None and (self._differs() or not joined):
            refuse("parameters and optimizer state", "synchronize(optimizer_state=True)")
        return packed(inner, self._state_without_sync())

    def load_state_dict(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return the inner optimizer's part of a state_dict, and what `load` takes."""
        bare, shared = unpacked(state_dict)
        return {k: v for k, v in bare.items() if k != KEY}, state_dict.get(KEY, shared)

    def state(self) -> dict[str, Any]:
        """Return what this rank needs to go on to the same bits: plain values and tensors.

        An exchange in flight is waited for and stored, not merged: saving changes nothing.
        """
        sync = None if self._sync is None or self._stale else self._sync.state()
        if self._sync is not None:
            self._sync.note_agreed()  # a resumed run goes on from here
        return {**self._state_without_sync(), "sync": sync}

    def _state_without_sync(self) -> dict[str, Any]:
        """Return what all ranks have alike of `state`."""
        return {
            "schedule": asdict(self.schedule),
            "history": self._history.state(),
            "shape": self._shape(),
            "sync": None,
        }

    def _shape(self) -> dict[str, Any] | None:
        named = None if self._sync is None else self._sync.trained.named
        return self.setup.shape(self.inner, self._place, named)

    @_as_in_training
    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from where `state` was saved.

        Where every rank has its own state of a world of this shape, training goes on to the same
        bits. Otherwise the schedule goes on from world rank 0's count, and parameters from world
        rank 0's: they are handed to all ranks at the next step.

        Collective over the world; blocking.
        """
        if state is not None and not (isinstance(state, Mapping) and state.keys() >= PARTS):
            raise CheckpointError(
                f"the part 'daso' of a state_dict must have {', '.join(sorted(PARTS))}, but it is "
                f"{format_value(state)}; leave it out to load the inner optimizer's alone"
            )
        if state is not None and (lacks := State.lacking(state["schedule"])):
            raise CheckpointError(
                f"the part 'daso' of a state_dict must be of this version of daso, but its "
                f"schedule lacks {', '.join(lacks)}; leave it out to load the inner optimizer's "
                f"alone"
            )
        if state is not None:
            check_format(state["shape"])
        self._joined = -1
        sync, opened = self._sync, self._sync is not None or not self._stale
        reason = self._misfit(state, opened=opened)
        if not opened and state is not None:
            self._loaded, self._measured = True, None
        if state is None or reason:
            self._start_anew(state, reason)
            return
        self.schedule = State.load(state["schedule"])
        self._history = History.load(state["history"])
        self._stale = False
        if sync is not None:
            sync.load(state["sync"])
            sync.enter(self.schedule)
            self._begin_telling()

    def _misfit(self, state: Mapping[str, Any] | None, *, opened: bool) -> Misfit:
        """Return why a state does not fit on some rank. Collective over the world; blocking."""
        reason = misfit(state, self._shape() if opened else None)
        if self._sync is not None:
            return Misfit(round(self._sync.coordinator.extremes(float(reason))[1]))
        # One process has no state of exchanges.
        return Misfit.NONE if reason is Misfit.ONE_COPY else reason

    def _start_anew(self, state: Mapping[str, Any] | None, reason: Misfit) -> None:
        """Go on from world rank 0's count with nothing in flight, and hand out parameters."""
        old, same, apart = self.schedule, True, True
        if state is not None:
            old = State.load(state["schedule"])
            same = state["shape"] is not None and state["shape"]["setup"] == self.setup.lasting()
            apart = state["sync"] is None or state["sync"]["counts"]["scales_apart"]
        if self._sync is not None:
            old, same, apart = self.topology.world_comm.bcast((old, same, apart))
        first = self.setup.start()
        batch, epoch = old.batch, old.epoch
        self._take(
            replace(
                old if same else replace(first, epoch=epoch),
                batch=batch,
                sent=None,
                last=batch,
                agreed=batch,
                fragments=first.fragments,
            )
        )
        if self._sync is not None:
            self._stale, self._sync.metrics.scales_apart = True, apart
            self._sync.forget()
            self._sync.enter(self.schedule)  # a backward may come before the next step
            if self.topology.rank == 0:
                what, advice = remedy(reason)
                logger.warning(
                    "%s was loaded: the schedule goes on after %d steps with nothing in flight, "
                    "and all ranks take rank 0's parameters; %s",
                    *(what, batch, advice),
                )


def _has_modes(inner: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has parameters for training and others for evaluating."""
    parts = getattr(inner, "optimizers", [inner])
    return any(
        all(callable(getattr(part, name, None)) for name in ("train", "eval")) for part in parts
    )


def _weakly(method: "weakref.WeakMethod[Callable[..., bool]]") -> Callable[..., bool]:
    """Return a call of a session's method that does not keep alive what a user dropped."""

    def call(*values: Any) -> bool:
        """Return False where it was dropped."""
        bound = method()
        return bound is not None and bound(*values)

    return call
