import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from itertools import accumulate, chain, pairwise, permutations
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import HANG_SECONDS

from daso.plan.layout import (
    ALIGNMENT,
    MIN_BUCKET_BYTES,
    Layout,
    Slot,
    Span,
    aligned,
    chunk_parts,
    first_difference,
    fit_buckets,
    flagged,
    fragments,
    last_layer,
    lay_out,
    pieces,
    small_tensors,
    split,
)

checked = settings(derandomize=True, max_examples=100, deadline=None)


def slot_of(name, shape, dtype="float32"):
    """A contiguous tensor."""
    strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return Slot(name, tuple(shape), strides, dtype)


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)  # 0-dim and empty ones too
slots = st.builds(
    slot_of,
    st.text("ab'\", (=", max_size=4),
    shapes,
    st.sampled_from(["float32", "float64", "bfloat16"]),
)
layouts = st.lists(slots, max_size=6).map(lay_out)
spans = st.tuples(st.integers(0, 200), st.integers(0, 200)).map(lambda ends: Span(*sorted(ends)))
parts_of_any = st.integers(1, 20)


@st.composite
def layouts_with_span(draw):
    layout = draw(layouts)
    ends = st.integers(0, layout.numel)
    return layout, Span(*sorted([draw(ends), draw(ends)]))


def cells(layout):
    """Every element of the row, as (tensor, element of that tensor): the obvious layout."""
    return [(i, element) for i, slot in enumerate(layout.slots) for element in range(slot.numel)]


# --- tensors in a row --------------------------------------------------------------------------


@checked
@given(layouts)
def test_tensors_lie_one_after_the_other_and_cover_the_row(layout):
    row = [(i, at) for i, span in enumerate(layout.spans) for at in range(*span)]
    assert [i for i, _ in row] == [i for i, _ in cells(layout)]
    assert [at for _, at in row] == list(range(layout.numel))
    assert [span.numel for span in layout.spans] == [slot.numel for slot in layout.slots]


@pytest.mark.parametrize(
    ("shape", "numel"), [((), 1), ((0,), 0), ((3, 0, 2), 0), ((1,), 1), ((2, 3, 4), 24)]
)
def test_a_scalar_has_one_element_and_an_empty_tensor_none(shape, numel):
    assert slot_of("w", shape).numel == numel
    assert lay_out([slot_of("w", shape)]).numel == numel


def test_empty_tensors_between_others_take_no_room():
    layout = lay_out([slot_of("a", (2,)), slot_of("b", (0,)), slot_of("c", ()), slot_of("d", (0,))])
    assert layout.spans == (Span(0, 2), Span(2, 2), Span(2, 3), Span(3, 3))


def test_a_layout_without_tensors_is_an_empty_row():
    layout = lay_out([])
    assert (layout.spans, layout.numel) == ((), 0)


@checked
@given(layouts)
def test_each_element_has_the_name_of_the_tensor_that_holds_it(layout):
    names = [layout.slots[i].name for i, _ in cells(layout)]
    assert [layout.name_at(index) for index in range(layout.numel)] == names


@checked
@given(layouts, st.integers(0, 10))
def test_an_element_outside_the_row_has_no_name(layout, beyond):
    for index in (layout.numel + beyond, -1 - beyond):
        with pytest.raises(IndexError, match=f"element {index} .* {layout.numel} elements"):
            layout.name_at(index)


def test_layout_and_slots_are_frozen():
    layout = lay_out([slot_of("w", (2,))])
    with pytest.raises(FrozenInstanceError):
        layout.slots = ()
    with pytest.raises(FrozenInstanceError):
        layout.slots[0].name = "v"


# --- digest ------------------------------------------------------------------------------------

WEIGHT = slot_of("layer.weight", (3, 4))
BIAS = slot_of("layer.bias", (3,))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "layer.weights"},
        {"shape": (4, 3)},
        {"shape": (3, 4, 1)},
        {"strides": (1, 3)},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("place", [0, 1])
