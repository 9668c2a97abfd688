"""What runs between nodes for one model: the engine, its communicators, its exchanges."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import TYPE_CHECKING

import torch

from daso.comm.allreduce.direct import DeterministicAllReduce, deterministic_allreduce, iallreduce
from daso.comm.allreduce.ordered import OnDevice, window
from daso.comm.dtypes import sum_buffer
from daso.comm.emulation import LinkModel, emulated_link
from daso.comm.engine import Arrival, Engine, Work
from daso.comm.health.step_watchdog import StepWatchdog
from daso.comm.health.survivors import revoke
from daso.comm.link_probe import link_costs, link_rates
from daso.comm.mpi import load
from daso.comm.node.base import NodeTransport
from daso.comm.reduction import BufferPool, Row, whole
from daso.comm.topology import Topology
from daso.kernels.codecs import Codec, exact_codec
from daso.plan.allreduce_plan import AllReducePlan
from daso.plan.cost_model import (
    LinkCosts,
    choose_plan,
    depends_on_costs,
    vote_rounds,
)
from daso.plan.header import Header, Tally
from daso.plan.options import Settings
from daso.plan.routes import plan_routes
from daso.train.deltas.shard import LEAST
from daso.train.gradients.compression import Averaged, GradientCompressor

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Channels", "node_weights"]

ABREAST = 3  # means of gradients that cross at a time, where other threads take them


def node_weights(node_sizes: Sequence[int]) -> list[int]:
    """Return how nodes count in a mean over ranks, as the smallest whole numbers."""
    divisor = gcd(*node_sizes)
    return [size // divisor for size in node_sizes]


def _occupied_seconds(
    link: LinkModel, nodes: int, plan: Callable[[int], AllReducePlan], result: object
) -> float:
    """Return how long a link is occupied by work with such a result: an exchange, sums, a vote."""
    if isinstance(result, int):  # bytes of averaged gradients
        result = Averaged(result)
    if isinstance(result, Averaged):
        return result.made_seconds + link.seconds(result.nbytes, plan(result.nbytes).rounds)
    sent = getattr(result, "nbytes", 0)
    rounds = vote_rounds(nodes) + (plan(sent).rounds if sent else 0)
    return float(getattr(result, "made_seconds", 0.0)) + link.seconds(sent, rounds)


class Communicators:
    """What ranks of a model speak over, each kind of word on a communicator of its own.

    Meetings, votes of exchanges and words beside them do not mix: ranks that are out of step wait,
    each in its own, until the watchdog raises, instead of matching what is another's. Means that
    end in another order on each rank do not share one either.

    Args:
        topology: Who is where.
        abreast: Means that may end in any order.

    Collective over the world; blocking.
    """

    def __init__(self, topology: Topology, abreast: int) -> None:
        self.world, self.votes = topology.world_comm.Dup(), topology.world_comm.Dup()
        self.asides, self.turns = topology.world_comm.Dup(), topology.world_comm.Dup()
        self.lane = _copy_of_lane(topology)
        self.slots = [self.lane, *(_copy_of_lane(topology) for _ in range(1, abreast))]

    @property
    def _all(self) -> "tuple[MPI.Comm, ...]":
        return (*self.slots, self.world, self.votes, self.asides, self.turns)

    def revoke(self) -> None:
        """Let nobody wait for this rank on them any more. Does not block."""
        revoke(self._all)

    def free(self) -> None:
        """Give them back. Collective over the world; blocking."""
        null = load().COMM_NULL
        for comm in self._all:
            if comm != null:
                comm.Free()


def _copy_of_lane(topology: Topology) -> "MPI.Comm":
    lane = topology.lane_comm
    return lane if lane == load().COMM_NULL else lane.Dup()


class Channels:
    """The engine with its own communicators, and the exchanges that run on them.

    Args:
        topology: Who is where.
        settings: How to exchange.
        replicas: The replica group: ranks that hold the same parameters; all, or, of shards, those
            of a lane.

    Collective over the world; blocking.
    """

    def __init__(self, topology: Topology, settings: Settings, replicas: Topology) -> None:
        self.rank_info, self.settings, self._topology = replicas.rank_info, settings, topology
        self._link = link = emulated_link()
        self.abreast = 1 if settings.gradients.reducer == "bucketed" else ABREAST
        self.comms = Communicators(topology, self.abreast)
        self.watchdog, self._liveness = StepWatchdog(topology.world_comm), topology.liveness
        self.missing = self._liveness.missing
        takes = (
            None
            if link is None
            else partial(_occupied_seconds, link, self.rank_info.nodes, self.plan)
        )
        self.engine = Engine(
            settings.exchange.timeout_seconds, self.missing, self.late, takes=takes
        )
        # Where they were measured: what suits links, and what messages cost.
        self.route: AllReducePlan | None = None
        self.costs: LinkCosts | None = None
        self._rooms = [BufferPool(window(self.rank_info.nodes)) for _ in self.comms.slots]
        self._gradient_means: dict[
            tuple[torch.dtype, int, AllReducePlan], DeterministicAllReduce
        ] = {}

    @property
    def leads(self) -> bool:
        """Whether this rank tells the others whose turn it is."""
        return self._topology.rank == 0

    def late(self) -> None:
        """Do what a long wait asks for: answer those who look for somebody, ring and listen."""
        self._liveness.answer()
        self.watchdog.late()

    def plan(self, nbytes: int) -> AllReducePlan:
        """Return how nodes take the mean of so many bytes on the wire; the same on every rank."""
        if self.route is not None:
            return self.route
        algorithm, nodes = self.settings.exchange.algorithm, self.rank_info.nodes
        return choose_plan(algorithm, nodes, nbytes, self.costs)

    def look_at_links(self) -> None:
        """Measure links as far as plans depend on them. Collective over the world; blocking."""
        algorithm = self.settings.exchange.algorithm
        if self.rank_info.nodes <= 2:
            return
        if algorithm == "planned":
            self.route = self.engine.run(self.measure_links())
        elif self.plans_follow_links:
            self.costs = self.engine.run(link_costs(self.comms.lane, self.comms.world))

    @property
    def plans_follow_links(self) -> bool:
        """Whether plans depend on what links did when they were measured."""
        algorithm, nodes = self.settings.exchange.algorithm, self.rank_info.nodes
        return self.route is not None or depends_on_costs(algorithm, nodes)

    def look_again(self) -> Work[None]:
        """Measure links anew, by which plans are chosen; nothing else may be under way.

        Collective over the world; non-blocking, as work for the engine.
        """
        if self.route is not None:
            self.route = yield from self.measure_links()
        else:
            self.costs = yield from link_costs(self.comms.lane, self.comms.world)

    def measured_costs(self) -> LinkCosts:
        """Return what messages cost, measured once. Collective over the world; blocking."""
        link = self._link
        if link is not None:
            return LinkCosts(link.latency_seconds, 1 / link.bytes_per_second)
        if self.costs is None:
            self.costs = self.engine.run(link_costs(self.comms.lane, self.comms.world))
        return self.costs

    def forget_means(self) -> None:
        """Give back what means of gradients by other plans have kept; nothing may be under way."""
        self._gradient_means.clear()

    def measure_links(self) -> Work[AllReducePlan]:
        """Return the plan that suits the links between nodes, from messages over each of them.

        Collective over the world; non-blocking, as work for the engine.
        """
        nodes, node = self.rank_info.nodes, self.rank_info.node
        return plan_routes((yield from link_rates(self.comms.lane, self.comms.world, node, nodes)))

    def ordered(
        self,
        codec: Codec,
        rounded: dict[int, torch.Tensor],
        where: OnDevice | None,
        plan: AllReducePlan,
    ) -> DeterministicAllReduce:
        """Return an exchange over this rank's lane in which every node counts by its ranks."""
        weights = node_weights(self.rank_info.node_sizes)
        return deterministic_allreduce(
            self.comms.lane, codec, weights, sum(weights), rounded, where, plan=plan
        )

    def compressor(
        self, wire: str, node: NodeTransport, device: torch.device
    ) -> GradientCompressor:
        """Return what takes means of gradients over the world on a narrow wire."""
        rank_info, where = self.rank_info, None
        if node.copies is not None and node.sums_stay:
            staged = not self.settings.exchange.gpu_direct
            where = OnDevice(device, node.copies, staged)
        return GradientCompressor(
            wire,
            plan=self.plan,
            chunk_bytes=self.settings.exchange.chunk_bytes,
            ordered=lambda codec, rounded, where, plan: deterministic_allreduce(
                *(
                    self.comms.lane,
                    codec,
                    [1] * rank_info.nodes,
                    rank_info.world_size,
                    rounded,
                    where,
                ),
                of_gradients=True,
                plan=plan,
            ),
            mean=self.gradient_mean,
            least=1 if node.copies is None else LEAST,
            where=where,
        )

    def gradient_mean(self, total: torch.Tensor, slot: int = 0) -> Work[int]:
        """Replace sums over nodes by the mean over the world; full precision.

        Collective over the lane; non-blocking, as work for the engine.
        """
        mean = self._gradient_mean(total, slot)
        return mean if self._link is None else self._held(mean, self._link)

    def _held(self, mean: Work[int], link: LinkModel) -> Work[int]:
        """Let a mean occupy an imitated link, after those which began before it."""
        begun = time.perf_counter()
        nbytes = yield from mean
        free_at = link.occupy(nbytes, self.plan(nbytes).rounds, begun)
        yield lambda: time.perf_counter() >= free_at
        return nbytes

    def _gradient_mean(self, total: torch.Tensor, slot: int) -> Work[int]:
        plan = self.plan(total.nbytes)
        chunks = plan.chunks(total.numel(), self.settings.exchange.chunk_bytes // total.itemsize)
        if self.settings.by_mpi:
            comm, rooms = self.comms.slots[slot], self._rooms[slot]
            whole_chunks = [[whole(parts)] for parts in chunks]
            return iallreduce(comm, Row(total), whole_chunks, 1, self.rank_info.world_size, rooms)
        key = total.dtype, slot, plan
        if key not in self._gradient_means:
            codec = exact_codec(total.dtype)
            self._gradient_means[key] = deterministic_allreduce(
                *(
                    self.comms.slots[slot],
                    codec,
                    [1] * self.rank_info.nodes,
                    self.rank_info.world_size,
                ),
                plan=plan,
            )
        return self._gradient_means[key].run(Row(total), chunks)

    def allreduce_header(
        self, header: Header, tally: Tally | None = None
    ) -> Work[tuple[Header, Tally]]:
        """Return what all ranks agree on: the header's elementwise maximum, the tally's sum.

        Args:
            header: Of this rank.
            tally: Of this rank; None, on all ranks alike: nothing is summed.

        Collective over the world; non-blocking, as work for the engine.
        """
        mpi, votes, sums = load(), self.comms.votes, None
        most = torch.tensor(header.encode(), dtype=torch.float64, device="cpu")
        requests = [votes.Iallreduce(mpi.IN_PLACE, sum_buffer(most), op=mpi.MAX)]
        if tally is not None:
            sums = torch.tensor(tally.encode(), dtype=torch.float64, device="cpu")
            requests.append(votes.Iallreduce(mpi.IN_PLACE, sum_buffer(sums), op=mpi.SUM))
        yield Arrival(requests, rounds=vote_rounds(self._topology.world_size) // 2)
        return Header.decode(most.tolist()), Tally(*([] if sums is None else sums.tolist()))

    def gather(self, number: float) -> Work[list[float]]:
        """Return every rank's number, in rank order; also a barrier with the stall limit.

        Collective over the world; non-blocking, as work for the engine.
        """
        return self._gather(self.comms.world, number)

    def _gather(self, comm: "MPI.Comm", number: float) -> Work[list[float]]:
        mine = torch.tensor([number], dtype=torch.float64, device="cpu")
        everyone = torch.empty(self._topology.world_size, dtype=torch.float64, device="cpu")
        yield [comm.Iallgather(sum_buffer(mine), sum_buffer(everyone))]
        return everyone.tolist()

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
        """Do what `gather` does, apart from meetings."""
        return self._gather(self.comms.asides, number)

    def lose(self) -> None:
        """Let nobody wait for this rank here any more, and stop the engine. Does not block long."""
        self.comms.revoke()
        self.watchdog.revoke()
        self.engine.abandon()

    def close(self) -> bool:
        """Stop the engine, then free its communicators. Collective over the world; idempotent."""
        timeout_seconds = self.settings.exchange.timeout_seconds
        # As long as others may wait here: who left early would be missed at the meeting.
        if not self.engine.close(timeout_seconds) or self.watchdog.given_up:
            return False
        self._topology.rendezvous("close an optimizer", timeout_seconds)
        self.comms.free()
        self.watchdog.free()
        return True
