"""Protocol that finds the ranks that answer: ranks pass their sets of known ranks to neighbors.

A rank that asks starts a round and announces itself to its neighbors. A rank that receives a
message of a new round joins it, and passes on its set of known ranks whenever the set grows.
Neighbors are at distances of powers of two, so that a round ends after about log2(ranks) turns, in
each of which a rank sends at most 2 log2(ranks) messages. A rank that asks during a round, or soon
after it, uses the results of that round.
"""

from collections.abc import Callable, Iterable, Sequence

from daso.comm.health.step_watchdog import neighbours

WORD = 32  # ranks per number of a message
FRESH_SECONDS = 1.0  # after joining a round, its answers are recent enough


class Census:
    """Ranks that are known to answer, as seen by one rank; does not communicate.

    Args:
        rank: This rank.
        ranks: Number of ranks.
        send: Sends numbers to a rank. Does not block.
    """

    def __init__(self, rank: int, ranks: int, send: Callable[[int, Sequence[int]], None]) -> None:
        self._rank, self._ranks, self._send = rank, ranks, send
        self._neighbours = neighbours(rank, ranks)
        self._round, self._joined_at = 0, float("-inf")
        self._alive = 1 << rank  # bit mask of the ranks known to answer in this round
        self._alive_since_asked = 0  # the same, in all rounds since this rank asked
        self._sent: dict[int, int] = {}  # the last mask sent to each rank in this round

    @staticmethod
    def numbers(ranks: int) -> int:
        """Return the number of integers in a message."""
        return 1 + -(-ranks // WORD)

    @property
    def silent(self) -> list[int]:
        """Ranks that have not answered since this one asked."""
        return [rank for rank in range(self._ranks) if not self._alive_since_asked >> rank & 1]

    def ask(self, now: float) -> None:
        """Start a round, unless this rank has joined one recently.

        Args:
            now: The current time, in seconds.
        """
        if now - self._joined_at > FRESH_SECONDS:
            self._join(self._round + 1, now)
        self._alive_since_asked = self._alive
        self._send_mask(self._neighbours)

    def ask_directly(self) -> None:
        """Ask some silent ranks directly, others each time; neighbors may not pass messages on."""
        unasked = [rank for rank in self.silent if rank not in self._sent]
        self._send_mask(unasked[: len(self._neighbours)])

    def receive(self, messages: Iterable[tuple[int, Sequence[int]]], now: float) -> None:
        """Merge received masks, pass on new information, and answer ranks that know less."""
        before, known = (self._round, self._alive), {}
        for source, (round_, *words) in messages:
            if round_ > self._round:
                self._join(round_, now)
            elif round_ < self._round:  # late: its sender may be lost since
                continue
            known[source] = sum(word << WORD * index for index, word in enumerate(words))
            self._alive |= known[source]
            self._alive_since_asked |= self._alive
        changed = (self._round, self._alive) != before
        behind = [source for source, mask in known.items() if mask != self._alive]
        self._send_mask([*(self._neighbours if changed else []), *behind])

    def _join(self, round_: int, now: float) -> None:
        self._round, self._joined_at = round_, now
        self._alive, self._sent = 1 << self._rank, {}

    def _send_mask(self, ranks: Sequence[int]) -> None:
        mask, count = (1 << WORD) - 1, self.numbers(self._ranks) - 1
        words = [self._alive >> WORD * index & mask for index in range(count)]
        for rank in ranks:
            if self._sent.get(rank) != self._alive:
                self._sent[rank] = self._alive
                self._send(rank, [self._round, *words])
