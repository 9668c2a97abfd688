"""Slots, rings and segments against closed forms and against trying everything."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.plan.slots import (
    best_segments,
    leader,
    pipelined_seconds,
    plan_digest,
    ring_order,
    slots,
)

checked = settings(derandomize=True, max_examples=100, deadline=None)


@checked
@given(st.integers(1, 40))
def test_every_slot_is_a_permutation_and_every_pair_meets_once(ranks):
    found = slots(ranks)
    assert len(found) == ranks - 1
    for slot in found:
        assert sorted(slot) == list(range(ranks))
        assert all(rank != to for rank, to in enumerate(slot))
    pairs = [(rank, to) for slot in found for rank, to in enumerate(slot)]
    assert sorted(pairs) == sorted(itertools.permutations(range(ranks), 2))


def matrix(ranks, seed):
    rng = random.Random(seed)
    return [[rng.choice([1.0, 2.0, 5.0, rng.random()]) for _ in range(ranks)] for _ in range(ranks)]


def links(ring, seconds):
    return [seconds[a][b] for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]


@checked
@given(st.integers(2, 6), st.integers(0, 2**20))
def test_no_other_ring_has_a_faster_slowest_link(ranks, seed):
    seconds = matrix(ranks, seed)
    ring = ring_order(seconds)
    assert sorted(ring) == list(range(ranks))
    assert ring[0] == 0
    best = min(max(links(one, seconds)) for one in itertools.permutations(range(ranks)))
    assert max(links(ring, seconds)) == best


@pytest.mark.parametrize("ranks", [4, 8, 9, 16])
def test_one_slow_link_is_gone_round(ranks):
    seconds = [[1.0] * ranks for _ in range(ranks)]
    seconds[2][3] = seconds[3][2] = 10.0
    ring = ring_order(seconds)
    assert sorted(ring) == list(range(ranks))
    assert max(links(ring, seconds)) == 1.0


@checked
@given(st.integers(9, 14), st.integers(0, 2**20))
def test_with_many_ranks_no_stretch_that_is_reversed_makes_it_better(ranks, seed):
    seconds = matrix(ranks, seed)
    ring = list(ring_order(seconds))
    cost = max(links(ring, seconds)), sum(links(ring, seconds))
    for a, b in itertools.combinations(range(1, ranks), 2):
        turned = [*ring[:a], *reversed(ring[a : b + 1]), *ring[b + 1 :]]
        assert (max(links(turned, seconds)), sum(links(turned, seconds))) >= cost


def test_the_leader_is_nearest_to_the_farthest():
    seconds = [[0, 1, 9], [1, 0, 2], [9, 2, 0]]
    assert leader(seconds) == 1
    assert leader([[0, 1], [1, 0]]) == 0  # of equals the first


@checked
@given(st.integers(2, 64), st.floats(1e-6, 1e-3), st.floats(1e-5, 1.0))
def test_no_other_number_of_segments_is_faster(ranks, latency, seconds):
    best = best_segments(ranks, latency, seconds)
    takes = pipelined_seconds(ranks, best, latency, seconds)
    near = range(max(1, best - 3), best + 4)
    assert all(takes <= pipelined_seconds(ranks, n, latency, seconds) * (1 + 1e-12) for n in near)
    # The closed form of the optimum, for any real number of segments (research: seed system I).
    least = ((seconds**0.5) + ((ranks - 2) * latency) ** 0.5) ** 2
    assert takes >= least * (1 - 1e-9)


def test_ranks_with_the_same_numbers_plan_alike_and_with_others_not():
    seconds = matrix(7, 1)
    assert plan_digest(seconds) == plan_digest([list(row) for row in seconds])
    other = [list(row) for row in seconds]
    other[0] = [100.0] * 7
    assert plan_digest(seconds) != plan_digest(other)
    assert plan_digest(seconds) == float(plan_digest(seconds)) < 2**53


@pytest.mark.parametrize("wrong", [[], [[0.0]], [[0, 1], [1]]])
def test_links_are_given_from_all_to_all(wrong):
    with pytest.raises(ConfigError, match="from each of 2 ranks or more to each"):
        ring_order(wrong)