def test_the_digest_changes_with_every_property_of_every_tensor(change, place):
    here = [BIAS, BIAS]
    here[place] = WEIGHT
    there = list(here)
    there[place] = replace(WEIGHT, **change)
    assert lay_out(here).digest != lay_out(there).digest


def test_the_digest_changes_with_the_order_and_the_number_of_tensors():
    tensors = [WEIGHT, BIAS, slot_of("scale", ())]
    orders = [lay_out(order) for count in range(4) for order in permutations(tensors, count)]
    assert len({layout.digest for layout in orders}) == len(orders) == 16


def test_names_that_look_like_the_end_of_a_tensor_do_not_fool_the_digest():
    quoted = [slot_of("a', shape=(1,)", (1,)), slot_of('a", "b', (1,)), slot_of("a, b", (1,))]
    plain = [slot_of("a", (1,)), slot_of("b", (1,))]
    layouts = [[one] for one in quoted] + [plain, plain[:1]]
    assert len({lay_out(one).digest for one in layouts}) == 5


@checked
@given(layouts, layouts)
def test_digests_are_equal_exactly_when_layouts_are(one, other):
    assert (one.digest == other.digest) == (one == other)
    assert Layout(tuple(one.slots)).digest == one.digest


@checked
@given(layouts)
def test_the_digest_survives_a_float64(layout):
    assert int(float(layout.digest)) == layout.digest
    assert int(float(-layout.digest)) == -layout.digest
    assert 0 <= layout.digest < 2**48


def test_the_digest_has_48_bits():
    digests = [lay_out([slot_of(f"w{number}", ())]).digest for number in range(100)]
    assert max(digests).bit_length() == 48


def test_the_digest_is_the_same_in_every_process():
    program = (
        "from daso.plan.layout import Slot, lay_out;"
        "print(lay_out([Slot('w', (3, 4), (4, 1), 'float32')]).digest)"
    )
    here = lay_out([Slot("w", (3, 4), (4, 1), "float32")]).digest
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=True,
        )
        assert int(run.stdout) == here


# --- first difference --------------------------------------------------------------------------


@checked
@given(layouts, layouts)
def test_layouts_differ_exactly_when_there_is_a_first_difference(one, other):
    assert (first_difference(one, other) is None) == (one == other)
    assert first_difference(one, one) is None


@checked
@given(layouts, slots)
def test_a_missing_tensor_is_told_by_the_numbers(layout, extra):
    longer = lay_out([*layout.slots, extra])
    count = len(layout.slots)
    assert first_difference(layout, longer) == f"{count} parameters against {count + 1}"
    assert first_difference(longer, layout) == f"{count + 1} parameters against {count}"


def test_the_first_difference_names_tensor_shape_dtype_and_strides_of_both():
    mine = lay_out([BIAS, WEIGHT, slot_of("a", ())])
    other = lay_out([BIAS, slot_of("layer.weight", (3, 5), "bfloat16"), slot_of("b", ())])
    assert first_difference(mine, other) == (
        "layer.weight (3, 4) float32 strides (4, 1) against "
        "layer.weight (3, 5) bfloat16 strides (5, 1)"
    )


@checked
@given(layouts, slots, slots)
def test_the_first_of_several_differences_is_told(layout, one, other):
    phrase = first_difference(
        lay_out([*layout.slots, replace(one, name="mine"), one]),
        lay_out([*layout.slots, replace(other, name="other"), other]),
    )
    assert phrase is not None
    assert phrase.startswith("mine ")
    assert " against other " in phrase


# --- cutting -----------------------------------------------------------------------------------


@checked
@given(spans, parts_of_any)
def test_a_split_covers_its_span_exactly_in_order(span, parts):
    cut = split(span, parts)
    assert len(cut) == parts
    assert [cut[0].start, *(part.stop for part in cut)] == [
        *(part.start for part in cut),
        cut[-1].stop,
    ]
    assert (cut[0].start, cut[-1].stop) == span
    assert sum(part.numel for part in cut) == span.numel


