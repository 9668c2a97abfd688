"""Finds the missing ranks after a wait has exceeded its limit.

No message is sent before that. Then the waiting rank asks, and the ranks that are also waiting, or
that exchange in the background, answer and pass the question on (`daso.comm.health.census`). A rank
that does not answer is lost, disconnected, or busy for longer than a step should take.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from daso.comm.health.census import Census
from daso.comm.health.step_watchdog import ControlChannel
from daso.comm.mpi import load

if TYPE_CHECKING:
    from mpi4py import MPI

ANSWER_SECONDS = 3.0  # ranks that started to wait together give up at about the same time
POLL_SECONDS = 1e-3
DIRECT_FRACTION = 0.5  # last part of these seconds, in which silent ranks are asked directly
NOTE = 1  # tag


class LivenessProbe:
    """Asks all ranks for an answer; used by the training thread and the engine.

    Args:
        make_comm: Makes a separate communicator over all ranks, such as ``world.Dup``.
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
        """Communicator of the probe's messages."""
        return self._notes.comm

    def answer(self) -> None:
        """Answer the probes of other ranks. Does not block; takes microseconds."""
        arrived: list[tuple[int, Sequence[int]]] = []
        with self._lock:
            try:
                for source, _, numbers in self._notes.arrived():
                    arrived.append((source, numbers))
            finally:  # messages that arrived before a connection was lost count
                self._census.receive(arrived, time.perf_counter())

    def _send(self, rank: int, numbers: Sequence[int]) -> None:
        with suppress(load().Exception):  # of a lost connection
            self._notes.send(rank, NOTE, *numbers)

    def missing(self, absent: Sequence[int] = ()) -> str:
        """Probe all ranks for a few seconds; return a text that names the silent ones.

        Args:
            absent: Ranks that have not arrived, named if every rank answers.
        """
        with suppress(load().Exception):
            self.answer()
        with self._lock:
            self._census.ask(time.perf_counter())
        end = time.perf_counter() + ANSWER_SECONDS
        directly = end - DIRECT_FRACTION * ANSWER_SECONDS
        while time.perf_counter() < end and self._census.silent:
            with suppress(load().Exception):  # a lost connection; others may still answer
                self.answer()
            if time.perf_counter() >= directly:
                with self._lock:
                    self._census.ask_directly()
            time.sleep(POLL_SECONDS)
        silent = self._census.silent
        if not silent and absent:
            return f"every rank answers, but world rank {self._names(absent)} did not arrive"
        if not silent:
            return "every rank answers, so the link is slow, or the exchange is too large for it"
        names = self._names(silent)
        return f"no answer from world rank {names}, which hangs or is disconnected"

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"{rank} on host {self.hosts[rank]}" for rank in ranks)

    def free(self) -> None:
        """Free the communicator. Collective over the world; blocking; idempotent."""
        self._notes.free()
