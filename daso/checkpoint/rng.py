"""The global random number generators of a process, as plain values."""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """Return the states of torch's CPU generator, Python's, and NumPy's if it is loaded."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (numpy := _numpy()) is not None:
        name, key, *rest = numpy.random.get_state()
        states["numpy"] = (name, key.tolist(), *rest)
    return states


def set_rng_state(states: Mapping[str, Any]) -> None:
    """Restore the states of `rng_state`; NumPy's only if it is loaded."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    numpy = _numpy()
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])


def _numpy() -> Any:
    # Not imported here: a program that has not loaded it has drawn no numbers from it.
    return sys.modules.get("numpy")
