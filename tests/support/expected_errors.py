"""Errors that a test expects, by the code of their rule."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from daso.errors import DasoError


@contextmanager
def raises(code: str) -> "Iterator[pytest.ExceptionInfo[DasoError]]":
    """Expect an error of daso with this code."""
    with pytest.raises(DasoError) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
