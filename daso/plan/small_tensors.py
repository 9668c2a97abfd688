"""Schedule of exchanges of small tensors alone, between two exchanges of everything.

These are early convolutions, norms and biases. With SGD, drift of these tensors costs most
accuracy. The period follows from the measured training time that one such exchange takes.
"""

import math
from dataclasses import dataclass, replace

SMALL_PERIOD = 2  # minimum batches from one exchange of small tensors to the next
SMALL_WAIT = 2  # batches that one may take: with fewer, ranks wait more for occasional slow ranks
# Maximum batches between them: every 4th batch gains little (scripts/figures/selective.json).
MAX_PERIOD = 3
DECAY = 0.9  # of the measured seconds, per exchange of everything without one of small tensors


@dataclass(frozen=True, slots=True)
class SmallTensors:
    """State of the exchanges of small tensors alone."""

    # Maximum share of their bytes in an exchange of everything; 0: they are never sent alone.
    share: float = 0.0
    period: int = SMALL_PERIOD  # batches from one to the next; 0: none
    seconds: float = 0.0  # recent training time lost to one exchange; 0: not measured yet
    last: int = 0  # batch of the last exchange of small tensors alone
    in_flight: bool = False  # the exchange in flight carries only small tensors

    def begin(self, share: float) -> "SmallTensors":
        """Return the state in which training starts, or is resumed, with tensors of this share."""
        return replace(self, share=share, period=(self.period or SMALL_PERIOD) if share else 0)

    def is_due(self, batch: int, *, last: int, skip: int, wait: int) -> bool:
        """Return whether they are sent alone now, between two exchanges of everything.

        Args:
            batch: The batch that has just ended.
            last: Batch after which everything was sent.
            skip: Batches from there to the next exchange of everything.
            wait: Maximum batches that an exchange of everything takes.
        """
        since = batch - max(last, self.last)
        return self.are_separate(wait) and min(since, last + skip - batch) >= self.period

    def sent(self, batch: int) -> "SmallTensors":
        """Return the state after small tensors were sent alone."""
        return replace(self, last=batch, in_flight=True)

    def measured(self, seconds: float) -> "SmallTensors":
        """Return the state after a measurement; 0 (no exchange) lets the estimate decay."""
        if not seconds:
            return replace(self, seconds=DECAY * self.seconds)
        return replace(self, seconds=(self.seconds + seconds) / 2 if self.seconds else seconds)

    def period_within(self, seconds: float) -> int:
        """Return the period with which they take at most ``seconds`` per batch; 0: none does."""
        if seconds <= 0 or not self.share:
            return self.period
        batches = self.seconds / seconds
        return max(SMALL_PERIOD, math.ceil(batches)) if batches <= MAX_PERIOD else 0

    def are_separate(self, wait: int) -> bool:
        """Return whether small tensors are exchanged alone if all take ``wait`` batches."""
        return 0 < self.share * wait <= 0.8 * SMALL_WAIT and self.period > 0

    def are_held_back(self, wait: int) -> bool:
        """Return whether an exchange of everything holds back exchanges of small tensors."""
        return wait > SMALL_WAIT and self.are_separate(wait)
