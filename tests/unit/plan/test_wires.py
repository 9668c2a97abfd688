"""Which wire is taken where the user leaves it open."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daso.plan.options import Exchange, Gradients, Settings
from daso.plan.schedule import Measurements
from daso.plan.wires import FEW, next_wire

seconds = st.floats(1e-6, 1e3)


def measurements(batches):
    return Measurements(step_seconds=0.1, exchange_seconds=0.1 * batches)


@pytest.mark.parametrize(
    ("now", "batches", "then"),
    [
        ("bf16", 0.1, "bf16"),
        ("bf16", 0.79, "bf16"),
        ("bf16", 0.81, "int4"),
        ("bf16", 100, "int4"),
        ("int4", 100, "int4"),
        ("int4", 0.12, "int4"),  # 0.41 with bf16
        ("int4", 0.1, "bf16"),  # 0.38
    ],
)
def test_slow_links_get_fewer_bits(now, batches, then):
    assert next_wire(now, measurements(batches), numel=FEW) == then


@pytest.mark.parametrize(
    ("own", "batches", "then"),
    [
        (0.0005, 0.9, "int4"),  # half a batch apart: the link is what makes exchanges rarer
        (0.002, 1.9, "bf16"),  # two batches apart for their work
        (0.002, 2.1, "int4"),
        (0.02, 3.9, "bf16"),  # twenty apart; merged late
        (0.02, 4.1, "int4"),
    ],
)
def test_where_the_work_of_exchanges_makes_them_rare_they_take_their_time(own, batches, then):
    told = replace(measurements(batches), own_seconds=own)
    assert next_wire("bf16", told, numel=FEW) == then


@pytest.mark.parametrize(("batches", "then"), [(0.79, "bf16"), (0.81, "int4")])
def test_where_steps_are_normalized_a_late_merge_costs_more_than_four_bits(batches, then):
    told = replace(measurements(batches), own_seconds=0.02, required_gain=1.2)
    assert next_wire("bf16", told, numel=FEW) == then


@given(st.sampled_from(["bf16", "int4"]), st.floats(0, 1e3), st.floats(0, 1e3))
def test_what_is_small_or_not_measured_changes_nothing(now, step, exchange):
    assert next_wire(now, Measurements(step, exchange), numel=FEW - 1) == now
    assert next_wire(now, Measurements(0.0, exchange), numel=FEW) == now
    assert next_wire(now, Measurements(step, 0.0), numel=FEW) == now


@given(seconds, seconds)
def test_on_a_link_that_stays_the_same_the_wire_settles(step, wide):
    """An exchange takes as long as its bytes say: no wire sends the next one back."""
    taken = {"bf16": wide, "int4": wide * 4.5 / 16}
    wire, wires = "bf16", []
    for _ in range(6):
        wire = next_wire(wire, Measurements(step, taken[wire]), numel=FEW)
        wires.append(wire)
    assert len(set(wires)) == 1


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int4", "int2", "topk"])
def test_a_wire_that_is_given_stays(wire):
    settings = Settings(wire=wire, merge="auto", exchange=Exchange(), gradients=Gradients())
    assert settings.wires == (wire,)
    assert settings.next_wire(wire, measurements(100), numel=FEW) == wire
