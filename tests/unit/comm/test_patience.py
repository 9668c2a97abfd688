"""A process that is stopped does not wait meanwhile; a real one is, below."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from jobs import HANG_SECONDS

from daso.comm import step_timer
from daso.comm.step_timer import RunningClock


def test_time_between_two_looks_counts_to_a_limit(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: now[0])
    waited = RunningClock()
    found = []
    for second in (1, 2, 4000, 4001):
        now[0] = float(second)
        found.append(waited.seconds())
    assert found == [1, 2, 2 + step_timer.MOST_SECONDS, 3 + step_timer.MOST_SECONDS]


@pytest.mark.parametrize("most_seconds", [0.0, 0.05, 1.2])
def test_what_does_not_come_is_waited_for_as_long_as_told(most_seconds):
    begun = time.perf_counter()
    assert not RunningClock().waits_for(threading.Event().wait, most_seconds)
    assert time.perf_counter() - begun >= most_seconds


def test_what_comes_ends_the_wait():
    came = threading.Event()
    threading.Timer(0.05, came.set).start()
    assert RunningClock().waits_for(came.wait, HANG_SECONDS)


PROGRAM = """
import sys, time
from daso.comm.step_timer import wait_until
begun = time.perf_counter()
print("waits", flush=True)
wait_until(lambda: time.perf_counter() - begun > 12, lambda: "nobody", 10.0, lambda: None)
print("came", flush=True)
"""


@pytest.mark.slow("is stopped for some seconds")
@pytest.mark.later("is stopped for some seconds")
def test_who_is_stopped_for_longer_than_the_limit_goes_on():
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as waits:
        assert waits.stdout.readline() == "waits\n"
        os.kill(waits.pid, signal.SIGSTOP)
        time.sleep(11)
        os.kill(waits.pid, signal.SIGCONT)
        out, _ = waits.communicate(timeout=HANG_SECONDS)
    assert (waits.returncode, out) == (0, "came\n")
