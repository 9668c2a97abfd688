"""What becomes of each unit's activations between forward and backward: keep, swap or recompute.

A unit is some operations of which the first costs much to compute (a convolution, a product of
matrices) and the rest little. Of what it saves for backward, its head is what the first made, and
its tail what the others made of that. Both stay where they are, or go to a second, larger memory
and come back, or the tail is dropped and computed once more; then its head stays, or goes and
comes back. Decided before forward from measured bytes and times (US12645941B2; PoocH, arXiv
1907.05013), on virtual time: computing is one resource, the way to the second memory another.

What comes out is not only who goes, but also when: by which unit copies must have ended, and with
which they begin to come back. Whoever follows it never has more bytes at once than were predicted,
however fast copies are.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import NamedTuple

from daso.errors import ConfigError

__all__ = [
    "BOTH",
    "EXACT_MOST",
    "KEEP",
    "POLICIES",
    "RECOMPUTE",
    "SWAP",
    "WAYS",
    "Course",
    "Group",
    "Link",
    "Part",
    "Plan",
    "Unit",
    "choose",
    "decision",
    "floor",
    "parts",
    "simulate_plan",
]

KEEP, SWAP, RECOMPUTE, BOTH = "keep", "swap", "recompute", "recompute_swap"
WAYS = (KEEP, SWAP, RECOMPUTE, BOTH)
EXACT_MOST = 7  # units of which all plans are tried


class Group(NamedTuple):
    """What a unit saves, and goes one way.

    Args:
        nbytes: How much.
        leaves: Unit after whose forward no operation reads it.
        returns: The last unit in whose backward it is read, or something recomputed from it;
            backward comes to that first.
    """

    nbytes: int
    leaves: int
    returns: int


class Unit(NamedTuple):
    """What is known of a unit.

    Args:
        head: What its first operation saves, and all else that cannot be recomputed.
        tail: What can be recomputed from heads.
        forward_seconds: Of all its operations.
        backward_seconds: Likewise.
        recompute_seconds: Of what makes its tail out of heads.
        forward_bytes: That are there besides heads and tails during its forward, at most.
        backward_bytes: Likewise, during its backward.
        recompute_bytes: That are there besides while its tail is made again.
    """

    head: Group
    tail: Group
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    forward_bytes: int = 0
    backward_bytes: int = 0
    recompute_bytes: int = 0


class Part(NamedTuple):
    """One of the two groups of a unit."""

    unit: int
    name: str  # head or tail


@dataclass(frozen=True, slots=True)
class Link:
    """The way to the second memory and back, one copy at a time.

    Args:
        bytes_per_second: Of a copy.
        latency_seconds: Of each.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Return what a copy takes; nothing for nothing."""
        return self.latency_seconds + nbytes / self.bytes_per_second if nbytes else 0.0


class Course(NamedTuple):
    """What a plan would come to, and when copies begin and must have ended.

    Args:
        seconds: Forward and backward of all units.
        peak_bytes: At most.
        swapped_bytes: To the second memory.
        stalled_seconds: Of ``seconds``, in which nothing was computed.
        there: Bytes, at most, in each moment: forward of the first unit to the last, then backward
            of the last to the first. What leaves counts until it is waited for.
        waits: What must have left before each moment.
        fetches: What begins to come back before each moment.
    """

    seconds: float
    peak_bytes: int
    swapped_bytes: int
    stalled_seconds: float
    there: tuple[int, ...]
    waits: tuple[tuple[Part, ...], ...]
    fetches: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of each unit.

    Args:
        ways: One of `WAYS`, of each.
        course: What that comes to.
    """

    ways: tuple[str, ...]
    course: Course


def parts(units: Sequence[Unit]) -> Iterator[tuple[Part, Group]]:
    """Iterate over all groups that are not empty, in the order of forward."""
    for number, unit in enumerate(units):
        for name in ("head", "tail"):
            group: Group = getattr(unit, name)
            if group.nbytes:
                yield Part(number, name), group


