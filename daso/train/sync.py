"""Carries out what the schedule says: averages in the node; sends, receives, merges between nodes.

The optimizer in front of it only calls `before_step` and `after_step`. Parameters are written here,
by the training thread, at step boundaries, and nowhere else.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import torch

from daso.comm.choose import choose_node, node_problem
from daso.comm.compress import codec_named
from daso.comm.dtypes import accumulator
from daso.comm.engine import Ticket, Work
from daso.comm.topology import Topology
from daso.errors import ExchangeError, NonFiniteError, TopologyError
from daso.plan.header import Header, culprit, decode_culprit
from daso.plan.merge import merge_rule
from daso.plan.options import Settings
from daso.plan.schedule import Act, State
from daso.train.agree import zero_nonfinite
from daso.train.buckets import Finish, GradientBuckets, Route
from daso.train.links import Links
from daso.train.meeting import Meeting
from daso.train.metrics import Counts
from daso.train.params import Trained, agree_layout, broadcast
from daso.train.rows import ParameterRow

__all__ = ["Sync"]

Result = TypeVar("Result")
logger = logging.getLogger("daso")

DIGESTS = 2**48  # a digest travels in a float64 and must survive there exactly
DROPS_LATELY = 3  # drops, without two good exchanges in a row between, at which all raise


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an exchange gave."""

    header: Header  # agreed by all ranks
    nbytes: int  # sent by this rank
    sound: bool  # this rank's own values were finite


@dataclass(frozen=True, slots=True)
class Flight:
    """An exchange under way."""

    ticket: Ticket[Outcome]
    batch: int  # batch after which it was sent


