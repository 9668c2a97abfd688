"""JSON that every reader takes."""

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["strict_json"]


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return JSON in which numbers that JSON does not have are their names."""
    return json.dumps(_named(value), indent=indent, allow_nan=False)


def _named(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _named(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_named(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
