import math
from dataclasses import FrozenInstanceError
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.plan.policies import observe
from daso.plan.schedule import PlateauState

checked = settings(derandomize=True, max_examples=150, deadline=None)

# Eighths and a power of two: exact in floats, so that the model below may use fractions.
eighths = st.integers(-40, 40).map(lambda n: n / 8)
losses_of_all_kinds = st.lists(st.one_of(eighths, st.sampled_from([math.nan, math.inf, -math.inf])))
thresholds = st.sampled_from([0.0, 0.25, 0.5])


def watch(losses, *, threshold=0.0, patience=2):
    stalls, state = [], PlateauState()
    for loss in losses:
        stalled, state = observe(state, loss, threshold=threshold, patience=patience)
        stalls.append(stalled)
    return stalls, state


def stalls_by_the_words(losses, threshold, patience):
    """Say for each loss whether it completes a row of bad ones, from the documentation alone."""
    best, bad, stalls = None, 0, []
    for loss in losses:
        good = math.isfinite(loss) and (
            best is None or best - Fraction(loss) > Fraction(threshold) * abs(best)
        )
        best, bad = (Fraction(loss), 0) if good else (best, bad + 1)
        stalls.append(bad > 0 and bad % patience == 0)
    return stalls


@checked
@given(losses_of_all_kinds, thresholds, st.integers(1, 4))
def test_a_loss_stalls_after_every_patience_bad_epochs_in_a_row(losses, threshold, patience):
    stalls, _ = watch(losses, threshold=threshold, patience=patience)
    assert stalls == stalls_by_the_words(losses, threshold, patience)


@checked
@given(losses_of_all_kinds)
def test_with_threshold_0_the_best_is_the_lowest_finite_loss(losses):
    _, state = watch(losses)
    assert state.best == min(filter(math.isfinite, losses), default=None)


@checked
@given(losses_of_all_kinds, thresholds, st.integers(1, 4))
def test_bad_epochs_are_always_fewer_than_patience(losses, threshold, patience):
    for end in range(len(losses)):
        _, state = watch(losses[:end], threshold=threshold, patience=patience)
        assert 0 <= state.bad_epochs < patience


@pytest.mark.parametrize(
    ("best", "loss", "improves"),
    [
        (2.0, 1.5, False),  # exactly the threshold is not below it
        (2.0, 1.49, True),
        (2.0, 3.0, False),
        (-2.0, -2.5, False),  # a negative best has to go further down, not up
        (-2.0, -2.51, True),
        (-2.0, -1.5, False),
        (0.0, 0.0, False),
        (0.0, -0.01, True),
        (0.0, 0.01, False),
    ],
)
def test_an_improvement_lies_below_the_best_by_more_than_the_threshold(best, loss, improves):
    stalled, state = observe(PlateauState(best=best), loss, threshold=0.25, patience=5)
    assert not stalled
    assert state == (PlateauState(loss, 0) if improves else PlateauState(best, 1))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_a_bad_epoch_and_never_the_best(loss):
    assert watch([loss, loss]) == ([False, True], PlateauState(best=None, bad_epochs=0))
    assert watch([3.0, loss]) == ([False, False], PlateauState(best=3.0, bad_epochs=1))


def test_one_stall_is_reported_once_and_the_best_is_kept():
    stalls, state = watch([1.0, 2.0, 2.0, 2.0, 2.0], patience=2)
    assert stalls == [False, False, True, False, True]
    assert state == PlateauState(best=1.0, bad_epochs=0)


def test_an_improvement_starts_the_count_again():
    stalls, _ = watch([5.0, 6.0, 4.0, 6.0, 6.0], patience=2)
    assert stalls == [False, False, False, False, True]


def test_slow_progress_is_compared_with_the_best_loss():
    stalls, state = watch([1.0, 0.9, 0.8, 0.7], threshold=0.25, patience=3)
    assert stalls == [False, False, False, False]
    assert state.best == 0.7


def test_an_integer_loss_will_do():
    assert watch([3, 2, 2, 2]) == ([False, False, False, True], PlateauState(best=2))


def test_the_record_is_frozen_and_observing_leaves_it_alone():
    state = PlateauState(best=1.0, bad_epochs=1)
    observe(state, 0.5, threshold=0.1, patience=3)
    assert state == PlateauState(best=1.0, bad_epochs=1)
    with pytest.raises(FrozenInstanceError):
        state.best = 2.0
