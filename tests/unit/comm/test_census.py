"""Who is there, told from rank to rank: found by all, whoever is silent, with few messages."""

import itertools
from collections import deque
from math import log2

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from daso.comm.health.census import FRESH_SECONDS, Census
from daso.comm.health.step_watchdog import neighbours


class Ranks:
    """Ranks whose messages arrive when the test says so; who is silent loses them."""

    def __init__(self, count, silent=()):
        self.sent, self.silent, self.now = 0, set(silent), 0.0
        self._under_way = deque()
        self.all = [Census(rank, count, self._sends(rank)) for rank in range(count)]

    def _sends(self, source):
        def send(rank, numbers):
            assert source not in self.silent
            assert source != rank
            self.sent += 1
            self._under_way.append((source, rank, numbers))

        return send

    def ask(self, rank):
        self.all[rank].ask(self.now)

    def turn(self):
        """Let what is sent arrive: each takes in what came at once."""
        arrived = {}
        while self._under_way:
            source, rank, numbers = self._under_way.popleft()
            arrived.setdefault(rank, []).append((source, numbers))
        for rank, messages in arrived.items():
            if rank not in self.silent:
                self.all[rank].receive(messages, self.now)

    def settle(self):
        while self._under_way:
            self.turn()


def with_silent(count):
    return st.tuples(st.just(count), st.sets(st.integers(0, count - 1), max_size=count - 1))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(2, 70).flatmap(with_silent), st.randoms(use_true_random=False))
@example((32, set(neighbours(0, 32))), None)
@example((70, {*range(70)} - {3, 40, 41}), None)
def test_each_that_asks_knows_who_is_there(world, random):
    """Also behind ranks that pass nothing on: who is asked directly answers with what it knows."""
    count, silent = world
    ranks, there = Ranks(count, silent), sorted({*range(count)} - silent)
    asking = there[:1] if random is None else random.sample(there, random.randint(1, len(there)))
    for rank in asking:
        ranks.ask(rank)
        ranks.turn()
    ranks.settle()
    for _ in range(count):
        for rank in asking:
            ranks.all[rank].ask_directly()
        ranks.settle()
    for rank in asking:
        assert ranks.all[rank].silent == sorted(silent)


@pytest.mark.parametrize(
    ("count", "asking", "turns"),
    [*itertools.product([16, 256], [1, 8], [0, 1, 3]), (1024, 8, 1)],
)
def test_messages_of_a_rank_grow_with_the_logarithm_of_ranks(count, asking, turns):
    """However many ask, at once or one after the other."""
    ranks = Ranks(count, silent=[count - 3])
    for rank in range(asking):
        ranks.ask(rank)
        for _ in range(turns):
            ranks.turn()
    ranks.settle()
    assert all(ranks.all[rank].silent == [count - 3] for rank in range(asking))
    assert ranks.sent / count <= 2 * log2(count) ** 2


def test_a_round_that_comes_late_is_no_news_of_the_next():
    ranks = Ranks(2, silent=[1])
    ranks.ask(0)
    ranks.now += 2 * FRESH_SECONDS
    ranks.ask(0)
    ranks.all[0].receive([(1, [1, 0b11])], ranks.now)
    assert ranks.all[0].silent == [1]
    ranks.all[0].receive([(1, [2, 0b11])], ranks.now)
    assert ranks.all[0].silent == []


def test_who_was_there_long_ago_may_be_gone():
    ranks = Ranks(3)
    ranks.ask(0)
    ranks.settle()
    ranks.silent.add(2)
    ranks.ask(1)
    assert ranks.all[1].silent == []
    ranks.now += 2 * FRESH_SECONDS
    ranks.ask(1)
    ranks.settle()
    assert ranks.all[1].silent == [2]


def test_who_asks_while_another_does_has_what_both_heard():
    """The first one's answers of its own round count, also those in the second one's."""
    ranks = Ranks(3)
    ranks.ask(0)
    ranks.all[0].receive([(1, [1, 0b011])], ranks.now)
    ranks.all[0].receive([(2, [2, 0b100])], ranks.now)
    assert ranks.all[0].silent == []


def test_all_ranks_have_a_bit():
    ranks = Ranks(100)
    ranks.ask(70)
    ranks.settle()
    assert ranks.all[70].silent == []
    assert (Census.numbers(64), Census.numbers(65)) == (3, 4)
