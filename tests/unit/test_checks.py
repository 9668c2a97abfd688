"""Rules of public arguments, and calls that do not fit: one line each, never Python's own error."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

import daso
from daso.checks import (
    MOST,
    check,
    choice,
    either,
    flag,
    format_value,
    number,
    one_of,
    positive,
    validate_call,
    validated_record,
    whole,
)
from daso.errors import ConfigError


@given(st.integers(1, MOST))
def test_a_count_is_a_whole_number_of_at_least_one(count):
    check("copies", count, whole(1))
    for bad in (1 - count, float(count), str(count), None, True, MOST + count):
        with pytest.raises(
            ConfigError, match=r"^copies must be a whole number of at least 1, not "
        ):
            check("copies", bad, whole(1))


@pytest.mark.parametrize(
    ("rule", "good", "bad", "text"),
    [
        (whole(0, 5, " of steps"), 5, 6, "a whole number of steps of at least 0 and at most 5"),
        (positive(), 1e-9, math.inf, "a positive number"),
        (positive(), 3, 0, "a positive number"),
        (positive(7.0), 7.0, 7.5, "a positive number of at most 7"),
        (number(0, 1), 0, -1e-9, "a number from 0 to 1"),
        (number(0, 1), 1.0, math.nan, "a number from 0 to 1"),
        (number(0, 1), 0.5, True, "a number from 0 to 1"),
        (choice("a", "b"), "a", ["a"], "one of a, b"),
        (choice(None, "b"), None, "None", "one of None, b"),
        (flag(), True, 1, "True or False"),
        (either(whole(1), one_of("auto")), "auto", "Auto", "at least 1, or 'auto'"),
    ],
)
def test_each_rule_says_what_a_value_must_be(rule, good, bad, text):
    check("it", good, rule)
    with pytest.raises(ConfigError) as error:
        check("it", bad, rule)
    assert str(error.value).startswith("it must be ")
    assert f"{text}, not {format_value(bad)}" in str(error.value)


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


@given(st.recursive(st.text() | st.integers() | st.floats(), st.lists))
def test_a_value_is_shown_on_one_short_line(value):
    assert len(format_value(value).splitlines()) <= 1
    assert len(format_value(value)) <= 100


def test_what_cannot_be_printed_is_named_by_its_type():
    assert format_value(Unprintable()) == "a Unprintable"
    assert format_value(10**5000) == "a int"


@validate_call
def door(inner, *, skip_all=False, policy=None):
    return inner, skip_all, policy


@validated_record
@dataclass(frozen=True)
class Options:
    size: int
    kind: str = "a"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (door, "door needs inner, but it is missing; pass inner="),
        (
            lambda: door(1, 2),
            "door takes skip_all, policy by name, but one is given without; write skip_all=...",
        ),
        (
            lambda: door(1, skip=2),
            "door takes inner, skip_all, policy, but not 'skip'; "
            "pass policy=daso.Fixed(skip=..., wait=...)",
        ),
        (
            lambda: door(1, polcy=2),
            "door takes inner, skip_all, policy, but not 'polcy'; did you mean 'policy'?",
        ),
        (lambda: door(1, x=2), "door takes inner, skip_all, policy, but not 'x'; leave it out"),
        (Options, "Options needs size, but it is missing; pass size="),
        (lambda: Options(1, "b", 3), "Options takes size, kind, but too many positional"),
        (
            lambda: Options(1, size=2),
            "Options takes size, kind, but multiple values for argument 'size'; leave it out",
        ),
    ],
)
def test_a_call_that_does_not_fit_says_what_does(call, message):
    with pytest.raises(ConfigError) as error:
        call()
    assert str(error.value).startswith(message)


def test_a_call_that_fits_is_passed_on():
    assert door(1, policy=3) == (1, False, 3)
    assert Options(2) == Options(size=2, kind="a")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Daso", "has no attribute 'Daso'; did you mean 'DASO'?"),
        ("fixed", "has no attribute 'fixed'; did you mean 'Fixed'?"),
        ("Policy", "has no attribute 'Policy'"),
        ("serve", "has no attribute 'serve'"),
    ],
)
def test_a_public_name_that_is_typed_wrongly_is_answered(name, message):
    with pytest.raises(AttributeError, match=message):
        getattr(daso, name)
