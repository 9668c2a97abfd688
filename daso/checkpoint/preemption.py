"""Stop requests: a signal that asks the job to end, reported on all ranks after the same batch."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

from daso.comm.control import AsyncMaxReduce
from daso.comm.health.survivors import is_loss, raise_if_lost
from daso.comm.mpi import load
from daso.comm.topology import Regrouped, Topology
from daso.environment import read_ignored_signals
from daso.plan.schedule import batches_to_next_vote
from daso.workers import ignore_in_workers

#: Exit code of a program that saved and should be restarted (EX_TEMPFAIL of sysexits.h).
CHECKPOINTED = 75


class StopRequest:
    """Listens for a signal, such as SLURM's before a time limit, and reports it on all ranks.

    The signal reaches ranks at different times, or only one of them, but all ranks must save and
    exit after the same batch. So they vote in the background, about twice a second::

        with daso.StopRequest(world) as stop:
            for inputs, targets in loader:
                ...
                optimizer.step()
                if stop.after_step():
                    save()
                    sys.exit(stop.CHECKPOINTED)

    Args:
        topology: Topology whose world votes.
        signals: Signals to listen for; their previous handlers are restored at the end.
        timeout_seconds: Maximum wait for a vote.

    Worker processes (of a DataLoader) that start meanwhile ignore these signals; spawned ones only
    if their program imports daso.

    Collective over the world, as a context manager too; blocking. Main thread only.
    """

    CHECKPOINTED: ClassVar[int] = CHECKPOINTED  #: exit code of a program that saved

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
            _restore_handlers(self._before)
            raise
        self._unregister = topology.on_regroup(self._restart_vote)
        self._is_reported = False  # to the caller, on all ranks
        self._batches = 0
        self._between = self._left = 1  # batches between votes, and to the next
        self._begun = time.perf_counter()
        self._ignored_before = read_ignored_signals()[1]  # by an enclosing StopRequest
        ignore_in_workers({*self._ignored_before, *signals})
        for number, handler in self._before.items():
            if getattr(handler, "heard", False):  # came before this object (slurm.rank_entry)
                self._heard = float(number)
        self._vote.start([self._heard, 0.0])

    def _listen(self, signals: Sequence[signal.Signals]) -> dict[signal.Signals, Any]:
        """Set handlers of all signals or, on an error, of none; return the previous handlers."""
        before: dict[signal.Signals, Any] = {}
        try:
            for number in signals:
                before[number] = signal.signal(number, self._hear)
        except Exception:
            _restore_handlers(before)
            raise
        return before

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._heard = float(number)

    def after_step(self) -> signal.Signals | None:
        """Return the signal that any rank received, on all ranks after the same batch; else None.

        Every rank calls it after every batch. It blocks only if the previous vote is not over yet.

        Raises:
            StallError: The vote was not over within the stall limit.
        """
        self._batches += 1
        self._left -= 1
        if self._left:
            return None
        try:
            number, step_seconds = self._vote.result()
            if number and self._topology.is_elastic:
                self._heard = number  # for the next vote
                raise_if_lost(self._topology)
        except (ConnectionError, load().Exception) as error:
            if not (self._topology.is_elastic and is_loss(error)):
                raise
            return None  # the optimizer's next step handles the loss
        if number:
            # Spares would continue to train while the others exit.
            self._topology.takes_spares = False
        now = time.perf_counter()
        self._vote.start([self._heard, (now - self._begun) / self._between])
        self._begun = now
        self._between = self._left = batches_to_next_vote(step_seconds)
        self._is_reported = bool(number)
        return signal.Signals(int(number)) if number else None

    def _restart_vote(self, world: Regrouped) -> None:
        """Restart votes with the remaining ranks, after the last batch that all have had."""
        self._vote = AsyncMaxReduce(self._topology, self._timeout_seconds)
        most = world.most(self._batches + world.in_step)
        if world.is_new:
            self._batches = max(0, most - 1)
        self._between, self._left = 1, 1 + most - self._batches
        self._vote.start([self._heard, 0.0])

    def close(self) -> None:
        """Restore the handlers. Collective over the world; blocking; idempotent."""
        self._restore()
        self._survive(self._vote.free)

    def _survive(self, call: Callable[[], None]) -> None:
        """Run a collective call; ignore the loss of a rank if the others continue."""
        try:
            call()
        except load().Exception as error:
            if not (self._topology.is_elastic and is_loss(error)):
                raise

    def _restore(self) -> None:
        self._unregister()
        _restore_handlers(self._before)
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
        """Close it; after an error ranks may be missing, and nothing collective runs.

        ``sys.exit(CHECKPOINTED)`` waits for the other ranks, which exit after the same batch: the
        first rank to exit would end those that are still saving.
        """
        self._restore()
        if self._is_reported and isinstance(error, SystemExit) and error.code == CHECKPOINTED:
            self._survive(
                lambda: self._topology.rendezvous("save a checkpoint", self._timeout_seconds)
            )
        if error is None:
            self._survive(self._vote.free)


def _restore_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Restore signal handlers."""
    for number, handler in handlers.items():
        signal.signal(number, handler)
