"""Throttles of one process: what they add, where, and that they leave results alone."""

import os
import time
from contextlib import contextmanager

import pytest
import torch
from jobs import slowness

from daso.comm.emulation import LinkModel, Stretch
from daso.errors import ConfigError
from daso.predict import Machine, ThrottlePlan, measure_machine, simulate_target, throttles
from daso.predict.emulate import StepTimes
from daso.predict.throttles import (
    PROBE_BYTES,
    DiskDelay,
    DiskRates,
    MemoryRates,
    OperationPadding,
    disk_rates,
)


def train(steps=4):
    """Return the parameters of a small model after some steps."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


class Clock:
    """Time that goes on when somebody sleeps, or an operation takes long."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("daso.comm.emulation.time", made)
    monkeypatch.setattr(throttles, "time", made)
    return made


def slow(clock, padding, seconds, times=1, numel=1):
    """Let operations take so long on the clock; return what they take, padded."""
    begun = clock.now

    def operation(row):
        clock.now += seconds
        return row

    for _ in range(times):
        padding.__torch_dispatch__(operation, (), (torch.zeros(numel),))
    return clock.now - begun


def test_an_operation_takes_as_many_times_as_long_right_after_it(clock):
    padding = OperationPadding(3.0)
    assert slow(clock, padding, 0.5) == pytest.approx(1.5)
    assert (padding.seconds, padding.in_operations) == (pytest.approx(1.0), pytest.approx(0.5))


def test_pauses_of_short_operations_are_collected_and_none_is_lost(clock):
    padding = OperationPadding(2.0)
    assert slow(clock, padding, 0.002) == pytest.approx(0.002)
    assert slow(clock, padding, 0.001, times=998) == pytest.approx(2 * 0.998 + 0.002, abs=5e-3)


def test_what_looking_takes_is_part_of_the_pauses(clock):
    padding = OperationPadding(2.0)
    padding._overhead_seconds = 0.25  # which the clock does not show
    assert slow(clock, padding, 0.5, times=4) == pytest.approx(4 * (0.5 + 0.25))
    assert padding.seconds == pytest.approx(4 * 0.5)


def test_padded_training_gives_the_same_bits():
    plain = train()
    torch.manual_seed(9)
    with OperationPadding(1.5) as padding:
        assert torch.initial_seed() == 9
        padded = train()
    assert all(map(torch.equal, plain, padded))
    assert padding.in_operations > 0


def test_backward_is_padded_too():
    row = torch.ones(64, 64, requires_grad=True)
    with OperationPadding(1.0) as padding:
        loss = (row @ row).sum()
        before = padding.in_operations
        loss.backward()
    assert padding.in_operations > before


def test_a_padding_brings_about_what_it_is_told():
    with OperationPadding(2.0) as padding:
        assert -0.05 < padding.off() < 0.05 * slowness()


def test_a_padding_that_sleeps_too_long_is_found_out(monkeypatch):
    def overslept(seconds):
        time.sleep(1.5 * max(0.0, seconds))
        return max(0.0, seconds)

    with OperationPadding(2.0) as padding:
        monkeypatch.setattr(throttles, "sleep_for", overslept)
        monkeypatch.setattr(throttles, "MOST_COMPUTE_TRIES", 3)
        assert padding.off() > 0.05


# --- memory --------------------------------------------------------------------------------------

LARGE = 1 << 19  # numbers of 4 bytes
SLOW_MEMORY = MemoryRates(current=4.0 * LARGE, target=2.0 * LARGE)  # 1 s, and 2 s on the target


@pytest.mark.parametrize(
    ("seconds", "numel", "padded"),
    [
        (1.0, LARGE, 2.0),
        (0.5, LARGE, 2.0),  # memory is faster than it was when measured
        (5.0, LARGE, 5.0),  # computing takes longer than memory will
        (0.3, LARGE, 0.3),  # from caches
        (1e-6, LARGE, 1e-6),  # a view
        (1.0, 1000, 1.0),  # in the caches of a core
    ],
)
def test_an_operation_takes_no_less_than_its_memory_on_the_target(clock, seconds, numel, padded):
    padding = OperationPadding(memory=SLOW_MEMORY)
    assert slow(clock, padding, seconds, numel=numel) == pytest.approx(padded)
    assert padding.memory_seconds == pytest.approx(padded - seconds)


