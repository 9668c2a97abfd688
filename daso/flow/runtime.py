"""`daso.flow.Runtime`: trains a flow over all ranks, many instances at once."""

import hashlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch

from daso.checks import (
    NONE,
    check,
    either,
    flag,
    instance_of,
    positive,
    validate_call,
    whole,
)
from daso.comm.collectives import gather
from daso.comm.mpi import load
from daso.comm.p2p.packets import routes
from daso.comm.reclaim import Closer, forget, keep, reclaim
from daso.comm.topology import Topology, default, errors_on_all_ranks
from daso.errors import CheckpointError, ConfigError, FlowError
from daso.flow.compute import Compute
from daso.flow.controller import Controller
from daso.flow.epoch import Epoch, Part, digest_of, put_together, summed
from daso.flow.loop_monitor import LoopMonitor
from daso.flow.messages import Post
from daso.flow.model.base import Base, Pass
from daso.flow.model.checks import wire
from daso.flow.model.graph import Graph, MakeOptimizer
from daso.flow.model.layers import Layers
from daso.flow.placement import Measured, Said, copied, measure, placed, said
from daso.flow.plan import Log, Updates, count_lanes
from daso.flow.replicas import FlowReplicas, MakeBetween
from daso.flow.worker import Worker, behaviours
from daso.plan.options import Exchange
from daso.strict import strict_json

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Runtime"]

MEASURED = 16  # instances by which nodes are placed
MEASURED_SECONDS = 2.0
CACHED = 4  # times the instances under way


@dataclass(frozen=True, slots=True)
class _Options:
    """Keywords of a `Runtime`, checked."""

    between_nodes: MakeBetween | None
    instances_per_batch: int
    max_active_keys: int
    seed: int
    timeout_seconds: float
    shuffle: bool


class _Wanted(NamedTuple):
    """Where layers are by the caller's word."""

    ranks: Mapping[int, tuple[int, ...]]  # of nodes
    copies: Mapping[int, int]  # how many ranks have a replica, of nodes


@dataclass(slots=True)
class _Journal:
    """What is kept of epochs."""

    logs: bool = False  # what an epoch is replayed from
    log: Log | None = None  # of the last epoch
    lines: Path | None = None  # file of a line for each epoch


