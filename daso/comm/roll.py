"""Finds out who is missing, when a rank has waited in vain for all it is allowed to.

Nothing is sent before. Then the rank asks every other one, and those that are waiting too, or that
exchange in the background, answer. Who does not answer is gone, cut off, or busy with something
else for longer than a step should take.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from daso.comm.dtypes import sum_buffer
from daso.comm.mpi import load

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["RollCall"]

ANSWER_SECONDS = 3.0  # ranks that began to wait together give up together, more or less
POLL_SECONDS = 1e-3
ASKED, HERE = 1, 2  # tags


class RollCall:
    """Asks all ranks whether they are there; used by the training thread and the engine.

    Args:
        world: All ranks; a communicator of its own is made.
        hosts: Host of every rank.

    Collective over the world; blocking.
    """

    def __init__(self, world: "MPI.Comm", hosts: Sequence[str]) -> None:
        self.comm, self.hosts = world.Dup(), hosts
        self._here: set[int] = set()  # who answered this round
        self._round = 0
        self._sent: list[tuple[MPI.Request, torch.Tensor]] = []
        self._lock = threading.Lock()

    def answer(self) -> None:
        """Answer those who ask. Does not block; cheap."""
        with self._lock:
            status = load().Status()
            while self.comm.Iprobe(status=status):
                source, tag = status.Get_source(), status.Get_tag()
                row = torch.empty(1, dtype=torch.int64)
                self.comm.Recv(sum_buffer(row), source, tag)
                if tag == ASKED:
                    self._send(source, HERE, int(row))
                elif int(row) == self._round:  # and no late answer to what was asked before
                    self._here.add(source)

    def _send(self, rank: int, tag: int, number: int) -> None:
        row = torch.tensor([number])
        self._sent.append((self.comm.Isend(sum_buffer(row), rank, tag), row))

    def missing(self) -> str:
        """Ask everybody, wait for answers for a few seconds, and say who gave none.

        Returns:
            For an error: ``"no answer from world rank 3 on host c"``.
        """
        me = self.comm.Get_rank()
        others = {rank for rank in range(self.comm.Get_size()) if rank != me}
        with self._lock:
            self._here.clear()
            self._round += 1
            for rank in others:
                self._send(rank, ASKED, self._round)
        end = time.perf_counter() + ANSWER_SECONDS
        with suppress(load().Exception):  # of a connection that is lost: nobody answers there
            while time.perf_counter() < end and not others <= self._here:
                self.answer()
                time.sleep(POLL_SECONDS)
        silent = sorted(others - self._here)
        if not silent:
            return "every rank answers, so the link is slow, or an exchange too large for it"
        names = ", ".join(f"{rank} on host {self.hosts[rank]}" for rank in silent)
        return f"no answer from world rank {names}"

    def free(self) -> None:
        """Give the communicator back. Collective over the world; idempotent."""
        if self.comm != load().COMM_NULL:
            self.comm.Free()
