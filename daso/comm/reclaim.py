"""Closes what users dropped without `close`: MPI has few communicators, and threads go on.

No rank closes alone: the next one to be made closes those that are garbage on all ranks.
"""

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["forget", "keep", "reclaim"]

COLLECT_FROM = 8  # open at a time, before garbage in cycles is looked for: it takes 0.1 s


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is to close once its owner is garbage."""

    owner: "weakref.ref[object]"
    within: object  # over whose ranks
    close: Callable[[], object]  # collective; does not keep the owner alive


_kept: dict[int, _Kept] = {}
_numbers = itertools.count()  # in the order in which they were made, the same on every rank


def keep(owner: object, within: object, close: Callable[[], object]) -> None:
    """Note what to close once its owner is garbage on all ranks.

    Args:
        owner: The user's object.
        within: The topology whose ranks made it together.
        close: Collective over these; must not keep the owner alive.
    """
    _kept[next(_numbers)] = _Kept(weakref.ref(owner), within, close)


def forget(owner: object) -> None:
    """Forget what was closed by its user; idempotent."""
    for number in [number for number, one in _kept.items() if one.owner() is owner]:
        del _kept[number]


def reclaim(within: object, gather: Callable[[list[bool]], list[list[bool]]]) -> None:
    """Close what is garbage on all ranks.

    Args:
        within: As for `keep`.
        gather: Returns every rank's value, in rank order.

    Collective over these ranks; blocking.
    """
    ours = {number: one for number, one in _kept.items() if one.within is within}
    if not ours:
        return
    if len(ours) >= COLLECT_FROM:
        gc.collect()
    garbage = [one.owner() is None for one in ours.values()]
    everyones = gather(garbage)
    for position, number in enumerate(list(ours)):
        if all(position < len(flags) and flags[position] for flags in everyones):
            _kept.pop(number).close()
