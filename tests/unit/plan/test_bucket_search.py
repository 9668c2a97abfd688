"""The search for a size of chunks, on made-up times of iterations."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.plan.bucket_search import BucketSizeSearch, SearchState

KIB, MIB = 1 << 10, 1 << 20


def searched(search, seconds_of, now=None, most=64):
    """Search until a size is held; return every state."""
    states = [now or search.start()]
    while not states[-1].holding:
        states.append(search.after(states[-1], seconds_of(states[-1].nbytes)))
        assert len(states) < most
    return states


def valley(best, steep):
    """Iterations that take longer by ``steep`` for each factor of two from the best size."""
    return lambda nbytes: 1.0 + steep * abs(math.log2(nbytes / best))


sizes = st.integers(1, 1 << 30)


@given(sizes, sizes, sizes, st.floats(0.03, 10.0), st.floats(1.2, 8.0))
def test_the_size_found_is_within_one_step_of_the_best(a, b, best, steep, expand):
    least, most = sorted((a, b))
    search = BucketSizeSearch(least, most, expand=expand, tolerance=0.0)
    found = searched(search, valley(best, steep), most=1000)[-1].nbytes
    nearest = min(max(best, least), most)
    assert least <= found <= most
    # Sizes are whole numbers: small ones cannot grow by less than 1.
    assert nearest / expand - 1 <= found <= nearest * expand + 1


@given(st.lists(st.floats(0.1, 10.0), min_size=40, max_size=40))
def test_whatever_is_measured_the_fastest_that_was_tried_is_kept(times):
    left = iter(times)
    last = searched(BucketSizeSearch(KIB, MIB), lambda _: next(left))[-1]
    assert last.nbytes == min(last.tried, key=lambda one: one[1])[0]
    tried = [nbytes for nbytes, _ in last.tried]
    assert len(set(tried)) == len(tried)
    assert all(KIB <= nbytes <= MIB for nbytes in tried)


def test_chunk_search_stops_after_two_slower_sizes():
    states = searched(BucketSizeSearch(KIB, MIB), valley(10 * KIB, 0.1))
    assert [one.nbytes // KIB for one in states] == [1, 2, 4, 8, 16, 32, 11, 11]
    assert [one.refining for one in states] == [False] * 6 + [True, False]
    states = searched(BucketSizeSearch(KIB, MIB, patience=1), valley(7 * KIB, 0.1))
    assert [one.nbytes // KIB for one in states] == [1, 2, 4, 8, 16, 5, 8]


def test_one_slow_size_does_not_end_the_search():
    times = {1: 1.0, 2: 1.5, 4: 0.9, 8: 1.1, 16: 1.2, 6: 1.0}
    states = searched(BucketSizeSearch(1, 64), times.__getitem__)
    assert [one.nbytes for one in states] == [1, 2, 4, 8, 16, 6, 4]


def test_search_continues_within_the_tolerance():
    noise = {1: 1.0, 2: 1.015, 4: 0.99, 8: 1.005}
    states = searched(BucketSizeSearch(1, 8), noise.__getitem__)
    assert [one.nbytes for one in states] == [1, 2, 4, 8, 4]


def test_one_size_needs_one_look():
    assert searched(BucketSizeSearch(7, 7), lambda _: 1.0)[-1] == SearchState(
        7, ((7, 1.0),), holding=True
    )


@pytest.mark.parametrize("factor", [1.2, 0.8])
def test_a_search_starts_anew_when_iterations_change_twice_in_a_row(factor):
    search = BucketSizeSearch(KIB, MIB)
    held = search.after(searched(search, valley(8 * KIB, 0.1))[-1], 1.0)
    assert (held.holding, held.held_seconds) == (True, 1.0)
    once = search.after(held, factor)
    assert (once.holding, once.nbytes) == (True, held.nbytes)
    assert search.after(once, 1.0) == held
    assert search.after(once, factor) == search.start()


@given(st.floats(0.88, 1.14))
def test_a_size_is_held_while_iterations_take_about_as_long(factor):
    search = BucketSizeSearch(KIB, MIB)
    held = SearchState(4 * KIB, holding=True, held_seconds=1.0)
    assert search.after(held, factor) == held


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"least_bytes": 0}, "BucketSizeSearch.least_bytes must be at least 1, not 0"),
        ({"least_bytes": 9}, "BucketSizeSearch.most_bytes must be at least least_bytes, not 8"),
        ({"every": 0}, "BucketSizeSearch.every must be at least 1, not 0"),
        ({"expand": 1.0}, "BucketSizeSearch.expand must be more than 1, not 1.0"),
        ({"tolerance": math.nan}, "BucketSizeSearch.tolerance must be at least 0, not nan"),
        ({"patience": 0}, "BucketSizeSearch.patience must be at least 1, not 0"),
        ({"reopen": 0.0}, "BucketSizeSearch.reopen must be more than 0, not 0.0"),
    ],
)
def test_what_makes_no_search_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        BucketSizeSearch(**({"least_bytes": 1, "most_bytes": 8} | values))
