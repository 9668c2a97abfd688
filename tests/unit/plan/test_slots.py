"""Slots: permutations in which all meet all."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from daso.plan.cost_model import slots

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