def test_memory_delays_slower_computing_by_the_rest_alone(clock):
    assert slow(clock, OperationPadding(1.5, SLOW_MEMORY), 1.0, numel=LARGE) == pytest.approx(2.0)
    assert slow(clock, OperationPadding(3.0, SLOW_MEMORY), 1.0, numel=LARGE) == pytest.approx(3.0)


def test_a_pause_for_memory_is_not_stretched_again(clock):
    steps = StepTimes(ThrottlePlan(Machine(2.0), Machine(1.0)))
    steps.padding = OperationPadding(2.0, SLOW_MEMORY)
    stretch = Stretch(2.0, steps.padded_seconds)
    for python, expected in ((0.0, None), (0.0, 2.0), (1.0, 4.0), (0.5, 3.0)):
        begun = clock.now
        slow(clock, steps.padding, 0.5, numel=LARGE)  # 1 s for computing, 2 for memory
        clock.now += python
        stretch.after_step(begun, 0.0)
        assert expected is None or clock.now - begun == pytest.approx(expected)


def test_tensors_in_lists_count_once_and_those_of_a_device_do_not():
    row = torch.zeros(1000)
    wide = row[:1].expand(1 << 20)
    sizes = throttles._sizes(([row, row], {"out": row}, wide, torch.zeros(9, device="meta")))
    assert sizes == {id(row): 4000, id(wide): 4000}


@pytest.mark.parametrize("times", [1.5, 3.0])
def test_memory_is_held_to_a_tenth_of_its_rate(times):
    """On two cores too: no thread has to take bandwidth away."""
    rate = throttles.memory_bytes_per_second()
    with OperationPadding(memory=MemoryRates(rate, rate / times)) as padding:
        assert -0.1 < padding.memory_off() < 0.1 * slowness()
        row, begun, owed = torch.zeros(PROBE_BYTES, dtype=torch.uint8), 0.0, padding._owed
        begun = time.perf_counter()
        for _ in range(4):
            row.neg()
        took = time.perf_counter() - begun + padding._owed - owed
    assert took >= 0.9 * 4 * 2 * PROBE_BYTES * times / rate


def test_memory_that_is_faster_than_it_was_told_is_found_out():
    with OperationPadding(memory=MemoryRates(1e6, 5e5)) as padding:
        assert padding.memory_off() < -0.9


# --- the disk ------------------------------------------------------------------------------------


@pytest.fixture
def counters(monkeypatch):
    """What the system counted: bytes read and written."""
    told = [0, 0]
    monkeypatch.setattr(throttles, "_counters", lambda: tuple(told))
    return told


def test_a_delay_is_what_bytes_take_longer(monkeypatch, counters):
    slept = []
    monkeypatch.setattr(throttles, "sleep_for", lambda seconds: slept.append(seconds) or seconds)
    with DiskDelay(DiskRates(write=100.0, read=200.0), DiskRates(write=50.0, read=50.0)) as delay:
        counters[:] = [0, 1000]
        delay.settle()
        counters[:] = [1000, 1000]
        delay.settle()
    assert slept == pytest.approx([1000 / 50 - 1000 / 100, 1000 / 50 - 1000 / 200, 0])
    assert delay.seconds == pytest.approx(sum(slept))


@pytest.mark.skipif(
    not throttles.COUNTERS.exists(), reason="the system counts no bytes of processes"
)
def test_a_saved_model_is_delayed(tmp_path):
    model, current, target = torch.zeros(1 << 20), DiskRates(1e9, 1e9), DiskRates(4e7, 1e9)
    with DiskDelay(current, target) as delay:
        torch.save(model, tmp_path / "model.pt")
        with (tmp_path / "model.pt").open("rb") as file:
            os.fsync(file.fileno())
        if throttles._counters()[1] == 0:
            pytest.skip("this folder is in memory")
        begun = time.perf_counter()
        delay.settle()
    assert time.perf_counter() - begun >= 0.95 * model.nbytes * (1 / 4e7 - 1 / 1e9)


