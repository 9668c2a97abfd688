"""A machine that is imitated by slowing down: the arithmetic, exact."""

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.predict.throttle_plan import Machine, ThrottlePlan, estimate

checked = settings(derandomize=True, max_examples=100, deadline=None)
EXACT = pytest.approx
RATES = st.floats(1e-3, 1e9)


def machines():
    return st.builds(Machine, RATES, RATES, st.floats(1e-7, 1e-2))


def test_faster_computing_over_the_same_link_is_a_slower_link():
    """T(C / k, L) = T(C, k L) / k."""
    plan = ThrottlePlan(Machine(100.0, 125e6), Machine(300.0, 125e6))
    assert plan.ratio == EXACT(3)
    assert plan.compute_factor == EXACT(1)
    assert plan.link_bytes_per_second == EXACT(125e6 / 3)


def test_a_slower_link_alone_is_just_that():
    plan = ThrottlePlan(Machine(100.0, 1e9, 1e-6), Machine(100.0, 125e6, 2e-5))
    assert (plan.ratio, plan.compute_factor) == (1, 1)
    assert plan.link_bytes_per_second == EXACT(125e6)
    assert plan.latency_seconds == EXACT(2e-5)


def test_a_faster_link_is_slower_computing():
    plan = ThrottlePlan(Machine(100.0, 1e8, 1e-5), Machine(100.0, 4e8, 1e-5))
    assert (plan.ratio, plan.compute_factor) == (EXACT(4), EXACT(4))
    assert plan.link_bytes_per_second == EXACT(1e8)
    assert plan.latency_seconds == EXACT(4e-5)


@checked
@given(machines(), machines())
def test_nothing_is_to_be_faster_than_it_is_and_something_stays(current, target):
    plan = ThrottlePlan(current, target)
    assert plan.compute_factor >= 1
    assert plan.link_bytes_per_second <= current.link_bytes_per_second * (1 + 1e-12)
    assert plan.latency_seconds >= current.latency_seconds * (1 - 1e-12)
    least = min(
        plan.compute_factor,
        current.link_bytes_per_second / plan.link_bytes_per_second,
        plan.latency_seconds / current.latency_seconds,
    )
    assert least == EXACT(1) or plan.ratio == 1  # or all are as slow as the target's


def length(tasks, edges, machine):
    """Return when the last of some tasks ends; each needs computing, or the link, in turn."""
    ends, free = [], {"compute": 0.0, "link": 0.0}
    for number, (kind, amount) in enumerate(tasks):
        begins = max([free[kind], *(ends[one] for one in edges[number])])
        if kind == "compute":
            took = amount / machine.compute
        else:
            took = machine.latency_seconds + amount / machine.link_bytes_per_second
        free[kind] = begins + took
        ends.append(begins + took)
    return max(ends)


@checked
@given(machines(), machines(), st.integers(0, 2**32))
def test_any_order_of_tasks_takes_a_ratio_of_what_it_takes_throttled(current, target, seed):
    rng = random.Random(seed)
    tasks = [(rng.choice(["compute", "link"]), rng.uniform(0, 1e6)) for _ in range(30)]
    edges = [rng.sample(range(n), min(n, rng.randint(0, 3))) for n in range(30)]
    plan = ThrottlePlan(current, target)
    throttled = Machine(
        current.compute / plan.compute_factor, plan.link_bytes_per_second, plan.latency_seconds
    )
    found = length(tasks, edges, throttled) / plan.ratio
    assert found == EXACT(length(tasks, edges, target), rel=1e-12)


def test_a_latency_that_is_not_given_is_refused_where_there_is_one():
    with pytest.raises(ConfigError, match="latency_seconds of the target must be above 0"):
        ThrottlePlan(Machine(1, 1, 1e-6), Machine(1, 1))
    assert ThrottlePlan(Machine(1, 1), Machine(1, 1, 1e-6)).ratio == 1


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf])
def test_rates_are_numbers_above_0(wrong):
    with pytest.raises(ConfigError, match="compute must be a positive number"):
        Machine(wrong, 1)
    with pytest.raises(ConfigError, match="link_bytes_per_second must be a positive number"):
        Machine(1, wrong)


# --- estimates -----------------------------------------------------------------------------------

HALF = ThrottlePlan(Machine(100.0, 1e8), Machine(200.0, 1e8))