def decision(way: str, name: str) -> str:
    """Return what becomes of one group of a unit: keep, swap or recompute."""
    if way == BOTH:
        return SWAP if name == "head" else RECOMPUTE
    return KEEP if way == RECOMPUTE and name == "head" else way


def floor(units: Sequence[Unit]) -> int:
    """Return the bytes below which no plan can go: what a unit reads and makes, and works with."""
    return max(_least(units), default=0)


def _least(units: Sequence[Unit]) -> Iterator[int]:
    """Iterate over the least of each unit's forward and backward."""
    forward, backward = [0] * len(units), [0] * len(units)
    for part, group in parts(units):
        for number in range(part.unit, group.leaves + 1):
            forward[number] += group.nbytes
        for number in range(part.unit, group.returns + 1):
            backward[number] += group.nbytes
    for number, unit in enumerate(units):
        yield forward[number] + unit.forward_bytes
        yield backward[number] + unit.backward_bytes


# --- on virtual time ------------------------------------------------------------------------------


class _Time:
    """Where computing and copying stand, and what is there.

    Args:
        units: All.
        ways: Of each.
        capacity: Bytes that may be there at once.
        link: To the second memory.
    """

    def __init__(
        self, units: Sequence[Unit], ways: Sequence[str], capacity: float, link: Link
    ) -> None:
        self.units, self.capacity, self.link = units, capacity, link
        self.now = 0.0  # of computing
        self.copied = 0.0  # when the last copy ends
        self.stalled = 0.0
        self.there = self.swapped = 0
        self.leaving: deque[tuple[Part, float, int]] = deque()  # when copies end, what they free
        self.groups = dict(parts(units))
        self.decisions = {part: decision(ways[part.unit], part.name) for part in self.groups}
        self.moments: list[int] = []
        self.waits: list[list[Part]] = [[] for _ in range(2 * len(units))]
        self.fetches: list[list[Part]] = [[] for _ in range(2 * len(units))]

    def wait(self, until: float) -> None:
        """Compute nothing until then."""
        if until > self.now:
            self.stalled += until - self.now
            self.now = until

    def make_room(self, nbytes: int) -> bool:
        """Wait for copies until there is room; return whether there can be.

        What may have left counts unless it is waited for: copies may take longer than predicted.
        """
        while self.there + nbytes > self.capacity:
            if not self.leaving:
                return False
            self.end_copy()
        return True

    def end_copy(self) -> None:
        """Wait for the oldest copy."""
        part, ends, freed = self.leaving.popleft()
        self.wait(ends)
        self.there -= freed
        self.waits[len(self.moments)].append(part)

    def copy(self, nbytes: int) -> float:
        """Begin a copy as soon as the link is free; return when it ends."""
        self.copied = max(self.copied, self.now) + self.link.seconds(nbytes)
        return self.copied

    def compute(self, seconds: float, working: int) -> None:
        """Compute for some time, with bytes besides what is there."""
        self.now += seconds
        self.moments.append(self.there + working)

    def course(self) -> Course:
        """Return what it came to."""
        return Course(
            self.now,
            max(self.moments, default=0),
            self.swapped,
            self.stalled,
            tuple(self.moments),
            tuple(map(tuple, self.waits)),
            tuple(map(tuple, self.fetches)),
        )


def simulate_plan(
    units: Sequence[Unit], ways: Sequence[str], capacity: float, link: Link
) -> Course | None:
    """Return what a plan would come to; None if it needs more than there is."""
    time = _Time(units, ways, capacity, link)
    if _forward(time) and _backward(time):
        return time.course()
    return None


