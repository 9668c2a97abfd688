"""The models that are kept in step now: a parameter belongs to one optimizer, the latest.

Hooks on parameters outlive an optimizer that was dropped without `close`.
"""

import atexit
import itertools
import logging
import sys
import weakref
from functools import partial

from daso.comm.reclaim import Closer
from daso.comm.topology import Topology
from daso.errors import ConfigError
from daso.train.model.params import Trained
from daso.train.synchronizer import Synchronizer

__all__ = ["add", "close", "closer_of", "forget", "take_over", "trained_ids"]

logger = logging.getLogger("daso")

_open_syncs: "weakref.WeakValueDictionary[int, Synchronizer]" = weakref.WeakValueDictionary()
_numbers = itertools.count()  # in the order in which they were opened, the same on every rank


def add(sync: Synchronizer) -> None:
    """Register a model until `close`, or the end of the process."""
    _open_syncs[next(_numbers)] = sync


def trained_ids() -> set[int]:
    """Return the ids of the parameters that open optimizers train."""
    syncs = [sync for _, sync in sorted(_open_syncs.items()) if sync.over is None]
    return {id(tensor) for sync in syncs for _, tensor in sync.trained.named}


def take_over(trained: Trained, topology: Topology) -> None:
    """Close the optimizers that average any of these parameters already.

    Collective over the world; blocking.
    """
    ours = {id(tensor) for _, tensor in trained.named}
    earlier = [
        sync
        for _, sync in sorted(_open_syncs.items())
        if sync.over is None and any(id(tensor) in ours for _, tensor in sync.trained.named)
    ]
    if not topology.equal_on_all_ranks(len(earlier)):
        raise ConfigError(
            "parameters must be wrapped on every rank or on none, but on some ranks they are "
            "wrapped already; close() that optimizer"
        )
    for sync in earlier:
        if topology.rank == 0:
            logger.warning("parameters were wrapped before: that one is closed, this one goes on")
        sync.settle()
        sync.forget()
        sync.coordinator.equalize(expected=True)
        sync.coordinator.join()
        sync.over = "was closed when its parameters were wrapped again"
        close(sync)


def close(sync: Synchronizer) -> None:
    """Close a model, and forget it where that ended well: else threads may go on.

    Collective over the world; blocking; idempotent.
    """
    if sync.close():
        forget(sync)


def forget(sync: Synchronizer) -> None:
    """Forget a model that is over."""
    for number in [number for number, one in _open_syncs.items() if one is sync]:
        del _open_syncs[number]


def closer_of(sync: Synchronizer) -> Closer:
    """Return how to close a model whose optimizer was dropped: hooks keep it alive until then."""
    return Closer(partial(close, sync), sync.abandon, sync.sound_steps)


@atexit.register
def _stop_engines() -> None:
    """Stop the threads before MPI is finalized; nothing collective: ranks may be missing."""
    for sync in list(_open_syncs.values()):
        _warn_if_apart(sync)
        sync.abandon()


def _warn_if_apart(sync: Synchronizer) -> None:
    """Warn where a program ends while nodes hold different parameters, unless it failed."""
    failed = getattr(sys, "last_value", None) is not None
    if sync.apart and sync.over is None and sync.coordinator.leads and not failed:
        logger.warning(
            "nodes must agree before a program evaluates, saves or ends, but this one ends while "
            "they hold different parameters; call optimizer.synchronize() behind the last step"
        )
