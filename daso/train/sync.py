"""Carries out what the schedule says: averages in the node; sends, receives, merges between nodes.

The optimizer in front of it only calls `before_step` and `after_step`. Parameters are written here,
by the training thread, at step boundaries, and nowhere else.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch

from daso.comm.compress import codec_named
from daso.comm.dtypes import accumulator
from daso.comm.engine import Ticket, Work
from daso.comm.node import choose_node, node_problem
from daso.comm.topology import Topology
from daso.errors import LayoutError, NonFiniteError, TopologyError
from daso.plan.header import Header, culprit, decode_culprit
from daso.plan.merge import merge_rule
from daso.plan.options import Settings
from daso.plan.schedule import Act, State
from daso.train.agree import (
    average_tensors,
    drop_partial_state,
    mend_buffers,
    state_tensors,
    zero_nonfinite,
)
from daso.train.buckets import Finish, GradientBuckets
from daso.train.links import Links
from daso.train.metrics import Counts
from daso.train.params import Named, agree_layout, broadcast
from daso.train.rows import ParameterRow

__all__ = ["Sync"]

Result = TypeVar("Result")
logger = logging.getLogger("daso")

DROPS_LATELY = 3  # drops, without two good exchanges in a row between, at which all raise


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an exchange gave."""

    header: Header  # agreed by all ranks
    nbytes: int  # sent by this rank
    sound: bool  # this rank's own values were finite


