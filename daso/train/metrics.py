"""What an optimizer counts about its communication, on one rank."""

import time
from collections import deque
from dataclasses import dataclass, field

__all__ = ["Counts"]


@dataclass(slots=True)
class Counts:
    """What happened since the start, on this rank."""

    epoch: int = 0  # epochs finished
    exchanges: int = 0  # merged, and synchronous batches
    dropped: int = 0  # exchanges or steps dropped for values that are not finite
    drops_lately: int = 0  # without two good exchanges in a row between them
    good_in_a_row: int = 0
    global_bytes_sent: int = 0  # to other nodes, by this rank
    exposed_seconds: float = 0.0  # the training thread stood still for other nodes
    step_seconds: float = 0.0  # between the last two steps
    exchange_seconds: float = 0.0  # the last exchange, start to end
    stepped_at: float = field(default_factory=time.perf_counter)
    # The last exchanges, drops and joins; bounded, so that a long run does not grow.
    events: deque[dict[str, object]] = field(default_factory=lambda: deque(maxlen=10_000))

    def step(self) -> None:
        """A step was taken."""
        now = time.perf_counter()
        self.step_seconds, self.stepped_at = now - self.stepped_at, now

    def good(self) -> None:
        """An exchange was merged, or a synchronous step taken."""
        self.exchanges += 1
        self.good_in_a_row += 1
        # One good exchange may only show that the one before it was dropped and mended.
        if self.good_in_a_row > 1:
            self.drops_lately = 0

    def drop(self) -> int:
        """An exchange or a step was dropped; return how many were lately."""
        self.dropped += 1
        self.drops_lately += 1
        self.good_in_a_row = 0
        return self.drops_lately

    def event(self, kind: str, **what: object) -> None:
        """Remember an event."""
        self.events.append({"kind": kind, "epoch": self.epoch, **what})