def _forward(time: _Time) -> bool:
    """Go through forward; return whether there is room."""
    leaving = _by_unit(time, lambda group: group.leaves)
    for number, unit in enumerate(time.units):
        made = unit.head.nbytes + unit.tail.nbytes
        if not time.make_room(made + unit.forward_bytes):
            return False
        time.there += made
        time.compute(unit.forward_seconds, unit.forward_bytes)
        for part in leaving[number]:
            nbytes = time.groups[part].nbytes
            if time.decisions[part] == SWAP:
                time.swapped += nbytes
                time.leaving.append((part, time.copy(nbytes), nbytes))
            elif time.decisions[part] == RECOMPUTE:
                time.there -= nbytes
    return True


def _by_unit(time: _Time, of: Callable[[Group], int]) -> list[list[Part]]:
    found: list[list[Part]] = [[] for _ in time.units]
    for part, group in time.groups.items():
        found[of(group)].append(part)
    return found


def _backward(time: _Time) -> bool:
    """Go on with backward: what was swapped comes back as early as there is room."""
    returning = _by_unit(time, lambda group: group.returns)
    swapped = (part for part, decision in time.decisions.items() if decision == SWAP)
    coming = deque(sorted(swapped, key=lambda part: (-time.groups[part].returns, -part.unit)))
    came: dict[Part, float] = {}  # when each is there again
    for number in reversed(range(len(time.units))):
        unit = time.units[number]
        while time.leaving and time.leaving[0][1] <= time.now:
            time.end_copy()
        again = [part for part in returning[number] if time.decisions[part] == RECOMPUTE]
        due = [part for part in returning[number] if time.decisions[part] == SWAP]
        due = [part for part in due if part not in came]
        nbytes = sum(time.groups[part].nbytes for part in (*again, *due))
        working = unit.backward_bytes + _again_bytes(time, again)
        if not time.make_room(nbytes + working):
            return False
        time.there += nbytes
        while coming and (coming[0] in due or _has_room(time, returning, number, coming[0])):
            part = coming.popleft()
            if part not in due:
                time.there += time.groups[part].nbytes
            came[part] = time.copy(time.groups[part].nbytes)
            time.fetches[len(time.moments)].append(part)
        time.wait(max((came[part] for part in returning[number] if part in came), default=0.0))
        seconds = sum(time.units[part.unit].recompute_seconds for part in again)
        time.compute(seconds + unit.backward_seconds, working)
        time.there -= unit.head.nbytes + unit.tail.nbytes
    return True


def _again_bytes(time: _Time, again: Sequence[Part]) -> int:
    return max((time.units[part.unit].recompute_bytes for part in again), default=0)


def _has_room(time: _Time, returning: Sequence[Sequence[Part]], at: int, early: Part) -> bool:
    """Return whether a group may come back before it is needed, and leave room for all between."""
    group = time.groups[early]
    there = time.there + group.nbytes
    for number in range(at, group.returns, -1):
        unit = time.units[number]
        again = [part for part in returning[number] if time.decisions[part] == RECOMPUTE]
        if number < at:
            there += sum(time.groups[part].nbytes for part in again)
        if there + unit.backward_bytes + _again_bytes(time, again) > time.capacity:
            return False
        there -= unit.head.nbytes + unit.tail.nbytes
    return True


# --- who decides ----------------------------------------------------------------------------------

Ways = tuple[str, ...]
Try = Callable[[Ways], Course | None]
Policy = Callable[[Sequence[Unit], Try], Ways]


def _all(way: str) -> Policy:
    return lambda units, _: (way,) * len(units)


def _keep_late(way: str) -> Policy:
    """Keep the last units, which are needed first, as many as fit; the others go one way."""
    return lambda units, try_: _kept_from_the_end((way,) * len(units), try_)


def _kept_from_the_end(ways: Ways, try_: Try) -> Ways:
    """Return the ways with as many units kept as fit, the last ones; found by halving."""

    def kept(count: int) -> Ways:
        return ways[: len(ways) - count] + (KEEP,) * count

    fits, too_many = 0, len(ways) + 1
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        if try_(kept(count)) is None:
            too_many = count
        else:
            fits = count
    return kept(fits)


