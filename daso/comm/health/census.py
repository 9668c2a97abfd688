"""Who is there, told from rank to rank: what each knows goes to its neighbours when it grows.

Whoever asks begins a round, and tells its neighbours that it is there. Each that is told of a round
joins it, and passes on what it knows whenever that has grown. Neighbours are at distances of powers
of two, so that a round is over after about log2(ranks) turns, in each of which a rank sends at most
2 log2(ranks) messages. Who asks while a round goes on, or soon after, has what that brought.
"""

from collections.abc import Callable, Iterable, Sequence

from daso.comm.health.step_watchdog import neighbours

__all__ = ["Census"]

WORD = 32  # ranks that a number of a message tells of
LATELY_SECONDS = 1.0  # since a round was joined, within which its answers are new enough


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
        self._round, self._joined_at = 0, float("-inf")
        self._here = 1 << rank  # bit by bit: who is known to be there, in this round
        self._since = 0  # the same, in all rounds since this rank asked
        self._told: dict[int, int] = {}  # what ranks were told in this round

    @staticmethod
    def numbers(ranks: int) -> int:
        """Return how many numbers a message has."""
        return 1 + -(-ranks // WORD)

    @property
    def silent(self) -> list[int]:
        """Ranks of which nothing is known since this one asked."""
        return [rank for rank in range(self._ranks) if not self._since >> rank & 1]

    def ask(self, now: float) -> None:
        """Begin a round, unless one goes on; at a time in seconds."""
        if now - self._joined_at > LATELY_SECONDS:
            self._join(self._round + 1, now)
        self._since = self._here
        self._tell(self._neighbours)

    def ask_directly(self) -> None:
        """Ask some, others each time, who may be there, but behind ranks that pass nothing on."""
        fresh = [rank for rank in self.silent if rank not in self._told]
        self._tell(fresh[: len(self._neighbours)])

    def heard(self, messages: Iterable[tuple[int, Sequence[int]]], now: float) -> None:
        """Take in what ranks sent, pass on what is news, and answer those who know less."""
        before, known = (self._round, self._here), {}
        for source, (round_, *words) in messages:
            if round_ > self._round:
                self._join(round_, now)
            elif round_ < self._round:  # late: who sent it may be gone since
                continue
            known[source] = sum(word << WORD * at for at, word in enumerate(words))
            self._here |= known[source]
            self._since |= self._here
        news = self._neighbours if (self._round, self._here) != before else []
        self._tell([*news, *(source for source, bits in known.items() if bits != self._here)])

    def _join(self, round_: int, now: float) -> None:
        self._round, self._joined_at = round_, now
        self._here, self._told = 1 << self._rank, {}

    def _tell(self, ranks: Sequence[int]) -> None:
        mask, count = (1 << WORD) - 1, self.numbers(self._ranks) - 1
        words = [self._here >> WORD * at & mask for at in range(count)]
        for rank in ranks:
            if self._told.get(rank) != self._here:
                self._told[rank] = self._here
                self._send(rank, [self._round, *words])
