"""The factor that the mean of nodes' steps lacks, against what it is made of."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daso.plan.schedule import SMOOTHING, next_gain, next_noise_share, shared_gain
from daso.plan.step_restoration import momentum_noise, required_gain


def variance(batches, momentum, steps=4000):
    """Variance of what `batches` steps sum up to, of noise of variance 1 in a running mean."""
    total = 0.0
    for age in range(steps):  # weight of each gradient in all steps that still hold it
        lags = [age - later for later in range(batches) if age >= later]
        total += sum((1 - momentum) * momentum**lag for lag in lags) ** 2
    return total


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("batches", [1, 2, 4, 16])
def test_momentum_noise_is_the_variance_of_a_sum_of_running_means(batches, momentum):
    assert momentum_noise(batches, momentum) * batches == pytest.approx(
        variance(batches, momentum), rel=1e-6
    )


@pytest.mark.parametrize(("batches", "kept"), [(1, 1 / 19), (2, 0.1), (4, 0.1855)])
def test_momentum_noise_of_adams_momentum(batches, kept):
    assert momentum_noise(batches, 0.9) == pytest.approx(kept, rel=1e-9)


@given(st.integers(1, 500), st.floats(0, 0.999))
def test_the_longer_the_more_of_the_noise_is_kept_and_never_more_than_all(batches, momentum):
    assert (
        0 < momentum_noise(batches, momentum) <= momentum_noise(batches + 1, momentum) * (1 + 1e-9)
    )
    assert momentum_noise(batches, momentum) <= 1 + 1e-9


@given(
    st.floats(0, 100),
    st.floats(1e-6, 100),
    st.integers(2, 64),
    st.integers(1, 64),
    st.sampled_from([0.0, 0.9, 0.99]),
)
def test_what_is_lacking_follows_from_signal_and_noise(signal, noise, nodes, batches, momentum):
    """Deltas of steps with this signal and noise, as they are on average."""
    apart = noise * batches * momentum_noise(batches, momentum)  # of one node from the truth
    distance = (nodes - 1) * apart  # sum over nodes, from their mean
    moved = nodes * signal * batches**2 + apart
    expected = math.sqrt((signal + noise) / (signal + noise / nodes))
    found = required_gain(distance, moved, nodes=nodes, batches=batches, momentum=momentum)
    assert found == pytest.approx(expected, rel=1e-6)


@given(st.floats(0, 1e300), st.floats(0, 1e300), st.integers(2, 4096), st.integers(1, 4096))
def test_it_is_from_1_to_the_root_of_nodes(distance, moved, nodes, batches):
    found = required_gain(distance, moved, nodes=nodes, batches=batches, momentum=0.9)
    assert found == 0.0 or 1 <= found <= math.sqrt(nodes)
    assert found or not 1e-200 < distance + moved < 1e200


@pytest.mark.parametrize(
    ("distance", "moved", "nodes", "batches"),
    [(0, 0, 2, 1), (1, 1, 1, 1), (1, 1, 2, 0), (math.inf, 1, 2, 1), (math.nan, 1, 2, 1)],
)
def test_where_nothing_was_measured_it_is_0_and_the_gain_stays(distance, moved, nodes, batches):
    assert required_gain(distance, moved, nodes=nodes, batches=batches, momentum=0.9) == 0.0
    assert next_gain(1.5, 0.0) == 1.5


def test_the_gain_goes_a_part_of_the_way_at_each_exchange():
    assert next_gain(1.0, 2.0) == 1 + SMOOTHING
    gain = 1.0
    for _ in range(60):
        gain = next_gain(gain, 2.0)
    assert gain == pytest.approx(2.0)


# --- the memory of squares ---------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.sampled_from([0.0, 0.5, 0.99, 0.999]))
def test_noise_share_is_a_bias_corrected_running_mean(alone, memory):
    share, mean, total = 1.0, 0.0, 0.0
    for batch, one in enumerate(alone, start=1):
        share = next_noise_share(share, batch=batch, memory=memory, synchronous=not one)
        mean = memory * mean + (1 - memory) * one  # what each batch adds to Adam's v
        total = memory * total + (1 - memory)
        assert share == pytest.approx(mean / total, abs=1e-9)
    if all(alone) or not any(alone):
        assert share == float(alone[0])  # to the bit


@given(st.floats(1, 100), st.floats(0, 1))
def test_a_share_of_the_gain_makes_up_for_the_mean_of_both_squares(gain, share):
    # Divided by the root of a mean of P times the noise and of the noise of all.
    squares = share * gain**2 + (1 - share)
    assert shared_gain(gain, share) == pytest.approx(squares**0.5)
    assert (shared_gain(gain, 1.0), shared_gain(gain, 0.0)) == (gain, 1.0)
