"""JSON without the extensions that only some parsers accept."""

import json
import math
from collections.abc import Mapping
from typing import Any


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return JSON in which NaN and infinities are strings."""
    return json.dumps(_named(value), indent=indent, allow_nan=False)


def _named(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def json_by_rows(value: Any) -> str:
    """Return the same JSON with a line for each innermost container or record."""
    return _by_rows(json.loads(strict_json(value)), "\n")


def _by_rows(value: Any, newline: str) -> str:
    if _depth(value) < 2:
        return json.dumps(value, allow_nan=False)
    inner = newline + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_by_rows(item, inner)}" for key, item in value.items()]
    else:
        parts = [_by_rows(item, inner) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}{inner}{f',{inner}'.join(parts)}{newline}{closing}"


def _depth(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, children), default=0) if isinstance(value, dict | list) else 0
