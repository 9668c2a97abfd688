"""`daso.flow.Runtime`: trains a flow over all ranks, many instances at once."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from daso.checks import NONE, check, either, instance_of, positive, validate_call
from daso.comm.control import STALL_SECONDS, broadcast, gather
from daso.comm.mpi import load
from daso.comm.p2p.routes import routes
from daso.comm.reclaim import CloseCallbacks, reclaim, track, untrack
from daso.comm.topology import Topology, default, errors_on_all_ranks
from daso.errors import CheckpointError, ConfigError
from daso.flow.epoch import Epoch
from daso.flow.epoch_runner import EpochRunner, Options, Progress
from daso.flow.measuring import Measured, measure
from daso.flow.model.checks import wire
from daso.flow.model.graph import Graph
from daso.flow.model.layers import Layers
from daso.flow.model.node import MakeOptimizer
from daso.flow.placement import Placement, choose_homes, requested_homes, requested_replicas
from daso.flow.plan import Log, Updates
from daso.flow.replicas import FlowReplicas, MakeBetween, flow_topology
from daso.plan.options import Exchange
from daso.strict import strict_json
from daso.torch_private import load_compiler

if TYPE_CHECKING:
    from mpi4py import MPI

MEASURED = 16  # instances measured to place nodes
MEASURED_SECONDS = 2.0


class Runtime:
    """Trains a flow with its nodes spread over all ranks and many instances under way at once.

    Each layer steps by itself when it has gathered enough gradients::

        with daso.flow.Runtime(graph, lambda p: torch.optim.SGD(p, lr=0.1)) as runtime:
            for _ in range(10):
                print(runtime.train_epoch(instances).loss)

    All ranks build the same graph; layers start from world rank 0's parameters. Only the ranks
    that compute a layer have its current parameters, until `synchronize` or the end of ``with``.

    Args:
        graph: The flow.
        optimizer_factory: Makes the optimizer of one layer from a list of its parameters.
        topology: The world's topology; None: from MPI.
        placement: Rank of nodes, by name, or several ranks for a layer, which get replicas and
            share the instances. Nodes without a name here are placed by measuring some instances
            before the first epoch; with ``"auto"`` all are.
        replicas: Number of replicas of layers, by name; their ranks are chosen. Replicas are
            averaged at the end of every epoch.
        max_active_keys: Highest number of instances under way at once.
        updates: When layers update their weights.
        shuffle: Each rank computes waiting messages in random order, drawn from the seed, instead
            of gradients first: shows how much a training depends on its order.
        between_nodes: Makes every node compute a whole flow, with different instances, and keeps
            the flows in step: wraps an optimizer over the ranks of a topology, as ``lambda moves,
            across: daso.DASO(moves, topology=across)`` does. None: one flow over all ranks.
        instances_per_batch: Number of finished instances of each flow in one of its batches.
        seed: Seed of random numbers in layers with torch's dropout modules: these depend only on
            it, the epoch, the layer, the instance and its state. A layer that draws otherwise
            (``F.dropout`` in its forward) depends on earlier draws, and is not replayed.
        timeout_seconds: Seconds that a rank waits without a message before it raises an error with
            the missing ranks.

    Raises:
        ConfigError: A keyword is out of range, or differs between ranks.
        FlowError: The graph cannot work, or a keyword names a node that is not in it.
        TopologyError: MPI, launcher and ranks do not match.

    Collective over the world; blocking.
    """

    @validate_call
    def __init__(  # noqa: PLR0913 - each is checked here
        self,
        graph: Graph,
        optimizer_factory: MakeOptimizer,
        *,
        topology: Topology | None = None,
        placement: Literal["auto"] | Placement = "auto",
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
            check("topology", topology, either(instance_of(Topology), NONE))
            check("updates", updates, either(instance_of(Updates), NONE))
            self._options = Options(
                between_nodes, instances_per_batch, max_active_keys, seed, timeout_seconds, shuffle
            )
            self._wiring = wire(graph)
        self._world = default() if topology is None else topology
        self._resources = ExitStack()  # closed by close()
        number = self._enter(timeout_seconds)
        self._topology = self._flow_topology()
        ranks = self._topology.world_size
        fixed = requested_homes(self._wiring, {} if placement == "auto" else placement, ranks)
        self._request = (fixed, requested_replicas(self._wiring, replicas or {}, fixed, ranks))
        updates = Updates() if updates is None else updates
        alike = (max_active_keys, updates, shuffle, seed, *self._request, instances_per_batch)
        self._check_same(alike)
        message_comm = self._topology.world_comm.Dup()
        self._resources.callback(_free, message_comm)
        track(self, self._world, number, CloseCallbacks(self._resources.close, int, int))
        packets = routes(self._topology, message_comm)
        self._layers = Layers(
            self._wiring, optimizer_factory, updates, self._topology, timeout_seconds
        )
        self._layers.fetch(lambda _: 0, self._world)
        self._runner = EpochRunner(
            self._world, self._topology, self._layers, packets, self._options
        )
        self._lines: Path | None = None  # file of a line for each epoch
        self._closed = False

    def _enter(self, timeout_seconds: float) -> int:
        """Close forgotten runtimes; return this runtime's number. Collective; blocking."""
        world = self._world
        world.rendezvous("make a flow's Runtime", timeout_seconds)
        return reclaim(world, lambda word: gather(world, word, timeout_seconds))

    def _flow_topology(self) -> Topology:
        """Return the topology of one flow. Collective over the world; blocking."""
        limit, is_alone = self._options.timeout_seconds, self._options.between_nodes is None
        topology = flow_topology(self._world, limit, is_alone=is_alone)
        if not is_alone:
            self._resources.callback(topology.free)
        return topology

    def _check_same(self, keywords: Any) -> None:
        """Raise on all ranks unless all have the same flow and keywords. Collective; blocking."""
        limit = self._options.timeout_seconds
        text = repr((self._wiring.description(), keywords))
        digest = hashlib.sha256(text.encode()).hexdigest()
        problem = None
        if digest != broadcast(self._world, digest, limit):
            problem = ConfigError(
                "every rank must build the same flow and be given the same keywords, but this "
                "one's differ from rank 0's",
                code="flows-differ-between-ranks",
            )
        self._world.raise_on_all_ranks(problem, limit)

    # --- epochs ------------------------------------------------------------------------------

    def train_epoch(
        self, instances: Sequence[Any], *, progress: Callable[[int, int], None] | None = None
    ) -> Epoch:
        """Train with instances, admitted to the flow in their order.

        Args:
            instances: The same on every rank, in the same order; with ``between_nodes``, the same
                on every rank of a node, and as many on all nodes. Each rank reads the instances
                that its layers need, possibly several times.
            progress: Called on world rank 0 about once a second with the number of finished
                instances and of all.

        Returns:
            The report of all flows together, the same on every rank.

        Raises:
            FlowError: A node failed, or waits for a message that cannot come; the error names the
                node, the instance and the state.
            StallError: No message arrived within ``timeout_seconds``.

        Collective over the world; blocking.
        """
        return self._run_pass(instances, progress, trains=True)

    def evaluate(
        self, instances: Sequence[Any], *, progress: Callable[[int, int], None] | None = None
    ) -> Epoch:
        """Run instances forward only, with modules in evaluation mode.

        Args:
            instances: As for `train_epoch`.
            progress: As for `train_epoch`.

        Returns:
            The report, the same on every rank.

        Collective over the world; blocking.
        """
        with self._layers.evaluating():
            return self._run_pass(instances, progress, trains=False)

    def _run_pass(
        self, instances: Sequence[Any], progress: Progress | None, *, trains: bool
    ) -> Epoch:
        if self._closed:
            raise ConfigError(
                "a runtime must be open, but close() was called; make another",
                code="runtime-is-closed",
            )
        if trains and (problem := self._layers.changed()) is not None:
            raise problem
        self._runner.check_instances(instances)
        self._place(instances)
        epoch = self._runner.run(instances, progress, trains=trains)
        if self._lines is not None and self._world.rank == 0:
            with self._lines.open("a", encoding="utf-8") as file:
                file.write(strict_json(asdict(epoch)) + "\n")
        return epoch

    # --- nodes -------------------------------------------------------------------------------

    def measure(self, instances: Sequence[Any], count: int = MEASURED) -> Measured:
        """Measure the nodes for the first instances, in this process only.

        Args:
            instances: As for `train_epoch`.
            count: Highest number of instances; fewer if they take seconds.
        """
        count = min(count, len(instances))
        return measure(self._wiring, instances.__getitem__, count, MEASURED_SECONDS)

    def _place(self, instances: Sequence[Any]) -> None:
        """Choose the ranks of all nodes, in the first epoch. Collective; blocking."""
        if self._layers.ranks_of:
            return
        load_compiler()  # on all ranks now, while none waits for a message
        rank_info = self._topology.rank_info
        ranks_of: tuple[tuple[int, ...], ...] = ((0,),) * len(self._wiring.nodes)
        if rank_info.world_size > 1 and self._world.rank == 0:
            measured = self.measure(instances)
            costs = measured.seconds, measured.traffic, measured.crossing
            ranks_of = choose_homes(self._wiring, *costs, rank_info.world_size, *self._request)
        # Rank 0 measures instances first, which may take longer than a wait for a message.
        limit = max(STALL_SECONDS, self._options.timeout_seconds)
        self._layers.settle(broadcast(self._world, ranks_of, limit))
        self._join_nodes()

    def _join_nodes(self) -> None:
        """Join the flows of other nodes, from node 0's parameters."""
        make, layers = self._options.between_nodes, self._layers
        if self._runner.replicas is not None:
            self._runner.replicas.close()
            self._runner.replicas = None
        if make is not None and layers.ranks_of:
            each = self._options.instances_per_batch
            self._runner.replicas = FlowReplicas(make, layers, self._world, each)
            self._resources.callback(self._runner.replicas.close)
            layers.publish()

    @property
    def epoch(self) -> int:
        """Number of training passes so far."""
        return self._runner.epoch

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Optimizers of this rank's layers by name, after placement; for schedulers."""
        return {
            self._wiring.nodes[node].name: weights.optimizer
            for node, weights in self._layers.weights.items()
            if weights.optimizer is not None
        }

    @property
    def placement(self) -> dict[str, tuple[int, ...]]:
        """Ranks of every node by name, after placement."""
        nodes = self._wiring.nodes
        return {nodes[node].name: ranks for node, ranks in enumerate(self._layers.ranks_of)}

    # --- between epochs ----------------------------------------------------------------------

    def synchronize(self) -> None:
        """Copy the parameters and buffers of all layers to every rank.

        With ``between_nodes``, parameters become their mean over nodes.

        Collective over the world; blocking.
        """
        ranks_of = self._layers.ranks_of
        if (replicas := self._runner.replicas) is not None:
            replicas.synchronize()
            self._layers.publish()
            self._layers.average()  # replicas, each of which is averaged over nodes by now
            replicas.settle()
        if ranks_of:
            self._layers.fetch(lambda node: ranks_of[node][0])

    def keep_log(self) -> None:
        """Log the computations of epochs in memory from now on, for `daso.flow.replay`.

        Raises:
            ConfigError: ``between_nodes`` was given: a log lacks the updates of other nodes.
        """
        if self._options.between_nodes is not None:
            raise ConfigError(
                "a log must hold all updates, but those from the flows of other nodes are not "
                "logged; leave between_nodes out",
                code="log-of-other-flows",
            )
        self._runner.keeps_log = True

    def logged(self) -> Log:
        """Return this rank's log of the last training epoch.

        Raises:
            ConfigError: `keep_log` was not called before that epoch.
        """
        if self._runner.log is None:
            raise ConfigError(
                "a log must be kept before it is read; call keep_log() first", code="log-not-kept"
            )
        return self._runner.log

    def write_lines(self, path: Path) -> None:
        """Append the report of every epoch from now on to a file, as one line of JSON.

        Only world rank 0 writes. A loss that is not finite is written as the string "nan", "inf"
        or "-inf".

        Args:
            path: The file; created if missing.
        """
        self._lines = Path(path)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's layers and their optimizers, between epochs; save it on each rank."""
        replicas = self._runner.replicas
        replica_state = None if replicas is None else replicas.state_dict()
        return {"epoch": self.epoch, "beside": replica_state, **self._layers.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank.

        Args:
            state_dict: State of a flow with the same layers, in a world of the same size.

        Raises:
            CheckpointError: The state is of another flow, or of more ranks.

        Collective over the world; blocking.
        """
        problem, limit = self._unfit(state_dict), self._options.timeout_seconds
        self._world.raise_on_all_ranks(problem, limit)
        self._runner.epoch = int(state_dict["epoch"])
        self._layers.settle(tuple(map(tuple, state_dict["ranks_of"])))
        self._join_nodes()
        self._layers.load_state_dict(state_dict)
        if self._runner.replicas is not None:
            self._runner.replicas.load_state_dict(state_dict["beside"])

    def _unfit(self, state: Mapping[str, Any]) -> CheckpointError | None:
        """Return why a state cannot be loaded; None if it can."""
        alone = state.get("beside") is None
        if state["ranks_of"] and alone != (self._options.between_nodes is None):
            return CheckpointError(
                f"state must be that of a flow {'alone' if alone else 'between nodes'} to go on "
                f"with one, but between_nodes is {'given' if alone else 'not'}",
                code="state-of-other-nodes",
            )
        return self._layers.unfit(state)

    def close(self) -> None:
        """Free the communicators. Collective over the world; blocking; idempotent."""
        if not self._closed:
            self._closed = True
            self._world.rendezvous("close a flow's Runtime", self._options.timeout_seconds)
            self._resources.close()
            untrack(self)

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
    """Free communicators. Collective over their ranks; idempotent."""
    for comm in comms:
        if comm != load().COMM_NULL:
            comm.Free()
