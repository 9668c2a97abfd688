"""How a mean over ranks is taken: in which groups, one after the other, and what each exchanges.

Ranks are numbered in mixed radix, the first level's digit lowest. On each level the ranks that
differ in its digit alone are a group, and reduce what they hold: level by level, until all ranks'
versions are in it. Then the means return, from the last level to the first. One level of all ranks
is the direct reduce-scatter and all-gather; levels of two are recursive halving and doubling
(Rabenseifner 2004); two levels are what clusters of racks do.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isqrt, prod
from typing import Any, Literal

from daso.plan.layout import Span, chunk_parts, split

__all__ = [
    "BLOCK",
    "Algorithm",
    "AllReducePlan",
    "Level",
    "candidate_plans",
    "direct_plan",
    "named_plan",
    "restored",
    "stored",
]

Way = Literal["scatter", "whole", "ring"]
Algorithm = Literal["auto", "direct", "two-level", "halving", "ring", "planned", "mpi"]

BLOCK = 4096  # numbers: a part is cut at multiples of them, which every codec can begin at
FULL_MESSAGES = 16  # of a chunk at the most, unless messages would be too small: memory is kept
SMALL = 4  # times smaller than asked for may messages be
MOST_LEVELS = 3  # of `candidate_plans`: narrow wires round once more on each


@dataclass(frozen=True, slots=True)
class Level:
    """Groups of so many ranks, and what they do.

    Args:
        size: Ranks of a group.
        way: ``"scatter"``: each sends each its part of what it holds, and adds its own; the means
            return alike. ``"ring"``: the same by the next rank of the group alone, which passes on
            what it added. ``"whole"``: each sends each all that it holds, and all add the same.
    """

    size: int
    way: Way = "scatter"

    @property
    def parts(self) -> int:
        """Into how many parts it cuts what a rank holds."""
        return 1 if self.way == "whole" else self.size


@dataclass(frozen=True)
class AllReducePlan:
    """Levels of groups, the first one first.

    Args:
        levels: What groups do.
        order: The ranks in the order in which they are numbered here; empty: as they are.
        shares: How much of a row each rank adds, where one level is all; empty: as much as any.
    """

    levels: tuple[Level, ...]
    order: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()

    @cached_property
    def peers(self) -> int:
        """Ranks in all."""
        return prod(level.size for level in self.levels)

    @property
    def parts(self) -> int:
        """Payloads that a rank sends of a chunk on the first level, its own part included."""
        return self.levels[0].parts

    @cached_property
    def leaves(self) -> int:
        """Parts of a chunk after all levels."""
        return prod(level.parts for level in self.levels)

    @property
    def messages_of_chunk(self) -> int:
        """How many full messages make a chunk: two ranks swap all of it, more send parts.

        From 16 parts on chunks grow no more, because memory would, until messages are `SMALL`.
        Where plans follow links, a thin one stands still while the first chunk comes to it, and
        after the last has crossed: these are short.
        """
        if self.shares or self.order:
            return max(1, self.leaves // SMALL)
        return max(min(self.leaves, FULL_MESSAGES), self.leaves // SMALL)

    def chunks(self, numel: int, message: int, even: int = 1) -> tuple[tuple[Span, ...], ...]:
        """Cut a row into chunks, and each into what has a payload on the first level.

        Args:
            numel: Of the row.
            message: Numbers of a message, about.
            even: Numbers at multiples of which everything begins.
        """
        chunk = max(1, message) * self.messages_of_chunk
        return chunk_parts(numel, self.parts, chunk, even, self.shares)

    @property
    def flat(self) -> bool:
        """Whether one level is all: two ranks swap, or each of more sends each its part."""
        (first, *others) = self.levels
        return not others and (first.way == "scatter" or first == Level(2, "whole"))

    @property
    def returns(self) -> bool:
        """Whether means return: no rank has all of them after the last level."""
        return self.leaves > 1

    @property
    def name(self) -> str:
        """In words, for logs and reports."""
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
        """All ranks, in the order in which they are numbered."""
        return self._ranks(range(self.peers))

    @property
    def rounds(self) -> int:
        """Messages that follow each other in the mean of a chunk."""
        return sum(
            (1 if level.way == "whole" else 2) * (level.size - 1 if level.way == "ring" else 1)
            for level in self.levels
        )

    def _ranks(self, numbers: range) -> tuple[int, ...]:
        return tuple(self.order[one] for one in numbers) if self.order else tuple(numbers)

    def digit(self, rank: int, depth: int) -> int:
        """Return a rank's place in its group on a level."""
        return self._numbers[rank] // self._stride(depth) % self.levels[depth].size

    def group(self, rank: int, depth: int) -> tuple[int, ...]:
        """Return the ranks of a rank's group on a level, in the order in which they add."""
        stride, size = self._stride(depth), self.levels[depth].size
        first = self._numbers[rank] - self.digit(rank, depth) * stride
        return self._ranks(range(first, first + size * stride, stride))

    def below(self, rank: int, depth: int) -> tuple[int, ...]:
        """Return the ranks whose versions are in what a rank holds before a level."""
        stride, number = self._stride(depth), self._numbers[rank]
        return self._ranks(range(number - number % stride, number - number % stride + stride))

    def leaf_range(self, rank: int, depth: int) -> tuple[int, int]:
        """Return the first leaf that a rank holds after a level, and the one after its last."""
        first, count = 0, self.leaves
        for at, level in enumerate(self.levels[: depth + 1]):
            count //= level.parts
            if level.parts > 1:
                first += self.digit(rank, at) * count
        return first, first + count

    def leaf_spans(self, parts: tuple[Span, ...]) -> tuple[Span, ...]:
        """Return the leaves of a chunk, given its parts on the first level, in their order."""
        spans = parts
        for level in self.levels[1:]:
            if level.parts > 1:
                spans = tuple(one for span in spans for one in split(span, level.parts, BLOCK))
        return spans


