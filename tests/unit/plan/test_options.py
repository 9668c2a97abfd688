import math
from dataclasses import FrozenInstanceError, asdict, fields

import pytest

from daso.errors import ConfigError
from daso.plan.options import MERGES, Exchange, Gradients, Settings, is_eager


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
        "algorithm": "auto",
        "chunk_bytes": 2**18,
        "nonfinite": "drop",
        "timeout_seconds": 300.0,
        "fragments": 1,
        "gpu_direct": False,
        "step_restoration": "auto",
        "elastic": False,
        "keep_local": (),
    }
    assert asdict(Gradients()) == {
        "bucket_bytes": "auto",
        "reducer": "bucketed",
        "step": "auto",
        "priority": "layer",
        "link_efficiency": 0.9,
        "wire": "auto",
    }
    assert not make().outer


@pytest.mark.parametrize("name", list(asdict(Exchange())))
def test_an_exchange_record_is_frozen(name):
    with pytest.raises(FrozenInstanceError):
        setattr(Exchange(), name, 1)


@pytest.mark.parametrize("name", [one.name for one in fields(Settings)])
def test_settings_are_frozen(name):
    with pytest.raises(FrozenInstanceError):
        setattr(make(), name, 1)


def test_gradients_are_frozen():
    with pytest.raises(FrozenInstanceError):
        Gradients().bucket_bytes = 1


@pytest.mark.parametrize("record", [Exchange, Gradients])
def test_records_take_keywords_only(record):
    with pytest.raises(ConfigError, match=f"{record.__name__} takes .* by name"):
        record("auto")


@pytest.mark.parametrize(
    "algorithm", ["auto", "direct", "two-level", "halving", "ring", "planned", "mpi"]
)
@pytest.mark.parametrize("nonfinite", ["drop", "raise"])
def test_every_documented_choice_of_an_exchange_is_taken(algorithm, nonfinite):
    exchange = Exchange(
        algorithm=algorithm, nonfinite=nonfinite, chunk_bytes=1, timeout_seconds=0.1
    )
    assert (exchange.algorithm, exchange.nonfinite) == (algorithm, nonfinite)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        *(
            (
                {"algorithm": value},
                "Exchange.algorithm must be one of auto, direct, two-level, halving, ring, "
                f"planned, mpi, not {value!r}",
            )
            for value in ("sum", None)
        ),
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
        ({"timeout_seconds": 0.0}, "Exchange.timeout_seconds must be a positive .*number, not 0.0"),
        ({"timeout_seconds": -1}, "Exchange.timeout_seconds must be a positive .*number, not -1"),
        (
            {"timeout_seconds": math.nan},
            "Exchange.timeout_seconds must be a positive .*number, not nan",
        ),
        (
            {"timeout_seconds": None},
            "Exchange.timeout_seconds must be a positive .*number, not None",
        ),
    ],
)
def test_an_exchange_refuses_with_rule_and_value(values, match):
    with pytest.raises(ConfigError, match=match):
        Exchange(**values)


@pytest.mark.parametrize("nbytes", [0, -1, False, None, "1", math.nan])
def test_a_bucket_size_must_be_positive(nbytes):
    with pytest.raises(ConfigError, match=f"Gradients.bucket_bytes .* not {nbytes!r}"):
        Gradients(bucket_bytes=nbytes)


def test_a_bucket_size_may_be_searched():
    assert Gradients(bucket_bytes="search").first_bucket_bytes(on_gpu=True) is None
    assert Gradients(bucket_bytes=9).first_bucket_bytes(on_gpu=True) == 9
    assert Gradients().first_bucket_bytes(on_gpu=False) == 4 * 2**20
    assert Gradients().first_bucket_bytes(on_gpu=True) == 25 * 2**20
    assert Gradients(reducer="prioritized").first_bucket_bytes(on_gpu=True) == 2**20
    with pytest.raises(ConfigError, match='of at least 1, "auto" or "search", not'):
        Gradients(bucket_bytes="find")


@pytest.mark.parametrize("nbytes", [4e6, math.inf])
def test_the_bytes_of_a_chunk_must_be_a_whole_number(nbytes):
    # A float would go on into plan.layout.chunk_parts and raise there, at the first exchange.
    with pytest.raises(ConfigError, match=f"Exchange.chunk_bytes .* not {nbytes!r}"):
        Exchange(chunk_bytes=nbytes)


@pytest.mark.parametrize("fragments", [True, 2.0, "2", None, math.nan, 0, -3, 10**12])
def test_fragments_must_be_a_whole_number(fragments):
    text = f"whole number of at least 1 and at most 100000, not {fragments!r}"
    with pytest.raises(ConfigError, match=f"^Exchange.fragments must be a {text}$"):
        Exchange(fragments=fragments)


@pytest.mark.parametrize("fragments", [1, 2, 1000])
def test_any_number_of_fragments_is_taken(fragments):
    assert Exchange(fragments=fragments).fragments == fragments


@pytest.mark.parametrize("wire", ["fp17", "", None, "TOPK"])
def test_an_unknown_wire_is_refused_with_the_known_ones(wire):
    text = f"wire must be one of auto, fp32, bf16, fp16, int8, int4, int2, topk, not {wire!r}"
    with pytest.raises(ConfigError, match=f"^{text}$"):
        make(wire=wire)


@pytest.mark.parametrize("merge", ["mean", None, True, math.nan, 1.5, -0.1])
def test_an_unknown_merge_is_refused_with_the_known_ones(merge):
    text = f"merge must be one of auto, daso, delta, eager, or a number .*, not {merge!r}"
    with pytest.raises(ConfigError, match=f"^{text}$"):
        make(merge=merge)


@pytest.mark.parametrize("merge", ["daso", 0, 0.5, 1])
def test_topk_refuses_merges_that_keep_a_part_of_what_it_did_not_send(merge):
    text = f"wire='topk' needs merge 'auto', 'delta' or 'eager' .*, not {merge!r}$"
    with pytest.raises(ConfigError, match=text):
        make(wire="topk", merge=merge)


def test_topk_refuses_parts_that_move():
    with pytest.raises(ConfigError, match=r"wire='topk' needs an Exchange\.algorithm that"):
        make(wire="topk", merge="auto", exchange=Exchange(algorithm="planned"))


@pytest.mark.parametrize("merge", [*MERGES, 0.5])
@pytest.mark.parametrize("outer", [False, True])
def test_settings_go_ahead_when_their_merge_does(merge, outer):
    assert make(merge=merge, outer=outer).eager == is_eager(merge, outer=outer)


def test_mpi_may_not_add_16_bit_numbers_and_the_error_says_what_to_do():
    exchange = Exchange(algorithm="mpi")
    for wire in ("bf16", "topk"):
        text = f"needs wire='fp32' .* not '{wire}'; use algorithm='auto'"
        with pytest.raises(ConfigError, match=text):
            make(wire=wire, merge="delta", exchange=exchange)
    assert make(wire="fp32", exchange=exchange).by_mpi


def test_mpi_may_not_add_in_a_devices_memory_and_the_error_says_what_to_do():
    with pytest.raises(ConfigError, match=r"needs another algorithm .* than 'mpi'; leave"):
        Exchange(gpu_direct=True, algorithm="mpi")
    with pytest.raises(ConfigError, match="gpu_direct must be True or False, not 'gpu'"):
        Exchange(gpu_direct="gpu")
