"""Builds and releases the parts of one model, and registers them with other optimizers."""

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from daso.comm.control import gather
from daso.comm.reclaim import count_open, reclaim, track, untrack
from daso.comm.topology import RankInfo, Topology, default
from daso.train.build import SessionCallbacks, build_parts
from daso.train.metrics import Metrics
from daso.train.model.params import Trained
from daso.train.parts import Parts, close_parts, closer_of, forget_parts, register, trained_ids
from daso.train.setup import Setup

logger = logging.getLogger("daso")
MANY = 10  # open optimizers from one warning to the next


class Watcher(ABC):
    """Interface to recovery from lost ranks; see `daso.train.recovery`."""

    @abstractmethod
    def absorbs(self, error: Exception) -> bool:
        """Return whether the next step handles an error that a backward raised."""

    @abstractmethod
    def opened(self, parts: Parts) -> None:
        """Handle the construction of parts. Collective over the world; blocking."""


class PartsOwner:
    """Owner of the parts of one model.

    Args:
        inner: The user's optimizer.
        setup: Its keywords.
        topology: The ranks and nodes; found from MPI if None.
        watcher: Recovery from lost ranks, if any; held by a weak reference.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        setup: Setup,
        topology: Topology | None,
        watcher: Watcher | None,
    ) -> None:
        self.inner, self.setup, self.known_topology = inner, setup, topology
        self._watcher = None if watcher is None else weakref.ref(watcher)
        self.parts: Parts | None = None
        self.metrics: Metrics | None = None  # of all parts so far; None before the first
        self.number = 0  # among optimizers that are open

    @property
    def topology(self) -> Topology:
        """Topology of the ranks."""
        if self.known_topology is None:
            self.known_topology = default()
        return self.known_topology

    @property
    def rank_info(self) -> RankInfo | None:
        """Ranks and nodes, if the topology is known already."""
        return None if self.known_topology is None else self.known_topology.rank_info

    def meet(self) -> None:
        """Wait for all ranks, and close optimizers that were dropped on all of them.

        Collective over the world; blocking.
        """
        topology, limit = self.topology, self.setup.settings.exchange.timeout_seconds
        topology.rendezvous("wrap an optimizer", limit)
        self.number = reclaim(topology, lambda report: gather(topology, report, limit))
        number = 1 + count_open(topology)
        if number % MANY == 0 and topology.rank == 0:
            logger.warning(
                "%d optimizers are open, and each holds communicators, of which MPI has few, and a "
                "thread: close() those that are not used",
                number,
            )

    def build(self, user: object, metrics: Metrics, *, first_step_checked: bool) -> Parts | None:
        """Build the parts; return None in a world of one rank.

        Args:
            user: Object whose garbage collection on all ranks closes the parts.
            metrics: Counters of the session.
            first_step_checked: Earlier parts of the same training did the checks of the first step.

        Collective over the world; blocking.
        """
        topology, setup = self.topology, self.setup
        if topology.world_size == 1:
            return None
        self.metrics = metrics
        self.parts = parts = build_parts(
            Trained.by(self.inner, setup.module),
            topology,
            setup.settings,
            metrics,
            outer=setup.outer,
            callbacks=SessionCallbacks(_absorbs(self._watcher), trained_ids),
            first_step_checked=first_step_checked,
        )
        parts.gradients.keep_alive(parts)
        register(parts)
        track(user, topology, self.number, closer_of(parts))
        return parts

    def warns(self) -> bool:
        """Return whether this rank logs warnings about this training."""
        return self.parts is not None and self.parts.coordinator.leads and not self.parts.over

    def notify_watcher(self, parts: Parts) -> None:
        """Pass new parts to the watcher, if any."""
        watcher = None if self._watcher is None else self._watcher()
        if watcher is not None:
            watcher.opened(parts)

    def close(self, user: object, parts: Parts) -> None:
        """Release parts. Collective over the world; blocking; idempotent."""
        close_parts(parts)
        untrack(user)

    def lose(self, user: object) -> Parts | None:
        """Abandon the parts after the loss of a rank; return them. Does not block long."""
        parts, self.parts = self.parts, None
        if parts is not None:
            parts.metrics.close_node(parts.node.idle_seconds)
            parts.lose()
            forget_parts(parts)
            untrack(user)
        return parts


def _absorbs(watcher: "weakref.ref[Watcher] | None") -> Callable[[Exception], bool]:
    """Return a callback to the watcher that holds a weak reference to it."""

    def absorbs(error: Exception) -> bool:
        """Return whether the next step handles an error that a backward raised."""
        live_watcher = None if watcher is None else watcher()
        return live_watcher is not None and live_watcher.absorbs(error)

    return absorbs
