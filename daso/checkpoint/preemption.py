"""A signal that asks the job to end, known to all ranks after the same batch."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from daso.comm.collectives import AsyncMaxReduce
from daso.comm.health.survivors import is_loss, raise_where_lost
from daso.comm.mpi import load
from daso.comm.topology import Regrouped, Topology
from daso.environment import read_ignored_signals
from daso.plan.schedule import batches_to_next_vote
from daso.workers import ignore_in_workers

__all__ = ["CHECKPOINTED", "StopRequest"]

#: Exit code: saved, start me again (EX_TEMPFAIL of sysexits.h).
CHECKPOINTED = 75


class StopRequest:
    """Listens for a signal, such as SLURM's before a time limit, and tells all ranks at once.

    The signal comes to every rank at another moment, or to one alone; all of them may save and
    leave only after the same batch. So they vote, twice a second or so, in the background::

        from daso.checkpoint.preemption import CHECKPOINTED, StopRequest

        with StopRequest(topology) as stop:
            for inputs, targets in loader:
                ...
                optimizer.step()
                if stop.after_step():
                    save()
                    sys.exit(CHECKPOINTED)

    Args:
        topology: Whose world.
        signals: What to listen for; the handlers that were there come back at the end.
        timeout_seconds: How long a vote is waited for at most.

    Worker processes (of a DataLoader) that start meanwhile ignore these signals; those that begin
    as a new Python do where their program imports daso.

    Collective over the world, as a context manager too; blocking. Main thread only.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        signals: Sequence[signal.Signals] = (signal.SIGUSR1,),
        timeout_seconds: float = 300.0,
    ) -> None:
        self._topology, self._timeout_seconds = topology, timeout_seconds
        self._heard = 0.0  # number of the signal
        self._before = self._listen(signals)
        try:
            self._vote = AsyncMaxReduce(topology, timeout_seconds)
        except Exception:
            _put_back(self._before)
            raise
        self._forget = topology.on_regroup(self._vote_anew)
        self._told = False  # the caller knows of it, on all ranks
        self._batches = 0
        self._between = self._left = 1  # batches: from vote to vote; to the next
        self._begun = time.perf_counter()
        self._ignored_before = read_ignored_signals()[1]  # of another one around this
        ignore_in_workers({*self._ignored_before, *signals})
        for number, handler in self._before.items():
            if getattr(handler, "heard", False):  # before anybody listened (slurm.rank_entry)
                self._heard = float(number)
        self._vote.start([self._heard, 0.0])

    def _listen(self, signals: Sequence[signal.Signals]) -> dict[signal.Signals, Any]:
        """Listen to all signals or, on an error, to none; return the handlers that were there."""
        before: dict[signal.Signals, Any] = {}
        try:
            for number in signals:
                before[number] = signal.signal(number, self._hear)
        except Exception:
            _put_back(before)
            raise
        return before

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._heard = float(number)

    def after_step(self) -> signal.Signals | None:
        """Return the signal that a rank heard, on all ranks after the same batch; else None.

        Every rank calls it after every batch. Waits only where the vote of some batches ago is not
        over.

        Raises:
            StallError: It was not over within the stall limit.
        """
        self._batches += 1
        self._left -= 1
        if self._left:
            return None
        try:
            heard, step_seconds = self._vote.result()
            if heard and self._topology.is_elastic:
                self._heard = heard  # should it be asked again
                raise_where_lost(self._topology)
        except (ConnectionError, load().Exception) as error:
            if not (self._topology.is_elastic and is_loss(error)):
                raise
            return None  # the optimizer's next step sees to it
        if heard:
            self._topology.takes_spares = False  # they would train on, and the others leave
        now = time.perf_counter()
        self._vote.start([self._heard, (now - self._begun) / self._between])
        self._begun = now
        self._between = self._left = batches_to_next_vote(step_seconds)
        self._told = bool(heard)
        return signal.Signals(int(heard)) if heard else None

    def _vote_anew(self, world: Regrouped) -> None:
        """Vote with the ranks that are left, first behind the batch that all of them have had."""
        self._vote = AsyncMaxReduce(self._topology, self._timeout_seconds)
        most = world.most(self._batches + world.in_step)
        if world.is_new:
            self._batches = max(0, most - 1)
        self._between, self._left = 1, 1 + most - self._batches
        self._vote.start([self._heard, 0.0])

    def close(self) -> None:
        """Put the handlers back. Collective over the world; blocking; idempotent."""
        self._restore()
        self._survive(self._vote.free)

    def _survive(self, call: Callable[[], None]) -> None:
        """Do something together; where a rank is lost meanwhile, and others go on, without it."""
        try:
            call()
        except load().Exception as error:
            if not (self._topology.is_elastic and is_loss(error)):
                raise

    def _restore(self) -> None:
        self._forget()
        _put_back(self._before)
        if self._before:
            ignore_in_workers(self._ignored_before)
        self._before = {}

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it; after an error ranks may be missing, and nothing collective is done.

        Who leaves by ``sys.exit(CHECKPOINTED)`` waits for the others, which do so after the same
        batch: the first to leave would end those that still save.
        """
        self._restore()
        if self._told and isinstance(error, SystemExit) and error.code == CHECKPOINTED:
            self._survive(
                lambda: self._topology.rendezvous("save a checkpoint", self._timeout_seconds)
            )
        if error is None:
            self._survive(self._vote.free)


def _put_back(handlers: Mapping[signal.Signals, Any]) -> None:
    """Let signals do again what they did."""
    for number, handler in handlers.items():
        signal.signal(number, handler)
