"""Simulation of a step whose units keep, swap or recompute the tensors they save for backward.

A unit is a module, a run of a `torch.nn.Sequential`'s children, or the model's operations between
two of them. Its saved tensors stay where they are, or are copied to a second, larger memory and
back, or are dropped and recomputed from the unit's inputs; the inputs are then kept or swapped.
Computation and the link to the second memory are two resources of virtual time.

A simulated step also has the units by which copies out must have ended, and before which copies
back begin. A pass that follows it never holds more bytes than predicted, however fast copies are.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

KEEP, SWAP, RECOMPUTE, BOTH = "keep", "swap", "recompute", "recompute_swap"
WAYS = (KEEP, SWAP, RECOMPUTE, BOTH)


class Group(NamedTuple):
    """Storages with the same users.

    Args:
        nbytes: Sum of their bytes.
        copies: Number of storages.
        leaves: Unit after whose forward the model releases them.
        saved: Units that save them for backward, in order.
        inputs: Units that have them as inputs, and would recompute from them.
    """

    nbytes: int
    copies: int
    leaves: int
    saved: tuple[int, ...]
    inputs: tuple[int, ...] = ()

    @property
    def first(self) -> int:
        """The first unit that uses them."""
        return min((*self.saved[:1], *self.inputs[:1]))


class Unit(NamedTuple):
    """Measurements of a unit; bytes are peaks, without those of groups.

    Args:
        forward_seconds: Time of its forward.
        backward_seconds: Time of its backward.
        recompute_seconds: Time of recomputing its saved tensors.
        recomputed_bytes: Saved bytes that can be recomputed; 0: none, or it cannot be recomputed.
        forward_bytes: Peak of its forward.
        backward_bytes: Peak of its backward.
        lean_bytes: Peak of its forward, if it is recomputed.
        recompute_bytes: Peak of its backward, if it is recomputed, including recomputed tensors.
        state_bytes: Random states and changed buffers, held from its forward to its backward if it
            is recomputed.
    """

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float = 0.0
    recomputed_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    lean_bytes: int = 0
    recompute_bytes: int = 0
    state_bytes: int = 0


class StepProfile(NamedTuple):
    """A measured step.

    Args:
        units: Units in the order of forward.
        groups: Storages that they save.
    """

    units: tuple[Unit, ...]
    groups: tuple[Group, ...]


class Part(NamedTuple):
    """Storages that are swapped together.

    Args:
        owner: First unit that holds them, which decides; its backward is the last to read them.
        returns: Last unit that holds them; its backward is the first to read them.
        leaves: Unit after whose forward the model releases them.
    """

    owner: int
    returns: int
    leaves: int


class Decision(NamedTuple):
    """Decision on a group: keep or swap, and its part."""

    way: str  # keep or swap
    part: Part


@dataclass(frozen=True, slots=True)
class Link:
    """The link to the second memory, one copy at a time.

    Args:
        bytes_per_second: Bandwidth of a copy.
        latency_seconds: Latency of each copy.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, nbytes: int, copies: int = 1) -> float:
        """Return the seconds of some copies; 0 for 0 bytes."""
        return self.latency_seconds * copies + nbytes / self.bytes_per_second if nbytes else 0.0


class SimulatedStep(NamedTuple):
    """A simulated step under a plan: its time, its bytes, and when copies begin and end.

    Moments are the forwards of all units in order, then their backwards in reverse order.

    Args:
        seconds: Time of forward and backward of all units.
        peak_bytes: Highest number of bytes.
        swapped_bytes: Bytes copied to the second memory.
        stalled_seconds: Part of ``seconds`` without computation.
        resident_bytes: Peak bytes in each moment. Bytes that are copied out count until the pass
            waits for their copy.
        waits: Parts whose copies out must have ended before each moment.
        fetches: Parts whose copies back begin before each moment.
    """

    seconds: float
    peak_bytes: int
    swapped_bytes: int
    stalled_seconds: float
    resident_bytes: tuple[int, ...]
    waits: tuple[tuple[Part, ...], ...]
    fetches: tuple[tuple[Part, ...], ...]


def valid_ways(units: Sequence[Unit], ways: Sequence[str]) -> tuple[str, ...]:
    """Replace recomputation of units that cannot be recomputed: they keep or swap instead."""
    plain = {RECOMPUTE: KEEP, BOTH: SWAP}
    return tuple(
        way if unit.recomputed_bytes else plain.get(way, way)
        for unit, way in zip(units, ways, strict=True)
    )


