"""Parts that keep one model in step with the other ranks, and the registry of open models.

A parameter belongs to the latest optimizer that wraps it. Hooks on parameters outlive an optimizer
that was dropped without `close`.
"""

import atexit
import itertools
import logging
import sys
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

from daso.comm.control import broadcast
from daso.comm.health.survivors import raise_if_lost
from daso.comm.node.base import NodeTransport
from daso.comm.reclaim import CloseCallbacks
from daso.comm.step_timer import HostTimestamp
from daso.comm.topology import Topology
from daso.errors import ConfigError, ExchangeError
from daso.plan.schedule import State
from daso.train.channels import Channels
from daso.train.coordinator import Coordinator
from daso.train.deltas.exchange import DeltaExchange
from daso.train.gradients.averaging import GradientAveraging
from daso.train.gradients.step import GradientStep
from daso.train.metrics import Metrics
from daso.train.model.changes import ParameterChanges, ParameterWrites
from daso.train.model.params import Trained

logger = logging.getLogger("daso")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Parts:
    """Components that keep one model in step with the other ranks."""

    trained: Trained
    topology: Topology
    metrics: Metrics
    changes: ParameterChanges
    writes: ParameterWrites
    channels: Channels
    coordinator: Coordinator
    node: NodeTransport
    averaging: GradientAveraging
    gradients: GradientStep
    deltas: DeltaExchange | None  # None: one node
    over: str | None = None  # reason why the parts are unusable
    # States of the schedule: the one in force, after the last step, and at the last mean of nodes
    # that the program requested.
    entered: State | None = None
    stepped: State | None = None
    _agreed: State | None = None

    @property
    def apart(self) -> bool:
        """True if nodes hold different parameters and had no mean since the last step."""
        state = None if self.deltas is None or self.stepped is self._agreed else self.stepped
        return state is not None and not state.alike

    @property
    def exposed_seconds(self) -> float:
        """Seconds that this rank was idle because it waited for other ranks."""
        return self.metrics.exposed_seconds + self.node.idle_seconds

    def start_watch(self) -> None:
        """Start the step timer, on the clock of the device that computes."""
        copies = self.node.copies
        self.metrics.watch.start(HostTimestamp if copies is None else copies.timestamp)

    def pass_batch(self, state: State) -> None:
        """Count a batch in which this rank takes no step."""
        self.gradients.end_step(state.batch)
        self.metrics.pass_step()
        self.enter(state)

    def enter(self, state: State) -> None:
        """Apply the choices of a state of the schedule."""
        self.stepped = self.entered = state
        self._agreed = None
        if state.epoch != self.metrics.epoch:
            self.metrics.begin_epoch(state.epoch)
        changed = self.gradients.enter(state)
        if changed and state.synchronous and self.deltas is not None:
            self.deltas.rest()

    def note_agreed(self) -> None:
        """Record that the program holds the mean of nodes, or a state to resume from."""
        self._agreed = self.stepped

    def chosen(self) -> dict[str, str]:
        """Return the choices in force now, for reports."""
        choices = {"node_transport": self.node.name}
        if self.deltas is not None:
            choices |= self.deltas.chosen(self.averaging.wire)
        return choices

    # --- checkpoint --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state of all parts on this rank: plain values and tensors."""
        return {
            "exchanges": None if self.deltas is None else self.deltas.state(),
            "counts": self.metrics.state(),
            "gradients": self.gradients.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` returned on the same rank of a world of the same shape."""
        if self.deltas is not None:
            self.deltas.load(state["exchanges"])
        self.writes.forget()  # the loaded parameters belong to this state
        self.metrics.load(state["counts"])
        self.gradients.load(state["gradients"])

    # --- end ---------------------------------------------------------------------------------

    def close(self) -> bool:
        """Stop the threads and release all resources. Collective over the world; idempotent.

        Returns:
            Whether all work ended well; otherwise threads may still run.
        """
        self.over = self.over or "was closed"
        self.unhook()
        sound = self.averaging.close()
        sound = self.channels.close() and sound  # ends an exchange in flight
        if sound:
            self.node.free()
        self.deltas = None
        return sound

    def lose(self) -> None:
        """Abandon all but the node's memory after the loss of a rank. Does not block long."""
        self.over = "lost a rank"
        self.channels.lose()
        self.unhook()
        self.deltas = None

    def go_on_from(self, other: "Parts | None") -> None:
        """Replace parts that lost a rank, if this rank had some; free their memory.

        Collective over the world; blocking.
        """
        self.coordinator.skip_first_step_checks()
        # All ranks are here; later some of them train alone.
        own_order = None if other is None else other.gradients.reducer.rows.order
        limit = self.channels.settings.exchange.timeout_seconds
        order = broadcast(self.topology, own_order, limit)
        raise_if_lost(self.topology)  # the memory of a node is freed by all its ranks
        if order:
            self.gradients.reducer.rows.make(order)
        if other is not None:
            other.node.free()

    def sound_steps(self) -> int | None:
        """Return the number of steps taken; None if an exchange failed here."""
        try:
            self.averaging.check()
        except ExchangeError:
            return None
        return self.gradients.position().steps

    def abandon(self) -> None:
        """Stop all threads, even with work in flight; for the end of the process."""
        self.averaging.abandon()

    def unhook(self) -> None:
        """Remove the hooks from the user's model; idempotent."""
        self.writes.close()
        self.gradients.close()


# --- open models ---------------------------------------------------------------------------------

_open_parts: "weakref.WeakValueDictionary[int, Parts]" = weakref.WeakValueDictionary()
_numbers = itertools.count()  # in the order in which they were opened, the same on every rank


def register(parts: Parts) -> None:
    """Register a model until `close`, or the end of the process."""
    _open_parts[next(_numbers)] = parts


def trained_ids() -> set[int]:
    """Return the ids of the parameters that open optimizers train."""
    models = [parts for _, parts in sorted(_open_parts.items()) if parts.over is None]
    return {id(tensor) for parts in models for _, tensor in parts.trained.named}


def take_over(trained: Trained, topology: Topology, limit: float) -> None:
    """Close the optimizers that average any of these parameters already.

    Collective over the world; blocking.
    """
    ours = {id(tensor) for _, tensor in trained.named}
    earlier = [
        parts
        for _, parts in sorted(_open_parts.items())
        if parts.over is None and any(id(tensor) in ours for _, tensor in parts.trained.named)
    ]
    if not topology.equal_on_all_ranks(len(earlier), limit):
        raise ConfigError(
            "parameters must be wrapped on every rank or on none, but on some ranks they are "
            "wrapped already; close() that optimizer",
            code="wrapped-on-some-ranks",
        )
    for parts in earlier:
        if topology.rank == 0:
            logger.warning("parameters were wrapped before: daso closes the earlier optimizer")
        parts.gradients.settle()
        if parts.deltas is not None:
            parts.deltas.forget()
        parts.coordinator.equalize(expected=True)
        parts.coordinator.join()
        parts.over = "was closed when its parameters were wrapped again"
        close_parts(parts)


def close_parts(parts: Parts) -> None:
    """Close a model, and forget it if that ended well: otherwise threads may still run.

    Collective over the world; blocking; idempotent.
    """
    if parts.close():
        forget_parts(parts)


def forget_parts(parts: Parts) -> None:
    """Remove a model from the registry."""
    for number in [number for number, registered in _open_parts.items() if registered is parts]:
        del _open_parts[number]


def closer_of(parts: Parts) -> CloseCallbacks:
    """Return the callbacks that close a model whose optimizer was dropped."""
    return CloseCallbacks(partial(close_parts, parts), parts.abandon, parts.sound_steps)


@atexit.register
def _stop_engines() -> None:
    """Stop the threads before MPI is finalized. Does not communicate: ranks may be missing."""
    for parts in list(_open_parts.values()):
        _warn_if_apart(parts)
        parts.abandon()


def _warn_if_apart(parts: Parts) -> None:
    """Warn if a program ends without an error while nodes hold different parameters."""
    failed = getattr(sys, "last_value", None) is not None
    if parts.apart and parts.over is None and parts.coordinator.leads and not failed:
        logger.warning(
            "nodes must agree before a program evaluates, saves or ends, but this one ends while "
            "they hold different parameters; call optimizer.synchronize() after the last step"
        )
