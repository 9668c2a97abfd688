"""When small tensors are exchanged alone, between two exchanges of everything.

Early convolutions, norms and biases: nodes that train by SGD lose most where these drift apart.
How often they go follows from what one takes of training, measured on all ranks.
"""

import math
from dataclasses import dataclass, replace

__all__ = ["SMALL_PERIOD", "SMALL_WAIT", "SmallTensors"]

SMALL_PERIOD = 2  # batches from one exchange of small tensors to the next, at least
SMALL_WAIT = 2  # batches that one may take: with fewer, ranks wait more for who is slow for once
# Batches between them, at most: at every 4th they gain little (scripts/figures/selective.json).
LONGEST = 3
MEMORY = 0.9  # of what one takes, from one exchange of everything to the next without any


@dataclass(frozen=True, slots=True)
class SmallTensors:
    """Where exchanges of small tensors alone stand."""

    # Of the bytes of an exchange of everything, at most, theirs; 0: they do not go alone.
    share: float = 0.0
    period: int = SMALL_PERIOD  # batches from one to the next; 0: none
    seconds: float = 0.0  # that one takes from training, lately; 0: not measured yet
    last: int = 0  # batch after which they were sent alone last
    in_flight: bool = False  # what is in flight is they alone

    def begin(self, share: float) -> "SmallTensors":
        """Return how training begins, or goes on, with tensors of this share."""
        return replace(self, share=share, period=(self.period or SMALL_PERIOD) if share else 0)

    def is_due(self, batch: int, *, last: int, skip: int, wait: int) -> bool:
        """Tell whether they go now: some batches after, and before, they go with everything.

        Args:
            batch: That is over.
            last: After which everything was sent.
            skip: Batches from there to the next time.
            wait: Batches that everything takes at most, of which they take their share.
        """
        since = batch - max(last, self.last)
        return self.go_alone(wait) and min(since, last + skip - batch) >= self.period

    def sent(self, batch: int) -> "SmallTensors":
        """Return how it is when they were sent alone."""
        return replace(self, last=batch, in_flight=True)

    def measured(self, seconds: float) -> "SmallTensors":
        """Take in what one took: where none went, 0, one is tried in a while."""
        if not seconds:
            return replace(self, seconds=MEMORY * self.seconds)
        return replace(self, seconds=(self.seconds + seconds) / 2 if self.seconds else seconds)

    def period_within(self, seconds: float) -> int:
        """Return how many batches apart they take no more than so much of each; 0: none go."""
        if seconds <= 0 or not self.share:
            return self.period
        batches = self.seconds / seconds
        return max(SMALL_PERIOD, math.ceil(batches)) if batches <= LONGEST else 0

    def go_alone(self, wait: int) -> bool:
        """Tell whether they do, where everything takes so many batches at most."""
        return 0 < self.share * wait <= 0.8 * SMALL_WAIT and self.period > 0

    def stay_behind(self, wait: int) -> bool:
        """Tell whether they go alone, and everything takes longer: they stay meanwhile."""
        return wait > SMALL_WAIT and self.go_alone(wait)
