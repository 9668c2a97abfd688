"""How often ranks ask each other whether the job has to end."""

import math

__all__ = ["batches_to_next_vote"]

SECONDS = 0.5  # from vote to vote; a request waits for two of them at most
MOST_BATCHES = 64


def batches_to_next_vote(step_seconds: float) -> int:
    """Return after how many batches the next vote begins.

    A vote is received at the next one's begin, so that nobody waits for it: ranks are at most that
    many batches apart.
    """
    if not 0 < step_seconds < math.inf:
        return 1
    return max(1, min(MOST_BATCHES, math.ceil(SECONDS / step_seconds)))