class Sync:
    """Keeps one model the same on all ranks, or as near as the schedule asks.

    Args:
        inner: The user's optimizer.
        named: Names and parameters it trains.
        module: The model, for its buffers; may be None.
        topology: Who is where; more than one rank.
        settings: How to exchange.

    Collective over the world; blocking.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        named: Named,
        module: torch.nn.Module | None,
        topology: Topology,
        settings: Settings,
    ) -> None:
        self.inner, self.named, self.module = inner, named, module
        self.topology, self.settings = topology, settings
        self.layout = agree_layout(named, module, topology)
        topology.agree(node_problem(named[0][1].device), TopologyError)
        everything = [tensor for _, tensor in named]
        if module is not None:
            everything += [*module.parameters(), *module.buffers()]
        broadcast(everything, topology)
        self.counts = Counts()
        self.state = State()
        self.links = Links(topology, settings)
        place = topology.place
        stall = settings.exchange.stall_seconds
        self.node = choose_node(topology, named[0][1].device, stall)
        self.buckets = GradientBuckets(
            named,
            self.node,
            node_size=place.local_size,
            bucket_bytes=settings.gradients.bucket_bytes,
            same_order=topology.world.bcast,
        )
        self.rows = self._make_rows() if place.nodes > 1 else []
        self._ticket: Ticket[Outcome] | None = None
        self._sent_batch = 0
        self._rounds = 0
        self._last_step = time.perf_counter()

    def _make_rows(self) -> list[ParameterRow]:
        rows = []
        for dtype in (torch.float32, torch.float64):
            members = [(name, p) for name, p in self.named if accumulator(p.dtype) == dtype]
            if members:
                mean = self.links.two_phase(codec_named(self.settings.wire, dtype))
                place = self.topology.place
                rows.append(
                    ParameterRow(members, dtype, node=self.node, place=place, two_phase=mean)
                )
        return rows

    # --- gradients ---------------------------------------------------------------------------

    def enter(self, state: State) -> None:
        """Take over the schedule's state: it says where gradients are averaged from now on."""
        self.state = state
        everywhere = state.synchronous and self.topology.place.nodes > 1
        self.buckets.between = self._average_between if everywhere else None
        place = self.topology.place
        self.buckets.lanes = place.lanes if everywhere else place.local_size

    def _average_between(self, total: torch.Tensor) -> Finish:
        """Start the mean over the world of a part that holds the sum over this node."""
        ticket = self.links.engine.submit(self.links.gradient_mean(total))

        def finish() -> None:
            self.counts.global_bytes_sent += self._wait(ticket)

        return finish

    def _wait(self, ticket: Ticket[Result]) -> Result:
        start = time.perf_counter()
        try:
            return self.links.engine.wait(ticket)
        finally:
            self.counts.exposed_seconds += time.perf_counter() - start

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
        if self.buckets.rounds == self._rounds:
            self.buckets.finish_round()
        self._rounds = self.buckets.rounds
        return self._gradients_sound()

    def _gradients_sound(self) -> bool:
        """Tell whether a synchronous step may be taken; its gradients are the same everywhere."""
        if self.buckets.between is None:
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
        self._rounds = self.buckets.rounds
        now = time.perf_counter()
        self.counts.step_seconds, self._last_step = now - self._last_step, now
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
            # A blocking exchange promises that all nodes agree: repeat it when it was dropped.
            while not self._receive(batch) and self._sent_batch == batch:
                self._send(batch)
        elif act is Act.JOIN:
            self._join()

    # --- exchanges ---------------------------------------------------------------------------

    def anchor(self) -> None:
        """Take the parameters, equal everywhere, as the reference."""
        for row in self.rows:
            row.anchor()

    def _send(self, batch: int) -> None:
        for row in self.rows:
            row.take_snapshot()
        header = Header(
            layout=self.layout.digest,
            minus_layout=-self.layout.digest,
            batch=batch,
            minus_batch=-batch,
            step_seconds=self.counts.step_seconds,
            exchange_seconds=self.counts.exchange_seconds,
        )
        self._sent_batch = batch
        self._ticket = self.links.engine.submit(self._exchange(header))

    def _exchange(self, header: Header) -> Work[Outcome]:
        """Vote first; where all values are finite, move every row's reference by the mean delta."""
        code = self._first_nonfinite()
        agreed = yield from self.links.agree(header, code)
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

    def _receive(self, batch: int) -> bool:
        """Finish the exchange in flight; return whether it was merged."""
        assert self._ticket is not None, "the schedule receives only what was sent"
        ticket, self._ticket = self._ticket, None
        outcome = self._wait(ticket)
        self.counts.exchange_seconds = ticket.seconds
        self.counts.global_bytes_sent += outcome.nbytes
        if not outcome.header.aligned:
            raise LayoutError(
                f"ranks must exchange the same parameters after the same number of steps, but "
                f"rank {self.topology.place.rank} is at step {self._sent_batch} and others are "
                f"not; give every rank the same number of batches"
            )
        waited = batch - self._sent_batch
        if outcome.header.nonfinite:
            self._drop(outcome)
            return False
        rule = merge_rule(self.settings.merge, waited=waited, nodes=self.topology.place.nodes)
        for row in self.rows:
            row.merge(rule)
        self.counts.good()
        self._event(
            "exchange",
            sent=self._sent_batch,
            received=batch,
            seconds=ticket.seconds,
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
            zero_nonfinite(self.inner, self.named)
        if self.module is not None:
            mend_buffers(self.module, self._average)

    def _name_at(self, element: int) -> str:
        for row in self.rows:
            if element < row.layout.numel:
                return row.layout.name_at(element)
            element -= row.layout.numel
        raise AssertionError("an element outside all rows")

    def _count_drop(self, what: str) -> None:
        """Note a drop; raise, on every rank alike, when there were too many."""
        lately = self.counts.drop()
        self._event("dropped", why=what)
        if self.topology.place.rank == 0:
            logger.warning(what)
        limit = 1 if self.settings.exchange.nonfinite == "raise" else DROPS_LATELY
        if lately >= limit:
            raise NonFiniteError(
                f"values must be finite, but {what} (drop number {lately} within a few exchanges); "
                f"lower the learning rate, clip gradients, or look at that rank's data"
            )

    def _event(self, kind: str, **what: object) -> None:
        self.counts.events.append({"kind": kind, "epoch": self.state.epoch, **what})

    # --- agreement ---------------------------------------------------------------------------

    def _join(self) -> None:
        """Average the inner optimizer's state: from here all nodes take the same steps."""
        comm = self.topology.world
        keys = [*state_tensors(self.inner, self.named)]
        everywhere = set(keys).intersection(*comm.allgather(keys))
        drop_partial_state(self.inner, self.named, everywhere)
        self._average([*state_tensors(self.inner, self.named).values()])
        self._event("join", tensors=len(everywhere))

    def average_buffers(self) -> None:
        """Make the model's buffers (BatchNorm statistics) equal: means over all ranks."""
        if self.module is not None:
            self._average(list(self.module.buffers()))

    def _average(self, tensors: list[torch.Tensor]) -> None:
        start = time.perf_counter()
        self.counts.global_bytes_sent += average_tensors(
            tensors,
            self.topology,
            self.links.world,
            self.links.engine.run,
            self.settings.exchange.chunk_bytes,
        )
        self.counts.exposed_seconds += time.perf_counter() - start

    def same(self, value: object) -> bool:
        """Return whether every rank passed an equal value. Collective over the world; blocking."""
        return self.topology.same(value)

    def mean(self, value: float) -> float:
        """Return the mean of a number over all ranks, the same bits everywhere; blocking."""
        values: list[float] = self.topology.world.allgather(value)
        return sum(values) / len(values)

    def close(self) -> None:
        """Stop the engine and give everything back. Collective over the world; idempotent."""
        self.links.close()
        self.buckets.close()
        self.rows = []
        self.node.free()
