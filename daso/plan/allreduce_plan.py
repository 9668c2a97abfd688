"""All-reduce plans: levels of groups of ranks that reduce one after the other.

Ranks are numbered in mixed radix, the first level's digit lowest. On each level the ranks that
differ only in its digit form a group and reduce their parts. After all levels, all ranks' payloads
are reduced. Then the means return, from the last level to the first. One level of all ranks is the
direct reduce-scatter and all-gather; levels of two are recursive halving and doubling (Rabenseifner
2004); two levels suit clusters of racks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isqrt, prod
from typing import Any, Literal

from daso.plan.layout import Span, chunk_parts, split

Way = Literal["scatter", "whole", "ring"]
Algorithm = Literal["auto", "direct", "two-level", "halving", "ring", "planned", "mpi"]

BLOCK = 4096  # numbers: parts start at multiples, as every codec requires
FULL_MESSAGES = 16  # per chunk at most, to limit memory, unless messages would be too small
MAX_SHRINK = 4  # factor by which messages may be smaller than requested
MAX_LEVELS = 3  # of `candidate_plans`: narrow wires round once more on each level


@dataclass(frozen=True, slots=True)
class Level:
    """Level of a plan: the size of its groups, and their operation.

    Args:
        size: Ranks of a group.
        way: ``"scatter"``: each rank sends each other rank its part, reduces its own part, and
            returns the mean. ``"ring"``: the same, but parts and means pass around the group, from
            each rank to the next. ``"whole"``: all ranks exchange everything and reduce it all.
    """

    size: int
    way: Way = "scatter"

    @property
    def parts(self) -> int:
        """Number of parts into which a rank's data is divided."""
        return 1 if self.way == "whole" else self.size