class Runtime:
    """Trains a flow: its nodes are spread over all ranks, and many instances are under way at once.

    Each layer updates its own weights when it has gathered enough gradients, without a step in
    common::

        with daso.flow.Runtime(graph, lambda p: torch.optim.SGD(p, lr=0.1)) as runtime:
            for _ in range(10):
                print(runtime.train_epoch(instances).loss)

    All ranks build the same graph; layers start from world rank 0's parameters. Those of a layer
    are up to date on the ranks that compute it alone, until `synchronize`, or the end of ``with``.

    Args:
        graph: The flow.
        optimizer_factory: Makes the optimizer of one layer from a list of its parameters.
        topology: Who is where; found from MPI if None.
        placement: Rank of nodes, by name, or several ranks of a layer: each has a replica, for
            every so many-th instance. What is not named is placed by measuring some instances
            before the first epoch; with ``"auto"`` everything is.
        replicas: On how many ranks layers are, by name, where these are not chosen. Replicas are
            averaged at the end of every epoch.
        max_active_keys: Instances under way at once.
        updates: When weights change.
        shuffle: Each rank takes what waits in an order drawn at random from the seed, instead of
            gradients first: to find out what a training owes to its order.
        between_nodes: Makes every node compute a whole flow, with instances of its own, and keeps
            these in step: wraps an optimizer over the ranks of a topology, as ``lambda moves,
            across: daso.DASO(moves, topology=across)`` does. None: one flow over all ranks.
        instances_per_batch: How many finished instances of each flow are a batch to it.
        seed: Of random numbers in layers with torch's dropout modules: they depend on it, the
            epoch, the layer, the instance and its state alone. A layer that draws otherwise
            (``F.dropout`` in its forward) depends on what came before, and is not replayed.
        timeout_seconds: How long a rank waits without a message before it raises and names who is
            missing.

    Raises:
        ConfigError: A keyword has no such value, or ranks were given different ones.
        FlowError: The graph can never work, or a name in a keyword is not in it.
        TopologyError: MPI, launcher and ranks do not fit together.

    Collective over the world; blocking.
    """

    @validate_call
    def __init__(  # noqa: PLR0913 - checked here, each by itself
        self,
        graph: Graph,
        optimizer_factory: MakeOptimizer,
        *,
        topology: Topology | None = None,
        placement: Literal["auto"] | Said = "auto",
        replicas: Mapping[str, int] | None = None,
        max_active_keys: int = 16,
        updates: Updates | None = None,
        shuffle: bool = False,
        between_nodes: MakeBetween | None = None,
        instances_per_batch: int = 16,
        seed: int = 0,
        timeout_seconds: float = Exchange().timeout_seconds,
    ) -> None:
        limit = timeout_seconds if positive().holds(timeout_seconds) else Exchange().timeout_seconds
        with errors_on_all_ranks(topology, "make a flow's Runtime", limit):
            _check_records(topology, updates, shuffle)
            _check_numbers(max_active_keys, instances_per_batch, seed, timeout_seconds)
            self._wiring = wire(graph)
        self._whole = default() if topology is None else topology
        self._options = _Options(
            between_nodes, instances_per_batch, max_active_keys, seed, timeout_seconds, shuffle
        )
        self._held = ExitStack()  # what close() gives back
        number = self._enter(timeout_seconds)
        self._topology = self._flow_topology()
        self._beside: FlowReplicas | None = None
        ranks = self._topology.world_size
        fixed = said(self._wiring, {} if placement == "auto" else placement, ranks)
        self._wanted = _Wanted(fixed, copied(self._wiring, replicas or {}, fixed, ranks))
        updates = Updates() if updates is None else updates
        alike = (max_active_keys, updates, shuffle, seed, *self._wanted, instances_per_batch)
        self._check_same(alike)
        self._world = self._topology.world_comm.Dup()
        self._message_comm = self._topology.world_comm.Dup()
        self._held.callback(_free, self._world, self._message_comm)
        keep(self, self._whole, number, Closer(self._held.close, int, int))
        self._packets, _ = routes(self._topology, self._message_comm, "messages", 0)
        self._layers = Layers(self._wiring, optimizer_factory, updates, self._world)
        self._layers.fetch(lambda _: 0, self._whole.world_comm)
        self.epoch = 0  # passes that trained
        self._journal = _Journal()
        self._closed = False

    def _enter(self, timeout_seconds: float) -> int:
        """Close what was forgotten; return this runtime's number. Collective; blocking."""
        whole = self._whole
        whole.rendezvous("make a flow's Runtime", timeout_seconds)
        return reclaim(whole, lambda word: gather(whole, word, timeout_seconds))

    def _flow_topology(self) -> Topology:
        """Return the topology of one flow. Collective over the world; blocking."""
        whole = self._whole
        if not whole.equal_on_all_ranks(self._options.between_nodes is None):
            raise ConfigError("between_nodes must be given to all ranks or to none, not to some")
        if self._options.between_nodes is None:
            return whole
        inside = _inside(whole)
        self._held.callback(inside.free)
        return inside

    def _check_same(self, keywords: Any) -> None:
        nodes = [
            (node.name, node.kind, node.inputs, node.outputs, _shapes(node.call))
            for node in self._wiring.nodes
        ]
        digest = hashlib.sha256(repr((nodes, self._wiring.edges, keywords)).encode()).hexdigest()
        problem = None
        if digest != self._whole.world_comm.bcast(digest):
            problem = (
                "every rank must build the same flow and be given the same keywords, but this "
                "one's differ from rank 0's"
            )
        self._whole.raise_on_all_ranks(problem, ConfigError)

    # --- epochs ------------------------------------------------------------------------------

    def train_epoch(
        self, instances: Sequence[Any], *, progress: Callable[[int, int], None] | None = None
    ) -> Epoch:
        """Let instances through the flow, in their order, and train with them.

        Args:
            instances: The same on every rank, in the same order; where nodes have flows of their
                own, on every rank of a node, and as many on all nodes. Each rank asks for those
                that its layers are told of, perhaps several times.
            progress: Called on world rank 0 about once a second: instances finished, and all.

        Returns:
            What happened, in all flows together, the same on every rank.

        Raises:
            FlowError: A node failed, or waits for what cannot come; names it, instance and state.
            StallError: No message came for as long as may be.

        Collective over the world; blocking.
        """
        found = self._go_through(instances, progress, trains=True)
        self.epoch += 1
        return found

    def evaluate(
        self, instances: Sequence[Any], *, progress: Callable[[int, int], None] | None = None
    ) -> Epoch:
        """Let instances through the flow forward alone, with modules in evaluation mode.

        Args:
            instances: As for `train_epoch`.
            progress: Likewise.

        Returns:
            What happened, the same on every rank.

        Collective over the world; blocking.
        """
        with self._evaluating():
            return self._go_through(instances, progress, trains=False)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modules = [one for node in self._layers.nodes for one in node.call.modules()]
        trained = [one for one in modules if one.training]
        for one in modules:
            one.training = False
        try:
            yield
        finally:
            for one in trained:
                one.training = True

    def _go_through(
        self,
        instances: Sequence[Any],
        progress: Callable[[int, int], None] | None,
        *,
        trains: bool,
    ) -> Epoch:
        if self._closed:
            raise ConfigError("a runtime must be open to train, but close() was called")
        if trains and (problem := self._layers.changed()) is not None:
            raise ConfigError(problem)
        self._check_instances(instances)
        self._place(instances)
        for weights in self._layers.weights.values():
            weights.begin()
        loop = self._loop(instances, progress, trains=trains)
        before = self._counts()
        start = time.perf_counter()
        loop.worker.run()
        # Before ranks wait for each other: packets of an imitated link leave as somebody looks.
        sent_bytes = 0 if loop.post is None else loop.post.drain()
        if trains:
            self._settle(loop, len(instances))
        seconds = time.perf_counter() - start
        part = Part(
            *summed(loop.all.results),
            seconds,
            loop.worker.busy_seconds,
            0 if loop.controller is None else loop.controller.highest,
            self._counts(before),
            sent_bytes,
        )
        flows = 1 if self._options.between_nodes is None else self._whole.nodes
        parts = self._whole.world_comm.allgather(part)
        found = put_together(self.epoch, trains, flows * len(instances), parts)
        self._write(found)
        return found

    def _loop(
        self,
        instances: Sequence[Any],
        progress: Callable[[int, int], None] | None,
        *,
        trains: bool,
    ) -> "_Loop":
        rank_info, ranks_of = self._topology.rank_info, self._layers.ranks_of
        all_ = Pass(
            _asked(instances, CACHED * self._options.max_active_keys), trains, self._seed_now()
        )
        controller = None
        if rank_info.rank == 0:
            source = self._wiring.nodes[self._wiring.source]
            controller = Controller(
                self._options.max_active_keys, len(instances), source, count_lanes(ranks_of)
            )
        nodes = self._behaviours(all_)
        post = Post(self._packets, self._device()) if rank_info.world_size > 1 else None
        told = progress if self._whole.rank == 0 else None
        beside = self._beside if trains else None
        watch = LoopMonitor(self._whole, self._options.timeout_seconds, controller, told, beside)
        drawn = random.Random(hash((all_.seed, rank_info.rank))) if self._options.shuffle else None
        worker = Worker(
            self._wiring, nodes, ranks_of, rank_info, post, all_, controller, watch, drawn
        )
        watch.waiting = worker.here.waiting
        worker.log = [] if self._journal.logs and trains else None
        return _Loop(worker, all_, controller, post)

    def _seed_now(self) -> int:
        # Of dropout: each node's flow has instances of its own.
        node = () if self._options.between_nodes is None else (self._whole.node,)
        return hash((self._options.seed, self.epoch, *node))

    def _settle(self, loop: "_Loop", count: int) -> None:
        """Take in what is left of gradients, and let replicas and other nodes meet."""
        nodes, log = loop.worker.here.nodes, loop.worker.log
        left = [one.node.name for one in nodes.values() if one.cache]
        if left:
            raise FlowError(
                f"every message must come back once, but nodes {left} still wait for some: one of "
                f"their messages did not come to a loss"
            )
        for one in nodes.values():
            if isinstance(one, Compute):
                one.settle()
        if self._beside is not None:
            losses = self._world.allgather(summed(loop.all.results)[0])
            self._beside.end_epoch(math.fsum(losses) / count)
            self._layers.publish()
        self._layers.average()
        if log is not None:
            digests = tuple((node, one.digest()) for node, one in self._layers.weights.items())
            self._journal.log = Log(
                self._topology.rank,
                self._layers.updates,
                self._seed_now(),
                self._layers.ranks_of,
                () if loop.controller is None else tuple(loop.controller.lane_of),
                tuple(log),
                digests,
            )

    def _check_instances(self, instances: Sequence[Any]) -> None:
        self._whole.rendezvous("begin an epoch of a flow", self._options.timeout_seconds)
        count = len(instances)
        problem = None if count else "an epoch must have one instance at least, not none"
        self._whole.raise_on_all_ranks(problem, ConfigError)
        ends = (count, *(digest_of(instances[place]) for place in (0, count - 1)))
        first = self._whole.world_comm.bcast(count)
        if ends != self._world.bcast(ends):
            problem = (
                "every rank must be given the same instances in the same order, but their number, "
                "the first or the last differs from rank 0's; shuffle with the same seed"
            )
        elif count != first:
            problem = (
                f"every node must be given as many instances as the first, but node "
                f"{self._whole.node} was given {count}; leave some out"
            )
        self._whole.raise_on_all_ranks(problem, FlowError)

    def _counts(
        self, before: tuple[int, int, int, int] = (0, 0, 0, 0)
    ) -> tuple[int, int, int, int]:
        """Return updates, gradients and their ages, of all layers since then; the highest age."""
        updates = gradients = ages = highest = 0
        for one in self._layers.weights.values():
            updates += one.version
            gradients += one.ages[0]
            ages += one.ages[1]
            highest, one.ages[2] = max(highest, one.ages[2]), 0
        return updates - before[0], gradients - before[1], ages - before[2], highest

    # --- nodes -------------------------------------------------------------------------------

    def measure(self, instances: Sequence[Any], count: int = MEASURED) -> Measured:
        """Return what nodes take for the first of some instances, in this process alone.

        Args:
            instances: As for `train_epoch`.
            count: How many at most; fewer where they take seconds.
        """
        count = min(count, len(instances))
        return measure(self._wiring, instances.__getitem__, count, MEASURED_SECONDS)

    def _place(self, instances: Sequence[Any]) -> None:
        """Settle who computes what, if that is not done yet."""
        if self._layers.ranks_of:
            return
        # An optimizer's first step imports it, for seconds: on all ranks now, while none waits for
        # a message.
        import torch._dynamo  # noqa: F401

        rank_info = self._topology.rank_info
        ranks_of: tuple[tuple[int, ...], ...] = ((0,),) * len(self._wiring.nodes)
        if rank_info.world_size > 1 and self._whole.rank == 0:
            measured = self.measure(instances)
            ranks_of = placed(self._wiring, measured, rank_info.world_size, *self._wanted)
        self._layers.settle(self._whole.world_comm.bcast(ranks_of))
        self._stand_beside()

    def _stand_beside(self) -> None:
        """Join the flows of other nodes, from node 0's parameters."""
        if self._beside is not None:
            self._beside.close()
            self._beside = None
        if self._options.between_nodes is not None and self._layers.ranks_of:
            layers = self._layers
            self._beside = FlowReplicas(
                self._options.between_nodes, layers, self._whole, self._options.instances_per_batch
            )
            self._held.callback(self._beside.close)
            layers.publish()

    def _behaviours(self, all_: Pass) -> dict[int, Base]:
        rank, layers = self._topology.rank, self._layers
        here = [node for node, ranks in enumerate(layers.ranks_of) if rank in ranks]
        return behaviours(self._wiring, here, all_, layers.weights)

    def _device(self) -> torch.device:
        for one in self._layers.weights.values():
            for p in one.own:
                return p.device
        return torch.device("cpu")

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Optimizers of this rank's layers by name, once they are placed: for schedulers."""
        return {
            self._wiring.nodes[node].name: one.optimizer
            for node, one in self._layers.weights.items()
            if one.optimizer is not None
        }

    @property
    def placement(self) -> dict[str, tuple[int, ...]]:
        """Ranks of every node by name, once they are placed."""
        nodes = self._wiring.nodes
        return {nodes[node].name: ranks for node, ranks in enumerate(self._layers.ranks_of)}

    # --- beside epochs -----------------------------------------------------------------------

    def synchronize(self) -> None:
        """Give every rank the parameters and buffers of all layers.

        Where nodes have flows of their own, parameters become the mean of all.

        Collective over the world; blocking.
        """
        ranks_of = self._layers.ranks_of
        if self._beside is not None:
            self._beside.synchronize()
            self._layers.publish()
            self._layers.average()  # of replicas, each of which has met its own elsewhere
            self._beside.settle()
        if ranks_of:
            self._layers.fetch(lambda node: ranks_of[node][0])

    def keep_log(self) -> None:
        """Keep from now on what an epoch is replayed from, in memory; see `daso.flow.replay`.

        Raises:
            ConfigError: Nodes have flows of their own: what comes of the others is in no log.
        """
        if self._options.between_nodes is not None:
            raise ConfigError(
                "a log must hold all that was trained, but what comes of the flows of other nodes "
                "is in none; leave between_nodes out"
            )
        self._journal.logs = True

    def logged(self) -> Log:
        """Return what this rank did in the last epoch that trained.

        Raises:
            ConfigError: `keep_log` was not called before it.
        """
        if self._journal.log is None:
            raise ConfigError("a log must be kept before it is read; call keep_log() first")
        return self._journal.log

    def write_lines(self, path: Path) -> None:
        """Append every epoch from now on to a file, as a line of JSON; on world rank 0 alone.

        A loss that is not finite is a string in it: "nan", "inf" or "-inf".

        Args:
            path: The file; made if it is not there.
        """
        self._journal.lines = Path(path)

    def _write(self, epoch: Epoch) -> None:
        if self._journal.lines is not None and self._whole.rank == 0:
            with self._journal.lines.open("a", encoding="utf-8") as file:
                file.write(strict_json(asdict(epoch)) + "\n")

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's layers and their optimizers, between epochs; save one on each rank."""
        beside = None if self._beside is None else self._beside.state_dict()
        return {"epoch": self.epoch, "beside": beside, **self._layers.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank.

        Args:
            state_dict: Of a flow with the same layers, in a world of the same size.

        Raises:
            CheckpointError: It is of another flow, or of more ranks.

        Collective over the world; blocking.
        """
        self._whole.raise_on_all_ranks(self._unfit(state_dict), CheckpointError)
        self.epoch = int(state_dict["epoch"])
        self._layers.settle(tuple(map(tuple, state_dict["ranks_of"])))
        self._stand_beside()
        self._layers.load_state_dict(state_dict)
        if self._beside is not None:
            self._beside.load_state_dict(state_dict["beside"])

    def _unfit(self, state: Mapping[str, Any]) -> str | None:
        """Return why a state cannot be gone on from; None if it can."""
        alone = state.get("beside") is None
        if state["ranks_of"] and alone != (self._options.between_nodes is None):
            return (
                f"state must be that of a flow {'alone' if alone else 'between nodes'} to go on "
                f"with one, but between_nodes is {'given' if alone else 'not'}"
            )
        return self._layers.unfit(state)

    def close(self) -> None:
        """Give communicators back. Collective over the world; blocking; idempotent."""
        if not self._closed:
            self._closed = True
            self._whole.rendezvous("close a flow's Runtime", self._options.timeout_seconds)
            self._held.close()
            forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.synchronize()
            self.close()


def _free(*comms: "MPI.Comm") -> None:
    """Give communicators back. Collective over their ranks; idempotent."""
    for comm in comms:
        if comm != load().COMM_NULL:
            comm.Free()


class _Loop(NamedTuple):
    """One pass of this rank, and what it is told by."""

    worker: Worker
    all: Pass
    controller: Controller | None
    post: Post | None


def _inside(topology: Topology) -> Topology:
    """Return the topology of this rank's node alone. Collective over the world; blocking."""
    sizes = topology.node_sizes
    problem = None
    if len(set(sizes)) > 1:
        problem = (
            f"flows that are beside each other must have as many ranks on every node, but the "
            f"nodes have {list(sizes)}; start as many on each"
        )
    topology.raise_on_all_ranks(problem, ConfigError)
    node = topology.world_comm.Split(topology.node, topology.local_rank)
    found = Topology(node, ranks_per_node=topology.local_size)
    node.Free()
    return found


def _asked(instances: Sequence[Any], cached: int) -> Callable[[int], Any]:
    if isinstance(instances, list | tuple):
        return instances.__getitem__
    return lru_cache(maxsize=cached)(instances.__getitem__)  # which may be slow


def _shapes(call: Any) -> list[Any]:
    if not isinstance(call, torch.nn.Module):
        return []
    return [(name, tuple(t.shape), str(t.dtype)) for name, t in call.state_dict().items()]


def _check_records(topology: object, updates: object, shuffle: object) -> None:
    check("topology", topology, either(instance_of(Topology), NONE))
    check("updates", updates, either(instance_of(Updates), NONE))
    check("shuffle", shuffle, flag())


def _check_numbers(
    max_active_keys: object, instances_per_batch: object, seed: object, timeout_seconds: object
) -> None:
    check("max_active_keys", max_active_keys, whole(1))
    check("instances_per_batch", instances_per_batch, whole(1))
    check("seed", seed, whole(0, 2**63 - 1))
    check("timeout_seconds", timeout_seconds, positive())
