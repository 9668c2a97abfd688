"""JSON that every reader takes."""

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["json_by_rows", "strict_json"]


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return JSON in which numbers that JSON does not have are their names."""
    return json.dumps(_named(value), indent=indent, allow_nan=False)


def _named(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _named(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_named(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def json_by_rows(value: Any) -> str:
    """Return the same JSON over lines: what holds no container of containers is one line."""
    return _by_rows(json.loads(strict_json(value)), "\n")


def _by_rows(value: Any, newline: str) -> str:
    if _depth(value) < 2:
        return json.dumps(value, allow_nan=False)
    inner = newline + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_by_rows(one, inner)}" for key, one in value.items()]
    else:
        parts = [_by_rows(one, inner) for one in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}{inner}{f',{inner}'.join(parts)}{newline}{closing}"


def _depth(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, children), default=0) if isinstance(value, dict | list) else 0
