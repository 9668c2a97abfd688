"""Who is there, told from rank to rank: what each knows goes to its neighbours when it grows.

Whoever asks begins a round, and tells its neighbours that it is there. Each that is told of a round
joins it, and passes on what it knows whenever that has grown. Neighbours are at distances of powers
of two, so that a round is over after about log2(ranks) turns, in each of which a rank sends at most
2 log2(ranks) messages: 143 in all among 1,024 ranks, however many ask. If each asked all others,
that were 2,046, over as many connections.
"""

from collections.abc import Callable, Sequence

from daso.comm.health.step_watchdog import neighbours

__all__ = ["Census"]

WORD = 32  # ranks that a number of a message tells of


class Census:
    """What one rank knows of the others; does not communicate.

    Args:
        rank: This rank.
        ranks: How many there are.
        send: Sends numbers to a rank. Does not block.
    """

    def __init__(self, rank: int, ranks: int, send: Callable[[int, Sequence[int]], None]) -> None:
        self._rank, self._ranks, self._send = rank, ranks, send
        self._neighbours = neighbours(rank, ranks)
        self._round = 0
        self._here = 1 << rank  # bit by bit: who is known to be there, in this round
        self._since = 0  # the same, in all rounds since this rank asked

    @staticmethod
    def numbers(ranks: int) -> int:
        """Return how many numbers a message has."""
        return 1 + -(-ranks // WORD)

    @property
    def silent(self) -> list[int]:
        """Ranks of which nothing is known since this one asked."""
        return [rank for rank in range(self._ranks) if not self._since >> rank & 1]

    def ask(self) -> None:
        """Begin a round."""
        self._join(self._round + 1)
        self._since = self._here
        self._tell(self._neighbours)

    def ask_directly(self) -> None:
        """Ask some who may be there, but behind ranks that pass nothing on."""
        self._tell(self.silent[: len(self._neighbours)])

    def heard(self, messages: Sequence[Sequence[int]]) -> None:
        """Take in what was received, and pass it on if it was news."""
        before = self._round, self._here
        for round_, *words in messages:
            if round_ > self._round:
                self._join(round_)
            elif round_ < self._round:  # late: who sent it may be gone since
                continue
            self._here |= sum(word << WORD * at for at, word in enumerate(words))
            self._since |= self._here
        if (self._round, self._here) != before:
            self._tell(self._neighbours)

    def _join(self, round_: int) -> None:
        self._round, self._here = round_, 1 << self._rank

    def _tell(self, ranks: Sequence[int]) -> None:
        mask, count = (1 << WORD) - 1, self.numbers(self._ranks) - 1
        words = [self._here >> WORD * at & mask for at in range(count)]
        for rank in ranks:
            self._send(rank, [self._round, *words])
