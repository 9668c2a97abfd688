from dataclasses import FrozenInstanceError
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.plan.merge import ADOPT, MERGES, Merge, merge_rule

checked = settings(derandomize=True, max_examples=100, deadline=None)

names = st.sampled_from(MERGES)
waits = st.integers(0, 1000)
nodes = st.integers(1, 10_000)
values = st.floats(-1000, 1000)


def merged(rule, x, s, g):
    """Carry out a merge as the record documents it: x now, s when sent, g the reference."""
    return x + (g - s) if rule.since_send else x + rule.pull * (g - x)


@checked
@given(waits.filter(bool), nodes, values, values, values)
def test_daso_is_the_formula_of_the_paper(waited, count, x, s, g):
    rule = merge_rule("daso", waited=waited, nodes=count)
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
    rule = merge_rule("daso", waited=waited, nodes=count)
    assert 1 - rule.pull == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize(
    ("waited", "count", "pull"), [(1, 2, 0.5), (3, 2, 0.25), (1, 6, 0.75), (4, 1, 1 / 9)]
)
def test_daso_in_numbers(waited, count, pull):
    assert merge_rule("daso", waited=waited, nodes=count) == Merge(pull=pull, since_send=False)


@checked
@given(waits.filter(bool), nodes, values, values, values)
def test_delta_adds_all_local_work_since_the_send_to_the_reference(waited, count, x, s, g):
    rule = merge_rule("delta", waited=waited, nodes=count)
    assert merged(rule, x, s, g) == pytest.approx(g + (x - s), abs=1e-9)


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("count", [1, 2, 64])
def test_after_0_batches_every_rule_adopts_the_reference(name, count):
    assert merge_rule(name, waited=0, nodes=count) is ADOPT


def test_adopting_is_told_from_every_merge_after_a_wait():
    # train/rows.py copies for ADOPT, and only for it: nothing else may compare equal.
    rules = [merge_rule(name, waited=w, nodes=p) for name in MERGES for w in (1, 9) for p in (1, 9)]
    assert Merge(pull=1.0, since_send=False) == ADOPT
    assert ADOPT not in rules


@checked
@given(names, waits, nodes, values)
def test_nodes_that_agree_already_stay_where_they_are_bit_for_bit(name, waited, count, x):
    rule = merge_rule(name, waited=waited, nodes=count)
    assert merged(rule, x, x, x) == x


@checked
@given(names, waits, nodes, values, values, values, values)
def test_every_rule_moves_with_the_origin(name, waited, count, x, s, g, shift):
    rule = merge_rule(name, waited=waited, nodes=count)
    moved = merged(rule, x + shift, s + shift, g + shift)
    assert moved == pytest.approx(merged(rule, x, s, g) + shift, abs=1e-8)


@pytest.mark.parametrize("waited", [0, 3])
@pytest.mark.parametrize("name", ["mean", "", "DASO", None])
def test_an_unknown_rule_is_refused_with_the_known_ones_and_the_value(name, waited):
    with pytest.raises(ConfigError, match=f"merge must be one of daso, delta, not {name!r}"):
        merge_rule(name, waited=waited, nodes=2)


def test_a_rule_is_frozen():
    with pytest.raises(FrozenInstanceError):
        ADOPT.pull = 0.5
