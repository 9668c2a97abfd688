"""Cards that send and receive one message at a time, against closed forms."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.plan.cost_model import pipelined_seconds, slots
from daso.predict.links import Link, push_seconds

checked = settings(derandomize=True, max_examples=100, deadline=None)
LINK = Link(1e6, latency_seconds=0.5, headers=1.0)  # a message of 1 MB takes 1.5 s
EXACT = pytest.approx


def in_slots(ranks):
    return [[slot[rank] for slot in slots(ranks)] for rank in range(ranks)]


def same_order(ranks):
    return [[to for to in range(ranks) if to != rank] for rank in range(ranks)]


@checked
@given(st.integers(2, 30))
def test_in_slots_nobody_waits(ranks):
    assert push_seconds(in_slots(ranks), 1e6, LINK) == EXACT(1.5 * (ranks - 1))


@checked
@given(st.integers(3, 30))
def test_in_the_same_order_all_wait_for_one_receiver_after_the_other(ranks):
    """Towards twice as long: each begins when those before it are through with the receiver."""
    found = push_seconds(same_order(ranks), 1e6, LINK) / 1.5
    assert ranks - 1 < found <= 2 * (ranks - 1)


def test_many_ranks_in_the_same_order_take_about_twice_as_long():
    assert push_seconds(same_order(64), 1e6, LINK) / 1.5 / 63 > 1.9


def test_nothing_to_push_takes_no_time():
    assert push_seconds([[], []], 1e6, LINK) == 0
    assert push_seconds([[1], []], 1e6, LINK) == EXACT(1.5)


def chain_seconds(ranks: int, segments: int, nbytes: float, link: Link) -> float:
    """Return how long a buffer takes from the first rank to the last, passed on in segments."""
    takes = link.latency_seconds + link.seconds(nbytes / segments)
    arrivals = [0.0] * segments  # when each segment is at the rank that sends
    for _ in range(ranks - 1):
        free = 0.0
        for segment, at in enumerate(arrivals):
            free = arrivals[segment] = max(at, free) + takes
    return arrivals[-1]


@checked
@given(st.integers(2, 20), st.integers(1, 50))
def test_a_chain_in_segments_takes_what_the_formula_says(ranks, segments):
    found = chain_seconds(ranks, segments, 1e6, LINK)
    assert found == EXACT(pipelined_seconds(ranks, segments, 0.5, 1.0))


def test_one_segment_is_store_and_forward():
    assert chain_seconds(5, 1, 1e6, LINK) == EXACT(4 * 1.5)


def test_who_comes_first_to_a_card_that_is_taken_goes_first():
    """Rank 1 has card 3 until 1.5; rank 2 waits for it from the beginning, rank 0 comes then."""
    found = push_seconds([[2, 3], [3], [3, 4], [], []], 1e6, LINK)
    assert found == EXACT(3 * 1.5)
