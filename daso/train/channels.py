"""Inter-node channels of one model: the engine, its communicators, its exchanges."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any

import torch

from daso.comm.allreduce.direct import DeterministicAllReduce, deterministic_allreduce, iallreduce
from daso.comm.allreduce.message_sums import MessageSums
from daso.comm.allreduce.ordered import DeviceContext, window
from daso.comm.engine import Engine, Work
from daso.comm.health.step_watchdog import StepWatchdog
from daso.comm.health.survivors import revoke
from daso.comm.link_probe import link_costs, link_rates
from daso.comm.mpi import load
from daso.comm.node.base import NodeTransport
from daso.comm.reduction import CPU, BufferPool, Row, sum_buffer, whole
from daso.comm.topology import Topology
from daso.kernels.choice import kernels_for
from daso.kernels.codecs import Codec, exact_codec
from daso.plan.allreduce_plan import AllReducePlan, restored, stored
from daso.plan.cost_model import LinkCosts, choose_plan, depends_on_costs
from daso.plan.options import Settings
from daso.plan.routes import plan_routes
from daso.train.deltas.shard import LEAST
from daso.train.gradients.compression import GradientCompressor

if TYPE_CHECKING:
    from mpi4py import MPI

Mean = Callable[[Row], Work[int]]  # replaces sums over nodes of one length by their means
ABREAST = 3  # concurrent all-reduces of gradients, if other threads run them


def node_weights(node_sizes: Sequence[int]) -> list[int]:
    """Return the weight of each node in a mean over ranks, as the smallest whole numbers."""
    divisor = gcd(*node_sizes)
    return [size // divisor for size in node_sizes]


class Communicators:
    """Communicators of one model, one for each kind of message.

    Meetings, votes on exchanges and side messages use separate communicators. Ranks that are out of
    step then wait until the watchdog raises, instead of matching messages of another kind. The
    concurrent means of gradients, whose order differs between ranks, do not share one either.

    Args:
        topology: The ranks and nodes.

    Collective over the world; blocking.
    """

    def __init__(self, topology: Topology) -> None:
        self._of_lane, self._duplicates = topology.lane_comm, list["MPI.Comm"]()
        self.world, self.votes, self.asides, self.turns = self._copies(topology.world_comm, 4)
        self.slots: list[MPI.Comm] = []  # until `open_lane`

    def open_lane(self, settings: Settings) -> None:
        """Create one communicator per concurrent all-reduce; separate, as one lane may fail.

        Collective over the lane; blocking.
        """
        abreast = 1 if settings.gradients.reducer == "bucketed" else ABREAST
        self.slots = self._copies(self._of_lane, abreast)

    @property
    def lane(self) -> "MPI.Comm":
        """Communicator of this rank's lane; COMM_NULL if it has none."""
        return self.slots[0]

    def _copies(self, comm: "MPI.Comm", count: int) -> "list[MPI.Comm]":
        if comm == load().COMM_NULL:
            return [comm] * count
        copies: list[MPI.Comm] = []
        with ExitStack() as undo:  # if MPI runs out, it does so on all of these ranks
            for _ in range(count):
                copies.append(comm.Dup())
                undo.callback(copies[-1].Free)
            undo.pop_all()
        self._duplicates += copies
        return copies

    def revoke(self) -> None:
        """Revoke the communicators, so that no rank waits for this one. Does not block."""
        revoke(self._duplicates)

    def free(self) -> None:
        """Free the communicators. Collective over the world; blocking; idempotent."""
        while self._duplicates:
            self._duplicates.pop().Free()


