"""Who is missing, on a clock of the test: answers come when the test lets them."""

import time

from local_world import run_ranks

from daso.comm.health import liveness
from daso.comm.health.liveness import LivenessProbe

MAYBE = "which hangs or is disconnected"


class Clock:
    """Time that goes on when somebody sleeps; others have their turn meanwhile."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        time.sleep(0)


def test_a_late_answer_to_an_earlier_probe_is_none_to_the_next(monkeypatch):
    monkeypatch.setattr(liveness, "time", Clock())

    def body(world):
        call = LivenessProbe(world.Dup, ["a", "b"])
        found = []
        for _ in range(2):
            if world.rank == 0:
                found.append(call.missing())  # which takes longer than answers are new
            world.Barrier()
            if world.rank == 1:
                call.answer()  # nobody waits for it any more
            world.Barrier()
        call.free()
        return found

    assert run_ranks(2, body)[0] == [f"no answer from world rank 1 on host b, {MAYBE}"] * 2


def test_who_answers_in_time_is_there_at_every_probe(monkeypatch):
    monkeypatch.setattr(liveness, "time", Clock())
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", float("inf"))

    def body(world):
        call = LivenessProbe(world.Dup, ["a", "b"])
        found = []
        for _ in range(2):
            if world.rank == 0:
                found += [call.missing(), call.missing(absent=[1])]
                world.Ibarrier().Wait()
                continue
            over = world.Ibarrier()
            while not over.Test():
                call.answer()
                time.sleep(0)
        call.free()
        return found

    slow = "every rank answers, so the link is slow, or the exchange is too large for it"
    absent = "every rank answers, but world rank 1 on host b did not arrive"
    assert run_ranks(2, body)[0] == [slow, absent] * 2