class Sync:
    """Keeps one model the same on all ranks, or as near as the schedule asks.

    Args:
        trained: The optimizer and what it trains.
        topology: Who is where; more than one rank.
        settings: How to exchange.
        counts: Where everything is counted.

    Collective over the world; blocking.
    """

    def __init__(
        self, trained: Trained, topology: Topology, settings: Settings, counts: Counts
    ) -> None:
        agree_layout(trained, topology)
        topology.agree(node_problem(trained.device), TopologyError)
        broadcast(trained.tensors(), topology)
        self.trained, self.topology, self.settings = trained, topology, settings
        self.counts = counts
        self.links = Links(topology, settings)
        self.meeting = Meeting(trained, topology, self.links, self.counts)
        self.buckets = GradientBuckets(
            trained.named,
            choose_node(topology, trained.device, settings.exchange.stall_seconds),
            self._route(State()),
            bucket_bytes=settings.gradients.bucket_bytes,
            same_order=self.meeting.same_order,
        )
        self._flight: Flight | None = None
        try:
            self.rows = self._make_rows() if topology.place.nodes > 1 else []
        except TopologyError:  # no shared memory: leave the user's model without hooks
            self.links.engine.close()
            self.buckets.close()
            raise

    def _make_rows(self) -> list[ParameterRow]:
        rows, node, place = [], self.buckets.node, self.topology.place
        for dtype in (torch.float32, torch.float64):
            members = [(name, p) for name, p in self.trained.named if accumulator(p.dtype) == dtype]
            if members:
                mean = self.links.two_phase(codec_named(self.settings.wire, dtype))
                rows.append(ParameterRow(members, dtype, node=node, place=place, two_phase=mean))
        return rows

    # --- gradients ---------------------------------------------------------------------------

    def enter(self, state: State) -> None:
        """Take over the schedule's state: it says where gradients are averaged from now on."""
        self.counts.epoch = state.epoch
        self.buckets.route = self._route(state)

    def _route(self, state: State) -> Route:
        place = self.topology.place
        if state.synchronous and place.nodes > 1:
            return Route(place.local_size, place.lanes, self._average_between)
        return Route(place.local_size, place.local_size)

    def _average_between(self, total: torch.Tensor) -> Finish:
        """Start the mean over the world of a part that holds the sum over this node."""
        ticket = self.links.engine.submit(self.links.gradient_mean(total))

        def finish() -> None:
            self.counts.global_bytes_sent += self.meeting.wait(ticket)

        return finish

    # --- one step ----------------------------------------------------------------------------

    def before_step(self, *, has_closure: bool) -> bool:
        """Join the averaging if no backward did since the last step.

        Args:
            has_closure: The step will call backward itself.

        Returns:
            Whether the inner optimizer should step.

        Raises:
            ExchangeError: An exchange failed since the last step.
        """
        self.links.engine.check()
        if has_closure:
            return True
        if not self.buckets.fresh:
            self.buckets.finish_round()
        return self._gradients_sound()

    def _gradients_sound(self) -> bool:
        """Tell whether a synchronous step may be taken; its gradients are the same everywhere."""
        if self.buckets.route.between is None:
            return True
        name = self.buckets.first_nonfinite()
        if name is None:
            self.counts.good()
            return True
        self._count_drop(f"the mean gradient of {name} is not finite; this step is dropped")
        return False

    def after_step(self, acts: Sequence[Act], state: State) -> None:
        """Carry out what is due after a batch.

        Args:
            acts: From the schedule.
            state: The schedule's state after them.

        Collective over the world in the sense of the schedule; blocks for receives.
        """
        self.buckets.fresh = False
        self.counts.step()
        self.perform(acts, state)

    def perform(self, acts: Sequence[Act], state: State) -> None:
        """Carry out acts in order, then go on from ``state``."""
        if self.rows:
            for act in acts:
                self._carry_out(act, state.batch)
        self.enter(state)

    def _carry_out(self, act: Act, batch: int) -> None:
        if act is Act.ANCHOR:
            self.anchor()
        elif act is Act.SEND:
            self._send(batch)
        elif act is Act.RECEIVE:
            assert self._flight is not None, "the schedule receives only what was sent"
            blocking = self._flight.batch == batch
            # A blocking exchange promises that all nodes agree: repeat it when it was dropped.
            while not self._receive(self._flight, batch) and blocking:
                self._send(batch)
        elif act is Act.JOIN:
            self.meeting.join()

    # --- exchanges ---------------------------------------------------------------------------

    def anchor(self) -> None:
        """Take the parameters, equal everywhere, as the reference."""
        for row in self.rows:
            row.anchor()

    def _send(self, batch: int) -> None:
        for row in self.rows:
            row.take_snapshot()
        digest = sum(row.layout.digest for row in self.rows) % DIGESTS
        header = Header(
            layout=digest,
            minus_layout=-digest,
            batch=batch,
            minus_batch=-batch,
            step_seconds=self.counts.step_seconds,
            exchange_seconds=self.counts.exchange_seconds,
        )
        self._flight = Flight(self.links.engine.submit(self._exchange(header)), batch)

    def _exchange(self, header: Header) -> Work[Outcome]:
        """Vote first; where all values are finite, move every row's reference by the mean delta."""
        code = self._first_nonfinite()
        agreed = yield from self.links.agree(replace(header, nonfinite=code))
        nbytes = 0
        if not agreed.nonfinite and agreed.aligned and self.topology.place.lane is not None:
            for row in self.rows:
                nbytes += yield from row.exchange(
                    self.settings.delta_reduce, self.settings.exchange.chunk_bytes
                )
        return Outcome(agreed, nbytes, sound=code == 0.0)

    def _first_nonfinite(self) -> float:
        before = 0
        for row in self.rows:
            element = row.first_nonfinite()
            if element is not None:
                place = self.topology.place
                return culprit(before + element, place.rank, place.size)
            before += row.layout.numel
        return 0.0

    def _receive(self, flight: Flight, batch: int) -> bool:
        """Finish the exchange in flight; return whether it was merged."""
        self._flight = None
        outcome = self.meeting.wait(flight.ticket)
        self.counts.exchange_seconds = flight.ticket.seconds
        self.counts.global_bytes_sent += outcome.nbytes
        if not outcome.header.aligned:
            header = outcome.header
            raise ExchangeError(
                f"ranks must exchange the same parameters after the same number of steps, but they "
                f"were at steps {-header.minus_batch:.0f} to {header.batch:.0f}; give every rank "
                f"the same number of batches and let every rank call step() for each"
            )
        if outcome.header.nonfinite:
            self._drop(outcome)
            return False
        waited, nodes = batch - flight.batch, self.topology.place.nodes
        rule = merge_rule(self.settings.merge, waited=waited, nodes=nodes)
        for row in self.rows:
            row.merge(rule)
        self.counts.good()
        self.counts.event(
            "exchange",
            sent=flight.batch,
            received=batch,
            seconds=flight.ticket.seconds,
            slowest_step_seconds=outcome.header.step_seconds,
            slowest_exchange_seconds=outcome.header.exchange_seconds,
            **asdict(rule),
        )
        return True

    def _drop(self, outcome: Outcome) -> None:
        """Say whose value is not finite; set that node back to the reference."""
        element, rank = decode_culprit(outcome.header.nonfinite, self.topology.place.size)
        self._count_drop(
            f"parameter {self._name_at(element)} on rank {rank} is not finite; this exchange is "
            f"dropped and that node starts again from the last agreed parameters"
        )
        if not all(self.topology.node.allgather(outcome.sound)):
            for row in self.rows:
                row.restore()
            zero_nonfinite(self.trained.inner, self.trained.named)
        self.meeting.mend_buffers()

    def _name_at(self, element: int) -> str:
        for row in self.rows:
            if element < row.layout.numel:
                return row.layout.name_at(element)
            element -= row.layout.numel
        raise AssertionError("an element outside all rows")

    def _count_drop(self, what: str) -> None:
        """Note a drop; raise, on every rank alike, when there were too many."""
        lately = self.counts.drop()
        self.counts.event("dropped", why=what)
        if self.topology.place.rank == 0:
            logger.warning(what)
        limit = 1 if self.settings.exchange.nonfinite == "raise" else DROPS_LATELY
        if lately >= limit:
            raise NonFiniteError(
                f"values must be finite, but {what} (drop number {lately} within a few exchanges); "
                f"lower the learning rate, clip gradients, or look at that rank's data"
            )

    def close(self) -> None:
        """Stop the engine and give everything back. Collective over the world; idempotent."""
        self.rows = []
        self.buckets.close()
        if self.links.close():
            self.buckets.node.free()