@checked
@given(spans, parts_of_any)
def test_the_parts_of_a_split_differ_by_at_most_one_element(span, parts):
    sizes = [part.numel for part in split(span, parts)]
    assert 0 <= min(sizes) <= max(sizes) <= min(sizes) + 1


@checked
@given(st.integers(0, 200), parts_of_any)
def test_a_number_means_the_row_from_0(numel, parts):
    assert split(numel, parts) == split(Span(0, numel), parts)


@checked
@given(spans, parts_of_any, st.integers(0, 100))
def test_a_split_does_not_depend_on_where_the_span_lies(span, parts, shift):
    moved = split(Span(span.start + shift, span.stop + shift), parts)
    assert moved == tuple(Span(a + shift, b + shift) for a, b in split(span, parts))


def test_a_split_in_numbers():
    assert split(Span(10, 20), 3) == (Span(10, 14), Span(14, 17), Span(17, 20))
    assert [part.numel for part in split(2, 4)] == [1, 1, 0, 0]


@checked
@given(st.integers(0, 200), st.integers(1, 8), st.integers(1, 50))
def test_chunks_and_their_parts_cover_the_row_exactly_in_order(numel, parts, chunk):
    chunks = chunk_parts(numel, parts, chunk)
    assert [at for span in chain(*chunks) for at in range(*span)] == list(range(numel))
    every = list(chain(*chunks))
    assert all(a.stop == b.start for a, b in pairwise(every))
    assert all(len(one) == parts for one in chunks)


@checked
@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 50))
def test_chunks_are_as_few_as_possible_and_none_is_too_large(numel, parts, chunk):
    sizes = [sum(part.numel for part in one) for one in chunk_parts(numel, parts, chunk)]
    assert max(sizes) <= chunk
    assert (len(sizes) - 1) * chunk < numel
    assert max(sizes) - min(sizes) <= 1


@checked
@given(st.integers(0, 200), st.integers(1, 8), st.integers(1, 50))
def test_the_parts_of_every_chunk_differ_by_at_most_one_element(numel, parts, chunk):
    for one in chunk_parts(numel, parts, chunk):
        sizes = [part.numel for part in one]
        assert max(sizes) - min(sizes) <= 1


def test_an_empty_row_has_no_chunk():
    assert chunk_parts(0, 4, 10) == ()


@pytest.mark.parametrize("chunk", [1, 0])
def test_the_smallest_chunk_is_one_element(chunk):
    assert len(chunk_parts(5, 2, chunk)) == 5


# --- pieces ------------------------------------------------------------------------------------


@checked
@given(layouts_with_span())
def test_the_pieces_of_a_span_are_exactly_its_elements_in_order(asked):
    layout, span = asked
    found = list(pieces(layout, span))
    elements = [(piece.slot, inside) for piece in found for inside in range(*piece.inside)]
    assert elements == cells(layout)[slice(*span)]
    places = [at for piece in found for at in range(*piece.at)]
    assert places == list(range(span.numel))


@checked
@given(layouts_with_span())
def test_a_piece_is_as_long_in_its_tensor_as_in_the_span_and_never_empty(asked):
    found = list(pieces(*asked))
    assert all(piece.inside.numel == piece.at.numel > 0 for piece in found)
    assert len({piece.slot for piece in found}) == len(found)


def test_pieces_in_numbers():
    layout = lay_out(
        [slot_of("a", (2, 2)), slot_of("b", (0,)), slot_of("c", ()), slot_of("d", (9,))]
    )
    assert list(pieces(layout, Span(3, 8))) == [
        (0, Span(3, 4), Span(0, 1)),
        (2, Span(0, 1), Span(1, 2)),
        (3, Span(0, 3), Span(2, 5)),
    ]


