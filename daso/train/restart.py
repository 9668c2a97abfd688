"""Checkpoint state of a session: saves it, and resumes training from it."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from daso.checks import format_value
from daso.comm.control import broadcast
from daso.errors import CheckpointError
from daso.plan.exchange import Tally
from daso.plan.schedule import Action, State
from daso.train.metrics import History, Metrics
from daso.train.model.misfit import Misfit, misfit, remedy
from daso.train.model.one_copy import KEY, is_saving_one_copy, packed, refuse, unpacked
from daso.train.runner import ScheduleRunner
from daso.train.setup import check_format

logger = logging.getLogger("daso")
PARTS = {"schedule", "history", "shape", "sync"}  # of a session's state
# A caller may be in inference mode, whose tensors other threads cannot write to.
_as_in_training = torch.inference_mode(mode=False)


class Restart:
    """Saves and loads the state from which training resumes.

    Args:
        runner: The schedule, and the parts that carry it out.
    """

    def __init__(self, runner: ScheduleRunner) -> None:
        self._runner, self._inner, self._setup = runner, runner.inner, runner.setup
        self._loaded = False  # whether a state was loaded before the session opened
        self._measured: tuple[Tally, int] | None = None  # by the original, if this is a copy

    def go_on_from(self, schedule: State, measured: tuple[Tally, int] | None) -> None:
        """Continue from the schedule of the optimizer that was copied.

        The session opens at the first step.
        """
        batch, self._measured = schedule.batch, measured
        self._runner.start_from(replace(schedule, sent=None, last=batch, agreed=batch))

    @property
    def measured(self) -> tuple[Tally, int] | None:
        """Tally of the last exchange, an input of the next one; a copy inherits it."""
        deltas = self._runner.deltas
        return self._measured if deltas is None else deltas.measured

    def reopen_if_stale(self) -> None:
        """Set up again after a checkpoint of another world, or for a copy before its first step."""
        runner = self._runner
        if not runner.stale:
            return
        runner.stale = False
        if runner.parts is not None:
            runner.reopen(Action.JOIN)
            return
        runner.owner.meet()
        runner.open(Metrics(), *((Action.JOIN,) if self._loaded else ()))
        if self._measured is not None and runner.deltas is not None:
            runner.deltas.go_on_from(self._measured)

    # --- checkpoint --------------------------------------------------------------------------

    def state_dict(self, inner: dict[str, Any]) -> dict[str, Any]:
        """Return the inner optimizer's state_dict with this rank's own part."""
        if not is_saving_one_copy():
            return {**inner, KEY: self.state()}
        runner, schedule = self._runner, self._runner.schedule
        joined = schedule.synchronous or runner.joined == schedule.batch
        if runner.deltas is not None and (runner.differs() or not joined):
            refuse("parameters and optimizer state", "synchronize(optimizer_state=True)")
        return packed(inner, self._state_without_sync())

    def load_state_dict(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return the inner optimizer's part of a state_dict, and the argument of `load`."""
        bare, shared = unpacked(state_dict)
        return {k: v for k, v in bare.items() if k != KEY}, state_dict.get(KEY, shared)

    def state(self) -> dict[str, Any]:
        """Return this rank's state for a bit-identical resume: plain values and tensors.

        An exchange in flight is waited for and stored, not merged: saving does not change training.
        """
        parts = self._runner.parts
        sync = None if parts is None or self._runner.stale else parts.state()
        if parts is not None:
            parts.note_agreed()  # a resumed run starts from here
        return {**self._state_without_sync(), "sync": sync}

    def _state_without_sync(self) -> dict[str, Any]:
        """Return the part of `state` that is equal on all ranks."""
        return {
            "schedule": asdict(self._runner.schedule),
            "history": self._runner.history.state(),
            "shape": self._shape(),
            "sync": None,
        }

    def _shape(self) -> dict[str, Any] | None:
        named = None if self._runner.parts is None else self._runner.parts.trained.named
        return self._setup.shape(self._inner, self._runner.owner.rank_info, named)

    @_as_in_training
    def load(self, state: Mapping[str, Any] | None) -> None:
        """Resume from a saved state.

        If every rank has its own state of a world of this shape, training resumes bit for bit.
        Otherwise the schedule resumes from world rank 0's count, and all ranks get world rank 0's
        parameters at the next step.

        Collective over the world; blocking.
        """
        if state is not None and not (isinstance(state, Mapping) and state.keys() >= PARTS):
            raise CheckpointError(
                f"the part 'daso' of a state_dict must have {', '.join(sorted(PARTS))}, but it is "
                f"{format_value(state)}; leave it out to load the inner optimizer's alone",
                code="state-parts-missing",
            )
        if state is not None and (lacks := State.lacking(state["schedule"])):
            raise CheckpointError(
                f"the part 'daso' of a state_dict must be of this version of daso, but its "
                f"schedule lacks {', '.join(lacks)}; leave it out to load the inner optimizer's "
                f"alone",
                code="state-schedule-incomplete",
            )
        if state is not None:
            check_format(state["shape"])
        runner, parts = self._runner, self._runner.parts
        runner.joined = -1
        opened = parts is not None or not runner.stale
        reason = self._misfit(state, opened=opened)
        if not opened and state is not None:
            self._loaded, self._measured = True, None
        if state is None or reason:
            self._start_again(state, reason)
            return
        runner.resume(State.load(state["schedule"]), History.load(state["history"]))
        if parts is not None:
            parts.load(state["sync"])
            parts.enter(self._runner.schedule)
            runner.reset_records()

    def _misfit(self, state: Mapping[str, Any] | None, *, opened: bool) -> Misfit:
        """Return the reason for which a state does not fit on some rank. Collective; blocking."""
        reason = misfit(state, self._shape() if opened else None)
        if self._runner.parts is not None:
            return Misfit(round(self._runner.parts.coordinator.extremes(float(reason))[1]))
        # One process has no state of exchanges.
        return Misfit.NONE if reason is Misfit.ONE_COPY else reason

    def _start_again(self, state: Mapping[str, Any] | None, reason: Misfit) -> None:
        """Resume from world rank 0's count and parameters, with nothing in flight."""
        old, same, apart = self._runner.schedule, True, True
        if state is not None:
            old = State.load(state["schedule"])
            shape = state["shape"]
            same = shape is not None and shape["setup"] == self._setup.compatibility_text()
            apart = state["sync"] is None or state["sync"]["counts"]["scales_apart"]
        parts = self._runner.parts
        if parts is not None:
            limit = self._setup.settings.exchange.timeout_seconds
            agreed = broadcast(self._runner.topology, (old, same, apart), limit)
            old, same, apart = agreed
        self._runner.take(self._setup.start_from(old, same=same))
        if parts is None:
            return
        self._runner.stale = True
        parts.metrics.note(scales_apart=apart)
        if parts.deltas is not None:
            parts.deltas.forget()
        parts.enter(self._runner.schedule)  # a backward may come before the next step
        if self._runner.topology.rank == 0:
            what, advice = remedy(reason)
            logger.warning(
                "%s was loaded: the schedule continues after %d steps with nothing in flight, "
                "and all ranks take rank 0's parameters; %s",
                what,
                old.batch,
                advice,
            )
