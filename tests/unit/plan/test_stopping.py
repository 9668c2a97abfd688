import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daso.plan.schedule import MAX_VOTE_BATCHES, VOTE_SECONDS, batches_to_next_vote


@pytest.mark.parametrize(
    ("step_seconds", "batches"),
    [
        (0.0, 1),
        (-1.0, 1),
        (math.nan, 1),
        (math.inf, 1),
        (5.0, 1),
        (0.125, 4),
        (0.075, 7),
        (1e-9, 64),
    ],
)
def test_votes_are_about_half_a_second_apart(step_seconds, batches):
    assert batches_to_next_vote(step_seconds) == batches


@given(st.floats(1e-6, 1e6))
def test_nobody_waits_for_a_vote_much_longer_than_for_a_batch(step_seconds):
    batches = batches_to_next_vote(step_seconds)
    assert 1 <= batches <= MAX_VOTE_BATCHES
    assert (batches - 1) * step_seconds < VOTE_SECONDS
