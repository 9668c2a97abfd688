"""Reasons for which a loaded state does not fit a session, each with its remedy."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any


class Misfit(IntEnum):
    """Reasons in ascending order; the message gives the highest of all ranks."""

    NONE = 0
    ONE_COPY = 1
    RANK = 2
    SETUP = 3
    MODEL = 4
    WORLD = 5
    UNOPENED = 6
    NOTHING = 7


_WORDS = {
    Misfit.ONE_COPY: (
        "one copy for all ranks",
        "to resume exactly, save state_dict() of each rank",
    ),
    Misfit.RANK: (
        "the state of another rank",
        "to resume exactly, save state_dict() of each rank, and load it on that rank",
    ),
    Misfit.SETUP: ("the state of other options", "to resume exactly, pass the same keywords"),
    Misfit.MODEL: ("the state of another model", "load the one of this model"),
    Misfit.WORLD: (
        "the state of other ranks or nodes",
        "call synchronize(optimizer_state=True) before saving, and nothing is lost by that",
    ),
    Misfit.UNOPENED: ("the state of a copy before its first step", "save it after a step"),
    Misfit.NOTHING: ("a state without daso's part", "save state_dict() of daso's optimizer"),
}


def misfit(state: Mapping[str, Any] | None, shape: Mapping[str, Any] | None) -> Misfit:
    """Return the reason for which a state does not fit a session of this shape."""
    if state is None:
        return Misfit.NOTHING
    if state["shape"] is None or shape is None:
        return Misfit.UNOPENED
    saved = state["shape"]
    reasons = {
        Misfit.WORLD: saved["node_sizes"] != shape["node_sizes"],
        Misfit.MODEL: saved["layout"] != shape["layout"],
        Misfit.SETUP: any(saved.get(key) != shape.get(key) for key in ("setup", "devices")),
        Misfit.ONE_COPY: state["sync"] is None,
        Misfit.RANK: saved["rank"] != shape["rank"],
    }
    return next((reason for reason, met in reasons.items() if met), Misfit.NONE)


def remedy(reason: Misfit) -> tuple[str, str]:
    """Return the description of the loaded state, and the remedy."""
    return _WORDS[reason]