class Channels:
    """Engine with separate communicators, and the exchanges that run on them.

    Args:
        topology: The ranks and nodes.
        settings: How to exchange.
        replicas: The replica group, ranks that hold the same parameters: all ranks; for shards,
            those of a lane.
        comms: Freed by `close`.
        watchdog: Freed by `close`.

    Does not communicate: if the thread fails to start on one rank, the others stop theirs.
    """

    def __init__(
        self,
        topology: Topology,
        settings: Settings,
        replicas: Topology,
        comms: Communicators,
        watchdog: StepWatchdog,
    ) -> None:
        self.rank_info, self.settings, self._topology = replicas.rank_info, settings, topology
        self.world_info = topology.rank_info
        self.comms, self.watchdog, self._liveness = comms, watchdog, topology.liveness
        self.abreast = len(comms.slots)
        self.missing = self._liveness.missing
        self._kernels = kernels_for(CPU)
        # Of exchanges of deltas; two nodes compute the mean twice, and differ after a change.
        self.message_sums = MessageSums() if self.rank_info.nodes > 2 else None
        self.engine = self._start_engine()
        # The best plan for the links, and the cost of messages; None if not measured.
        self.route: AllReducePlan | None = None
        self.costs: LinkCosts | None = None
        self.plans_follow_links = False  # True once links were measured
        self._rooms = [BufferPool(window(self.rank_info.nodes)) for _ in self.comms.slots]
        # For sums of gradients: exchanges that keep memory, and exchanges of one length.
        self._exchanges: dict[tuple[torch.dtype, int, AllReducePlan], DeterministicAllReduce] = {}
        self._means: dict[tuple[torch.dtype, int, int], Mean] = {}

    def _start_engine(self) -> Engine:
        return Engine(self.settings.exchange.timeout_seconds, self.missing, self.late)

    @property
    def leads(self) -> bool:
        """True on the rank that sets the order of exchanges for all ranks."""
        return self._topology.rank == 0

    def late(self) -> None:
        """Answer liveness requests and poll the watchdog; called during a long wait."""
        self._liveness.answer()
        self.watchdog.late()

    def plan(self, nbytes: int) -> AllReducePlan:
        """Return the all-reduce plan for a payload of ``nbytes``; the same on every rank."""
        if self.route is not None:
            return self.route
        algorithm, nodes = self.settings.exchange.algorithm, self.rank_info.nodes
        return choose_plan(algorithm, nodes, nbytes, self.costs)

    def measure_if_needed(self) -> None:
        """Measure links if plans depend on them. Collective over the world; blocking."""
        algorithm, nodes = self.settings.exchange.algorithm, self.rank_info.nodes
        if nodes <= 2:
            return
        self.plans_follow_links = algorithm == "planned" or depends_on_costs(algorithm, nodes)
        if algorithm == "planned":
            self.route = self.engine.run(self.measure_links())
        elif self.plans_follow_links:
            self.costs = self.engine.run(link_costs(self.comms.lane, self.comms.world))

    def look_again(self) -> Work[None]:
        """Measure links again, and choose plans by the result; no other work may be in flight.

        Collective over the world; non-blocking, as work for the engine.
        """
        self.forget_means()
        if self.route is not None:
            self.route = yield from self.measure_links()
        else:
            self.costs = yield from link_costs(self.comms.lane, self.comms.world)

    def state(self) -> dict[str, Any]:
        """Return the measurements of links, as plain values."""
        return {
            "route": self.route and stored(self.route),
            "costs": self.costs and asdict(self.costs),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the measurements that `state` returned."""
        self.forget_means()
        if state["costs"] is not None:
            self.costs = LinkCosts(**state["costs"])
        if state["route"] is not None:
            self.route = restored(state["route"])

    def measured_costs(self) -> LinkCosts:
        """Return the cost of messages, measured once. Collective over the world; blocking."""
        if self.costs is None:
            self.costs = self.engine.run(link_costs(self.comms.lane, self.comms.world))
        return self.costs

    def forget_means(self) -> None:
        """Free the exchanges of gradients by earlier plans; no work may be in flight."""
        self._exchanges.clear()
        self._means.clear()  # of the plans of before

    def measure_links(self) -> Work[AllReducePlan]:
        """Return the plan for the links between nodes, from messages over each link.

        Collective over the world; non-blocking, as work for the engine.
        """
        nodes, node = self.rank_info.nodes, self.rank_info.node
        rounds = yield from link_rates(self.comms.lane, self.comms.world, node, nodes)
        return plan_routes(rounds, self.route)

    def ordered(
        self,
        codec: Codec,
        rounded: dict[int, torch.Tensor],
        where: DeviceContext | None,
        plan: AllReducePlan,
    ) -> DeterministicAllReduce:
        """Return an all-reduce over this rank's lane that weights each node by its ranks."""
        weights = node_weights(self.rank_info.node_sizes)
        mean = deterministic_allreduce(
            self.comms.lane, codec, weights, sum(weights), rounded, where, plan=plan
        )
        if self.message_sums is not None:
            mean.count_messages(self.message_sums)
        return mean

    def compressor(
        self, wire: str, node: NodeTransport, device: torch.device
    ) -> GradientCompressor:
        """Return the compressor that averages gradients over the world on a narrow wire."""
        rank_info, where = self.rank_info, None
        if node.copies is not None and node.reduces_on_device:
            staged = not self.settings.exchange.gpu_direct
            where = DeviceContext(device, node.copies, staged)
        return GradientCompressor(
            wire,
            plan=self.plan,
            chunk_bytes=self.settings.exchange.chunk_bytes,
            ordered=lambda codec, rounded, where, plan: deterministic_allreduce(
                self.comms.lane,
                codec,
                weights=[1] * rank_info.nodes,
                total=rank_info.world_size,
                rounded=rounded,
                where=where,
                of_gradients=True,
                plan=plan,
            ),
            mean=self.gradient_mean,
            least=1 if node.copies is None else LEAST,
            where=where,
        )

    def gradient_mean(self, total: torch.Tensor, slot: int = 0) -> Work[int]:
        """Replace the sums of each node by the mean over the world; full precision.

        Collective over the lane; non-blocking, as work for the engine.
        """
        key = total.dtype, total.numel(), slot
        mean = self._means.get(key)
        if mean is None:
            mean = self._means[key] = self._mean_of(*key)
        return mean(Row(total, self._kernels))

    def _mean_of(self, dtype: torch.dtype, numel: int, slot: int) -> Mean:
        """Return the all-reduce of sums of one length, valid until links are measured again."""
        plan, world_size = self.plan(numel * dtype.itemsize), self.rank_info.world_size
        chunks = plan.chunks(numel, self.settings.exchange.chunk_bytes // dtype.itemsize)
        if self.settings.by_mpi:
            comm, rooms = self.comms.slots[slot], self._rooms[slot]
            wholes = [[whole(parts)] for parts in chunks]
            return lambda row: iallreduce(comm, row, wholes, 1, world_size, rooms)
        key = dtype, slot, plan
        if key not in self._exchanges:
            weights = [1] * self.rank_info.nodes
            self._exchanges[key] = deterministic_allreduce(
                self.comms.slots[slot], exact_codec(dtype), weights, world_size, plan=plan
            )
        return partial(self._exchanges[key].run, chunks=chunks)

    def gather(self, number: float) -> Work[list[float]]:
        """Return every rank's number, in rank order; also a barrier with the stall limit.

        Collective over the world; non-blocking, as work for the engine.
        """
        return self._gather(self.comms.world, number)

    def _gather(self, comm: "MPI.Comm", number: float) -> Work[list[float]]:
        own_number = torch.tensor([number], dtype=torch.float64, device="cpu")
        numbers = torch.empty(self._topology.world_size, dtype=torch.float64, device="cpu")
        yield [comm.Iallgather(sum_buffer(own_number), sum_buffer(numbers))]
        return numbers.tolist()

    def extremes(self, number: float) -> Work[tuple[float, float]]:
        """Return the lowest and the highest of all ranks' numbers; also a barrier, as `gather`.

        Collective over the world; non-blocking, as work for the engine.
        """
        row = torch.tensor([number, -number], dtype=torch.float64, device="cpu")
        yield [self.comms.world.Iallreduce(load().IN_PLACE, sum_buffer(row), op=load().MAX)]
        highest, minus_lowest = row.tolist()
        return -minus_lowest, highest

    def first(self, number: float) -> Work[float]:
        """Return world rank 0's number.

        Collective over the world; non-blocking, as work for the engine.
        """
        return (yield from self._first(self.comms.world, number))

    def first_of_lane(self, number: float) -> Work[float]:
        """Return the number of the first node's rank of this lane.

        Collective over the lane; non-blocking, as work for the engine.
        """
        return (yield from self._first(self.comms.lane, number))

    def _first(self, comm: "MPI.Comm", number: float) -> Work[float]:
        row = torch.tensor([number], dtype=torch.float64, device="cpu")
        yield [comm.Ibcast(sum_buffer(row))]
        return float(row)

    def gather_aside(self, number: float) -> Work[list[float]]:
        """Return every rank's number as `gather`, on a communicator for side messages."""
        return self._gather(self.comms.asides, number)

    def lose(self) -> None:
        """Revoke the communicators and stop the engine. Does not block long."""
        self.comms.revoke()
        self.watchdog.revoke()
        self.engine.abandon()

    def stop(self) -> None:
        """Stop the idle engine. Does not communicate; idempotent."""
        self.engine.close(self.settings.exchange.timeout_seconds)

    def close(self) -> bool:
        """Stop the engine, then free its communicators. Collective over the world; idempotent."""
        timeout_seconds = self.settings.exchange.timeout_seconds
        # Keep the communicators while other ranks may wait: the rendezvous needs all ranks.
        if not self.engine.close(timeout_seconds) or self.watchdog.given_up:
            return False
        self._topology.rendezvous("close an optimizer", timeout_seconds)
        self.comms.free()
        self.watchdog.free()
        return True
