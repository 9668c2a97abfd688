"""Finds out who is missing, when a rank has waited in vain for all it is allowed to.

Nothing is sent before. Then the rank asks every other one, and those that are waiting too, or that
exchange in the background, answer. Who does not answer is gone, cut off, or busy with something
else for longer than a step should take.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from daso.comm.health.control_messages import ControlChannel
from daso.comm.mpi import load

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["LivenessProbe"]

ANSWER_SECONDS = 3.0  # ranks that began to wait together give up together, more or less
POLL_SECONDS = 1e-3
ASKED, HERE = 1, 2  # tags


class LivenessProbe:
    """Asks all ranks whether they are there; used by the training thread and the engine.

    Args:
        make_comm: Makes a communicator of its own over all ranks, as ``world.Dup`` does.
        hosts: Host of every rank.

    Collective over the world; blocking.
    """

    def __init__(self, make_comm: "Callable[[], MPI.Comm]", hosts: Sequence[str]) -> None:
        self._notes, self.hosts = ControlChannel(make_comm), hosts
        self._here: set[int] = set()  # who answered this round
        self._round = 0
        self._lock = threading.Lock()

    @property
    def comm(self) -> "MPI.Comm":
        """What it asks over."""
        return self._notes.comm

    def answer(self) -> None:
        """Answer those who ask. Does not block; cheap."""
        with self._lock:
            for source, tag, numbers in self._notes.arrived():
                if tag == ASKED:
                    self._notes.send(source, HERE, numbers[0])
                elif numbers[0] == self._round:  # and no late answer to what was asked before
                    self._here.add(source)

    def missing(self, absent: Sequence[int] = ()) -> str:
        """Ask everybody, wait for answers for a few seconds, and say who gave none."""
        others, lost = set(self._notes.others), load().Exception
        with self._lock:
            self._here.clear()
            self._round += 1
            for rank in others:
                with suppress(lost):  # of this connection: nobody answers there
                    self._notes.send(rank, ASKED, self._round)
        end = time.perf_counter() + ANSWER_SECONDS
        while time.perf_counter() < end and not others <= self._here:
            with suppress(lost):  # MPI tells of any lost connection here; others may still answer
                self.answer()
            time.sleep(POLL_SECONDS)
        silent = sorted(others - self._here)
        if not silent and absent:
            return f"every rank answers, but world rank {self._names(absent)} did not come"
        if not silent:
            return "every rank answers, so the link is slow, or an exchange too large for it"
        names = self._names(silent)
        return f"no answer from world rank {names}, which hangs, or the link to it does"

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"{rank} on host {self.hosts[rank]}" for rank in ranks)

    def free(self) -> None:
        """Give the communicator back. Collective over the world; blocking; idempotent."""
        self._notes.free()
