"""Closes objects that users dropped without calling `close`, to free communicators and threads.

No rank closes an object alone: the next construction closes those that are garbage on all ranks.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass

COLLECT_FROM = 8  # open objects before gc.collect() is called, which takes 0.1 s
Report = tuple[dict[int, object], set[int]]  # of a rank: states of its garbage, objects in use


@dataclass(frozen=True, slots=True)
class CloseCallbacks:
    """Callbacks that close an object; they must not keep it alive.

    Args:
        close: Collective; called if all ranks are in the same state.
        abandon: Called on this rank alone if they are not.
        state: Returns a value that must be equal on all ranks to close together; None after a
            failure.
    """

    close: Callable[[], object]
    abandon: Callable[[], object]
    state: Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Tracked:
    owner: "weakref.ref[object]"
    topology: object
    callbacks: CloseCallbacks


_tracked: dict[tuple[int, int], _Tracked] = {}  # by topology and number


def track(owner: object, topology: object, number: int, callbacks: CloseCallbacks) -> None:
    """Track an object, to close it once it is garbage on all ranks."""
    _tracked[id(topology), number] = _Tracked(weakref.ref(owner), topology, callbacks)


def count_open(topology: object) -> int:
    """Return the number of open objects of a topology."""
    return sum(entry.topology is topology for entry in _tracked.values())


def untrack(owner: object) -> None:
    """Stop tracking an object that its user has closed; idempotent."""
    for key in [key for key, entry in _tracked.items() if entry.owner() is owner]:
        del _tracked[key]


def reclaim(topology: object, gather: Callable[[Report], list[Report]]) -> int:
    """Close the objects that are garbage on all ranks; return the number for the next object.

    Collective over the topology's ranks; blocking.
    """
    entries = {
        number: entry for (_, number), entry in _tracked.items() if entry.topology is topology
    }
    if len(entries) >= COLLECT_FROM:
        gc.collect()
    garbage = {
        number: entry.callbacks.state()
        for number, entry in entries.items()
        if entry.owner() is None
    }
    reports = gather((garbage, entries.keys() - garbage.keys()))
    in_use = set().union(*(used for _, used in reports))
    for number in sorted(garbage.keys() - in_use):
        callbacks = _tracked.pop((id(topology), number)).callbacks
        states = [states.get(number) for states, _ in reports]
        alike = states[0] is not None and all(state == states[0] for state in states)
        (callbacks.close if alike else callbacks.abandon)()
    numbers = (number for states, used in reports for number in (*states, *used))
    return 1 + max(numbers, default=0)
