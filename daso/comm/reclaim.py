"""Closes what users dropped without `close`: MPI has few communicators, and threads go on.

No rank closes alone: the next one to be made closes those that are garbage on all ranks.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Closer", "count_open", "forget", "keep", "reclaim"]

COLLECT_FROM = 8  # open at a time, before garbage in cycles is looked for: it takes 0.1 s
Word = tuple[dict[int, object], set[int]]  # of a rank: states of its garbage, and what it holds


@dataclass(frozen=True, slots=True)
class Closer:
    """How to close what users dropped; must not keep it alive.

    Args:
        close: Collective; called where all ranks are in the same state.
        abandon: On this rank alone, where they are not.
        state: Returns what must be equal on all ranks to close together; None: it failed.
    """

    close: Callable[[], object]
    abandon: Callable[[], object]
    state: Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Kept:
    owner: "weakref.ref[object]"
    within: object
    closer: Closer


_kept: dict[tuple[int, int], _Kept] = {}  # by topology and number


def keep(owner: object, within: object, number: int, closer: Closer) -> None:
    """Note what to close once its owner is garbage on all ranks."""
    _kept[id(within), number] = _Kept(weakref.ref(owner), within, closer)


def count_open(within: object) -> int:
    """Return how many were made by a topology's ranks and are not closed yet."""
    return sum(kept.within is within for kept in _kept.values())


def forget(owner: object) -> None:
    """Forget what was closed by its user; idempotent."""
    for key in [key for key, kept in _kept.items() if kept.owner() is owner]:
        del _kept[key]


def reclaim(within: object, gather: Callable[[Word], list[Word]]) -> int:
    """Close what is garbage on all ranks.

    Collective over these ranks; blocking.
    """
    ours = {number: kept for (_, number), kept in _kept.items() if kept.within is within}
    if len(ours) >= COLLECT_FROM:
        gc.collect()
    garbage = {number: one.closer.state() for number, one in ours.items() if one.owner() is None}
    words = gather((garbage, ours.keys() - garbage.keys()))
    held = set().union(*(holds for _, holds in words))
    for number in sorted(garbage.keys() - held):
        closer = _kept.pop((id(within), number)).closer
        states = [states.get(number) for states, _ in words]
        alike = states[0] is not None and all(state == states[0] for state in states)
        (closer.close if alike else closer.abandon)()
    return 1 + max((number for states, holds in words for number in (*states, *holds)), default=0)
