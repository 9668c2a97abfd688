import math
import re
from dataclasses import FrozenInstanceError
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.plan.exchange import ADOPT, MOST_DRIFT, Merge, keeps_local, merge_rule
from daso.plan.options import MERGES, check_merge, is_eager

checked = settings(derandomize=True, max_examples=100, deadline=None)

rules = st.one_of(st.sampled_from(MERGES), st.floats(0, 1))
waits = st.integers(0, 1000)
nodes = st.integers(1, 10_000)
values = st.floats(-1000, 1000)


def rule_of(merge, *, waited, nodes, drift=0.0, outer=False):
    """The rule for an exchange that takes as long as it was expected to."""
    keeps = waited > 0 and keeps_local(merge, wait=waited, drift=drift, outer=outer)
    return merge_rule(merge, waited=waited, nodes=nodes, keeps=keeps)


def merged(rule, x, s, g):
    """Carry out a merge as the record documents it: x now, s when sent, g the reference."""
    return x + (g - s) if rule.since_send else x + rule.pull * (g - x)


@checked
@given(waits.filter(bool), nodes, values, values, values)
def test_daso_is_the_formula_of_the_paper(waited, count, x, s, g):
    rule = rule_of("daso", waited=waited, nodes=count)
    exact = (2 * waited * Fraction(x) + count * Fraction(g)) / (2 * waited + count)
    assert merged(rule, x, s, g) == pytest.approx(float(exact), abs=1e-9)


@pytest.mark.parametrize(
    ("waited", "count", "kept"),
    [
        (1, 4, 0.33),
        (1, 16, 0.11),
        (1, 64, 0.03),
        (1, 256, 0.008),
        (4, 4, 0.67),
        (4, 16, 0.33),
        (4, 64, 0.11),
        (4, 256, 0.03),
    ],
)
def test_daso_keeps_the_known_share_of_local_work(waited, count, kept):
    rule = rule_of("daso", waited=waited, nodes=count)
    assert 1 - rule.pull == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize(
    ("waited", "count", "pull"), [(1, 2, 0.5), (3, 2, 0.25), (1, 6, 0.75), (4, 1, 1 / 9)]
)
def test_daso_in_numbers(waited, count, pull):
    assert rule_of("daso", waited=waited, nodes=count) == Merge(pull=pull, since_send=False)


@checked
@given(waits.filter(bool), nodes, values, values, values)
def test_delta_adds_all_local_work_since_the_send_to_the_reference(waited, count, x, s, g):
    rule = rule_of("delta", waited=waited, nodes=count)
    assert merged(rule, x, s, g) == pytest.approx(g + (x - s), abs=1e-9)


@checked
@given(waits.filter(bool), nodes, values, values, values)
def test_eager_adds_what_the_new_reference_has_beyond_where_the_node_went(waited, count, x, e, g):
    # A node that went ahead to e when it sent has e in the place of s.
    rule = rule_of("eager", waited=waited, nodes=count)
    assert merged(rule, x, e, g) == pytest.approx(x + (g - e), abs=1e-9)


@checked
@given(st.floats(0, 1), waits.filter(bool), nodes, values, values, values)
def test_a_number_is_the_weight_of_local_parameters(a, waited, count, x, s, g):
    rule = rule_of(a, waited=waited, nodes=count)
    assert rule == Merge(pull=1 - a)
    assert merged(rule, x, s, g) == pytest.approx(a * x + (1 - a) * g, abs=1e-9)


@pytest.mark.parametrize(("weight", "pull"), [(0, 1.0), (1, 0.0), (0.25, 0.75)])
def test_a_number_may_lie_at_either_end_and_be_whole(weight, pull):
    assert rule_of(weight, waited=3, nodes=2) == Merge(pull=pull)


drifts = st.floats(0, 1).filter(lambda made: abs(made - MOST_DRIFT) > 1e-9)


@checked
@given(drifts, waits.filter(bool), nodes)
def test_auto_keeps_all_work_up_to_a_drift_limit(made, waited, count):
    drift = made**2 / waited
    name = "delta" if made < MOST_DRIFT else "daso"
    expected = rule_of(name, waited=waited, nodes=count)
    assert rule_of("auto", waited=waited, nodes=count, drift=drift) == expected


def test_auto_looks_at_the_drift_of_all_batches_waited():
    drift = 0.004  # 0.063 in a batch, 0.089 in two, 0.11 in three
    kept = [rule_of("auto", waited=w, nodes=2, drift=drift).since_send for w in (1, 2, 3, 9)]
    assert kept == [True, True, False, False]


@checked
@given(st.floats(0, 1e9), waits.filter(bool), nodes)
def test_with_an_outer_optimizer_auto_keeps_all_work_whatever_the_drift(drift, waited, count):
    rule = rule_of("auto", waited=waited, nodes=count, drift=drift, outer=True)
    assert rule == rule_of("eager", waited=waited, nodes=count)
    assert rule.since_send


def test_before_anything_is_measured_auto_keeps_all_work():
    rule = rule_of("auto", waited=4, nodes=2)
    assert rule == rule_of("delta", waited=4, nodes=2)


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("outer", [False, True])
def test_nodes_go_ahead_for_eager_and_for_auto_with_an_outer_optimizer(name, outer):
    assert is_eager(name, outer=outer) == (name == "eager" or (name == "auto" and outer))
    assert not is_eager(0.5, outer=outer)


@pytest.mark.parametrize("rule", [*MERGES, 0, 0.5, 1])
@pytest.mark.parametrize("count", [1, 2, 64])
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("drift", [0.0, 9.0])
def test_after_0_batches_every_rule_adopts_the_reference(rule, count, outer, drift):
    assert rule_of(rule, waited=0, nodes=count, drift=drift, outer=outer) is ADOPT


def test_adopting_is_told_from_every_merge_after_a_wait():
    # train/deltas/buffer.py copies for ADOPT, and only for it: nothing else may compare equal.
    # (The weight 0 is x <- g by its own words: copying is what it asks for.)
    kinds = [*MERGES, 0.01, 0.5, 1]
    made = [rule_of(kind, waited=w, nodes=p) for kind in kinds for w in (1, 9) for p in (1, 9)]
    assert Merge(pull=1.0, since_send=False) == ADOPT
    assert ADOPT not in made


@checked
@given(rules, waits, nodes, values)
def test_nodes_that_agree_already_stay_where_they_are_bit_for_bit(name, waited, count, x):
    rule = rule_of(name, waited=waited, nodes=count)
    assert merged(rule, x, x, x) == x


@checked
@given(rules, waits, nodes, values, values, values, values)
def test_every_rule_moves_with_the_origin(name, waited, count, x, s, g, shift):
    rule = rule_of(name, waited=waited, nodes=count)
    moved = merged(rule, x + shift, s + shift, g + shift)
    assert moved == pytest.approx(merged(rule, x, s, g) + shift, abs=1e-8)


WRONG = ["mean", "", "DASO", None, True, False, math.nan, math.inf, 1.5, -0.1, 2, [0.5]]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_an_unknown_rule_is_refused_with_rule_choices_and_value(wrong):
    text = (
        "merge must be one of auto, daso, delta, eager, or a number between 0 and 1 (the weight "
        f"of local parameters), not {wrong!r}"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        check_merge(wrong)


@pytest.mark.parametrize("merge", [*MERGES, 0, 1, 0.0, 0.5, 1.0])
def test_every_documented_rule_is_taken(merge):
    check_merge(merge)


def test_a_rule_is_frozen():
    with pytest.raises(FrozenInstanceError):
        ADOPT.pull = 0.5
