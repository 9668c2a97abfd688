import math
from dataclasses import FrozenInstanceError, asdict

import pytest

from daso.errors import ConfigError
from daso.plan.options import Exchange, Gradients, Settings


def make(**changes):
    values = {
        "wire": "bf16",
        "merge": "daso",
        "exchange": Exchange(),
        "gradients": Gradients(),
    }
    return Settings(**values | changes)


def test_the_defaults_are_written_down():
    assert asdict(Exchange()) == {
        "reduce": "auto",
        "chunk_bytes": 4 * 2**20,
        "nonfinite": "drop",
        "stall_seconds": 300.0,
    }
    assert asdict(Gradients()) == {"bucket_bytes": 2**20}


@pytest.mark.parametrize("name", ["reduce", "chunk_bytes", "nonfinite", "stall_seconds"])
def test_an_exchange_record_is_frozen(name):
    with pytest.raises(FrozenInstanceError):
        setattr(Exchange(), name, 1)


@pytest.mark.parametrize("name", ["wire", "merge", "exchange", "gradients"])
def test_settings_are_frozen(name):
    with pytest.raises(FrozenInstanceError):
        setattr(make(), name, 1)


def test_gradients_are_frozen():
    with pytest.raises(FrozenInstanceError):
        Gradients().bucket_bytes = 1


@pytest.mark.parametrize("record", [Exchange, Gradients, Settings])
def test_records_take_keywords_only(record):
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        record("auto")


@pytest.mark.parametrize("reduce", ["auto", "iallreduce", "ordered"])
@pytest.mark.parametrize("nonfinite", ["drop", "raise"])
def test_every_documented_choice_of_an_exchange_is_taken(reduce, nonfinite):
    exchange = Exchange(reduce=reduce, nonfinite=nonfinite, chunk_bytes=1, stall_seconds=0.1)
    assert (exchange.reduce, exchange.nonfinite) == (reduce, nonfinite)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"reduce": "sum"}, "Exchange.reduce must be one of auto, iallreduce, ordered, not 'sum'"),
        ({"reduce": None}, "Exchange.reduce must be one of auto, iallreduce, ordered, not None"),
        ({"nonfinite": "skip"}, "Exchange.nonfinite must be one of drop, raise, not 'skip'"),
        (
            {"chunk_bytes": 0},
            "Exchange.chunk_bytes must be a whole number of bytes of at least 1, not 0",
        ),
        (
            {"chunk_bytes": -4},
            "Exchange.chunk_bytes must be a whole number of bytes of at least 1, not -4",
        ),
        (
            {"chunk_bytes": True},
            "Exchange.chunk_bytes must be a whole number of bytes of at least 1, not True",
        ),
        (
            {"chunk_bytes": "4"},
            "Exchange.chunk_bytes must be a whole number of bytes of at least 1, not '4'",
        ),
        ({"stall_seconds": 0.0}, "Exchange.stall_seconds must be a positive .*number, not 0.0"),
        ({"stall_seconds": -1}, "Exchange.stall_seconds must be a positive .*number, not -1"),
        (
            {"stall_seconds": math.nan},
            "Exchange.stall_seconds must be a positive .*number, not nan",
        ),
        ({"stall_seconds": None}, "Exchange.stall_seconds must be a positive .*number, not None"),
    ],
)
def test_an_exchange_refuses_with_rule_and_value(values, match):
    with pytest.raises(ConfigError, match=match):
        Exchange(**values)


@pytest.mark.parametrize("nbytes", [0, -1, False, None, "1", math.nan])
def test_a_bucket_size_must_be_positive(nbytes):
    with pytest.raises(ConfigError, match=f"Gradients.bucket_bytes .* not {nbytes!r}"):
        Gradients(bucket_bytes=nbytes)


@pytest.mark.parametrize("nbytes", [4e6, math.inf])
def test_the_bytes_of_a_chunk_must_be_a_whole_number(nbytes):
    # A float would go on into plan.layout.chunk_parts and raise there, at the first exchange.
    with pytest.raises(ConfigError, match=f"Exchange.chunk_bytes .* not {nbytes!r}"):
        Exchange(chunk_bytes=nbytes)


@pytest.mark.parametrize("wire", ["fp17", "", None])
def test_an_unknown_wire_is_refused_with_the_known_ones(wire):
    with pytest.raises(ConfigError, match=f"wire must be one of fp32, .*, int4, not {wire!r}"):
        make(wire=wire)


@pytest.mark.parametrize("merge", ["mean", "auto", None])
def test_an_unknown_merge_is_refused_with_the_known_ones(merge):
    with pytest.raises(ConfigError, match=f"merge must be one of daso, delta, not {merge!r}"):
        make(merge=merge)


def test_mpi_may_not_add_16_bit_numbers_and_the_error_says_what_to_do():
    exchange = Exchange(reduce="iallreduce")
    with pytest.raises(ConfigError, match=r"needs wire='fp32' .* not 'bf16'; use reduce='auto'"):
        make(wire="bf16", exchange=exchange)
    assert make(wire="fp32", exchange=exchange).delta_reduce == "iallreduce"


@pytest.mark.parametrize(
    ("reduce", "wire", "deltas", "gradients"),
    [
        ("auto", "bf16", "ordered", "iallreduce"),
        ("auto", "fp32", "iallreduce", "iallreduce"),
        ("ordered", "bf16", "ordered", "ordered"),
        ("ordered", "fp32", "ordered", "ordered"),
        ("iallreduce", "fp32", "iallreduce", "iallreduce"),
    ],
)
def test_how_to_add_is_decided_from_reduce_and_wire(reduce, wire, deltas, gradients):
    made = make(wire=wire, exchange=Exchange(reduce=reduce))
    assert (made.delta_reduce, made.gradient_reduce) == (deltas, gradients)
