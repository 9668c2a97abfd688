"""The global random number generators of a process, as plain values."""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["rng_state", "set_rng_state"]


def rng_state() -> dict[str, Any]:
    """Return the states of torch's CPU generator, Python's, and NumPy's if it is loaded."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (numpy := _numpy()) is not None:
        name, key, *rest = numpy.random.get_state()
        states["numpy"] = (name, key.tolist(), *rest)
    return states


def set_rng_state(states: Mapping[str, Any]) -> None:
    """Put back what `rng_state` returned; NumPy's only where it is loaded."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    numpy = _numpy()
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])


def _numpy() -> Any:
    # Not imported for this: who has not loaded it has not drawn from it.
    return sys.modules.get("numpy")
