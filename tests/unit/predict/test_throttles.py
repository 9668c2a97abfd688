"""Throttles of one process: what they add, where, and that they leave results alone."""

import os
import time
from contextlib import contextmanager

import pytest
import torch
from jobs import slowness

from daso.comm.emulation import LinkModel
from daso.errors import ConfigError
from daso.predict import Machine, ThrottlePlan, measure_machine, simulate_target, throttles
from daso.predict.throttles import ComputePadding, DiskDelay, DiskRates, MemoryHog, disk_rates


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


def slow(clock, padding, seconds, times=1):
    """Let operations take so long on the clock; return what they take, padded."""
    begun = clock.now

    def operation(row):
        clock.now += seconds
        return row

    for _ in range(times):
        padding.__torch_dispatch__(operation, (), (torch.zeros(1),))
    return clock.now - begun


def test_an_operation_takes_as_many_times_as_long_right_after_it(clock):
    padding = ComputePadding(3.0)
    assert slow(clock, padding, 0.5) == pytest.approx(1.5)
    assert (padding.seconds, padding.in_operations) == (pytest.approx(1.0), pytest.approx(0.5))


def test_pauses_of_short_operations_are_collected_and_none_is_lost(clock):
    padding = ComputePadding(2.0)
    assert slow(clock, padding, 0.002) == pytest.approx(0.002)
    assert slow(clock, padding, 0.001, times=998) == pytest.approx(2 * 0.998 + 0.002, abs=5e-3)


def test_what_looking_takes_is_part_of_the_pauses(clock):
    padding = ComputePadding(2.0)
    padding._overhead_seconds = 0.25  # which the clock does not show
    assert slow(clock, padding, 0.5, times=4) == pytest.approx(4 * (0.5 + 0.25))
    assert padding.seconds == pytest.approx(4 * 0.5)


def test_padded_training_gives_the_same_bits():
    plain = train()
    torch.manual_seed(9)
    with ComputePadding(1.5) as padding:
        assert torch.initial_seed() == 9
        padded = train()
    assert all(map(torch.equal, plain, padded))
    assert padding.in_operations > 0


def test_backward_is_padded_too():
    row = torch.ones(64, 64, requires_grad=True)
    with ComputePadding(1.0) as padding:
        loss = (row @ row).sum()
        before = padding.in_operations
        loss.backward()
    assert padding.in_operations > before


def test_a_padding_brings_about_what_it_is_told():
    with ComputePadding(2.0) as padding:
        assert -0.05 < padding.off() < 0.05 * slowness()


def test_a_padding_that_sleeps_too_long_is_found_out(monkeypatch):
    def overslept(seconds):
        time.sleep(1.5 * max(0.0, seconds))
        return max(0.0, seconds)

    with ComputePadding(2.0) as padding:
        monkeypatch.setattr(throttles, "sleep_for", overslept)
        monkeypatch.setattr(throttles, "MOST_COMPUTE_TRIES", 3)
        assert padding.off() > 0.05


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


# --- memory, and all together --------------------------------------------------------------------


def test_a_hog_ends_with_its_with(monkeypatch):
    monkeypatch.setattr("daso.predict.throttles.PROBE_BYTES", 1 << 20)
    with MemoryHog(1.0) as hog:
        assert hog._thread.is_alive()
        assert hog._duty > 0.9  # there is never so little left
        assert hog.off() < -0.9
    assert not hog._thread.is_alive()


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
    monkeypatch.setattr(ComputePadding, "off", lambda _: 0.0)
    plan = ThrottlePlan(*(Machine(one, memory_bytes_per_second=1.0) for one in (2.0, 1.0)))
    with simulate_target(plan) as steps:
        train(steps=6)
    assert len(steps.seconds) == 5
    assert steps.padding.seconds > 0
    train(steps=2)
    assert len(steps.seconds) == 5, "it is over"


def test_steps_of_a_second_optimizer_do_not_count():
    with simulate_target(ThrottlePlan(Machine(1.0), Machine(1.0))) as steps:
        first, second = (torch.optim.SGD([torch.zeros(1, requires_grad=True)]) for _ in range(2))
        for optimizer in (first, second, first, second, first):
            optimizer.step()
    assert len(steps.seconds) == 2


def test_a_padding_that_is_off_is_refused(monkeypatch):
    monkeypatch.setattr(ComputePadding, "off", lambda _: 0.2)
    plan = ThrottlePlan(*(Machine(one, memory_bytes_per_second=1.0) for one in (2.0, 1.0)))
    refused = "a throttle must be right to 5%, but computing takes 1.20 of the plan's time"
    with pytest.raises(ConfigError, match=refused):
        simulate_target(plan).__enter__()
