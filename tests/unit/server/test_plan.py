"""Decisions of the eager server: who owns which rows, when gradients leave, how old rows may be."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.plan.options import Exchange
from daso.server.plan import (
    FLOOR_BYTES,
    MESSAGE_SECONDS,
    Moment,
    Plan,
    PushScheduler,
    age,
    first_pace,
    is_fresh,
    leaving,
    next_pace,
    owners_of,
    rows_of,
)

GOOD = {
    "mode": "sharded",
    "staleness": 0,
    "push_every": "auto",
    "scale_by_staleness": False,
    "optimizer_state": "per_rank",
    "wire": None,
    "exchange": Exchange(),
}


@given(st.integers(0, 1000), st.sets(st.integers(0, 1000), min_size=1))
def test_every_row_has_one_owner_and_shares_are_even(rows, owners):
    spans = rows_of(rows, sorted(owners))
    assert [*spans] == sorted(owners)
    assert [row for start, stop in spans.values() for row in range(start, stop)] == [*range(rows)]
    sizes = [span.numel for span in spans.values()]
    assert max(sizes) - min(sizes) <= 1


ROW_BYTES = 256
LAYERS = st.lists(st.integers(1, 1 << 16), min_size=1, max_size=60)  # rows of each


@given(LAYERS, st.integers(1, 1100))
def test_a_share_of_a_layer_is_worth_a_message_and_ranks_own_alike(rows, ranks):
    nbytes = [ROW_BYTES * one for one in rows]
    owners = owners_of(nbytes, rows, ranks)
    assert all(who == tuple(sorted(set(who))) and who[-1] < ranks for who in owners)
    loads = [0.0] * ranks
    for size, who in zip(nbytes, owners, strict=True):
        share = size / len(who)
        assert share >= FLOOR_BYTES or len(who) == 1
        assert share < 2 * FLOOR_BYTES or len(who) == ranks
        for owner in who:
            loads[owner] += share
    # A share below the bound is all that any has more than another.
    assert max(loads) - min(loads) <= 2 * FLOOR_BYTES


def test_a_layer_of_one_long_row_has_one_owner():
    assert owners_of([10 << 20], [1], 64) == ((0,),)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 10))
@example(clock=8, step=10, staleness=3)
@example(clock=7, step=10, staleness=3)
@example(clock=6, step=10, staleness=3)
@example(clock=10, step=10, staleness=0)
@example(clock=9, step=10, staleness=0)
def test_rows_are_fresh_unless_they_lie_further_behind_than_may_be(clock, step, staleness):
    assert is_fresh(clock, step, staleness) == (step - clock <= staleness)
    assert is_fresh(clock, step, None)
    assert is_fresh(math.inf, step, staleness)  # nobody will add to them


def test_a_gradient_ages_by_a_step_when_all_ranks_have_updated_once():
    assert age(version=12, read=4, ranks=4) == 2.0


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(1, 10**6))),
)
def test_the_pace_stays_within_the_model(layers, seen):
    pace = first_pace("auto", layers)
    for backlog, nbytes in seen:
        pace = next_pace(pace, backlog_bytes=backlog, layer_bytes=nbytes)
        assert 1 <= pace.layers <= layers


@given(st.integers(1, 100), st.integers(1, 50), st.lists(st.integers(0, 10**7)))
def test_a_given_pace_stays(every, layers, backlogs):
    pace = first_pace(every, layers)
    assert pace.layers == min(every, layers)
    for backlog in backlogs:
        assert next_pace(pace, backlog_bytes=backlog, layer_bytes=1) == pace


def test_push_pace_follows_the_backlog():
    pace = first_pace("auto", 32)
    seen = []
    for backlog in [100, 100, 100, 10, 0, 0, 0, 0, 0, 0, 0]:
        pace = next_pace(pace, backlog_bytes=backlog, layer_bytes=10)
        seen.append(pace.layers)
    assert seen == [2, 4, 8, 8, 8, 4, 4, 2, 2, 1, 1]


SMALL, LARGE = FLOOR_BYTES - 1, FLOOR_BYTES


def test_small_messages_wait_unless_the_pace_is_given():
    auto, given_pace = first_pace("auto", 8), first_pace(1, 8)
    assert leaving(auto, Moment(1), {0: SMALL, 3: LARGE}) == [3]
    assert leaving(given_pace, Moment(1), {0: 1, 3: LARGE}) == [0, 3]
    assert leaving(first_pace(2, 8), Moment(1), {0: 10**9}) == []


@pytest.mark.parametrize(
    ("small", "quiet", "remaining", "early"),
    [
        (1, MESSAGE_SECONDS, MESSAGE_SECONDS, True),
        (1, 0.99 * MESSAGE_SECONDS, 1.0, False),  # one has just left
        (1, 1.0, 0.99 * MESSAGE_SECONDS, False),  # backward is about to end
        (4, 3.9 * MESSAGE_SECONDS, 1.0, False),  # as many messages keep the host busy
        (4, 4.1 * MESSAGE_SECONDS, 1.0, True),
    ],
)
def test_little_leaves_where_backward_goes_on_for_long_enough(small, quiet, remaining, early):
    nbytes = {owner: SMALL for owner in range(small)} | {9: LARGE}
    chosen = leaving(first_pace("auto", 8), Moment(1, quiet, remaining), nbytes)
    assert chosen == ([*nbytes] if early else [9])


@given(
    st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=12),
    st.one_of(st.just("auto"), st.integers(1, 4)),
    st.randoms(use_true_random=False),
)
def test_every_gradient_leaves_once_for_each_of_its_owners(owners, every, random):
    """Whatever waits, in whatever order layers are finished, and if some have no gradient."""
    owners = [tuple(sorted(who)) for who in owners]
    pushes = PushScheduler(owners, lambda *_: random.choice([1, LARGE]), first_pace(every, 12))
    for step in range(3):
        finished = random.sample(range(len(owners)), random.randint(0, len(owners)))
        left = []
        for at, layer in enumerate(finished):
            now = step + 1e-3 * at * random.randint(1, 5)
            found = pushes.finish(layer, backlog_bytes=random.choice([0, 10**6]), now=now)
            assert pushes.has_finished_layers
            left += [(owner, one) for owner, layers in found.items() for one in layers]
            assert {one for _, one in left} <= {*finished[: at + 1]}
        left += [(owner, one) for owner, layers in pushes.end().items() for one in layers]
        assert sorted(left) == sorted(
            (owner, layer) for layer, who in enumerate(owners) for owner in who
        )
        assert not pushes.has_finished_layers


@pytest.mark.parametrize(
    "bad",
    [
        {"mode": "replicated"},
        {"staleness": -1},
        {"staleness": 1.5},
        {"staleness": True},
        {"push_every": 0},
        {"push_every": "always"},
        {"scale_by_staleness": True},
        {"scale_by_staleness": True, "staleness": None, "mode": "local_rows"},
        {"optimizer_state": "both"},
        {"wire": "auto"},
        {"wire": "int2"},
        {"wire": "bf16", "mode": "local_rows"},
        {"clip_value": 0.0},
        {"clip_value": math.nan},
        {"clip_norm": -1.0},
        {"clip_norm": True},
        {"clip_norm": 1.0, "mode": "local_rows"},
        {"exchange": Exchange(fragments=2)},
        {"exchange": Exchange(algorithm="mpi")},
        {"exchange": Exchange(gpu_direct=True)},
    ],
    ids=str,
)
def test_bad_keywords_are_named(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Plan(**{**GOOD, **bad})


@pytest.mark.parametrize(("mode", "expected"), [("sharded", (0, 1, 2)), ("local_rows", (1,))])
def test_owners_take_in_all_ranks_gradients_and_others_their_own(mode, expected):
    assert Plan(**{**GOOD, "mode": mode}).contributors(1, 3) == expected