def test_an_estimate_is_the_mean_by_the_ratio_with_what_stands_behind_it():
    """Of steps of 1 s, each fourth waits another second; the first quarter is of something else."""
    found = estimate(HALF, [9.0] * 48 + [1.0, 1.0, 1.0, 2.0] * 36)
    assert found.seconds == EXACT(1.25 / 2)
    assert (found.low, found.high) == (EXACT(1.25 / 2), EXACT(1.25 / 2))
    assert "emulated, not measured" in str(found)
    assert "2 times as long as on the target" in str(found)


def test_its_bounds_hold_the_mean_as_often_as_they_say():
    rng, held = random.Random(3), 0
    for _ in range(1000):
        found = estimate(HALF, [rng.expovariate(1.0) for _ in range(400)])
        held += found.low <= 0.5 <= found.high
    assert 0.935 <= held / 1000 <= 0.965


def test_more_steps_bring_closer_bounds():
    rng = random.Random(1)
    times = [rng.gauss(1, 0.1) for _ in range(4000)]
    few, many = estimate(HALF, times[:40]), estimate(HALF, times)
    assert many.high - many.low < (few.high - few.low) / 5
    assert many.seconds == EXACT(statistics.fmean(times[1000:]) / 2)


def test_too_few_steps_are_refused():
    with pytest.raises(ConfigError, match="24 steps at least, not 23"):
        estimate(HALF, [1.0] * 23)


# --- more than computing and the link ------------------------------------------------------------


def test_every_rate_that_both_machines_give_counts():
    current = Machine(1.0, memory_bytes_per_second=10.0, disk_write_bytes_per_second=4.0)
    target = Machine(2.0, memory_bytes_per_second=30.0, copy_bytes_per_second=7.0)
    plan = ThrottlePlan(current, target)
    assert plan.counted == ("memory_bytes_per_second",)
    assert plan.ratio == EXACT(3)
    assert plan.compute_factor == EXACT(1.5)
    assert plan.factor("memory_bytes_per_second") == EXACT(1)
    assert plan.rate("copy_bytes_per_second") is None
    assert plan.factor("copy_bytes_per_second") == 1
    assert (plan.has_link, plan.link_bytes_per_second) == (False, None)
    assert (
        "assumed to be 3 times as fast on the target as well: the link, copies"
        in plan.assumptions[1]
    )


def test_a_latency_without_a_link_counts_for_nothing():
    plan = ThrottlePlan(Machine(1.0, None, 1e-6), Machine(1.0, 1e9, 1e-3))
    assert plan.ratio == 1


@pytest.mark.parametrize(
    ("current", "target", "why"),
    [
        (Machine(2.0), Machine(6.0), "computing of the target: 3 times as fast, and no other part"),
        (Machine(2.0, 1e8), Machine(6.0, 3e8), "computing, the link of the target: 3 times as"),
        (Machine(2.0), Machine(2.0), "the target is as fast as this machine"),
    ],
)
def test_nothing_is_estimated_where_nothing_is_slowed_down(current, target, why):
    plan = ThrottlePlan(current, target)
    assert plan.slowed == ()
    assert plan.assumptions[0].startswith(f"nothing is slowed down: {why}")
    with pytest.raises(ConfigError, match=f"a part that is slowed down, but {why}"):
        estimate(plan, [1.0] * 48)


@pytest.mark.parametrize(
    ("current", "target", "slowed"),
    [
        (Machine(2.0), Machine(1.0), ("compute",)),
        (Machine(1.0, 1e8), Machine(1.0, 1e7), ("link_bytes_per_second",)),
        (Machine(1.0, 1e8, 1e-5), Machine(1.0, 1e8, 1e-3), ("link_bytes_per_second",)),
        (Machine(1.0, 1e8, 0.0), Machine(1.0, 1e8, 1e-3), ("link_bytes_per_second",)),
    ],
)
def test_what_is_slower_on_the_target_is_slowed_down_by_just_that(current, target, slowed):
    plan = ThrottlePlan(current, target)
    assert (plan.slowed, plan.ratio) == (slowed, 1)
    assert plan.rate("compute") == EXACT(target.compute)
    assert plan.link_bytes_per_second == target.link_bytes_per_second
    assert plan.latency_seconds == target.latency_seconds
