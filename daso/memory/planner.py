"""Plans: the decision for each unit of a model, chosen from measured bytes and times.

Keep, swap or recompute: US12645941B2; PoocH, arXiv 1907.05013.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle, product

from daso.errors import ConfigError
from daso.memory.course import (
    BOTH,
    KEEP,
    RECOMPUTE,
    SWAP,
    WAYS,
    Link,
    SimulatedStep,
    StepProfile,
    floor,
    simulate_plan,
    smallest_ways,
    valid_ways,
)

EXACT_MOST = 7  # maximum number of units for policy exact


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision for each unit.

    Args:
        ways: One of `WAYS` for each unit.
        simulated: The simulated step under this plan.
    """

    ways: tuple[str, ...]
    simulated: SimulatedStep


Ways = tuple[str, ...]
Try = Callable[[Ways], SimulatedStep | None]
Policy = Callable[[StepProfile, Try], Ways]


def _all(way: str) -> Policy:
    return lambda profile, _: valid_ways(profile.units, (way,) * len(profile.units))


def _keep_late(way: str) -> Policy:
    """Keep as many of the last units as fit, which backward needs first; treat the others alike."""
    return lambda profile, try_: _keep_last(_all(way)(profile, try_), try_)


def _keep_last(ways: Ways, try_: Try) -> Ways:
    """Return the ways with as many of the last units kept as fit; by bisection."""

    def with_last_kept(count: int) -> Ways:
        return ways[: len(ways) - count] + (KEEP,) * count

    fits, too_many = 0, len(ways) + 1
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        if try_(with_last_kept(count)) is None:
            too_many = count
        else:
            fits = count
    return with_last_kept(fits)


def _greedy(profile: StepProfile, try_: Try) -> Ways:
    """Recompute the units with the most recomputable bytes, up to a share; swap the others.

    Tries several shares, with inputs of recomputed units kept or swapped; the fastest wins.
    """
    units = profile.units
    some = (number for number, unit in enumerate(units) if unit.recomputed_bytes)
    order = sorted(some, key=lambda number: (-units[number].recomputed_bytes, number))
    whole = sum(unit.recomputed_bytes for unit in units)
    outcomes: list[tuple[float, Ways]] = []
    for share, way in product(range(SHARES + 1), (RECOMPUTE, BOTH)):
        ways, total = [SWAP] * len(units), 0
        for number in order:
            if (total + units[number].recomputed_bytes) * SHARES <= whole * share:
                ways[number], total = way, total + units[number].recomputed_bytes
        adjusted = _keep_last(tuple(ways), try_)
        step = try_(adjusted)
        if step is not None:
            outcomes.append((step.seconds, adjusted))
    return min(outcomes)[1] if outcomes else smallest_ways(profile)


SHARES = 8  # fractions of all recomputable bytes that are tried


def _search(profile: StepProfile, try_: Try) -> Ways:
    """Start from the fastest of all other policies; change single units while that helps."""
    starts = [choose_ways(profile, try_) for choose_ways in STARTS.values()]
    outcomes = [(step.seconds, ways) for ways in starts if (step := try_(ways)) is not None]
    if not outcomes:
        return starts[0]
    seconds, ways = min(outcomes)
    least = sum(unit.forward_seconds + unit.backward_seconds for unit in profile.units)
    changes = [
        (number, way)
        for number, unit in enumerate(profile.units)
        for way in (WAYS if unit.recomputed_bytes else (KEEP, SWAP))
    ]
    tries, since = MAX_TRIES, 0  # tries since the last improvement
    for number, other in cycle(changes):
        # Computing alone is the lower bound; one round without improvement ends the search.
        if seconds <= least * (1 + MIN_GAIN) or since >= len(changes) or not tries:
            return ways
        changed = (*ways[:number], other, *ways[number + 1 :])
        step = try_(changed) if other != ways[number] else None
        tries, since = tries - (other != ways[number]), since + 1
        if step is not None and step.seconds < seconds * (1 - MIN_GAIN):
            seconds, ways, since = step.seconds, changed, 0
    return ways


MIN_GAIN = 1e-6  # fraction of the time that a change must save
MAX_TRIES = 2000


def _exact(profile: StepProfile, try_: Try) -> Ways:
    """Try all plans."""
    every = product(*((WAYS if unit.recomputed_bytes else (KEEP, SWAP)) for unit in profile.units))
    outcomes = [(step.seconds, ways) for ways in every if (step := try_(ways)) is not None]
    return min(outcomes)[1] if outcomes else smallest_ways(profile)


def _least(profile: StepProfile, _: Try) -> Ways:
    return smallest_ways(profile)


STARTS: Mapping[str, Policy] = {
    "all_keep": _all(KEEP),
    "all_swap": _all(SWAP),
    "all_recompute": _all(RECOMPUTE),
    "keep_late_swap": _keep_late(SWAP),
    "keep_late_recompute": _keep_late(RECOMPUTE),
    "keep_late_both": _keep_late(BOTH),
    "least": _least,
    "greedy": _greedy,
}
POLICIES: Mapping[str, Policy] = {
    **STARTS,
    "search": _search,
    "exact": _exact,
}


def choose(profile: StepProfile, capacity: float, link: Link, policy: str = "search") -> Plan:
    """Return a plan by a policy that fits the capacity and is as fast as possible."""
    if policy not in POLICIES:
        raise ConfigError(
            f"policy must be one of {', '.join(POLICIES)}, not {policy!r}",
            code="unknown-memory-policy",
        )
    if policy == "exact" and len(profile.units) > EXACT_MOST:
        raise ConfigError(
            f"policy exact can plan for at most {EXACT_MOST} units, not {len(profile.units)}; use "
            f"another policy, or fewer units",
            code="too-many-units",
        )

    def try_(ways: Ways) -> SimulatedStep | None:
        return simulate_plan(profile, ways, capacity, link)

    ways = POLICIES[policy](profile, try_)
    step = try_(ways)
    if step is None:
        raise ConfigError(
            f"activations must fit into {capacity:,.0f} bytes, but with {policy} they do not; "
            f"every plan needs at least {floor(profile):,}",
            code="activations-exceed-capacity",
        )
    return Plan(ways, step)
