"""Portions of gradients: cut, sized, and taken in an order."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.plan.layout import Span, flagged
from daso.plan.portions import Portion, PriorityQueue, cut_portions, efficient_bytes

numels = st.lists(st.integers(0, 5000), min_size=1, max_size=60)
capacities = st.integers(1, 6000)


@given(numels, capacities)
def test_portions_are_the_whole_row_and_know_what_lies_in_them(numels, capacity):
    spans = flagged(numels)
    layers = list(reversed(range(len(numels))))  # rows lie as gradients become ready
    made = cut_portions(spans, layers, capacity)
    assert made[0].span.start == 0
    assert made[-1].span.stop == spans[-1].stop + 1
    for one, other in pairwise(made):
        assert one.span.stop == other.span.start
    for portion in made:
        start, stop = portion.span
        inside = [at for at, span in enumerate(spans) if span.start < stop and start <= span.stop]
        assert portion.params == tuple(inside)
        assert portion.layer == min(layers[at] for at in inside)


@given(numels, capacities)
def test_no_portion_is_much_larger_than_its_capacity_and_few_are_smaller(numels, capacity):
    spans = flagged(numels)
    made = cut_portions(spans, [0] * len(numels), capacity)
    assert all(portion.span.numel < 2.5 * capacity for portion in made)
    large = sum(2 * (numel + 1) >= 3 * capacity for numel in numels)
    # What is less than full lies right before a large tensor, or is the last.
    small = [portion for portion in made if 4 * portion.span.numel < 3 * capacity - 4]
    assert len(small) <= large + 1


@given(numels, st.data())
def test_a_parameter_is_in_as_many_portions_as_it_is_cut_into(numels, data):
    capacity = data.draw(capacities)
    made = cut_portions(flagged(numels), [0] * len(numels), capacity)
    for at, numel in enumerate(numels):
        several = [portion for portion in made if at in portion.params]
        assert sum(portion.span.numel for portion in several) >= numel + 1
        if len(several) > 1:  # then it shares none of them
            assert all(portion.params == (at,) for portion in several)


def test_a_link_does_its_share_with_portions_of_that_size():
    nbytes = efficient_bytes(0.9, latency_seconds=200e-6, bytes_per_second=120e6)
    assert nbytes == 216_000
    assert nbytes / 120e6 / (nbytes / 120e6 + 200e-6) == pytest.approx(0.9)


@pytest.mark.parametrize("efficiency", [0.0, 1.0, -1.0, float("nan")])
def test_a_share_that_no_link_does_is_refused(efficiency):
    with pytest.raises(ConfigError, match="efficiency must be above 0 and below 1, not"):
        efficient_bytes(efficiency, latency_seconds=1e-4, bytes_per_second=1e8)


def portions_of(layers):
    return [Portion(Span(0, 1), (at,), layer) for at, layer in enumerate(layers)]


@given(st.permutations(range(8)), st.sampled_from(["layer", "lifo", "fifo"]))
def test_all_that_is_ready_leaves_in_order(came, order):
    waiting = PriorityQueue(order, portions_of([0, 0, 1, 1, 2, 2, 3, 3]))
    for portion in came:
        waiting.add(portion)
    taken = [waiting.take() for _ in came]
    expected = {"layer": sorted(came), "lifo": list(reversed(came)), "fifo": list(came)}
    assert taken == expected[order]
    assert len(waiting) == 0
    with pytest.raises(IndexError):
        waiting.take()


@given(st.lists(st.one_of(st.integers(0, 30), st.none()), max_size=80))
def test_whenever_one_is_taken_none_that_is_ready_is_needed_sooner(moves):
    """A number makes that portion ready, once; None takes one."""
    layers = [at // 3 for at in range(31)]
    waiting, ready, seen = PriorityQueue("layer", portions_of(layers)), set(), set()
    for move in moves:
        if move is not None and move not in seen:
            waiting.add(move)
            ready.add(move)
            seen.add(move)
        elif move is None and ready:
            taken = waiting.take()
            assert taken == min(ready, key=lambda one: (layers[one], one))
            ready.remove(taken)
