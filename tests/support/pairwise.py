"""Covering arrays: every pair of values in one case at least, instead of the whole product."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from allpairspy import AllPairs

__all__ = ["pairwise"]


def pairwise(
    *, only: Callable[..., bool] = lambda **_: True, **axes: Sequence[Any]
) -> pytest.MarkDecorator:
    """Return a marker that runs a test with every pair of values of any two axes.

    Args:
        only: Of a case's values by name: whether it makes sense.
        axes: Values by name.
    """
    names = list(axes)
    rows = AllPairs(list(axes.values()), filter_func=lambda row: _fits(names, row, only))
    return pytest.mark.parametrize(names, [tuple(row) for row in rows])


def _fits(names: Sequence[str], row: Sequence[Any], only: Callable[..., bool]) -> bool:
    return len(row) < len(names) or only(**dict(zip(names, row, strict=True)))
