"""Runs one pass of instances through a flow on one rank: setup, loop, last steps and report."""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from daso.checks import check, flag, positive, whole
from daso.comm.control import broadcast, gather
from daso.comm.p2p.packets import Packets
from daso.comm.topology import Topology
from daso.errors import ConfigError, DasoError, FlowError, StallError
from daso.flow.controller import Controller
from daso.flow.epoch import Epoch, Part, digest_of, merge_parts, sum_results
from daso.flow.messages import Post
from daso.flow.model.base import Pass
from daso.flow.model.layers import Layers
from daso.flow.plan import Log, count_lanes
from daso.flow.replicas import FlowReplicas, MakeBetween
from daso.flow.worker import LocalNodes, Worker

Progress = Callable[[int, int], None]
CACHED_PER_ACTIVE = 4  # instances in the cache, for each under way
PROGRESS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """Keywords of a `Runtime`, checked."""

    between_nodes: MakeBetween | None
    instances_per_batch: int
    max_active_keys: int
    seed: int
    timeout_seconds: float
    shuffle: bool

    def __post_init__(self) -> None:
        for name in ("instances_per_batch", "max_active_keys"):
            check(name, getattr(self, name), whole(1))
        check("seed", self.seed, whole(0, 2**63 - 1))
        check("timeout_seconds", self.timeout_seconds, positive())
        check("shuffle", self.shuffle, flag())


class LoopMonitor:
    """Callback of a loop: reports progress, raises `StallError` if no message arrives."""

    def __init__(
        self,
        world: Topology,
        timeout_seconds: float,
        controller: Controller | None,
        progress: Progress | None,
        waiting: Callable[[], list[str]],
    ) -> None:
        self._world, self._timeout_seconds = world, timeout_seconds
        self._controller, self._progress, self._waiting = controller, progress, waiting
        self._reported_at = time.perf_counter()

    def __call__(self, idle_seconds: float) -> None:
        """Answer liveness requests, report progress, raise after the time limit."""
        self._world.liveness.answer()
        now = time.perf_counter()
        controller, progress = self._controller, self._progress
        if progress and controller and now > self._reported_at + PROGRESS_SECONDS:
            self._reported_at = now
            progress(controller.finished, controller.count)
        if idle_seconds > self._timeout_seconds:
            waits = "; ".join(self._waiting()[:3]) or "no node of this rank waits for a part"
            raise StallError(
                f"a message must come within {self._timeout_seconds:g} s, but none came to rank "
                f"{self._world.rank}: {self._world.liveness.missing()}; {waits}; look there, "
                f"or raise timeout_seconds",
                code="message-timed-out",
            )


