"""Clocks that are wrong by a known amount are set right to what the trips allow."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.timeline.clock_offsets import Clock, Reading, clocks, close_loop

checked = settings(derandomize=True, max_examples=100, deadline=None)
TIMES = st.floats(-1e3, 1e3)


def readings(ahead, trips, skews):
    """Return what ranks read whose clocks are so far ahead; skews from -1 to 1 are the way there.

    An answer is stamped when the way there is over: half a trip plus as much of a half as the skew.
    """
    size = len(ahead)
    return [
        Reading(
            at=100.0 + ahead[rank],
            offset=ahead[(rank + 1) % size] - ahead[rank] + skews[rank] * trips[rank] / 2,
            trip=trips[rank],
        )
        for rank in range(size)
    ]


@checked
@given(st.data())
def test_offsets_are_right_to_half_the_trips_and_the_loop_closes(data):
    size = data.draw(st.integers(2, 9))
    ahead = [0.0, *data.draw(st.lists(TIMES, min_size=size - 1, max_size=size - 1))]
    trips = data.draw(st.lists(st.floats(1e-6, 1e-2), min_size=size, max_size=size))
    skews = data.draw(st.lists(st.floats(-1, 1), min_size=size, max_size=size))
    loop = close_loop(readings(ahead, trips, skews))
    slack = 1e-11 * size  # of adding floats of 1e3
    assert abs(loop.closure) <= loop.bound + slack
    for found, true, bound in zip(loop.offsets, ahead, loop.bounds, strict=True):
        assert abs(found - true) <= bound + slack


def test_bounds_are_reached_by_the_worst_of_links():
    """Links up to a rank all off one way, the others all the other way."""
    for rank in (1, 4, 9):
        skews = [1.0] * rank + [-1.0] * (10 - rank)
        loop = close_loop(readings([0.0] * 10, [1e-3] * 10, skews))
        assert abs(loop.offsets[rank]) == pytest.approx(loop.bounds[rank], rel=1e-9)
    assert loop.bounds[9] == pytest.approx(0.9e-3)


@checked
@given(st.lists(TIMES, min_size=2, max_size=9), st.integers(0, 8), st.floats(-1, 1))
def test_a_single_lopsided_link_is_told_by_the_loop(times, link, skew):
    """All other links are even: then the loop is off by exactly what that link is."""
    ahead, trips = [0.0, *times[1:]], [1e-4] * len(times)
    skews = [0.0] * len(times)
    skews[link % len(times)] = skew
    assert close_loop(readings(ahead, trips, skews)).closure == pytest.approx(
        skew * 5e-5, abs=1e-10
    )


def test_corrupted_link_gives_no_clock_offsets():
    good = close_loop(readings([0.0, 1.0, 2.0], [1e-5] * 3, [0.0] * 3))
    later = readings([0.0, 1.0, 2.0], [1e-5] * 3, [0.0, 200.0, 0.0])  # on rank 1: 1 ms off
    bad = close_loop([Reading(one.at + 50, one.offset, one.trip) for one in later])
    assert good.sound
    assert not bad.sound
    assert bad.closure == pytest.approx(1e-3, abs=1e-9)
    # The loop that does not close is left, whatever it says.
    for at in (102.0, 152.0, 1002.0):  # also where the other loop was taken, and after it
        first = clocks([good, bad])[2].first(at)
        assert first == pytest.approx(at - 2.0, abs=1e-9)
    assert clocks([bad])[2].first(102.0) == pytest.approx(100.0 - 1e-3, abs=1e-9)  # nothing better


@pytest.mark.parametrize(("part", "sound"), [(0.4, True), (0.5, True), (0.6, False), (1, False)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_loop_is_sound_up_to_half_of_all_trips(part, sound, sign):
    """Of four trips of 0.25 s; numbers that floats hold."""
    offsets, ats = (sign * part, 2.0, -2.0, 0.0), (1.0, 1.0, 3.0, 1.0)
    loop = close_loop([Reading(at, ahead, 0.25) for at, ahead in zip(ats, offsets, strict=True)])
    assert loop.bound == 0.5
    assert loop.sound == sound


@checked
@given(st.floats(-100, 100), st.floats(-1e-4, 1e-4), st.lists(st.floats(0, 5e3), min_size=1))
def test_an_even_drift_is_taken_off_between_before_and_after_loops(offset, drift, times):
    def shown(first):
        return first + offset + drift * first

    clock = Clock([(shown(at), shown(at) - at) for at in (10.0, 200.0, 1e3)])
    for first in times:
        assert clock.first(shown(first)) == pytest.approx(first, abs=1e-7)


def test_loops_shortly_after_each_other_do_not_make_a_drift():
    clock = Clock([(10.0, 1e-6), (10.1, 2e-6)])
    assert clock.first(1e6) == 1e6 - 1e-6


def test_a_loop_that_took_long_may_miss_by_what_clocks_drift_meanwhile():
    """On a busy machine ranks ask long after each other; what they drift is no link's fault."""
    drift, apart, trip = 5e-5, 0.12, 1e-5
    loop = close_loop(
        [Reading(10.0, 17.0, trip), Reading(27.0 + apart, -17.0 - drift * apart, trip)]
    )
    assert abs(loop.closure) > trip / 2
    assert loop.sound
    assert abs(loop.offsets[1] - 17.0) <= loop.bounds[1]
    far = close_loop([Reading(10.0, 17.0, trip), Reading(27.0 + apart, -17.0 - 5e-5, trip)])
    assert not far.sound


def test_many_loops_of_drifting_clocks():
    rng = random.Random(5)
    size, drifts = 5, [0.0] + [rng.uniform(-5e-5, 5e-5) for _ in range(4)]
    starts = [0.0] + [rng.uniform(-10, 10) for _ in range(4)]
    loops = []
    for time in range(0, 100, 10):
        ahead = [start + drift * time for start, drift in zip(starts, drifts, strict=True)]
        skews = [rng.uniform(-1, 1) for _ in range(size)]
        rows = readings(ahead, [1e-5] * size, skews)
        loops.append(
            close_loop(
                [Reading(time + a, r.offset, r.trip) for r, a in zip(rows, ahead, strict=True)]
            )
        )
    found = clocks(loops)
    worst = max(max(loop.bounds) for loop in loops)
    for time in (0.0, 3.3, 47.9, 90.0):
        for rank in range(size):
            own = time + starts[rank] + drifts[rank] * time
            assert abs(found[rank].first(own) - time) <= worst + 1e-9