def _greedy(units: Sequence[Unit], try_: Try) -> Ways:
    """Recompute the units with most to recompute, as far as an allocation goes; swap the others.

    The allocation is the one of some that comes out fastest; heads of those that are recomputed
    stay or go.
    """
    some = (one for one, unit in enumerate(units) if unit.tail.nbytes)
    order = sorted(some, key=lambda one: (-units[one].tail.nbytes, one))
    whole = sum(unit.tail.nbytes for unit in units)
    found: list[tuple[float, Ways]] = []
    for part, way in product(range(ALLOCATIONS + 1), (RECOMPUTE, BOTH)):
        ways, total = [SWAP] * len(units), 0
        for one in order:
            if (total + units[one].tail.nbytes) * ALLOCATIONS <= whole * part:
                ways[one], total = way, total + units[one].tail.nbytes
        kept = _kept_from_the_end(tuple(ways), try_)
        course = try_(kept)
        if course is not None:
            found.append((course.seconds, kept))
    return min(found)[1] if found else (SWAP,) * len(units)


ALLOCATIONS = 8  # that are tried: so many parts of all that could be recomputed


def _search(units: Sequence[Unit], try_: Try) -> Ways:
    """Begin with the fastest of all others, and change single units as long as it gets faster."""
    starts = [choose_ways(units, try_) for choose_ways in STARTS.values()]
    courses = [(course.seconds, ways) for ways in starts if (course := try_(ways)) is not None]
    if not courses:
        return starts[0]
    seconds, ways = min(courses)
    least = sum(unit.forward_seconds + unit.backward_seconds for unit in units)
    tries, since = MOST_TRIES, 0  # since the last change that was for the better
    for number, other in cycle(product(range(len(ways)), WAYS)):
        # Nothing is faster than computing alone, and a whole turn without gain is the end.
        if seconds <= least * (1 + WORTHWHILE) or since >= len(ways) * len(WAYS) or not tries:
            return ways
        changed = (*ways[:number], other, *ways[number + 1 :])
        course = try_(changed) if other != ways[number] else None
        tries, since = tries - (other != ways[number]), since + 1
        if course is not None and course.seconds < seconds * (1 - WORTHWHILE):
            seconds, ways, since = course.seconds, changed, 0
    return ways


WORTHWHILE = 1e-6  # part of the time that a change must save
MOST_TRIES = 2000


def _exact(units: Sequence[Unit], try_: Try) -> Ways:
    """Try all plans."""
    courses = [
        (course.seconds, ways)
        for ways in product(WAYS, repeat=len(units))
        if (course := try_(ways)) is not None
    ]
    return min(courses)[1] if courses else (SWAP,) * len(units)


STARTS: Mapping[str, Policy] = {
    "all_keep": _all(KEEP),
    "all_swap": _all(SWAP),
    "all_recompute": _all(RECOMPUTE),
    "keep_late_swap": _keep_late(SWAP),
    "keep_late_recompute": _keep_late(RECOMPUTE),
    "keep_late_both": _keep_late(BOTH),
    "greedy": _greedy,
}
POLICIES: Mapping[str, Policy] = {
    **STARTS,
    "search": _search,
    "exact": _exact,
}


def choose(units: Sequence[Unit], capacity: float, link: Link, policy: str = "search") -> Plan:
    """Return what becomes of each unit, so that all fit and it takes as little time as may be."""
    if policy not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
    if policy == "exact" and len(units) > EXACT_MOST:
        raise ConfigError(
            f"all plans can be tried of {EXACT_MOST} units at most, not of {len(units)}"
        )

    def try_(ways: Ways) -> Course | None:
        return simulate_plan(units, ways, capacity, link)

    ways = POLICIES[policy](units, try_)
    course = try_(ways)
    if course is None:
        raise ConfigError(
            f"activations must fit into {capacity:,.0f} bytes, but with {policy} they do not; no "
            f"plan needs less than {floor(units):,}"
        )
    return Plan(ways, course)
