"""Times of a device that is behind its host, on a clock that tests move."""

import pytest

from daso import trace
from daso.comm.step_timer import HostTimestamp, StepTimer


class Device:
    """Does what was launched, one after the other; its host moves on by `pass_`."""

    def __init__(self):
        self.now = self.busy_until = 0.0

    def launch(self, seconds):
        self.busy_until = max(self.now, self.busy_until) + seconds

    def pass_(self, seconds):
        self.now += seconds

    def stamp(self):
        return Moment(self, max(self.now, self.busy_until))


class Moment:
    def __init__(self, device, at):
        self.device, self.at = device, at

    def over(self):
        return self.device.now >= self.at

    def since(self, earlier):
        assert self.over(), "nobody waits for a time"
        assert earlier.over()
        return self.at - earlier.at


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def watch(device):
    return StepTimer(device.stamp)


def take(device, watch, *, launching=0.1, computing=1.0, waits=0.0, kind=trace.WAIT_INTER_NODE):
    device.pass_(launching)
    device.launch(computing)
    if waits:
        with watch.waiting(kind):
            device.pass_(waits)
    watch.step()


def test_a_host_that_is_ahead_says_nothing_of_the_device(device, watch):
    for _ in range(5):
        take(device, watch)
    assert watch.take_steps() == []  # half a second: the device is in its first step
    device.pass_(10)
    assert watch.take_steps() == pytest.approx([1.1, 1, 1, 1, 1])
    assert watch.take_steps() == []


@pytest.mark.parametrize(("waits", "idle"), [(0.5, 0.0), (1.0, 0.0), (1.7, 0.7), (4.0, 3.0)])
def test_only_what_the_device_has_nothing_to_do_is_idle(device, watch, waits, idle):
    take(device, watch, waits=waits)
    device.pass_(10)
    assert watch.idle_seconds(trace.WAIT_INTER_NODE) == pytest.approx(idle)
    assert watch.idle_seconds(trace.WAIT_INTRA_NODE) == 0
    assert watch.take_steps() == pytest.approx([1.1])  # without it


def test_a_wait_is_taken_off_its_own_step_and_no_later_one(device, watch):
    for waits in (1.5, 0.0, 0.0):
        take(device, watch, waits=waits)
    device.pass_(10)
    assert watch.idle_seconds(trace.WAIT_INTER_NODE) == pytest.approx(0.5)
    assert watch.take_steps() == pytest.approx([1.1, 1.1, 1.0])


def test_waits_inside_the_node_are_part_of_a_step(device, watch):
    take(device, watch, waits=1.5, kind=trace.WAIT_INTRA_NODE)
    device.pass_(10)
    assert watch.idle_seconds(trace.WAIT_INTRA_NODE) == pytest.approx(0.5)
    assert watch.take_steps() == pytest.approx([1.6])


def test_what_is_recorded_is_how_long_nothing_was_done(device, watch):
    recorder = trace.Recorder(10)
    trace.start(recorder)
    try:
        with watch.waiting(trace.WAIT_INTRA_NODE):
            device.pass_(0.25)
        device.launch(1.0)
        with watch.waiting(trace.WAIT_INTER_NODE, key=7):
            device.pass_(1.5)
        assert [span.kind for span in recorder.take()[0]] == [
            trace.WAIT_INTRA_NODE,
            trace.WAIT_INTER_NODE,
        ]
        device.launch(1.0)
        with watch.waiting(trace.WAIT_INTER_NODE, key=8):
            device.pass_(0.4)
        assert recorder.take() == ([], 0)  # not past
        device.pass_(10)
        watch.step()
        (span,) = recorder.take()[0]
    finally:
        trace.stop()
    assert (span.kind, span.key, span.begins) == (trace.WAIT_INTER_NODE, 8, span.ends)


def test_waits_that_an_error_ends_count_too(device, watch):
    with pytest.raises(ZeroDivisionError), watch.waiting(trace.WAIT_INTER_NODE):
        device.pass_(2)
        raise ZeroDivisionError
    assert watch.idle_seconds(trace.WAIT_INTER_NODE) == 2


def test_another_clock_keeps_what_was_taken(device, watch):
    take(device, watch, waits=2)
    device.pass_(10)
    device.launch(1)
    watch.step()  # not past
    watch.start(HostTimestamp)
    assert watch.idle_seconds(trace.WAIT_INTER_NODE) == pytest.approx(1)
    assert watch.take_steps() == pytest.approx([1.1])


def test_no_more_steps_are_kept_than_somebody_may_take(device, watch):
    for _ in range(1500):
        take(device, watch, launching=1, computing=0.5)
    assert len(watch._launched) <= 1
    assert len(watch.take_steps()) == 1000


def test_on_a_cpu_a_wait_is_idle_as_long_as_it_takes():
    watch = StepTimer()
    with watch.waiting(trace.WAIT_INTER_NODE):
        pass
    watch.step()
    (step,) = watch.take_steps()
    assert step >= 0
    assert 0 < watch.idle_seconds(trace.WAIT_INTER_NODE) < 0.1