def stored(plan: AllReducePlan) -> dict[str, Any]:
    """Return a plan as plain values, for checkpoints and logs."""
    return {
        "levels": [[level.size, level.way] for level in plan.levels],
        "order": [*plan.order],
        "shares": [*plan.shares],
    }


def restored(values: Mapping[str, Any]) -> AllReducePlan:
    """Return the plan that `stored` was given."""
    levels = tuple(Level(size, way) for size, way in values["levels"])
    return AllReducePlan(levels, tuple(values["order"]), tuple(values.get("shares", ())))


def direct_plan(peers: int) -> AllReducePlan:
    """Return the plan of one level: two ranks swap all they have, more send each peer its part."""
    return AllReducePlan((Level(peers, "whole" if peers == 2 else "scatter"),))


def named_plan(algorithm: Algorithm, peers: int) -> AllReducePlan:
    """Return the plan of an algorithm that was asked for by name.

    Two ranks always swap: nothing else sends fewer bytes, or fewer messages.
    """
    if peers <= 3 or algorithm == "direct":
        return direct_plan(peers) if algorithm != "ring" or peers <= 2 else _ring(peers)
    if algorithm == "ring":
        return _ring(peers)
    if algorithm == "two-level":
        size = next(one for one in range(isqrt(peers), 0, -1) if peers % one == 0)
        if size == 1:  # a prime
            return direct_plan(peers)
        return AllReducePlan((Level(peers // size), Level(size)))
    assert algorithm == "halving", "the others have no name of their own"
    return AllReducePlan(tuple(Level(factor) for factor in reversed([*_prime_factors(peers)])))


def _ring(peers: int) -> AllReducePlan:
    return AllReducePlan((Level(peers, "ring"),))


def candidate_plans(peers: int) -> list[AllReducePlan]:
    """Return the plans among which costs choose: up to three levels, larger groups first.

    The last levels may exchange what they hold as a whole, which saves messages where it is small.
    """
    plans = [direct_plan(peers)]
    for sizes in _factorizations(peers, peers, MOST_LEVELS):
        for whole in range(len(sizes) + 1):
            cut = len(sizes) - whole
            levels = (*map(Level, sizes[:cut]), *(Level(size, "whole") for size in sizes[cut:]))
            plan = AllReducePlan(levels)
            if plan not in plans:
                plans.append(plan)
    return plans


def _factorizations(number: int, most: int, levels: int) -> Iterator[tuple[int, ...]]:
    """Yield how a number is a product of factors from 2 to ``most`` that do not grow."""
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
