"""Runs the schedule of one model: performs its actions, and follows changes of the model."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from daso.comm.emulation import stretch
from daso.comm.topology import Topology
from daso.errors import NonFiniteError
from daso.plan.schedule import (
    Action,
    Measurements,
    State,
    after_batch,
    after_exchange,
    begin,
    drain,
)
from daso.train.deltas.exchange import DeltaExchange
from daso.train.inner.step_restoration import StepRestoration
from daso.train.listeners import Listeners
from daso.train.metrics import History, Metrics
from daso.train.model.changes import has_modes
from daso.train.model.one_copy import OneCopy
from daso.train.model.params import check_same_layout
from daso.train.owner import PartsOwner
from daso.train.parts import Parts

logger = logging.getLogger("daso")


class ScheduleRunner:
    """Schedule of one model, and the parts that perform its actions.

    Args:
        owner: Owner of the parts.
    """

    def __init__(self, owner: PartsOwner) -> None:
        self.owner, self.inner, self.setup = owner, owner.inner, owner.setup
        self.schedule = self.setup.start()
        self.history = History.of(self.schedule)
        self.joined = 0  # batch at which all nodes had the same optimizer state
        self.stale = False  # parameters were replaced: set up again before the next step
        self.has_modes = has_modes(self.inner)
        self._stretch, self.listeners = stretch(), Listeners()
        self._one_copy: OneCopy | None = None

    def take_over(self, number: int, history: History, joined: int) -> None:
        """Adopt the values of rank 0, on a rank that was spare."""
        self.owner.number, self.history, self.joined = number, history, joined

    def start_from(self, schedule: State) -> None:
        """Set the schedule from which the parts start at the first step."""
        self.schedule, self.stale = schedule, True

    def resume(self, schedule: State, history: History) -> None:
        """Resume from a checkpoint that fits."""
        self.schedule, self.history, self.stale = schedule, history, False

    @property
    def topology(self) -> Topology:
        """Topology of the ranks."""
        return self.owner.topology

    @property
    def parts(self) -> Parts | None:
        """The parts; None in a world of one rank."""
        return self.owner.parts

    @property
    def deltas(self) -> DeltaExchange | None:
        """Exchanges between nodes; None with a single node."""
        parts = self.owner.parts
        return None if parts is None else parts.deltas

    @property
    def scaling(self) -> StepRestoration | None:
        """Restoration that scales learning rates in the next step; None if they are not scaled."""
        return None if self.deltas is None else self.deltas.restorations.existing

    def scaled_lr(self, *, hooks: bool = True) -> AbstractContextManager[None]:
        """Scale the inner learning rate by the restoration gain inside the context.

        Args:
            hooks: Whether step hooks of the inner optimizer see the user's rate.
        """
        restoration = None if self.schedule.gain == 1.0 else self.scaling
        if restoration is None:
            return nullcontext()
        gain = self.schedule.step_gain
        return restoration.scaled(gain) if hooks else restoration.scaled_without_hooks(gain)

    def differs(self) -> bool:
        """Return whether nodes hold different parameters now."""
        return self.deltas is not None and (self.stale or not self.schedule.alike)

    # --- parts -------------------------------------------------------------------------------

    def open(self, metrics: Metrics, *actions: Action, first_step_checked: bool = False) -> None:
        """Build the parts, and start the schedule. Collective over the world; blocking."""
        parts = self.owner.build(self, metrics, first_step_checked=first_step_checked)
        if parts is None:
            return
        self._stretch = stretch()  # from the second step on: the first one includes the setup
        try:
            self.owner.notify_watcher(parts)
            self._start(parts, actions)
        except BaseException:  # the next wrap frees the communicators
            parts.unhook()
            raise

    def reopen(self, *actions: Action) -> None:
        """Build the parts again, for other parameters; nothing may be in flight.

        Collective over the world; blocking.
        """
        before = self.parts
        assert before is not None, "it is open"
        if self.setup.outer is not None and self.topology.rank == 0:
            logger.warning("parameters changed: the outer optimizer restarts")
        before.gradients.settle()
        before.metrics.close_node(before.node.idle_seconds)
        averaged = before.gradients.is_averaged_everywhere()
        self.owner.close(self, before)
        checked = before.coordinator.first_step_checked
        self.open(before.metrics, *actions, first_step_checked=checked)
        if self.parts is not None:
            self.parts.writes.history = before.writes.history
            self.parts.gradients.take_gradients_of(before.gradients, averaged=averaged)

    def _start(self, parts: Parts, actions: Sequence[Action]) -> None:
        """Start the schedule with its first actions. Collective over the world; blocking."""
        if self._one_copy is None and self.setup.module is not None:
            self._one_copy = OneCopy(self.setup.module, self.differs, self.owner.warns)
        self._begin(parts)
        anchor = () if self.schedule.synchronous else (Action.ANCHOR,)
        self._carry_out(parts, (*actions, *anchor), self.schedule, enters=True)
        parts.start_watch()  # the first step does not include the setup

    def _begin(self, parts: Parts) -> None:
        """Start the schedule with the traits of the inner optimizer."""
        restoration = None if parts.deltas is None else parts.deltas.restorations.always
        began = begin(
            self.setup.policy,
            self.schedule,
            nodes=self.topology.rank_info.nodes,
            memory=0.0 if restoration is None else restoration.memory,
            may_hide=restoration is not None and self.setup.settings.may_hide,
            small_share=0.0 if parts.deltas is None else parts.deltas.small_share,
            numel=sum(tensor.numel() for _, tensor in parts.trained.named),
        )
        self.take(began)
        if began.batch == 0:
            self.history = History.of(self.schedule)

    def close(self) -> None:
        """Stop communicating. Collective over the world; blocking; idempotent."""
        if self._one_copy is not None:
            self._one_copy.close()
        if self.parts is not None:
            try:
                self.parts.gradients.flush()
            finally:
                self.owner.close(self, self.parts)

    # --- one step ----------------------------------------------------------------------------

    def end_step(self) -> None:
        """Count a step, and perform the actions that are due.

        Collective over the world in the sense of the schedule; blocks for receives.
        """
        actions, state = after_batch(self.setup.policy, self.schedule)
        parts, measurements = self.owner.parts, None
        try:
            if parts is not None:
                if self._stretch is not None:
                    self._stretch.after_step(parts.metrics.stepped_at, parts.exposed_seconds)
                parts.stepped = state
                parts.gradients.end_step(state.batch)
                parts.metrics.step(state.batch)
                if parts.gradients.defers and (actions or (state.skip, state.wait) != (1, 0)):
                    parts.gradients.flush()
                measurements = self._carry_out(parts, actions, state)
                if parts.gradients.tuner is not None:
                    parts.gradients.tune(state)
        finally:  # all ranks get the error, and stay in step
            self.take(state)
        self._learn(measurements)

    def perform(self, actions: Sequence[Action], state: State) -> None:
        """Perform actions between steps, and adopt a state of the schedule.

        Collective over the world; blocking.
        """
        measurements = None
        if self.deltas is not None:
            self.deltas.note_writes()
            if not actions and not state.synchronous:
                self.deltas.agree_on_writes()
        try:
            if self.parts is not None:
                measurements = self._carry_out(self.parts, actions, state, enters=True)
        finally:
            self.take(state)
        self._learn(measurements)

    def _carry_out(
        self, parts: Parts, actions: Sequence[Action], state: State, *, enters: bool = False
    ) -> Measurements | None:
        """Perform actions in order; return the last measurements that all ranks agreed on."""
        measurements, error = None, None
        for action in actions:
            try:
                if action is Action.JOIN:
                    parts.coordinator.join()
                elif parts.deltas is not None:  # None with a single node
                    measurements = parts.deltas.perform(action, state) or measurements
            except NonFiniteError as caught:  # on all ranks: the other actions keep them in step
                error = caught
        if enters or _choices_of(state) != _choices_of(parts.entered or self.schedule):
            parts.enter(state)
        if error is not None:
            raise error
        return measurements

    def take(self, state: State) -> None:
        """Adopt a state of the schedule."""
        before, self.schedule = self.schedule, state
        if _choices_of(before) == _choices_of(state):
            return
        self.history.take(before, state)
        if before.synchronous == state.synchronous or self.deltas is None:
            return
        if hasattr(self.setup.policy, "why") and self.owner.warns():
            logger.info("from batch %d: %s", state.batch, self.why())

    def why(self) -> str:
        """Return the reason for the current skip."""
        if self.deltas is None:
            return "nothing crosses between nodes"
        why = getattr(self.setup.policy, "why", None)
        return "the policy's" if why is None else str(why(self.schedule))

    def _learn(self, measurements: Measurements | None) -> None:
        """Let the policy choose by measurements; restart if the program wrote parameters."""
        parts = self.owner.parts
        if measurements is not None:
            actions, state = after_exchange(self.setup.policy, self.schedule, measurements)
            try:
                if parts is not None:
                    self._carry_out(parts, actions, state)
            finally:
                self.take(state)
            if self.listeners.calls and parts is not None:
                self.listeners.notify(state, measurements, parts.metrics, parts.exposed_seconds)
        if parts is not None and parts.deltas is not None and parts.deltas.restart_due:
            self._follow_writes(parts)
        self.mark_writes()

    def reset_records(self) -> None:
        """Restart the counters of the records that listeners get."""
        if self.parts is not None:
            self.listeners.begin(self.parts.metrics, self.parts.exposed_seconds)

    def mark_writes(self) -> None:
        """Watch for changes of parameters by the program until the next step."""
        parts = self.owner.parts
        if parts is not None and parts.deltas is not None:
            # `eval()` and `train()` of the inner optimizer, and layerwise steps, write parameters.
            parts.writes.mark(by_layers=parts.averaging.by_layers or self.has_modes)

    # --- changes of the model ----------------------------------------------------------------

    def follow_changes(self) -> None:
        """Follow changes of parameters by the program since the last step.

        Collective over the world, and blocking, if any were frozen, unfrozen or have a new layout.
        """
        parts = self.owner.parts
        if parts is None:
            return
        trainable, layout = parts.changes.look()
        if layout:
            self._follow_layout(parts)
        if trainable:
            self._follow_trainable(self.owner.parts or parts)
        parts = self.owner.parts or parts
        if parts.deltas is not None and (change := parts.writes.changed()):
            parts.deltas.note_change(change)

    def _follow_trainable(self, parts: Parts) -> None:
        """Build the parts again for parameters that were added, frozen or unfrozen."""
        for _, param in parts.trained.named:
            if not param.requires_grad:  # else it steps by a gradient that nodes do not share
                param.grad = None
        if not any(p.requires_grad for group in self.inner.param_groups for p in group["params"]):
            return  # no parameter is trained for now
        self.equalize()
        # Parameters frozen between exchanges have a different state on each node.
        self.reopen(*((Action.JOIN,) if self.schedule.synchronous else ()))

    def _follow_layout(self, parts: Parts) -> None:
        """Follow a new layout: discard the exchange in flight, and continue from the mean."""
        parts.coordinator.check_same_batch(self.schedule.batch)
        if parts.deltas is not None:
            parts.deltas.forget()
        check_same_layout(parts.trained, self.topology)
        self._go_on_from_the_mean(parts)

    def _follow_writes(self, parts: Parts) -> None:
        """Restart from parameters that the program wrote. Collective over the world."""
        if self.topology.rank == 0:
            logger.warning(
                "the program wrote parameters between steps, up to batch %d: nodes restart "
                "from them, and discard the exchange in flight",
                self.schedule.batch,
            )
        self._go_on_from_the_mean(parts)

    def _go_on_from_the_mean(self, parts: Parts) -> None:
        """Discard the exchange in flight, and continue from the mean parameters on all ranks."""
        if parts.deltas is not None:
            parts.deltas.forget()
        parts.coordinator.equalize(expected=True)
        batch = self.schedule.batch
        self.take(replace(self.schedule, sent=None, last=batch, agreed=batch))
        self.reopen()

    # --- meetings of all ranks ---------------------------------------------------------------

    def settle(self) -> None:
        """Complete layerwise steps, follow a new layout, and check that ranks are in step.

        Collective over the world; blocking.
        """
        self.flush()
        if self.parts is not None and self.parts.changes.layout_changed():
            self._follow_layout(self.parts)
        if self.parts is not None:
            self.parts.coordinator.check_same_batch(self.schedule.batch)

    def flush(self) -> None:
        """Complete a layerwise step, and clean up after a backward that raised.

        Collective over the world; blocking.
        """
        if self.parts is not None:
            self.parts.gradients.reducer.finish_aborted_round()
            self.parts.gradients.flush()

    @torch.inference_mode(mode=False)
    def equalize(self, *, optimizer_state: bool = False) -> None:
        """Make parameters, buffers and frozen parameters bit-identical on all ranks.

        Args:
            optimizer_state: The inner optimizer's state too.

        Collective over the world; blocking.
        """
        self.settle()
        self.perform(*drain(self.schedule))
        parts = self.parts
        if parts is None:
            return
        coordinator, state = parts.coordinator, self.schedule
        if parts.deltas is not None and state.synchronous:
            coordinator.agree_on_slowest()  # no exchange of parameters carries it
        if not coordinator.equalize():  # parameters were changed outside steps
            if state.synchronous:
                coordinator.join()
            elif parts.deltas is not None:
                parts.deltas.anchor(state.batch)
        coordinator.others.equalize()
        self.mark_writes()
        # `eval()` of a schedule-free optimizer computes parameters from its state.
        if optimizer_state or self.has_modes:
            coordinator.join()
            self.joined = state.batch

    # --- lost ranks --------------------------------------------------------------------------

    def pass_batch(self) -> None:
        """Count a batch that this rank skips. Does not communicate."""
        self.take(replace(self.schedule, batch=self.schedule.batch + 1))
        if self.parts is not None:
            self.parts.pass_batch(self.schedule)


def _choices_of(state: State) -> tuple[object, ...]:
    """Return the choices of a schedule that the parts apply and its history records."""
    sync, small = state.sync, state.small
    return state.skip, state.wait, state.hidden, sync.wide, small.period, state.epoch