def decision(group: Group, ways: Sequence[str]) -> Decision | None:
    """Return the decision on a group; None if no unit holds it until backward."""
    holders = [unit for unit in group.saved if ways[unit] in (KEEP, SWAP)]
    holders += [unit for unit in group.inputs if ways[unit] in (RECOMPUTE, BOTH)]
    if not holders:
        return None
    part = Part(min(holders), max(holders), group.leaves)
    return Decision(SWAP if ways[part.owner] in (SWAP, BOTH) else KEEP, part)


def is_internal(group: Group, ways: Sequence[str]) -> bool:
    """Return whether a group is freed within the forward of a recomputed unit."""
    first = group.first
    return (
        group.leaves == first and ways[first] in (RECOMPUTE, BOTH) and decision(group, ways) is None
    )


def residents(profile: StepProfile, ways: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the bytes of groups in each unit's forward and backward, after all possible copies."""
    ways = valid_ways(profile.units, ways)
    states = [
        unit.state_bytes if way in (RECOMPUTE, BOTH) else 0
        for unit, way in zip(profile.units, ways, strict=True)
    ]
    forward = list(accumulate(states))
    backward = [*forward]
    for group in profile.groups:
        if not is_internal(group, ways):
            for number in range(group.first, group.leaves + 1):
                forward[number] += group.nbytes
        outcome = decision(group, ways)
        if outcome is not None:
            for number in range(outcome.part.owner, outcome.part.returns + 1):
                backward[number] += group.nbytes
    return forward, backward


def smallest_ways(profile: StepProfile) -> tuple[str, ...]:
    """Return for each unit the way that needs the fewest bytes."""
    count = len(profile.units)
    swapped, both = (_min_bytes(profile, (way,) * count) for way in (SWAP, BOTH))
    pairs = zip(swapped, both, strict=True)
    ways = tuple(BOTH if recomputed < plain else SWAP for plain, recomputed in pairs)
    return valid_ways(profile.units, ways)


def floor(profile: StepProfile) -> int:
    """Return the bytes that every plan needs at least."""
    return max(_min_bytes(profile, smallest_ways(profile)), default=0)


def _min_bytes(profile: StepProfile, ways: Sequence[str]) -> list[int]:
    """Return the minimal bytes of each unit, in forward or backward, whichever is more."""
    ways = valid_ways(profile.units, ways)
    working = [_working_bytes(unit, way) for unit, way in zip(profile.units, ways, strict=True)]
    needs = zip(*residents(profile, ways), working, strict=True)
    return [max(ahead + more[0], behind + more[1]) for ahead, behind, more in needs]


def _working_bytes(unit: Unit, way: str) -> tuple[int, int]:
    """Return the bytes of a unit's forward and backward, without those of groups."""
    if way in (RECOMPUTE, BOTH):
        return unit.lean_bytes, unit.recompute_bytes
    return unit.forward_bytes, unit.backward_bytes


# --- on virtual time ------------------------------------------------------------------------------


class _Simulation:
    """State of a simulated step, on virtual time."""

    def __init__(
        self, profile: StepProfile, ways: Sequence[str], capacity: float, link: Link
    ) -> None:
        units, count = profile.units, len(profile.units)
        ways = valid_ways(units, ways)
        self.units, self.capacity, self.link = units, capacity, link
        self.recomputed = [way in (RECOMPUTE, BOTH) for way in ways]
        self.working = [_working_bytes(unit, way) for unit, way in zip(units, ways, strict=True)]
        self.now = 0.0  # virtual time
        self.copied = 0.0  # when the last copy ends
        self.stalled = 0.0
        self.resident = self.swapped = 0
        self.leaving: deque[tuple[Part, float]] = deque()  # copies out, and when they end
        self.nbytes: dict[Part, int] = {}  # of swapped parts
        self.copies: dict[Part, int] = {}
        self.born = [0] * count  # bytes by unit: allocated in its forward
        self.dropped = [0] * count  # freed after its forward
        self.freed = [0] * count  # freed after its backward
        self.sends: list[list[Part]] = [[] for _ in units]
        self.returning: list[list[Part]] = [[] for _ in units]
        for number, unit in enumerate(units):
            if self.recomputed[number]:
                self.born[number] += unit.state_bytes
                self.freed[number] += unit.state_bytes
        self.moments: list[int] = []
        self.waits: list[list[Part]] = [[] for _ in range(2 * count)]
        self.fetches: list[list[Part]] = [[] for _ in range(2 * count)]
        self._schedule(profile.groups, ways)

    def _schedule(self, groups: Sequence[Group], ways: Sequence[str]) -> None:
        """Schedule groups by the units that allocate, copy and free them."""
        for group in groups:
            outcome = decision(group, ways)
            if is_internal(group, ways):
                continue
            self.born[group.first] += group.nbytes
            if outcome is None:
                self.dropped[group.leaves] += group.nbytes
                continue
            self.freed[outcome.part.owner] += group.nbytes
            if outcome.way == SWAP:
                part = outcome.part
                self.nbytes[part] = self.nbytes.get(part, 0) + group.nbytes
                self.copies[part] = self.copies.get(part, 0) + group.copies
        for part in sorted(self.nbytes):
            self.sends[part.leaves].append(part)
            self.returning[part.returns].append(part)

    def wait(self, until: float) -> None:
        """Stall until a time."""
        if until > self.now:
            self.stalled += until - self.now
            self.now = until

    def make_room(self, nbytes: int) -> bool:
        """Wait for copies until some bytes fit; return whether they can.

        Parts count until their copy is waited for: copies may take longer than predicted.
        """
        while self.resident + nbytes > self.capacity:
            if not self.leaving:
                return False
            self.end_copy()
        return True

    def end_copy(self) -> None:
        """Wait for the oldest copy out."""
        part, ends = self.leaving.popleft()
        self.wait(ends)
        self.resident -= self.nbytes[part]
        self.waits[len(self.moments)].append(part)

    def copy(self, part: Part) -> float:
        """Start a copy as soon as the link is free; return its end."""
        seconds = self.link.seconds(self.nbytes[part], self.copies[part])
        self.copied = max(self.copied, self.now) + seconds
        return self.copied

    def compute(self, seconds: float, working: int) -> None:
        """Compute for some time, with working bytes in addition to the resident ones."""
        self.now += seconds
        self.moments.append(self.resident + working)

    def result(self) -> SimulatedStep:
        """Return the simulated step."""
        return SimulatedStep(
            self.now,
            max(self.moments, default=0),
            sum(self.nbytes.values()),
            self.stalled,
            tuple(self.moments),
            tuple(map(tuple, self.waits)),
            tuple(map(tuple, self.fetches)),
        )


def simulate_plan(
    profile: StepProfile, ways: Sequence[str], capacity: float, link: Link
) -> SimulatedStep | None:
    """Simulate a step under a plan; return None if it exceeds the capacity."""
    sim = _Simulation(profile, ways, capacity, link)
    if _forward(sim) and _backward(sim):
        return sim.result()
    return None


def _forward(sim: _Simulation) -> bool:
    """Simulate forward; return whether it fits."""
    for number, unit in enumerate(sim.units):
        working = sim.working[number][0]
        if not sim.make_room(sim.born[number] + working):
            return False
        sim.resident += sim.born[number]
        sim.compute(unit.forward_seconds, working)
        sim.resident -= sim.dropped[number]
        sim.leaving.extend((part, sim.copy(part)) for part in sim.sends[number])
    return True


def _backward(sim: _Simulation) -> bool:
    """Simulate backward, with copies back as early as they fit; return whether it fits."""
    coming = deque(sorted(sim.nbytes, key=lambda part: (-part.returns, -part.owner)))
    came: dict[Part, float] = {}  # when each copy back ends
    for number in reversed(range(len(sim.units))):
        while sim.leaving and sim.leaving[0][1] <= sim.now:
            sim.end_copy()
        due = [part for part in sim.returning[number] if part not in came]
        nbytes = sum(sim.nbytes[part] for part in due)
        working = sim.working[number][1]
        if not sim.make_room(nbytes + working):
            return False
        sim.resident += nbytes
        while coming and (coming[0] in due or _has_room(sim, came, number, coming[0])):
            part = coming.popleft()
            if part not in due:
                sim.resident += sim.nbytes[part]
            came[part] = sim.copy(part)
            sim.fetches[len(sim.moments)].append(part)
        sim.wait(max((came[part] for part in sim.returning[number]), default=0.0))
        unit = sim.units[number]
        extra = unit.recompute_seconds if sim.recomputed[number] else 0.0
        sim.compute(unit.backward_seconds + extra, working)
        sim.resident -= sim.freed[number]
    return True


def _has_room(sim: _Simulation, came: Mapping[Part, float], at: int, early: Part) -> bool:
    """Return whether an early copy back leaves room for all moments before its use.

    Parts whose copy out was not waited for still count.
    """
    resident = sim.resident + sim.nbytes[early]
    for number in range(at, early.returns - 1, -1):
        if number < at:
            due = (part for part in sim.returning[number] if part not in came and part != early)
            resident += sum(sim.nbytes[part] for part in due)
        if resident + sim.working[number][1] > sim.capacity:
            return False
        resident -= sim.freed[number]
    return True
