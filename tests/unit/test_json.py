import json
import math

import pytest

from daso.strict import json_by_rows, strict_json


def refused(name):
    raise AssertionError(f"{name} is no number of JSON")


def read(text):
    """Read JSON as a reader does that knows no NaN."""
    return json.loads(text, parse_constant=refused)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_their_names(number):
    found = read(strict_json({"loss": number, "rows": [(1.5, number)], "in": {"it": number}}))
    name = str(number)
    assert found == {"loss": name, "rows": [[1.5, name]], "in": {"it": name}}


@pytest.mark.parametrize("indent", [None, 2])
def test_all_else_is_as_json_writes_it(indent):
    value = {"a": [1, 2.5, -0.0, 1e300], "b": None, "c": (True, "nan"), 4: {}}
    assert strict_json(value, indent=indent) == json.dumps(value, indent=indent)


def test_rows_are_lines_and_nothing_is_lost():
    value = {
        "a": {"b": [1, {"c": [[2.5], {"d": "e"}]}]},
        "f": [],
        "g": {"h": math.inf},
        4: {"i": [[1]]},
    }
    text = json_by_rows(value)
    assert read(text) == json.loads(strict_json(value))
    assert text.splitlines()[1:3] == [' "a": {', '  "b": [']
    assert "     [2.5]," in text.splitlines()
