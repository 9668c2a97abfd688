"""Elastic sessions: training continues without lost nodes, or with spare ones.

A rank that notices a loss, in a step, between two or in a meeting of all ranks, drops the work in
flight and informs the others, which do the same. The ranks of whole nodes form a smaller world and
continue from the mean of their parameters, so that none of their work is lost. Each keeps its own
count of batches: ranks that were behind catch up before the next exchange (`daso.plan.rejoin`).
Spare nodes replace lost ones: they begin with rank 0's optimizer state and that mean, at the batch
from which all ranks meet again.

A loss costs the lost node's work since the last exchange, the gradients of the batch in which a
rank noticed it, rounding errors kept for later exchanges, and the state of an outer optimizer.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from daso.comm.topology import Topology
from daso.plan.schedule import State, after_batch
from daso.train.inner.step_restoration import StepRestoration
from daso.train.inner.steps import Scaling
from daso.train.owner import Watcher
from daso.train.parts import Parts
from daso.train.recovery.survivor import Survivor
from daso.train.runner import ScheduleRunner
from daso.train.session import Closure, Session
from daso.train.setup import Setup

Result = TypeVar("Result")


class ElasticSession(Watcher):
    """A `Session` that continues without lost nodes.

    If the launcher or the MPI library lacks support, it logs that, and behaves as `Session`. On a
    spare rank it does nothing before `join`.

    Args:
        inner: The user's optimizer.
        setup: Its keywords.
        topology: The ranks and nodes; found from MPI if None.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, setup: Setup, topology: Topology | None
    ) -> None:
        self._session = session = Session(inner, setup, topology, self)
        self._runner, self.inner, self.setup = session.runner, inner, setup
        self.no_sync, self.on_exchange = session.no_sync, session.on_exchange
        self.scaled_lr, self.warns, self.report = session.scaled_lr, session.warns, session.report
        self.flush, self.restart = session.flush, session.restart
        self.go_on_from = session.go_on_from
        self.load, self.load_state_dict = session.load, session.load_state_dict
        self._survivor = Survivor(session)
        self._skips_end = False  # of this step, because a new world was formed at its start
        self._depth = 0  # nesting of calls that are repeated as a whole

    @property
    def runner(self) -> ScheduleRunner:
        """The schedule, and the parts that carry it out."""
        return self._runner

    @property
    def schedule(self) -> State:
        """State of the schedule."""
        return self._runner.schedule

    @property
    def topology(self) -> Topology:
        """Topology of the ranks."""
        return self._runner.topology

    @property
    def scaling(self) -> StepRestoration | None:
        """Restoration that scales rates; see `Session.scaling`."""
        return self._session.scaling

    @property
    def was_closed(self) -> bool:
        """True after `close`."""
        return self._session.was_closed

    def open(self) -> None:
        """Open the session, except on a spare; see `Session.open`."""
        if self._survivor.open_spare():
            return
        try:
            self._session.open()
        except Exception as error:
            if not self._survivor.survives(error):
                self._survivor.forget()
                raise
            self._survivor.go_on(error, self.schedule)

    def opened(self, parts: Parts) -> None:
        """Survive lost ranks from now on, or log the reason why not."""
        self._survivor.opened(parts)

    def join(self) -> int:
        """Wait, on a spare, until it replaces a lost rank; see `Session.join`."""
        self._survivor.join()
        return self.schedule.batch

    # --- one step ----------------------------------------------------------------------------

    def begin(
        self, closure: Closure | None, scaling: Scaling | None
    ) -> tuple[bool, Closure | None]:
        """Prepare the inner optimizer's step; see `Session.begin`.

        Returns:
            Whether to step (not after a loss, or if other ranks had this batch before), and the
            closure.
        """
        survivor = self._survivor
        if survivor.is_aside:
            return False, None
        survivor.refuse_spare()
        survivor.meetings = 0
        try:
            survivor.raise_noticed()
            survivor.call_spares()
            if closure is None:
                return self._session.begin(None, scaling)
            return self._begin_with(closure, scaling)
        except Exception as error:
            with survivor.within_step(drops=True):
                survivor.go_on(error, after_batch(self.setup.policy, self.schedule)[1])
            self._skips_end = True
            return False, None

    def _begin_with(self, closure: Closure, scaling: Scaling | None) -> tuple[bool, Closure | None]:
        """Prepare a step whose closure returns this rank's loss if another rank is lost."""
        loss: Any = None

        def recorded() -> Any:
            nonlocal loss
            loss = closure()
            return loss

        steps, averaged = self._session.begin(recorded, scaling)

        def absorbing() -> Any:
            """Return this rank's loss if another rank is lost: the next step handles that."""
            try:
                return averaged()  # type: ignore[misc]  # a closure was given
            except Exception as error:
                if not self.absorbs(error):
                    raise
                return loss

        return steps, closure if averaged is recorded else absorbing

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Defer errors of nested meetings to the outer call, which is repeated as a whole."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def end(self) -> None:
        """Count a step, and start or finish an exchange when one is due; see `Session.end`."""
        if self._skips_end:
            self._skips_end = False
            return
        survivor = self._survivor
        passes = survivor.is_aside or not self._session.is_probing
        if survivor.is_behind and passes:
            self._runner.pass_batch()
            survivor.pause_aside()
            return
        try:
            self._session.end()
            survivor.check_losses()
        except Exception as error:
            with survivor.within_step():
                survivor.go_on(error, self.schedule)

    def absorbs(self, error: Exception) -> bool:
        """Defer an error of a backward to the next step, if a lost rank caused it."""
        return self._survivor.absorbs(error)

    def zero_grad(self, set_to_none: bool) -> None:
        """Reset gradients; see `Session.zero_grad`."""
        try:
            self._session.zero_grad(set_to_none)
        except Exception as error:
            if not self.absorbs(error):
                raise
            self.inner.zero_grad(set_to_none)

    # --- meetings of all ranks ---------------------------------------------------------------

    def end_epoch(self, loss: float | torch.Tensor) -> float:
        """End an epoch; see `Session.end_epoch`."""
        self._survivor.refuse_spare()
        return self._together(lambda: self._session.end_epoch(loss))

    def synchronize(self, *, optimizer_state: bool = False) -> None:
        """Make all ranks equal; see `Session.synchronize`."""
        self._survivor.refuse_spare()
        self._together(lambda: self._session.synchronize(optimizer_state=optimizer_state))

    def add_param_group(self, add: Callable[[], None]) -> None:
        """Add parameters; see `Session.add_param_group`."""
        self._survivor.refuse_spare()
        self._session.add_param_group(add, self.synchronize)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Average the model over all ranks inside the context; see `Session.averaged`."""
        self._survivor.refuse_spare()
        with ExitStack() as stack:
            call = self._session.averaged
            self._together(lambda: stack.enter_context(call()), undo=stack.close)
            self._survivor.averaging = stack
            try:
                yield
            finally:
                self._survivor.averaging = None

    def together(self, call: Callable[[], Result]) -> Result:
        """Call a collective function, again after a loss; see `Session.together`."""
        return self._together(call)

    def state_dict(self, inner: dict[str, Any]) -> dict[str, Any]:
        """Return the inner optimizer's state_dict with this rank's own part."""
        return self._together(lambda: self._session.state_dict(inner), meets=False)

    def close(self) -> None:
        """Stop communicating and release memory; see `Session.close`."""
        try:
            self._session.close()
        except Exception as error:
            if not self._survivor.survives(error):
                raise
            self._survivor.lose()

    def _together(
        self,
        call: Callable[[], Result],
        *,
        meets: bool = True,
        undo: Callable[[], None] = lambda: None,
    ) -> Result:
        """Call a collective function; undo and repeat it if a rank was lost meanwhile."""
        if self._depth:
            return call()
        while True:
            before = self.schedule
            try:
                self._survivor.check_losses()
                with self._inside():
                    result = call()
                if meets:
                    self._survivor.raise_on_all_if_lost()
                self._survivor.meetings += meets
                return result  # noqa: TRY300 - repeated otherwise
            except Exception as error:
                undo()
                self._survivor.go_on(error, before)


AnySession = Session | ElasticSession


def make_session(
    inner: torch.optim.Optimizer, setup: Setup, topology: Topology | None
) -> AnySession:
    """Return a session that is not open; an elastic one if the keywords ask for it."""
    kind = ElasticSession if setup.settings.exchange.elastic else Session
    return kind(inner, setup, topology)
