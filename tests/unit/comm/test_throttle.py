"""Computing that is made to take longer, on a clock of the test."""

import pytest

from daso.comm import emulation as throttle
from daso.comm.emulation import Stretch, stretch, throttled


class Clock:
    """Time that goes on when somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(throttle, "time", made)
    return made


def taken(clock, stretch, *steps):
    """Return the seconds of steps that compute and stand still for so long, stretched."""
    found, stood = [], 0.0
    for computes, stands in steps:
        begun, stood = clock.now, stood + stands
        clock.now += computes + stands
        stretch.after_step(begun, stood)
        found.append(clock.now - begun)
    return found


def test_computing_takes_as_many_times_as_long_but_in_the_first_step(clock):
    assert taken(clock, Stretch(3.0), (1, 0), (1, 0), (2, 0)) == pytest.approx([1, 3, 6])
    assert taken(clock, Stretch(1.0), (1, 0), (1, 0), (2, 0)) == pytest.approx([1, 1, 2])


def test_standing_still_for_others_is_not_stretched(clock):
    steps = taken(clock, Stretch(3.0), (1, 5), (1, 4), (2, 0), (0, 2), (1, 1))
    assert steps == pytest.approx([6, 3 + 4, 6, 2, 3 + 1])


def test_two_optimizers_of_one_program_stretch_its_computing_once(clock):
    """As of a GAN: each computes for 1 s, and each has the other's sleeping in its interval."""
    with throttled(None, 3.0):
        one, other = stretch(), stretch()
    begun, found = {one: clock.now, other: clock.now}, []
    for _ in range(8):
        before = clock.now
        for each in (one, other):
            clock.now += 1
            each.after_step(begun[each], 0.0)
            begun[each] = clock.now
        found.append(clock.now - before)
    assert found[0] == pytest.approx(2)  # first steps hold the setup
    assert found[1:] == pytest.approx([6] * 7)


def test_steps_that_are_not_stretched_have_nothing_to_call():
    assert stretch() is None
    with throttled(None, 1.0):
        assert stretch() is None
