"""What exchanges take of the core that trains: of an imitated kernel, and of the real one."""

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from jobs import HANG_SECONDS

from daso.train.deltas import meter
from daso.train.deltas.meter import SHARE, CpuContention, ready_seconds


@pytest.fixture
def kernel(monkeypatch):
    """Time, and how long the thread was ready without a core, as a test sets them."""
    told = SimpleNamespace(now=0.0, ready=0.0)
    monkeypatch.setattr(meter.time, "perf_counter", lambda: told.now)
    monkeypatch.setattr(meter, "ready_seconds", lambda: told.ready)

    def after(seconds, ready=0.0):
        told.now, told.ready = told.now + seconds, told.ready + ready

    return after


def test_where_no_core_is_left_all_of_it_is_lost_and_beside_a_gpu_nothing():
    for cores, lost in (("shared", 0.05), ("other", 0.0)):
        one = CpuContention(cores)
        one.begin(during_training=True)
        assert one.end(0.05) == lost
        assert one.of(0.004) == lost * 0.08


def test_what_a_thread_waits_for_its_core_during_an_exchange_is_lost(kernel):
    one = CpuContention("spare")
    assert one.end(0.05) == 0.0, "an exchange that a checkpoint brought"
    one.begin(during_training=True)
    kernel(0.2, ready=0.03)
    assert one.end(0.05) == pytest.approx(0.03)
    kernel(1.0)
    one.begin(during_training=True)
    kernel(0.2, ready=0.07)
    assert one.end(0.05) == pytest.approx(0.03 + SHARE * 0.02), "no more than it was busy, smoothed"
    for _ in range(50):
        kernel(1.0)
        one.begin(during_training=True)
        kernel(0.2)
        loss = one.end(0.05)
    assert loss < 1e-6, "and a core that comes free is learned"


def test_core_loss_of_steps_counts_since_the_last_look(kernel):
    taken = {}
    for cores in ("shared", "spare", "other"):
        one = CpuContention(cores)
        first = one.of_steps(0.2)
        kernel(1.0, ready=0.03)
        second = one.of_steps(0.25)
        kernel(1.0, ready=0.08)
        taken[cores] = [first, second, one.of_steps(0.3)]
    assert taken["shared"] == pytest.approx([0, 0.05, 0.05])
    assert taken["spare"] == pytest.approx([0, 0.03, 0.05]), "no more than it was busy"
    assert taken["other"] == [0, 0, 0]


def test_what_others_take_without_exchanges_too_is_not_theirs(kernel):
    one = CpuContention("spare")
    for _ in range(60):
        one.begin(during_training=True)
        kernel(0.2, ready=0.2 * 0.3 + 0.01)
        loss = one.end(0.05)
        kernel(1.0, ready=1.0 * 0.3)
    assert loss == pytest.approx(0.01, rel=0.01)


def test_what_other_exchanges_take_in_between_is_not_taken_for_others(kernel):
    one = CpuContention("spare")
    for _ in range(60):
        one.begin(during_training=True)
        kernel(0.2, ready=0.03)
        loss = one.end(0.05)
        kernel(0.5)
        one.pause()
        kernel(0.4, ready=0.2)  # by small tensors
        one.resume()
        kernel(0.5)
    assert loss == pytest.approx(0.03)
    assert one.state()["others"] == 0.0


def test_blocking_and_dropped_exchanges_teach_nothing(kernel):
    one = CpuContention("spare")
    for _ in range(3):
        one.begin(during_training=True)
        kernel(0.2, ready=0.03)
        assert one.end(0.05) == pytest.approx(0.03)
        one.begin(during_training=False)
        kernel(0.2)
        assert one.end(0.05) == pytest.approx(0.03)
        one.begin(during_training=True)
        kernel(0.2, ready=0.2)
        one.drop()
    state = one.state()
    assert state == {"loss": pytest.approx(0.03), "others": 0.0, "part": pytest.approx(0.6)}
    assert one.of(0.01) == pytest.approx(0.006), "a shorter one loses as much of its time"
    other = CpuContention("spare")
    other.load(one.state())
    assert other.end(0.05) == pytest.approx(0.03), "an exchange that a checkpoint brought"


def test_noise_of_others_does_not_add_up_and_another_thread_spoils_nothing(kernel):
    one, noise = CpuContention("spare"), 0
    for turn in range(200):
        one.begin(during_training=True)
        kernel(0.2, ready=0.02 * (turn % 2))
        noise = one.end(0.05)
        kernel(1.0, ready=0.05)
    assert noise < 0.005
    kernel(1.0, ready=-1e4)
    one.begin(during_training=True)
    kernel(0.2, ready=0.01)
    assert 0 <= one.end(0.05) < 0.02
    kernel(1.0, ready=1e6)
    one.begin(during_training=True)
    kernel(0.2)
    assert one.end(0.05) == 0.0


def test_the_kernel_tells_that_a_thread_waits_for_its_core():
    """Which another process has too."""
    core, found = min(os.sched_getaffinity(0)), []

    def spin():
        os.sched_setaffinity(0, {core})
        before, ends = ready_seconds(), time.perf_counter() + HANG_SECONDS
        while ready_seconds() - before < 0.02 and time.perf_counter() < ends:
            sum(range(1000))
        found.append(ready_seconds() - before)

    spins = f"import os, time; os.sched_setaffinity(0, {{{core}}})\nend = time.time() + 60\n"
    other = subprocess.Popen([sys.executable, "-c", f"{spins}while time.time() < end: pass"])
    try:
        thread = threading.Thread(target=spin)
        thread.start()
        thread.join()
    finally:
        other.kill()
        other.wait()
    assert found[0] >= 0.02


def test_a_kernel_that_does_not_tell_counts_as_no_loss(monkeypatch, tmp_path):
    for text in (None, "", "1", "1 x 3"):
        path = tmp_path / "schedstat"
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(meter, "SCHEDSTAT", path)
        assert ready_seconds() == 0.0
