"""The engine polls as often as the link needs, and no more: on a clock of the test."""

import threading
import time
from types import SimpleNamespace

import pytest

from daso.comm import engine as module
from daso.errors import StallError


class Clock:
    """Time that goes on when somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def thread_time(self):
        return 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Polled:
    """A request that is over so many seconds after it was asked for first."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.end, self.polls = clock, seconds, None, 0

    def test(self):
        self.polls += 1
        self.end = self.clock.now + self.seconds if self.end is None else self.end
        return self.clock.now >= self.end


@pytest.fixture
def carry_out(monkeypatch):
    """Let an engine wait for one request after the other, with nobody standing still for it."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)

    def run(*seconds, wraps=list, due_seconds=0.0):
        engine = module.Engine(20.0, str)
        testall = SimpleNamespace(Testall=lambda requests: all(one.test() for one in requests))
        engine._mpi = SimpleNamespace(Request=testall)
        engine._is_awaited = SimpleNamespace(wait=clock.sleep, clear=lambda: None)
        requests = [Polled(clock, each) for each in seconds]

        def work():
            for one in requests:
                yield wraps([one])

        handle = engine.submit(work(), due_seconds=due_seconds)
        assert handle.finished.wait(20)
        engine.close()
        assert handle.error is None
        return requests

    return run


def test_a_long_wait_after_short_ones_is_polled_seldom(carry_out):
    *_, long = carry_out(*[0.0] * 20, 1.0)
    assert 500 < long.polls < 1000  # at the shortest sleep all the time it would be 10,000


def test_messages_of_a_fast_link_do_not_wait_for_a_poll(carry_out):
    first, *rest = carry_out(1.0, *[0.0005] * 100)
    assert first.polls < 1000
    # A sleep of 2 ms for each would take four times as long as the messages.
    assert sum(one.end is not None and one.polls >= 3 for one in rest) > 80
    assert max(one.polls for one in rest) < 10


@pytest.mark.parametrize(
    ("due_seconds", "least", "most"),
    [(0.0, 200, 400), (0.002, 600, 900), (0.064, 19, 30), (9, 4, 8)],
)
def test_others_are_waited_for_by_the_time_that_is_left(carry_out, due_seconds, least, most):
    (one,) = carry_out(0.08, wraps=module.PeerRendezvous, due_seconds=due_seconds)
    assert least < one.polls < most
    (one,) = carry_out(0.08, due_seconds=due_seconds)
    assert 200 < one.polls < 400, "where messages cross, the link is not kept waiting"


@pytest.mark.parametrize(("rounds", "least", "most"), [(0, 4, 8), (1, 4, 8), (4, 15, 25)])
def test_ranks_on_whose_way_messages_lie_rest_shorter(carry_out, rounds, least, most):
    def wraps(requests):
        return module.PeerRendezvous(requests, rounds)

    (one,) = carry_out(0.08, wraps=wraps, due_seconds=9.0)
    assert least < one.polls < most


@pytest.fixture
def resting(monkeypatch):
    """An engine that would rest for ten minutes, at work that is over when a test says so."""
    monkeypatch.setattr(module, "PEER_POLL_SECONDS", 600.0)
    engine = module.Engine(20.0, str)
    told = SimpleNamespace(engine=engine, begins=threading.Event(), there=threading.Event())
    told.asked, told.polls = threading.Event(), 0

    def test_all(_):
        told.polls += 1
        told.asked.set()
        return told.there.is_set()

    engine._mpi = SimpleNamespace(Request=SimpleNamespace(Testall=test_all))

    def work():
        yield told.begins.is_set
        yield module.PeerRendezvous(["of all ranks"])
        return "together"

    told.handle = engine.submit(work(), due_seconds=9600.0)
    yield told
    told.there.set()
    engine.close()


def test_who_is_waited_for_looks_at_once_whether_others_came(resting):
    resting.begins.set()
    assert resting.asked.wait(20)
    resting.there.set()
    assert resting.engine.wait(resting.handle) == "together"


def test_who_is_waited_for_for_a_part_looks_at_once_too(resting):
    resting.begins.set()
    assert resting.asked.wait(20)
    resting.there.set()
    with resting.engine.poll_eagerly(resting.handle):
        assert resting.handle.finished.wait(20)


def test_who_was_waited_for_before_does_not_rest(resting):
    waits = threading.Thread(target=resting.engine.wait, args=(resting.handle,))
    waits.start()
    while resting.engine._awaited is None:
        time.sleep(0.001)
    resting.begins.set()
    while resting.polls < 3:  # not there yet, again and again
        assert waits.is_alive()
        time.sleep(0.001)
    resting.there.set()
    waits.join(20)
    assert resting.handle.result == "together"


@pytest.mark.parametrize("moves", [True, False])
def test_a_slow_link_is_no_missing_rank(moves):
    ends = threading.Event()
    engine = module.Engine(0.4, lambda: "no answer from world rank 1")

    def work():
        while moves and not ends.is_set():
            yield lambda: time.sleep(0.01) or True  # one message after the other
        yield ends.is_set

    handle = engine.submit(work())
    with pytest.raises(StallError, match="no answer from world rank 1") as caught:
        engine.wait(handle)
    assert ("the last message arrived 0.0 s ago: a slow link" in str(caught.value)) == moves
    ends.set()
    engine.close()
