"""What becomes of each unit's activations between forward and backward: keep, swap or recompute.

A unit is some layers of which the first costs much to compute (a convolution, a product of
matrices) and the rest little. What it saves for backward stays where it is, goes to a second,
larger memory and comes back, or is dropped and computed once more. Decided before forward from
measured bytes and times (US12645941B2; PoocH, arXiv 1907.05013), on virtual time: computing is one
resource, the way to the second memory another.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

from daso.errors import ConfigError

__all__ = [
    "EXACT_MOST",
    "POLICIES",
    "Course",
    "Link",
    "Plan",
    "Unit",
    "choose",
    "floor",
    "foretell",
]

KEEP, SWAP, RECOMPUTE = "keep", "swap", "recompute"
WAYS = (KEEP, SWAP, RECOMPUTE)
EXACT_MOST = 10  # units of which all plans are tried


class Unit(NamedTuple):
    """What is known of a unit.

    Args:
        nbytes: Saved for backward, and free to go: it can come back or be recomputed.
        fixed_bytes: Saved besides, that stays: what it would be recomputed from.
        forward_seconds: Of all its layers.
        backward_seconds: Likewise.
        recompute_seconds: Of what makes ``nbytes`` out of ``fixed_bytes``.
    """

    nbytes: int
    fixed_bytes: int
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float


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
    """What a plan would come to.

    Args:
        seconds: Forward and backward of all units.
        peak_bytes: Of activations, at most.
        swapped_bytes: To the second memory.
    """

    seconds: float
    peak_bytes: int
    swapped_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of each unit.

    Args:
        ways: ``"keep"``, ``"swap"`` or ``"recompute"``, of each.
        course: What that comes to.
    """

    ways: tuple[str, ...]
    course: Course


def floor(units: Sequence[Unit]) -> int:
    """Return the bytes below which no plan can go: what stays of units so far, and one unit's."""
    fixed = accumulate(unit.fixed_bytes for unit in units)
    sums = (stay + unit.nbytes for stay, unit in zip(fixed, units, strict=True))
    return max(sums, default=0)


# --- on virtual time ------------------------------------------------------------------------------


class _Time:
    """Where computing and copying stand, and what is there.

    Args:
        units: All.
        capacity: Bytes that may be there at once.
        link: To the second memory.
    """

    def __init__(self, units: Sequence[Unit], capacity: float, link: Link) -> None:
        self.units, self.capacity, self.link = units, capacity, link
        self.now = 0.0  # of computing
        self.copied = 0.0  # when the last copy ends
        self.there = self.peak = self.swapped = 0
        self.leaving: list[tuple[float, int]] = []  # when copies end, and what they free

    def compute(self, seconds: float) -> None:
        """Compute for some time."""
        self.now += seconds

    def take(self, nbytes: int) -> bool:
        """Make room and take it; return whether there can be so much."""
        self.free()
        while self.there + nbytes > self.capacity:
            if not self.leaving:
                return False
            self.now = max(self.now, self.leaving[0][0])  # wait for a copy
            self.free()
        self.there += nbytes
        self.peak = max(self.peak, self.there)
        return True

    def free(self) -> None:
        """Forget what has left."""
        while self.leaving and self.leaving[0][0] <= self.now:
            self.there -= self.leaving.pop(0)[1]

    def copy(self, nbytes: int) -> float:
        """Begin a copy as soon as the link is free; return when it ends."""
        self.copied = max(self.copied, self.now) + self.link.seconds(nbytes)
        return self.copied

    def send(self, nbytes: int) -> None:
        """Let a unit's leave."""
        self.swapped += nbytes
        self.leaving.append((self.copy(nbytes), nbytes))


def foretell(
    units: Sequence[Unit], ways: Sequence[str], capacity: float, link: Link
) -> Course | None:
    """Return what a plan would come to; None if it needs more than there is.

    Args:
        units: In the order of forward.
        ways: Of each.
        capacity: Bytes of activations that may be there at once.
        link: To the second memory.
    """
    time = _Time(units, capacity, link)
    for unit, way in zip(units, ways, strict=True):
        if not time.take(unit.fixed_bytes + unit.nbytes):
            return None
        time.compute(unit.forward_seconds)
        if way == SWAP:
            time.send(unit.nbytes)
        elif way == RECOMPUTE:
            time.there -= unit.nbytes
    return _back(time, units, ways)


