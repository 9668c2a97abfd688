"""What is fitted to runs with slower copies."""

import warnings

import pytest
from expected_errors import raises

from daso.errors import ConfigError
from daso.predict import LinkSweep, slow_copies

FACTORS = (1, 1.5, 2, 3, 4)
EXACT = pytest.approx


@pytest.mark.parametrize(
    ("floor", "base", "slope"), [(10.0, 4.0, 3.0), (0.0, 5.0, 2.0), (9.0, 8.5, 0.25), (3.0, 0, 2.9)]
)
def test_a_run_of_the_form_is_told_exactly(floor, base, slope):
    def seconds(factor):
        return max(floor, base + slope * factor)

    found = LinkSweep.fit(FACTORS, [seconds(one) for one in FACTORS])
    for one in (1, 1.7, 2.5, 4):
        assert found.estimate(one) == EXACT(seconds(one) / one, rel=0.03)
    assert [found.seconds_with(one) for one in FACTORS] == EXACT([seconds(k) for k in FACTORS])


def test_copies_that_are_hidden_are_not_counted():
    found = LinkSweep.fit(FACTORS, [7.0] * 5)
    assert [found.seconds_with(one) for one in (1, 4)] == [7.0, 7.0]
    assert found.estimate(4) == 7.0 / 4


def test_what_was_not_measured_is_said():
    found = LinkSweep.fit(FACTORS, [1.0, 1.5, 2.0, 3.0, 4.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.estimate(4)
    with pytest.warns(UserWarning, match="5 times is beyond the factors that were measured, 1 to"):
        found.estimate(5)


def test_the_largest_factor_may_be_given_twice():
    found = LinkSweep.fit((1, 2, 4, 4), (5.0, 5.0, 5.0, 7.0))
    assert found.seconds_with(1) == pytest.approx(5.0)
    assert found.seconds_with(4) == pytest.approx(6.0, abs=1.0)


def test_too_few_factors_are_refused():
    with pytest.raises(ConfigError, match="3 different factors at least, not 2"):
        LinkSweep.fit((1, 2), (1.0, 2.0))


def test_without_a_device_nothing_is_slowed_down():
    with raises("no-cuda-to-slow"):
        slow_copies(2).__enter__()
    with pytest.raises(ConfigError, match="factor must be a number"):
        slow_copies(0.5).__enter__()