@checked
@given(spans, parts_of_any, st.integers(1, 16))
def test_even_parts_begin_at_multiples_and_differ_by_one_of_them(span, parts, even):
    cut = split(span, parts, even)
    assert [n for part in cut for n in range(*part)] == list(range(*span))
    assert all((part.start - span.start) % even == 0 for part in cut if part.numel)
    sizes = [-(-part.numel // even) for part in cut]
    assert max(sizes) - min(sizes) <= 1


@checked
@given(st.integers(0, 500), st.integers(1, 6), st.integers(1, 200), st.integers(1, 16))
def test_even_chunks_hold_the_row_once(numel, parts, chunk, even):
    chunks = chunk_parts(numel, parts, chunk, even)
    flat = [part for one in chunks for part in one]
    assert [n for part in flat for n in range(*part)] == list(range(numel))
    assert all(part.start % even == 0 for part in flat if part.numel)
    assert all(sum(part.numel for part in one) < chunk + even for one in chunks)


# --- fragments ---------------------------------------------------------------------------------

numels_of_tensors = st.lists(st.one_of(st.integers(0, 40), st.just(10_000)), max_size=30)


@checked
@given(numels_of_tensors, st.integers(1, 12))
def test_every_tensor_is_in_one_fragment_in_order(numels, count):
    groups = fragments(numels, count)
    assert len(groups) == count
    assert list(chain(*groups)) == list(range(len(numels)))


@checked
@given(numels_of_tensors, st.integers(1, 12))
def test_a_fragment_differs_from_its_share_by_at_most_the_largest_tensor(numels, count):
    sizes = [sum(numels[index] for index in group) for group in fragments(numels, count)]
    share, largest = sum(numels) / count, max(numels, default=0)
    assert all(abs(size - share) <= largest for size in sizes)


@checked
@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 1000))
def test_equal_tensors_that_can_be_shared_out_equally_are(each, count, numel):
    groups = fragments([numel] * (each * count), count)
    assert [len(group) for group in groups] == [each] * count


@checked
@given(numels_of_tensors)
def test_one_fragment_is_all_tensors(numels):
    assert fragments(numels, 1) == (tuple(range(len(numels))),)


@checked
@given(numels_of_tensors, st.integers(1, 12), st.integers(1, 2**40))
def test_fragments_do_not_depend_on_the_unit_of_sizes(numels, count, factor):
    assert fragments([numel * factor for numel in numels], count) == fragments(numels, count)


@pytest.mark.parametrize(
    ("numels", "count", "groups"),
    [
        ([], 3, ((), (), ())),
        ([0, 0], 2, ((0, 1), ())),
        ([5, 5, 5, 5], 2, ((0, 1), (2, 3))),
        ([1, 2, 1000, 2, 1], 3, ((0, 1), (2,), (3, 4))),  # a huge tensor in the middle
        ([1000, 1, 1], 3, ((), (0,), (1, 2))),
        ([1, 1, 1000], 3, ((0, 1), (2,), ())),
        ([7, 7], 5, ((), (0,), (), (1,), ())),  # more fragments than tensors
        ([7, 0], 1, ((0, 1),)),
        ([7, 0], 2, ((), (0, 1))),  # an empty tensor at the very end
    ],
)
def test_fragments_in_numbers(numels, count, groups):
    assert fragments(numels, count) == groups


# --- buckets -----------------------------------------------------------------------------------

sizes_of_tensors = st.lists(st.integers(0, 40), max_size=20)


@checked
@given(sizes_of_tensors, st.integers(1, 100))
def test_every_tensor_is_in_one_bucket_in_the_order_given(nbytes, capacity):
    buckets = fit_buckets(nbytes, capacity)
    assert list(chain(*buckets)) == list(range(len(nbytes)))
    assert all(buckets)