def test_a_delay_is_off_by_a_part_of_the_whole_write(tmp_path, monkeypatch, counters):
    """A throttle of 5 % whose sleep is 20 % too long is 1 % off, not 20."""
    clock = [0.0]
    written = 16 << 20

    def oversleep(seconds):
        clock[0] += 1.2 * max(0.0, seconds)
        return 1.2 * max(0.0, seconds)

    @contextmanager
    def write(_):
        counters[1] += written
        yield

    monkeypatch.setattr(throttles, "_written", write)
    monkeypatch.setattr(throttles, "sleep_for", oversleep)
    monkeypatch.setattr(throttles.time, "perf_counter", lambda: clock[0])
    with DiskDelay(DiskRates(1.05e9, 1e9), DiskRates(1e9, 1e9)) as delay:
        assert delay.off(tmp_path) == pytest.approx(0.2 * 0.05 / 1.05, rel=1e-6)


def test_a_disk_whose_bytes_nobody_counts_is_not_throttled(tmp_path, monkeypatch):
    monkeypatch.setattr(throttles, "COUNTERS", tmp_path / "none")
    with DiskDelay(DiskRates(1e9, 1e9), DiskRates(1e9, 1e8)) as delay, pytest.raises(OSError):
        delay.off(tmp_path)


def test_nothing_is_left_on_a_disk_that_is_full(tmp_path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(throttles.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        disk_rates(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_disk_has_rates_and_nothing_is_left_on_it(tmp_path):
    rates = disk_rates(tmp_path)
    assert rates.write > 0
    assert rates.read > 0
    assert list(tmp_path.iterdir()) == []


# --- all together --------------------------------------------------------------------------------


def test_a_link_is_occupied_by_one_after_the_other():
    link = LinkModel(100.0, latency_seconds=1.0)
    first = link.occupy(200, 2, since=time.perf_counter() + 10)
    assert link.occupy(100, 1, since=0.0) == pytest.approx(first + 2)


def test_what_is_measured_of_one_process_has_no_link(tmp_path):
    found = measure_machine(folder=tmp_path)
    assert found.compute > 1e8
    assert min(found.memory_bytes_per_second, found.disk_write_bytes_per_second) > 1e6
    assert found.link_bytes_per_second is None
    with pytest.raises(ConfigError, match="folder must be an existing folder"):
        measure_machine(folder=tmp_path / "none")


def test_a_program_without_ranks_is_throttled_and_its_steps_are_timed(monkeypatch):
    monkeypatch.setattr(OperationPadding, "off", lambda _: 0.0)
    plan = ThrottlePlan(*(Machine(one, memory_bytes_per_second=1.0) for one in (2.0, 1.0)))
    with simulate_target(plan) as steps:
        train(steps=6)
    assert len(steps.seconds) == 5
    assert steps.padding.seconds > 0
    train(steps=2)
    assert len(steps.seconds) == 5, "it is over"


def test_use_before_the_steps_does_not_count():
    steps, used = StepTimes(ThrottlePlan(Machine(1.0), Machine(1.0))), [5.0]
    steps.used["a part"] = lambda: used[0]
    steps._end_step()
    assert (steps.use, steps.is_slowed) == (0.0, False)
    for seconds in (0.0, 1e-5, 1.0):
        used[0] += seconds
        time.sleep(0.01)
        steps._end_step()
        assert steps.is_slowed == (seconds == 1.0)


def test_steps_of_a_second_optimizer_do_not_count():
    with simulate_target(ThrottlePlan(Machine(1.0), Machine(1.0))) as steps:
        first, second = (torch.optim.SGD([torch.zeros(1, requires_grad=True)]) for _ in range(2))
        for optimizer in (first, second, first, second, first):
            optimizer.step()
    assert len(steps.seconds) == 2


def test_a_padding_that_is_off_is_refused(monkeypatch):
    monkeypatch.setattr(OperationPadding, "off", lambda _: 0.2)
    plan = ThrottlePlan(*(Machine(one, memory_bytes_per_second=1.0) for one in (2.0, 1.0)))
    refused = "a throttle must be right to 5%, but computing takes 1.20 of the plan's time"
    with pytest.raises(ConfigError, match=refused):
        simulate_target(plan).__enter__()
