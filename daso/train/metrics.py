"""What an optimizer counts about its communication, on one rank."""

from collections import deque
from dataclasses import dataclass, field

__all__ = ["Counts"]


@dataclass(slots=True)
class Counts:
    """What happened since the start, on this rank."""

    exchanges: int = 0  # merged, and synchronous batches
    dropped: int = 0  # exchanges or steps dropped for values that are not finite
    dropped_in_a_row: int = 0
    global_bytes_sent: int = 0  # to other nodes, by this rank
    exposed_seconds: float = 0.0  # the training thread stood still for other nodes
    step_seconds: float = 0.0  # between the last two steps
    exchange_seconds: float = 0.0  # the last exchange, start to end
    # The last exchanges, drops and joins; bounded, so that a long run does not grow.
    events: deque[dict[str, object]] = field(default_factory=lambda: deque(maxlen=10_000))
