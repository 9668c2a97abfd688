import math
import statistics
from dataclasses import FrozenInstanceError, fields, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.plan.exchange import Tally
from daso.plan.header import Header, culprit, decode_culprit

checked = settings(derandomize=True, max_examples=100, deadline=None)

PAIRS = 2**53
numbers = st.floats(allow_nan=False)
headers = st.builds(Header, *[numbers] * Header.width(0), st.tuples(*[numbers] * 4))
fingerprints = st.integers(0, 2**45)  # sums of 32-bit words' over rows
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
    # All ranks reduce the same numbers in the same places.
    header = Header(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
    assert [field.name for field in fields(Header)] == [
        "nonfinite",
        "layout",
        "minus_layout",
        "batch",
        "minus_batch",
        "minus_step_seconds",
        "minus_exchange_seconds",
        "lr",
        "minus_lr",
        "own_seconds",
        "minus_exposed_seconds",
        "small_own_seconds",
        "minus_small_exposed_seconds",
        "clipping",
        "slowest",
        "written",
        "references",
    ]
    assert header.encode() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    assert header.with_reference(7, 1, 2).encode()[16:] == [-math.inf, -math.inf, 7, -7]
    assert {type(number) for number in header.encode()} == {float}


@checked
@given(headers)
def test_the_width_is_the_number_of_numbers(header):
    assert Header.width(2) == len(header.encode())


@checked
@given(st.lists(st.lists(fingerprints, min_size=2, max_size=2), min_size=1, max_size=4))
def test_references_are_the_same_exactly_when_each_lane_has_one(nodes):
    headers = [
        Header().with_reference(own, lane, 2) for node in nodes for lane, own in enumerate(node)
    ]
    headers.append(Header().with_reference(0, None, 2))  # a third rank of a node has no lane
    same = all(len(set(lane)) == 1 for lane in zip(*nodes, strict=True))
    assert reduced(headers).same_references == same


def test_votes_without_a_reference_do_not_differ():
    assert Header().same_references
    assert Header.decode([*Header().encode(), 0.0, 0.0]).same_references


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


def test_header_merges_fastest_step_and_largest_rate():
    # Nobody waits where the fastest does not; who comes last to an exchange sees it shortest.
    sides = [
        header_of(7, 1, minus_step_seconds=-0.1, minus_exchange_seconds=-3.0, lr=0.5),
        header_of(7, 1, minus_step_seconds=-0.2, minus_exchange_seconds=-1.0, lr=0.1),
    ]
    agreed = reduced(sides)
    assert (agreed.step_seconds, agreed.exchange_seconds, agreed.lr) == (0.1, 1.0, 0.5)
    assert agreed.aligned


seconds = st.floats(1e-6, 1e6)


@checked
@given(st.lists(st.tuples(st.none() | seconds, st.none() | seconds), min_size=1, max_size=6))
def test_a_rank_that_measured_nothing_leaves_the_word_to_those_who_did(measured):
    def minus(value):
        return -math.inf if value is None else -value

    agreed = reduced(
        Header(minus_step_seconds=minus(step), minus_exchange_seconds=minus(exchange))
        for step, exchange in measured
    )
    for told, said in zip(
        (agreed.step_seconds, agreed.exchange_seconds), zip(*measured, strict=True), strict=True
    ):
        assert told == min((value for value in said if value is not None), default=0.0)


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


@checked
@given(headers)
def test_a_rank_with_nothing_to_say_changes_no_number_of_the_others(header):
    # These are said by every rank, and compared: there is no silence about them.
    silent = {"layout": -math.inf, "minus_layout": -math.inf, "minus_lr": -math.inf}
    silent |= {"batch": -math.inf, "minus_batch": -math.inf}
    least_0 = (
        "nonfinite",
        "lr",
        "own_seconds",
        "small_own_seconds",
        "clipping",
        "slowest",
        "written",
    )
    positive = {name: abs(getattr(header, name)) for name in least_0}
    loud = replace(header, **positive)
    silent["references"] = (-math.inf,) * 4
    assert reduced([loud, Header(**silent)]) == loud


def test_what_was_not_measured_is_0_seconds():
    assert (Header().step_seconds, Header().exchange_seconds) == (0.0, 0.0)
    assert (Header().nonfinite, Header().lr) == (0.0, 0.0)


def test_a_header_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Header().batch = 1.0


# --- tally -------------------------------------------------------------------------------------

amounts = st.one_of(st.floats(0, 1e6), st.sampled_from([0.0, 1e300, math.inf, math.nan, -1.0]))
shares = st.lists(st.tuples(amounts, amounts, amounts), min_size=1, max_size=64)
MOST = 2.0**42  # of one rank


def summed(shares):
    """What an elementwise sum over the world leaves, added in the order given."""
    total = [0.0] * Tally.width()
    for share in shares:
        total = [a + b for a, b in zip(total, share.encode(), strict=True)]
    return Tally(*total)


@checked
@given(shares, st.floats(1e-3, 1e9), st.randoms(use_true_random=False))
def test_the_sum_over_ranks_is_exact_and_the_same_in_every_order(shares, size, random):
    ranks = [Tally.measured(*share, size) for share in shares]
    exact = [sum(map(int, column)) for column in zip(*(r.encode() for r in ranks), strict=True)]
    for _ in range(3):
        assert summed(ranks).encode() == exact
        random.shuffle(ranks)


@checked
@given(st.tuples(amounts, amounts, amounts), st.one_of(st.floats(1e-300, 1e300), amounts))
def test_a_share_is_a_whole_number_from_0_to_the_most(share, size):
    for number in Tally.measured(*share, size).encode():
        assert type(number) is float
        assert number.is_integer()
        assert 0 <= number <= MOST


def test_shares_saturate_so_that_the_sum_of_2048_ranks_is_exact():
    share = Tally.measured(1e300, math.inf, 1e300, 1e-300)
    assert share.encode() == [MOST] * 3 + [0.0]
    one = Tally(distance=1.0, norm=1.0, moved=1.0)
    for ranks in ([share] * 2047 + [one], [one] + [share] * 2047):
        assert summed(ranks).encode() == [2047 * 2**42 + 1] * 3 + [0.0]
    assert summed([share] * 2048).encode() == [2**53] * 3 + [0.0]


@pytest.mark.parametrize("value", [math.nan, -1.0, -math.inf])
def test_what_is_no_size_of_anything_counts_as_0(value):
    assert Tally.measured(value, value, value, 1.0) == Tally()
    assert Tally.measured(1.0, 1.0, 1.0, value) == Tally()


@pytest.mark.parametrize("value", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("size", [0.0, math.inf])
def test_a_size_that_measures_nothing_gives_0_and_does_not_raise(value, size):
    assert Tally.measured(value, value, value, size) == Tally()


TALLY_OF_NODES = [
    [3.0, -1.0, 2.0, 0.5, -2.5, 1.0, 4.0],
    [2.0, 0.0, 1.0, 1.5, -0.5, 3.0, 2.0],
    [4.0, -2.0, 1.5, 0.0, -1.5, 2.0, 3.5],
    [1.0, 1.0, 2.5, -1.0, -3.5, 0.0, 5.0],
]
REFERENCE = [2.0, -1.0, 1.0, 1.0, -2.0, 1.5, 3.0]


@pytest.mark.parametrize("cuts", [(0, 7), (0, 3, 7), (0, 1, 1, 5, 7)], ids=["1", "2", "4"])
@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_drift_is_a_relative_mean_square_distance(nodes, batches, cuts):
    values = TALLY_OF_NODES[:nodes]
    means = [sum(column) / nodes for column in zip(*values, strict=True)]
    ranks = []
    for node in values:
        for start, stop in pairwise(cuts):  # each lane measures its part of the node
            lane = range(start, stop)
            distance = sum((node[i] - means[i]) ** 2 for i in lane)
            norm = sum(REFERENCE[i] ** 2 for i in lane)
            ranks.append(Tally.measured(distance, norm, 0.0, size=20.0))
    variances = [statistics.pvariance(column) for column in zip(*values, strict=True)]
    size = sum(one**2 for one in REFERENCE)
    drift = summed(ranks).drift(nodes=nodes, batches=batches)
    assert drift == pytest.approx(sum(variances) / batches / size, rel=1e-6)


@pytest.mark.parametrize("size", [0.01, 1.0, 20.0, 1e3])
def test_drift_does_not_depend_on_the_size_that_ranks_agreed_on(size):
    ranks = [Tally.measured(0.5, 10.0, 0.5, size)] * 2
    assert summed(ranks).drift(nodes=2, batches=1) == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize(
    ("tally", "nodes", "batches"),
    [
        (Tally(5.0, 5.0), 1, 1),  # a node alone
        (Tally(5.0, 5.0), 0, 1),
        (Tally(5.0, 5.0), 2, 0),  # no batch apart
        (Tally(5.0, 0.0), 2, 1),  # nothing to measure against
        (Tally(), 2, 1),
    ],
)
def test_without_a_measurement_drift_is_0(tally, nodes, batches):
    assert tally.drift(nodes=nodes, batches=batches) == 0.0


@pytest.mark.parametrize("distance", [0.0, 1e-12, 4e-10])
@pytest.mark.parametrize("nodes", [2, 64])
def test_a_distance_too_small_to_count_is_told_from_no_measurement(distance, nodes):
    ranks = [Tally.measured(distance, 1.0, 0.0, 1.0)] * nodes
    assert 0 < summed(ranks).drift(nodes=nodes, batches=1) < 1e-9


def test_a_tally_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Tally().norm = 1.0
