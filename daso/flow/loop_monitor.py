"""Looks after a rank's loop: progress, waits in vain, exchanges with other nodes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from daso.comm.topology import Topology
from daso.errors import StallError
from daso.flow.controller import Controller
from daso.flow.replicas import FlowReplicas
from daso.flow.worker import Watch

__all__ = ["LoopMonitor"]

PROGRESS_SECONDS = 1.0


@dataclass(slots=True)
class LoopMonitor(Watch):
    """Looks after a loop a few times a second.

    Args:
        topology: Whose ranks ask for each other.
        timeout_seconds: How long nothing may come.
        controller: Where instances come in.
        progress: The caller's.
        beside: The flows of other nodes; None: there are none.
    """

    topology: Topology
    timeout_seconds: float
    controller: Controller | None
    progress: Callable[[int, int], None] | None
    beside: FlowReplicas | None
    waiting: Callable[[], list[str]] = list
    told_at: float = field(default_factory=time.perf_counter)

    @property
    def hears_all(self) -> bool:  # type: ignore[override]
        """Whether every rank is told of every instance: to exchange after as many as elsewhere."""
        return self.beside is not None

    def look(self, idle_seconds: float) -> None:
        """Answer ranks that ask, tell the caller how far it is, raise where waiting is in vain."""
        self.topology.liveness.answer()
        now = time.perf_counter()
        one = self.controller
        if self.progress is not None and one is not None and now > self.told_at + PROGRESS_SECONDS:
            self.told_at = now
            self.progress(one.finished, one.count)
        if idle_seconds > self.timeout_seconds:
            waits = "; ".join(self.waiting()[:3]) or "no node of this rank waits for a part"
            raise StallError(
                f"a message must come within {self.timeout_seconds:g} s, but none came to rank "
                f"{self.topology.rank}: {self.topology.liveness.missing()}; {waits}; look there, "
                f"or raise timeout_seconds"
            )

    def is_due(self) -> bool:
        """Return whether a batch of instances is full."""
        return self.beside is not None and self.beside.is_due()

    def exchange(self) -> None:
        """Exchange with the flows of other nodes."""
        assert self.beside is not None
        self.beside.step()
