"""Finds out who is missing, when a rank has waited in vain for all it is allowed to.

Nothing is sent before. Then the rank asks, and those that are waiting too, or that exchange in the
background, say that they are there, and pass it on (`daso.comm.health.census`). Of whom nothing is
heard is gone, cut off, or busy with something else for longer than a step should take.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from daso.comm.health.census import Census
from daso.comm.health.control_messages import ControlChannel
from daso.comm.mpi import load

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["LivenessProbe"]

ANSWER_SECONDS = 3.0  # ranks that began to wait together give up together, more or less
POLL_SECONDS = 1e-3
DIRECTLY = 0.5  # of these seconds, in which who is silent is asked without others between
NOTE = 1  # tag


class LivenessProbe:
    """Asks all ranks whether they are there; used by the training thread and the engine.

    Args:
        make_comm: Makes a communicator of its own over all ranks, as ``world.Dup`` does.
        hosts: Host of every rank.

    Collective over the world; blocking.
    """

    def __init__(self, make_comm: "Callable[[], MPI.Comm]", hosts: Sequence[str]) -> None:
        ranks = len(hosts)
        self._notes, self.hosts = ControlChannel(make_comm, Census.numbers(ranks)), hosts
        self._census = Census(self._notes.rank, ranks, self._send)
        self._lock = threading.Lock()

    @property
    def comm(self) -> "MPI.Comm":
        """What it asks over."""
        return self._notes.comm

    def answer(self) -> None:
        """Answer those who ask. Does not block; cheap."""
        arrived: list[tuple[int, Sequence[int]]] = []
        with self._lock:
            try:
                for source, _, numbers in self._notes.arrived():
                    arrived.append((source, numbers))
            finally:  # what came before a connection was lost counts
                self._census.heard(arrived, time.perf_counter())

    def _send(self, rank: int, numbers: Sequence[int]) -> None:
        with suppress(load().Exception):  # of this connection: nobody answers there
            self._notes.send(rank, NOTE, *numbers)

    def missing(self, absent: Sequence[int] = ()) -> str:
        """Ask, wait for a few seconds, and say of whom nothing was heard."""
        with suppress(load().Exception):
            self.answer()
        with self._lock:
            self._census.ask(time.perf_counter())
        end = time.perf_counter() + ANSWER_SECONDS
        directly = end - DIRECTLY * ANSWER_SECONDS
        while time.perf_counter() < end and self._census.silent:
            with suppress(load().Exception):  # a lost connection; others may still answer
                self.answer()
            if time.perf_counter() >= directly:
                with self._lock:
                    self._census.ask_directly()
            time.sleep(POLL_SECONDS)
        silent = self._census.silent
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
