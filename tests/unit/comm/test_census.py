"""Who is there, told from rank to rank: found by all, whoever is silent, with few messages."""

from collections import deque
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.comm.health.census import Census


class Ranks:
    """Ranks whose messages arrive when the test says so; who is silent loses them."""

    def __init__(self, count, silent=()):
        self.sent, self.silent = 0, set(silent)
        self._under_way = deque()
        self.all = [Census(rank, count, self._sends(rank)) for rank in range(count)]

    def _sends(self, source):
        def send(rank, numbers):
            assert source not in self.silent
            assert source != rank
            self.sent += 1
            self._under_way.append((rank, numbers))

        return send

    def settle(self):
        """Let all that is sent arrive: each takes in what came in a turn at once."""
        while self._under_way:
            arrived = {}
            while self._under_way:
                rank, numbers = self._under_way.popleft()
                arrived.setdefault(rank, []).append(numbers)
            for rank, messages in arrived.items():
                if rank not in self.silent:
                    self.all[rank].heard(messages)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(2, 70), st.data())
def test_each_that_asks_knows_who_is_there(count, data):
    silent = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    ranks = Ranks(count, silent)
    asking = data.draw(
        st.lists(st.sampled_from(sorted({*range(count)} - silent)), min_size=1, unique=True)
    )
    for rank in asking:
        ranks.all[rank].ask()
    ranks.settle()
    for _ in range(count):  # as many rounds of asking directly as it may take: usually none or one
        if all(ranks.all[rank].silent == sorted(silent) for rank in asking):
            break
        for rank in asking:
            ranks.all[rank].ask_directly()
        ranks.settle()
    for rank in asking:
        assert set(ranks.all[rank].silent) >= silent
    alone = [rank for rank in asking if ranks.all[rank].silent != sorted(silent)]
    assert len(silent) > count // 2 or not alone


@pytest.mark.parametrize("count", [16, 256, 1024])
@pytest.mark.parametrize("asking", [1, 8])
def test_messages_of_a_rank_grow_with_the_logarithm_of_ranks(count, asking):
    ranks = Ranks(count, silent=[count - 3])
    for rank in range(asking):
        ranks.all[rank].ask()
    ranks.settle()
    assert all(ranks.all[rank].silent == [count - 3] for rank in range(asking))
    assert ranks.sent / count <= 2 * log2(count) ** 2


def test_a_round_that_comes_late_is_no_news_of_the_next():
    ranks = Ranks(2, silent=[1])
    ranks.all[0].ask()
    ranks.all[0].ask()
    ranks.all[0].heard([[1, 0b11]])
    assert ranks.all[0].silent == [1]
    ranks.all[0].heard([[2, 0b11]])
    assert ranks.all[0].silent == []


def test_who_asks_while_another_does_has_what_both_heard():
    """The first one's answers of its own round count, also those in the second one's."""
    ranks = Ranks(3)
    ranks.all[0].ask()
    ranks.all[0].heard([[1, 0b011]])
    ranks.all[0].heard([[2, 0b100]])
    assert ranks.all[0].silent == []


def test_all_ranks_have_a_bit():
    ranks = Ranks(100)
    ranks.all[70].ask()
    ranks.settle()
    assert ranks.all[70].silent == []
    assert (Census.numbers(64), Census.numbers(65)) == (3, 4)
