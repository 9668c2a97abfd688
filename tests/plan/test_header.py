from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.plan.header import Header, culprit, decode_culprit

checked = settings(derandomize=True, max_examples=100, deadline=None)

PAIRS = 2**53
numbers = st.floats(allow_nan=False)
headers = st.builds(Header, *[numbers] * Header.width())
digests = st.integers(0, 2**48 - 1)
batches = st.integers(0, 2**40)


def header_of(layout, batch, **others):
    return Header(layout=layout, minus_layout=-layout, batch=batch, minus_batch=-batch, **others)


def reduced(sides):
    """What an elementwise maximum over the world leaves."""
    return Header.decode([max(column) for column in zip(*(s.encode() for s in sides), strict=True)])


@checked
@given(headers)
def test_decoding_undoes_encoding(header):
    assert Header.decode(header.encode()) == header


def test_the_numbers_have_a_fixed_order_and_are_floats():
    # train/links.py writes the vote over number 0 in the communication thread.
    header = Header(1, 2, 3, 4, 5, 6, 7)
    assert [field.name for field in fields(Header)] == [
        "nonfinite",
        "layout",
        "minus_layout",
        "batch",
        "minus_batch",
        "step_seconds",
        "exchange_seconds",
    ]
    assert header.encode() == [1, 2, 3, 4, 5, 6, 7]
    assert {type(number) for number in header.encode()} == {float}


@checked
@given(headers)
def test_the_width_is_the_number_of_numbers(header):
    assert Header.width() == len(header.encode())


@checked
@given(digests, batches, st.integers(1, 6))
def test_ranks_with_one_layout_and_one_count_of_batches_are_aligned(layout, batch, size):
    assert reduced([header_of(layout, batch)] * size).aligned


@checked
@given(st.lists(st.tuples(digests, batches), min_size=1, max_size=6))
def test_ranks_are_aligned_exactly_when_all_say_the_same(said):
    assert reduced([header_of(*one) for one in said]).aligned == (len(set(said)) == 1)


@pytest.mark.parametrize("other", [(2**48 - 2, 5), (2**48 - 1, 6), (2**48 - 1, 4), (0, 5)], ids=str)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_rank_that_differs_in_one_number_breaks_the_alignment(other, place):
    sides = [header_of(2**48 - 1, 5)] * 3
    sides[place] = header_of(*other)
    assert not reduced(sides).aligned


def test_the_slowest_rank_speaks_for_all():
    sides = [
        header_of(7, 1, step_seconds=0.1, exchange_seconds=3.0),
        header_of(7, 1, step_seconds=0.2, exchange_seconds=1.0),
    ]
    agreed = reduced(sides)
    assert (agreed.step_seconds, agreed.exchange_seconds) == (0.2, 3.0)
    assert agreed.aligned


@st.composite
def culprits(draw):
    """Draw (element, rank, size), of fewer than 2**53 pairs of element and rank."""
    size = draw(st.integers(1, 2**20))
    rank = draw(st.integers(0, size - 1))
    return draw(st.integers(0, (PAIRS - rank - 1) // size)), rank, size


@checked
@given(culprits())
def test_a_culprit_is_named_exactly_among_2_to_the_53(who):
    element, rank, size = who
    assert decode_culprit(culprit(element, rank, size), size) == (element, rank)


@pytest.mark.parametrize(
    ("element", "rank", "size"),
    [(0, 0, 1), (PAIRS - 1, 0, 1), (PAIRS - 2, 0, 1), (PAIRS // 4 - 1, 3, 4), (0, 1023, 1024)],
)
def test_culprits_at_the_edges_are_exact_and_never_mistaken_for_none(element, rank, size):
    code = culprit(element, rank, size)
    assert decode_culprit(code, size) == (element, rank)
    assert code > Header().nonfinite


@checked
@given(culprits())
def test_a_culprit_is_never_mistaken_for_none(who):
    assert culprit(*who) > Header().nonfinite


@checked
@given(st.integers(1, 64), st.data())
def test_after_the_maximum_the_first_element_is_named_and_its_first_rank(size, data):
    rank = st.integers(0, size - 1)
    element = st.one_of(st.integers(0, 3), st.integers(0, 10**12))
    said = data.draw(st.dictionaries(rank, element, min_size=1))
    votes = [Header(nonfinite=culprit(said[r], r, size) if r in said else 0.0) for r in range(size)]
    first = min((element, rank) for rank, element in said.items())
    assert decode_culprit(reduced(votes).nonfinite, size) == first


def test_a_rank_with_nothing_to_say_sends_zeros():
    assert Header().encode() == [0.0] * Header.width()


def test_a_header_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Header().batch = 1.0