def _back(time: _Time, units: Sequence[Unit], ways: Sequence[str]) -> Course | None:
    """Go on with backward: what was swapped comes back as early as there is room."""
    came: dict[int, float] = {}  # when each is there again
    coming = [number for number in reversed(range(len(units))) if ways[number] == SWAP]
    for number in reversed(range(len(units))):
        unit, way = units[number], ways[number]
        if way == RECOMPUTE and not time.take(unit.nbytes):
            return None
        while coming and (coming[0] == number or _has_room(time, ways, number, coming[0])):
            one = coming.pop(0)
            if not time.take(units[one].nbytes):
                return None
            came[one] = time.copy(units[one].nbytes)
        if way == RECOMPUTE:
            time.compute(unit.recompute_seconds)
        time.now = max(time.now, came.get(number, 0.0))
        time.compute(unit.backward_seconds)
        time.there -= unit.nbytes + unit.fixed_bytes
    return Course(time.now, time.peak, time.swapped)


def _has_room(time: _Time, ways: Sequence[str], at: int, early: int) -> bool:
    """Return whether a unit may come back before it is needed, and leave room for those between."""
    time.free()
    between = (
        time.units[number].nbytes for number in range(early + 1, at) if ways[number] == RECOMPUTE
    )
    return time.there + time.units[early].nbytes + max(between, default=0) <= time.capacity


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
    for number in reversed(range(len(ways))):
        kept = (*ways[:number], KEEP, *ways[number + 1 :])
        if try_(kept) is None:
            break
        ways = kept
    return ways


def _patent(units: Sequence[Unit], try_: Try) -> Ways:
    """Recompute the units with most to swap, as far as an allocation goes; swap the others.

    The allocation is the one of some that comes out fastest.
    """
    some = (one for one, unit in enumerate(units) if unit.nbytes)
    order = sorted(some, key=lambda one: (-units[one].nbytes, one))
    whole = sum(unit.nbytes for unit in units)
    found: list[tuple[float, Ways]] = []
    for part in range(ALLOCATIONS + 1):
        ways, total = [SWAP] * len(units), 0
        for one in order:
            if (total + units[one].nbytes) * ALLOCATIONS <= whole * part:
                ways[one], total = RECOMPUTE, total + units[one].nbytes
        kept = _kept_from_the_end(tuple(ways), try_)
        course = try_(kept)
        if course is not None:
            found.append((course.seconds, kept))
    return min(found)[1] if found else (SWAP,) * len(units)


ALLOCATIONS = 8  # that are tried: so many parts of all that could be swapped


def _pooch(units: Sequence[Unit], try_: Try) -> Ways:
    """Begin with the fastest of all others, and change single units as long as it gets faster."""
    starts = [choose_ways(units, try_) for choose_ways in STARTS.values()]
    courses = [(course.seconds, ways) for ways in starts if (course := try_(ways)) is not None]
    if not courses:
        return starts[0]
    seconds, ways = min(courses)
    while True:
        changed = [
            (course.seconds, other)
            for other in _one_changed(ways)
            if (course := try_(other)) is not None and course.seconds < seconds
        ]
        if not changed:
            return ways
        seconds, ways = min(changed)


def _one_changed(ways: Ways) -> Sequence[Ways]:
    return [
        (*ways[:number], other, *ways[number + 1 :])
        for number, way in enumerate(ways)
        for other in WAYS
        if other != way
    ]


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
    "patent": _patent,
}
POLICIES: Mapping[str, Policy] = {
    **STARTS,
    "pooch": _pooch,
    "exact": _exact,
}


def choose(units: Sequence[Unit], capacity: float, link: Link, policy: str = "pooch") -> Plan:
    """Return what becomes of each unit, so that all fit and it takes as little time as may be.

    Args:
        units: In the order of forward.
        capacity: Bytes of activations that may be there at once.
        link: To the second memory.
        policy: One of `POLICIES`.

    Raises:
        ConfigError: There is no such policy, too many units for ``"exact"``, or it does not fit.
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
    if policy == "exact" and len(units) > EXACT_MOST:
        raise ConfigError(
            f"all plans can be tried of {EXACT_MOST} units at most, not of {len(units)}"
        )

    def try_(ways: Ways) -> Course | None:
        return foretell(units, ways, capacity, link)

    ways = POLICIES[policy](units, try_)
    course = try_(ways)
    if course is None:
        raise ConfigError(
            f"activations must fit into {capacity:,.0f} bytes, but with {policy} they do not; no "
            f"plan needs less than {floor(units):,}"
        )
    return Plan(ways, course)