@dataclass(frozen=True)
class AllReducePlan:
    """Levels of groups, in order.

    Args:
        levels: Size and operation of the groups on each level.
        order: Ranks in the order of numbering; empty: by rank.
        shares: Relative size of the part that each rank reduces, with one level; empty: equal.
    """

    levels: tuple[Level, ...]
    order: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()

    @cached_property
    def peers(self) -> int:
        """Number of ranks."""
        return prod(level.size for level in self.levels)

    @property
    def parts(self) -> int:
        """Payloads of a chunk on the first level, including the rank's own part."""
        return self.levels[0].parts

    @cached_property
    def leaves(self) -> int:
        """Number of parts of a chunk after the last level of groups."""
        return prod(level.parts for level in self.levels)

    @property
    def messages_of_chunk(self) -> int:
        """Number of full messages in a chunk: two ranks swap all of it, more ranks send parts.

        From 16 parts on, chunks stop growing, to limit memory, until messages have shrunk by
        `MAX_SHRINK`. In plans for unequal links, a slow link is idle until the first chunk arrives
        and after the last has passed, so chunks are short.
        """
        if self.shares or self.order:
            return max(1, self.leaves // MAX_SHRINK)
        return max(min(self.leaves, FULL_MESSAGES), self.leaves // MAX_SHRINK)

    def chunks(self, numel: int, message: int, even: int = 1) -> tuple[tuple[Span, ...], ...]:
        """Cut a buffer into chunks, and each chunk into its payloads on the first level.

        Args:
            numel: Of the buffer.
            message: Approximate numbers per message.
            even: All spans start at multiples of this.
        """
        chunk = max(1, message) * self.messages_of_chunk
        return chunk_parts(numel, self.parts, chunk, even, self.shares)

    @property
    def flat(self) -> bool:
        """True with one level, in which two ranks swap or all ranks send each other parts."""
        (first, *others) = self.levels
        return not others and (first.way == "scatter" or first == Level(2, "whole"))

    @property
    def returns(self) -> bool:
        """True if means return, because no rank has all of them after the last level."""
        return self.leaves > 1

    @property
    def name(self) -> str:
        """Description for logs and reports."""
        if self.flat:
            shares = f" by {' '.join(map(str, self.shares))}" if self.shares else ""
            return "swap" if self.levels[0].way == "whole" else f"direct{shares}"
        order = f" of {' '.join(map(str, self.order))}" if self.order else ""
        if self.levels == (Level(self.peers, "ring"),):
            return f"ring{order}"
        ways = {"scatter": "", "whole": " whole", "ring": " ring"}
        return " x ".join(f"{level.size}{ways[level.way]}" for level in self.levels) + order

    def _stride(self, depth: int) -> int:
        return prod(level.size for level in self.levels[:depth])

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """The number of each rank."""
        return {rank: number for number, rank in enumerate(self.order or range(self.peers))}

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in the order of numbering."""
        return self._ranks(range(self.peers))

    @property
    def rounds(self) -> int:
        """Number of consecutive messages in the mean of a chunk."""
        return sum(
            (1 if level.way == "whole" else 2) * (level.size - 1 if level.way == "ring" else 1)
            for level in self.levels
        )

    def _ranks(self, numbers: range) -> tuple[int, ...]:
        return tuple(self.order[number] for number in numbers) if self.order else tuple(numbers)

    def digit(self, rank: int, depth: int) -> int:
        """Return a rank's index in its group on a level."""
        return self._numbers[rank] // self._stride(depth) % self.levels[depth].size

    def group(self, rank: int, depth: int) -> tuple[int, ...]:
        """Return the ranks of a rank's group on a level, in the order of addition."""
        stride, size = self._stride(depth), self.levels[depth].size
        first = self._numbers[rank] - self.digit(rank, depth) * stride
        return self._ranks(range(first, first + size * stride, stride))

    def below(self, rank: int, depth: int) -> tuple[int, ...]:
        """Return the ranks whose data a rank's partial sum contains before a level."""
        stride, number = self._stride(depth), self._numbers[rank]
        return self._ranks(range(number - number % stride, number - number % stride + stride))

    def leaf_range(self, rank: int, depth: int) -> tuple[int, int]:
        """Return the range of leaves that a rank holds after a level."""
        first, count = 0, self.leaves
        for index, level in enumerate(self.levels[: depth + 1]):
            count //= level.parts
            if level.parts > 1:
                first += self.digit(rank, index) * count
        return first, first + count

    def leaf_spans(self, parts: tuple[Span, ...]) -> tuple[Span, ...]:
        """Return the leaves of a chunk, in order, given its parts on the first level."""
        spans = parts
        for level in self.levels[1:]:
            if level.parts > 1:
                spans = tuple(part for span in spans for part in split(span, level.parts, BLOCK))
        return spans


def stored(plan: AllReducePlan) -> dict[str, Any]:
    """Return a plan as plain values, for checkpoints and logs."""
    return {
        "levels": [[level.size, level.way] for level in plan.levels],
        "order": [*plan.order],
        "shares": [*plan.shares],
    }


def restored(values: Mapping[str, Any]) -> AllReducePlan:
    """Return the plan that `stored` has converted."""
    levels = tuple(Level(size, way) for size, way in values["levels"])
    return AllReducePlan(levels, tuple(values["order"]), tuple(values.get("shares", ())))


def direct_plan(peers: int) -> AllReducePlan:
    """Return the plan with one level: two ranks swap buffers, more ranks send each other parts."""
    return AllReducePlan((Level(peers, "whole" if peers == 2 else "scatter"),))


def named_plan(algorithm: Algorithm, peers: int) -> AllReducePlan:
    """Return the plan of a named algorithm.

    Two ranks always swap: no other algorithm sends fewer bytes or messages.
    """
    if peers <= 3 or algorithm == "direct":
        return direct_plan(peers) if algorithm != "ring" or peers <= 2 else _ring(peers)
    if algorithm == "ring":
        return _ring(peers)
    if algorithm == "two-level":
        size = next(divisor for divisor in range(isqrt(peers), 0, -1) if peers % divisor == 0)
        if size == 1:  # a prime
            return direct_plan(peers)
        return AllReducePlan((Level(peers // size), Level(size)))
    assert algorithm == "halving", "other algorithms are not named plans"
    return AllReducePlan(tuple(Level(factor) for factor in reversed([*_prime_factors(peers)])))


def _ring(peers: int) -> AllReducePlan:
    return AllReducePlan((Level(peers, "ring"),))


def candidate_plans(peers: int) -> list[AllReducePlan]:
    """Return the plans to choose from by cost: up to three levels, larger groups first.

    The last levels may exchange whole buffers, which saves messages if the buffers are small.
    """
    plans = [direct_plan(peers)]
    for sizes in _factorizations(peers, peers, MAX_LEVELS):
        for count in range(len(sizes) + 1):
            cut = len(sizes) - count
            levels = (*map(Level, sizes[:cut]), *(Level(size, "whole") for size in sizes[cut:]))
            plan = AllReducePlan(levels)
            if plan not in plans:
                plans.append(plan)
    return plans


def _factorizations(number: int, most: int, levels: int) -> Iterator[tuple[int, ...]]:
    """Yield the factorizations of a number into non-increasing factors from 2 to ``most``."""
    if number <= most and number > 1:
        yield (number,)
    if levels == 1:
        return
    for factor in range(min(most, number // 2), 1, -1):
        if number % factor == 0:
            for rest in _factorizations(number // factor, factor, levels - 1):
                yield (factor, *rest)


def _prime_factors(number: int) -> Iterator[int]:
    factor = 2
    while number > 1:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 1