class EpochRunner:
    """Runs passes of instances through the layers of one rank."""

    def __init__(
        self,
        world: Topology,
        topology: Topology,
        layers: Layers,
        packets: Mapping[int, Packets],
        options: Options,
    ) -> None:
        self._world, self._topology, self._layers = world, topology, layers
        self._packets, self._options = packets, options
        self.replicas: FlowReplicas | None = None  # the same layers on other nodes
        self.epoch = 0  # passes that trained
        self.keeps_log = False
        self.log: Log | None = None  # of the last pass that trained

    def run(self, instances: Sequence[Any], progress: Progress | None, *, trains: bool) -> Epoch:
        """Run one pass; return all ranks' report. Collective over the world; blocking."""
        for weights in self._layers.weights.values():
            weights.begin()
        rank, ranks_of = self._topology.rank, self._layers.ranks_of
        controller = self._controller(len(instances)) if rank == 0 else None
        all_ = Pass(self._cached(instances), trains, self._seed())
        here = LocalNodes.of(self._layers.wiring, rank, ranks_of, all_, self._layers.weights)
        post = Post(self._packets, self._device()) if self._topology.world_size > 1 else None
        worker = Worker(
            here,
            self._topology.world_size,
            post=post,
            controller=controller,
            replicas=self.replicas if trains else None,
            monitor=self._monitor(controller, progress, here),
            shuffled=random.Random(hash((all_.seed, rank))) if self._options.shuffle else None,
        )
        worker.log = [] if self.keeps_log and trains else None
        before, start = self._counts(), time.perf_counter()
        worker.run()
        # Before ranks wait for each other: packets of an imitated link leave when polled.
        sent_bytes = 0 if post is None else post.drain()
        if trains:
            self._settle(worker, controller, len(instances))
        part = Part(
            *sum_results(all_.results),
            time.perf_counter() - start,
            worker.busy_seconds,
            0 if controller is None else controller.highest,
            self._counts(before),
            sent_bytes,
        )
        flows = 1 if self._options.between_nodes is None else self._world.nodes
        parts = gather(self._world, part, self._options.timeout_seconds)
        epoch = merge_parts(self.epoch, trains, flows * len(instances), parts)
        self.epoch += trains
        return epoch

    def check_instances(self, instances: Sequence[Any]) -> None:
        """Raise on all ranks unless all have the same instances. Collective; blocking."""
        self._world.rendezvous("begin an epoch of a flow", self._options.timeout_seconds)
        count = len(instances)
        problem: DasoError | None = None
        if not count:
            problem = ConfigError(
                "an epoch must have one instance at least, not none", code="epoch-without-instances"
            )
        self._world.raise_on_all_ranks(problem, self._options.timeout_seconds)
        ends = (count, *(digest_of(instances[place]) for place in (0, count - 1)))
        limit = self._options.timeout_seconds
        first = broadcast(self._world, count, limit)
        if ends != broadcast(self._topology, ends, limit):
            problem = FlowError(
                "every rank must be given the same instances in the same order, but their number, "
                "the first or the last differs from rank 0's; shuffle with the same seed",
                code="instances-differ-between-ranks",
            )
        elif count != first:
            problem = FlowError(
                f"every node must be given as many instances as the first, but node "
                f"{self._world.node} was given {count}; leave some out",
                code="instances-uneven-on-nodes",
            )
        self._world.raise_on_all_ranks(problem, self._options.timeout_seconds)

    def _controller(self, count: int) -> Controller:
        wiring, lanes = self._layers.wiring, count_lanes(self._layers.ranks_of)
        source = wiring.nodes[wiring.source]
        return Controller(self._options.max_active_keys, count, source, lanes)

    def _monitor(
        self, controller: Controller | None, progress: Progress | None, here: LocalNodes
    ) -> LoopMonitor:
        callback = progress if self._world.rank == 0 else None
        limit = self._options.timeout_seconds
        return LoopMonitor(self._world, limit, controller, callback, here.waiting)

    def _cached(self, instances: Sequence[Any]) -> Callable[[int], Any]:
        if isinstance(instances, list | tuple):
            return instances.__getitem__
        cached = CACHED_PER_ACTIVE * self._options.max_active_keys
        return lru_cache(maxsize=cached)(instances.__getitem__)  # reading one may be slow

    def _seed(self) -> int:
        # For dropout: the flows of different nodes have different instances.
        node = () if self._options.between_nodes is None else (self._world.node,)
        return hash((self._options.seed, self.epoch, *node))

    def _device(self) -> torch.device:
        own = (p for weights in self._layers.weights.values() for p in weights.own)
        return next((p.device for p in own), torch.device("cpu"))

    def _settle(self, worker: Worker, controller: Controller | None, count: int) -> None:
        """Step with the remaining gradients, then average replicas and nodes."""
        nodes = worker.here.nodes.values()
        if left := [node.node.name for node in nodes if node.cache]:
            raise FlowError(
                f"every message must come back once, but nodes {left} still wait for some: one of "
                f"their messages did not come to a loss; end every path in a loss",
                code="message-did-not-return",
            )
        for compute in worker.here.computes.values():
            compute.settle()
        if self.replicas is not None:
            loss = sum_results(worker.here.all.results)[0]
            losses = gather(self._topology, loss, self._options.timeout_seconds)
            self.replicas.end_epoch(math.fsum(losses) / count)
            self._layers.publish()
        self._layers.average()
        if worker.log is not None:
            digests = tuple(
                (node, layer_weights.digest())
                for node, layer_weights in self._layers.weights.items()
            )
            self.log = Log(
                self._topology.rank,
                self._layers.updates,
                worker.here.all.seed,
                self._layers.ranks_of,
                () if controller is None else tuple(controller.lane_of),
                tuple(worker.log),
                digests,
            )

    def _counts(
        self, before: tuple[int, int, int, int] = (0, 0, 0, 0)
    ) -> tuple[int, int, int, int]:
        """Return updates, gradients and the sum of their ages since ``before``; the highest age."""
        updates = gradients = ages = highest = 0
        for weights in self._layers.weights.values():
            updates += weights.version
            gradients += weights.ages[0]
            ages += weights.ages[1]
            highest, weights.ages[2] = max(highest, weights.ages[2]), 0
        return updates - before[0], gradients - before[1], ages - before[2], highest