@checked
@given(sizes_of_tensors, st.integers(1, 100))
def test_a_bucket_is_closed_by_the_tensor_that_fills_it(nbytes, capacity):
    buckets = fit_buckets(nbytes, capacity)
    for number, bucket in enumerate(buckets, 1):
        filled = list(accumulate(nbytes[index] for index in bucket))
        assert all(before < capacity for before in filled[:-1])
        assert filled[-1] >= capacity or number == len(buckets)


@pytest.mark.parametrize(
    ("nbytes", "capacity", "buckets"),
    [
        ([], 10, ()),
        ([0, 0], 10, ((0, 1),)),
        ([4, 6, 10, 3], 10, ((0, 1), (2,), (3,))),
        ([4, 100, 1], 10, ((0, 1), (2,))),
        ([100, 100], 1, ((0,), (1,))),
    ],
)
def test_buckets_in_numbers(nbytes, capacity, buckets):
    assert fit_buckets(nbytes, capacity) == buckets


def test_the_last_buckets_are_halved_down_to_a_mebibyte():
    buckets = fit_buckets([2**18] * 64, 2**22)
    assert [len(bucket) for bucket in buckets] == [16, 16, 16, 8, 4, 4]
    assert [len(bucket) for bucket in fit_buckets([2**18] * 64, 2**20)] == [4] * 16


LEAST = MIN_BUCKET_BYTES


@checked
@given(st.lists(st.integers(0, 3 * LEAST), max_size=20), st.integers(1, 10 * LEAST), st.data())
def test_the_last_layer_shares_no_bucket_with_what_could_leave_before_it(nbytes, capacity, data):
    last = data.draw(st.integers(0, len(nbytes)))
    first = len(nbytes) - last
    buckets = fit_buckets(nbytes, capacity, last=last)
    assert list(chain(*buckets)) == list(range(len(nbytes)))
    assert all(buckets)
    for bucket in buckets:
        before = sum(nbytes[at] for at in bucket if at < first)
        assert before < LEAST or bucket[-1] < first or bucket[0] >= first
    # Cut once more at most than where the last layer is none by itself.
    assert len(buckets) - len(fit_buckets(nbytes, capacity)) in (0, 1)


@pytest.mark.parametrize(
    ("names", "count"),
    [
        ([], 0),
        (["head.bias", "head.weight", "body.bias", "conv.bias", "conv.weight"], 2),
        (["2.weight", "0.weight"], 1),
        (["b.c.weight", "b.weight", "b.bias"], 2),
        (["3", "2", "1"], 3),  # parameters without modules: no layers are known
    ],
)
def test_the_last_layer_is_what_becomes_ready_last_of_one_module(names, count):
    assert last_layer(names) == count


@given(st.lists(st.integers(0, 50), max_size=20))
def test_every_tensor_has_a_flag_behind_it_and_nothing_else_lies_between(numels):
    spans = flagged(numels)
    assert [span.numel for span in spans] == numels
    taken = [at for span in spans for at in range(span.start, span.stop + 1)]
    assert taken == list(range(sum(numels) + len(numels)))


@checked
@given(st.lists(st.integers(0, 1000)))
def test_message_tensors_are_aligned_and_disjoint(sizes):
    spans = aligned(sizes)
    assert [span.numel for span in spans] == sizes
    assert all(span.start % ALIGNMENT == 0 for span in spans)
    assert all(a.stop <= b.start < a.stop + ALIGNMENT for a, b in pairwise(spans))


@checked
@given(st.lists(st.integers(0, 300), max_size=30))
def test_small_tensors_are_a_16th_at_most_and_no_size_is_cut_in_two(numels):
    small = small_tensors(numels)
    assert small == sorted(set(small))
    sizes = {numels[at] for at in small}
    large = [numel for at, numel in enumerate(numels) if at not in small]
    assert 16 * sum(numels[at] for at in small) <= sum(numels)
    assert not sizes & set(large)
    if large:  # with those of the next size they would be too many
        following = min(large)
        assert not sizes or max(sizes) < following
        more = sum(numels[at] for at in small) + following * numels.count(following)
        assert 16 * more > sum(numels) or following == 0
