"""The choice of the wire where the user leaves it open."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daso.plan.exchange import MIN_NUMEL, next_wire
from daso.plan.options import BITS, Exchange, Gradients, Settings
from daso.plan.schedule import Measurements

seconds = st.floats(1e-6, 1e3)
OPEN = Settings(wire="auto", merge="auto", exchange=Exchange(), gradients=Gradients()).wires


def measurements(batches, gain=1.5):
    return Measurements(step_seconds=0.1, exchange_seconds=0.1 * batches, required_gain=gain)


def chosen(now, told, *, timed="", choices=OPEN, numel=MIN_NUMEL):
    return next_wire(now, told, timed=timed or now, choices=choices, numel=numel)


def test_the_first_exchange_has_4_bits():
    assert OPEN == ("int4", "int2")


@pytest.mark.parametrize(
    ("now", "batches", "then"),
    [
        ("int4", 0.1, "int4"),
        ("int4", 0.94, "int4"),
        ("int4", 0.96, "int2"),
        ("int4", 100, "int2"),
        ("int2", 100, "int2"),
        ("int2", 0.43, "int2"),  # 0.77 with int4
        ("int2", 0.42, "int4"),  # 0.756
    ],
)
def test_where_4_bits_take_more_than_a_batch_2_are_sent(now, batches, then):
    assert chosen(now, measurements(batches)) == then


def test_seconds_count_by_the_bits_of_the_wire_that_took_them():
    assert chosen("int2", measurements(0.75), timed="int4") == "int4"
    assert chosen("int2", measurements(0.77), timed="int4") == "int2"
    assert chosen("int4", measurements(0.53), timed="int2") == "int2"  # 0.954 with int4


@given(st.sampled_from(OPEN), st.floats(0, 1e3), st.floats(0, 1e3))
def test_unmeasured_small_or_linear_exchanges_keep_their_wire(now, step, exchange):
    told = Measurements(step, exchange, required_gain=1.5)
    assert chosen(now, told, numel=MIN_NUMEL - 1) == now
    assert chosen(now, Measurements(0.0, exchange, required_gain=1.5)) == now
    assert chosen(now, Measurements(step, 0.0, required_gain=1.5)) == now
    assert chosen(now, Measurements(step, exchange)) == now  # SGD: no gain is required


@given(seconds, seconds)
def test_on_a_link_that_stays_the_same_the_wire_settles(step, narrow):
    """An exchange takes as long as its bytes say: no wire sends the next one back."""
    taken = {"int4": narrow, "int2": narrow * BITS["int2"] / BITS["int4"]}
    wire, wires = "int4", []
    for _ in range(6):
        wire = chosen(wire, Measurements(step, taken[wire], required_gain=1.5))
        wires.append(wire)
    assert len(set(wires)) == 1


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int4", "int2", "topk"])
def test_a_wire_that_is_given_stays(wire):
    settings = Settings(wire=wire, merge="auto", exchange=Exchange(), gradients=Gradients())
    assert settings.wires == (wire,)
    for batches in (0.01, 100):
        assert chosen(wire, measurements(batches), choices=settings.wires) == wire
