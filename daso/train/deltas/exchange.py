"""Exchanges of parameters between nodes: sending, receiving, merging, dropping.

One exchange is in flight at a time. Parameters are written here, by the training thread, at step
boundaries, and nowhere else.
"""

import copy
import logging
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from daso import trace
from daso.comm.device.cuda_aware import trial
from daso.comm.engine import Work, WorkHandle
from daso.comm.node.base import NodeTransport
from daso.errors import ExchangeError, TopologyError
from daso.kernels.choice import describe_kernels
from daso.plan.allreduce_plan import restored, stored
from daso.plan.cost_model import LinkCosts
from daso.plan.exchange import ExchangeRules, ExchangeState, Sent
from daso.plan.header import (
    Header,
    Tally,
    culprit,
    decode_culprit,
    decode_slow_rank,
    slow_rank,
)
from daso.plan.merge import Merge
from daso.plan.routes import has_changed
from daso.plan.schedule import Measurements
from daso.plan.small_tensors import SMALL_WAIT
from daso.train.coordinator import Coordinator, largest_rate
from daso.train.deltas.buffer import DeltaBuffer, Measured
from daso.train.deltas.core_loss import CoreLoss
from daso.train.deltas.in_flight import InFlight, Outcome, pack, unpack
from daso.train.deltas.outer import MakeOuter
from daso.train.deltas.rows import make_rows
from daso.train.inner.clipping import GradientScaleMeter
from daso.train.inner.step_restoration import Restorations, make_restorations
from daso.train.model.writes import ParameterWrites
from daso.train.state_sync import zero_nonfinite

__all__ = ["Exchanges"]

logger = logging.getLogger("daso")
REMEMBERED = 20  # exchanges, of which it is looked whether the last ones took longer
DIGESTS = 2**48  # a digest travels in a float64 and must survive there exactly


@dataclass(slots=True)
class LocalMeasurements:
    """Measurements of this rank that the next header carries, and times of earlier exchanges."""

    size: float = 1.0  # about the squared norm of all parameters; the same on every rank
    measured: Tally = field(default_factory=Tally)  # of the last exchange
    own_seconds: float = 0.0  # of a core that training wanted, for the last exchange
    # Of each exchange of small tensors since: seconds that it took from training, and exposed ones.
    small_own_seconds: list[float] = field(default_factory=list)
    small_exposed_seconds: list[float] = field(default_factory=list)
    # Where plans follow links: seconds of the last exchanges by wire and fragment, and the kind of
    # the last one.
    lately: dict[str, list[float]] = field(default_factory=dict)
    kind: str = ""
    written: bool = False  # the program wrote parameters since nodes agreed
    # Batch of the last measurement in this phase, and seconds that steps were exposed until then.
    marked: tuple[int, float] | None = None


def spare_cores(ranks: int, threads: int) -> bool:
    """Return whether cores are left on which exchanges go on beside training."""
    return len(os.sched_getaffinity(0)) > ranks * threads


def _check_aligned(header: Header) -> None:
    """Raise, on every rank alike, unless all ranks are after the same step."""
    if not header.aligned:
        raise ExchangeError(
            f"ranks must exchange the same parameters after the same number of steps, but they "
            f"were at steps {-header.minus_batch:.0f} to {header.batch:.0f}; give every rank "
            f"the same number of batches and let every rank call step() for each"
        )


class Exchanges:
    """What nodes exchange of one model.

    Args:
        coordinator: Where all ranks meet; knows the model, the world and the links.
        node: The node whose ranks share rows.
        outer: Makes an optimizer for the reference.
        writes: Notices that the program writes parameters between steps.

    Collective over the node; blocking.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        node: NodeTransport,
        outer: MakeOuter | None,
        writes: ParameterWrites,
    ) -> None:
        self._writes = writes
        self.restart_due = False  # all ranks agreed that parameters were written between steps
        self.coordinator, self.channels, self.metrics = (
            coordinator,
            coordinator.channels,
            coordinator.metrics,
        )
        self.settings, self.rank_info = (
            coordinator.channels.settings,
            coordinator.topology.rank_info,
        )
        if self.settings.exchange.gpu_direct:
            self._try_memory(node)
        self.channels.look_at_links()
        self.restorations = self._make_restorations()
        self.gradient_scale: GradientScaleMeter | None = None
        if self.restorations.clipped is not None and not coordinator.is_sharded:
            self.gradient_scale = GradientScaleMeter(coordinator.trained.named)
        # The gain is measured of tensors that were apart for the same number of batches.
        may_select = self.restorations.always is None
        self.rows = make_rows(coordinator, node, outer, may_select=may_select)
        self._flight: InFlight | None = None
        self._node = node
        ranks, threads = self.rank_info.local_size, torch.get_num_threads()
        cores: Literal["spare", "shared"] = "spare" if spare_cores(ranks, threads) else "shared"
        on_host = coordinator.trained.device.type == "cpu"
        self._core_loss = CoreLoss(cores if on_host else "other")
        self.rules = ExchangeRules(
            self.settings,
            self.rank_info.nodes,
            tuple(self._numels),
            *self.restorations.momentums,
        )
        self._state, self._local = self.rules.start(), LocalMeasurements()

    def _make_restorations(self) -> Restorations:
        """Make the restorations, the same on every rank. Collective over the world; blocking."""
        leads, topology = self.coordinator.leads, self.coordinator.topology
        made = make_restorations(self.coordinator.trained.inner, self.settings, says=leads)
        if topology.equal_on_all_ranks(made.traits):
            return made
        if leads:
            logger.warning(
                "the inner optimizer must be the same on every rank, but a few steps of a copy "
                "show others on some; steps are not restored"
            )
        return Restorations()

    def _try_memory(self, node: NodeTransport) -> None:
        """Let a row cross from this rank's device. Collective over the world; blocking."""
        problem, channels = None, self.channels
        if self.rank_info.lane is not None and node.copies is not None:
            problem = channels.engine.run(
                trial(channels.comms.lane, self.coordinator.trained.device, node.copies)
            )
        self.coordinator.topology.raise_on_all_ranks(problem, TopologyError)

    def _rows_of(self, fragment: int | None) -> list[DeltaBuffer]:
        if fragment is not None:
            return self.rows[fragment]
        return [row for rows in self.rows.values() for row in rows]

    @property
    def _small_rows(self) -> list[DeltaBuffer]:
        return [row for row in self._rows_of(None) if row.is_small]

    @property
    def small_numel(self) -> int:
        """Numbers of small tensors, which are exchanged alone, too."""
        return sum(row.sharding.whole.numel for row in self._small_rows)

    @property
    def _numels(self) -> list[int]:
        """Numbers of each fragment."""
        return [sum(row.sharding.whole.numel for row in self._rows_of(one)) for one in self.rows]

    @property
    def numel(self) -> int:
        """Numbers of all tensors."""
        return sum(row.sharding.whole.numel for row in self._rows_of(None))

    @property
    def small_share(self) -> float:
        """Share of the bytes of everything that small tensors have at most."""
        return self.settings.small_share(self.small_numel, self.numel)

    def anchor(self, batch: int) -> None:
        """Take the parameters, equal everywhere, as the reference."""
        norms = [row.anchor() for row in self._rows_of(None)]
        size = self.coordinator.first(sum(norms)) or 1.0
        self._local = LocalMeasurements(size, own_seconds=self._local.own_seconds)
        self._state = self.rules.start(batch, self._state)

    def rest(self) -> None:
        """Give memory back until `anchor`: nodes average gradients. Does not communicate."""
        for row in self._rows_of(None):
            row.rest()

    @property
    def measured(self) -> tuple[Tally, int]:
        """What the next exchange will tell of the last one: this rank's share, its batches."""
        return self._local.measured, self._state.batches

    @measured.setter
    def measured(self, measured: tuple[Tally, int]) -> None:
        self._local.measured, batches = measured
        self._state = replace(self._state, batches=batches)

    def measure(self, batch: int) -> Measurements:
        """Return what all ranks agree on about synchronous steps since the last call.

        Collective over the world; blocking.
        """
        local, exposed = self._local, self.metrics.watch.step_idle_seconds()
        header = self._measured_header(batch)
        since, before = local.marked or (batch, 0.0)
        lost = self._core_loss.of_steps(self.channels.engine.busy_seconds)
        # A rank without a lane waits in its node.
        if self.rank_info.lane is not None and since < batch:
            seconds = (exposed - before + lost) / (batch - since)
            header = replace(header, minus_exposed_seconds=-seconds)
        with self.channels.watchdog.meeting(batch):
            agreed, _ = self.coordinator.wait(
                self.channels.engine.submit(self.channels.allreduce_header(header)), of_step=False
            )
        _check_aligned(agreed)
        local.marked = batch, exposed
        self._note_slowest(agreed)
        measurements = Measurements(
            agreed.step_seconds, lr=agreed.lr, exposed_seconds=agreed.exposed_seconds
        )
        self.metrics.event("measured", batch=batch, **asdict(measurements))
        return measurements

    def send(self, batch: int, fragment: int | None, *, wait: int) -> None:
        """Start an exchange.

        Collective over the world; non-blocking, but for the node where nodes go ahead.
        """
        begun, waited = time.perf_counter(), self._node.waited_seconds
        rows, blocking = self._rows_of(fragment), wait == 0
        sent = self.rules.send(self._state, batch, fragment, wait=wait)
        ahead, dense = self.settings.eager and not blocking, fragment is None
        for row in rows:
            row.encode(sent.wire, dense=dense, keeps=sent.keeps)
        if ahead:
            for row in rows:
                row.go_ahead()
        work = self._exchange(rows, self._measured_header(batch), self._local.measured)
        number = self.metrics.send()
        own = time.perf_counter() - begun - (self._node.waited_seconds - waited)
        trace.record(trace.SEND, begun, key=number)
        self._core_loss.begin(beside=not blocking)
        handle = self._submit(work, number, wait)
        self._flight = InFlight(handle, sent, ahead, own)

    def before_step(self) -> None:
        """Look at what the program did since the last step. Does not communicate."""
        self.note_writes()
        if self.gradient_scale is not None:
            self.gradient_scale.measure()

    def note_writes(self, *, goes_on: bool = False) -> None:
        """Remember that the program wrote parameters, until all nodes start from them."""
        change = self._writes.changed(goes_on=goes_on)
        # Before the first exchange nothing of the old parameters is under way.
        if change == "loaded" or (change and (self._flight is not None or self._state.batches)):
            self._local.written = True
            if change == "written":
                self._writes.widen()

    def agree_on_writes(self) -> None:
        """Make a restart due if any rank wrote parameters; for a drain without an exchange.

        Collective over the world; blocking.
        """
        if self.coordinator.extremes(float(self._local.written))[1]:
            self.restart_due = True

    def send_small(self, batch: int) -> None:
        """Start an exchange of small tensors alone, of which nothing is measured.

        Collective over the world; non-blocking.
        """
        begun, waited = time.perf_counter(), self._node.waited_seconds
        rows, wire = self._small_rows, self.settings.wires[0]
        keeps = self.rules.keeps(self._state, wait=SMALL_WAIT)
        for row in rows:
            row.encode(wire, dense=False, keeps=keeps)
        work = self._exchange(rows, self._header(batch), None)
        number = self.metrics.send()
        own = time.perf_counter() - begun - (self._node.waited_seconds - waited)
        trace.record(trace.SEND, begun, key=number)
        self._core_loss.pause()
        handle = self._submit(work, number, SMALL_WAIT)
        sent = Sent(batch, 0, 0, keeps, wire)
        self._flight = InFlight(handle, sent, ahead=False, own_seconds=own, small=True)

    def _submit(self, work: Work[Outcome], number: int, wait: int) -> WorkHandle[Outcome]:
        """Hand in an exchange that is merged after some batches."""
        due_seconds = wait * self._state.step_seconds
        return self.channels.engine.submit(work, key=number, due_seconds=due_seconds)

    def _header(self, batch: int) -> Header:
        """Return what ranks check at every exchange."""
        digest = sum(row.sharding.whole.digest for row in self._rows_of(None)) % DIGESTS
        lr = largest_rate(self.coordinator.trained.inner)
        return Header(
            layout=digest,
            minus_layout=-digest,
            batch=batch,
            minus_batch=-batch,
            lr=lr,
            minus_lr=-lr,
        )

    def _measured_header(self, batch: int) -> Header:
        """Return that, and what this rank measured since it returned one last."""
        header = replace(self._header(batch), own_seconds=self._local.own_seconds)
        header = replace(header, **self._small_measured())
        header = replace(header, written=float(self._local.written))
        if self.gradient_scale is not None:
            header = replace(header, clipping=self.gradient_scale.take())
        if seconds := self.metrics.watch.take_steps():
            median = statistics.median(seconds)
            slowest = slow_rank(median, self.rank_info.rank, self.rank_info.world_size)
            header = replace(header, minus_step_seconds=-median, slowest=slowest)
        if self.metrics.exchange_seconds and self.rank_info.lane is not None:
            header = replace(header, minus_exchange_seconds=-self.metrics.exchange_seconds)
        return header

    def _small_measured(self) -> dict[str, float]:
        """Return what a header tells of exchanges of small tensors since it told of them last."""
        local = self._local
        own, exposed = local.small_own_seconds, local.small_exposed_seconds
        local.small_own_seconds, local.small_exposed_seconds = [], []
        if not own or self.rank_info.lane is None:
            return {}
        return {
            # One slow moment is not what it takes: all ranks go by who loses most.
            "small_own_seconds": statistics.median(own),
            "minus_small_exposed_seconds": -statistics.fmean(exposed),
        }

    def _exchange(
        self, rows: list[DeltaBuffer], header: Header, tally: Tally | None
    ) -> Work[Outcome]:
        """Vote first; where all values are finite, move every row's reference by the mean delta."""
        begun, busy = time.perf_counter(), time.thread_time()
        code = yield from self._nonfinite(rows)
        made_seconds = time.perf_counter() - begun
        header = replace(header, nonfinite=code)
        agreed, sums = yield from self.channels.allreduce_header(header, tally)
        total = Measured()
        if not agreed.nonfinite and agreed.aligned and self.rank_info.lane is not None:
            for row in rows:
                one = yield from row.exchange()
                # Small tensors went lately: what they are apart by says nothing of skip.
                total += Measured(one.nbytes) if row.is_small else one
        measured = Tally.measured(total.distance, total.norm, total.moved, self._local.size)
        sound = header.nonfinite == 0.0
        busy_seconds = time.thread_time() - busy
        return Outcome(agreed, sums, measured, total.nbytes, sound, made_seconds, busy_seconds)

    def _nonfinite(self, rows: list[DeltaBuffer]) -> Work[float]:
        """Return the first value that is not finite of what rows send, as a number."""
        rank_info, before, code = self.rank_info, 0, 0.0
        for row in self._rows_of(None):
            if row in rows:
                element = yield from row.collect()
                if element is not None and not code:
                    code = culprit(before + element, rank_info.rank, rank_info.world_size)
            before += row.sharding.whole.numel
        return code

    def receive(self, batch: int, *, settles: bool = False) -> Measurements | None:
        """Finish the exchange in flight, merge it, and return what was agreed on with it.

        Args:
            batch: Batches done.
            settles: A blocking exchange of all later work follows.

        Collective over the world; blocking.
        """
        flight = self._flight
        if flight is not None and flight.small:
            self._receive_small(flight, batch, settles=settles)
            return None
        measurements = self._receive(batch, settles=settles)
        # A blocking exchange promises that all nodes agree: repeat it when it was dropped.
        blocking = flight is not None and flight.sent.batch == batch
        while measurements is None and blocking and flight is not None and not self.restart_due:
            self.send(batch, flight.sent.fragment, wait=0)
            measurements = self._receive(batch)
        return measurements

    def _receive_small(self, flight: InFlight, batch: int, *, settles: bool) -> None:
        """Finish an exchange of small tensors, and merge it."""
        self._flight, begun = None, time.perf_counter()
        outcome = self.coordinator.wait(flight.handle)
        exposed_seconds = time.perf_counter() - begun
        self.metrics.global_bytes_sent += outcome.nbytes
        _check_aligned(outcome.header)
        if outcome.header.nonfinite:
            self._drop(flight, outcome)
            return
        _, merging_seconds = self._merge(
            flight, self._small_rows, batch, outcome.nbytes, settles=settles
        )
        own_seconds = flight.own_seconds + merging_seconds
        own_seconds += self._core_loss.of(outcome.busy_seconds)
        self._core_loss.resume()
        self._local.small_own_seconds.append(own_seconds)
        self._local.small_exposed_seconds.append(exposed_seconds)
        self.metrics.small_exchanges += 1

    def _merge(
        self,
        flight: InFlight,
        rows: Sequence[DeltaBuffer],
        batch: int,
        nbytes: int,
        *,
        settles: bool,
    ) -> tuple[Merge, float]:
        """Merge what an exchange brought; return how, and the seconds of this thread.

        Collective over the node; blocking.
        """
        begun, waited = time.perf_counter(), self._node.waited_seconds
        sent = flight.sent
        rule = self.rules.merge(waited=batch - sent.batch, keeps=sent.keeps, settles=settles)
        applies = not self._local.written  # else the mean is of parameters that were discarded
        for row in rows:
            row.merge(rule, applies=applies)
        trace.record(trace.MERGE, begun, key=flight.handle.key, nbytes=nbytes)
        return rule, time.perf_counter() - begun - (self._node.waited_seconds - waited)

    def forget(self) -> None:
        """Let the exchange in flight end, and leave what it brought. Blocking."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self.metrics.global_bytes_sent += self.coordinator.wait(flight.handle).nbytes

    def _receive(self, batch: int, *, settles: bool = False) -> Measurements | None:
        """Finish the exchange in flight; return what was agreed on if it was merged."""
        flight, self._flight = self._flight, None
        assert flight is not None, "the schedule receives only what was sent"
        outcome = self.coordinator.wait(flight.handle)
        seconds = flight.handle.seconds - outcome.made_seconds
        self.metrics.global_bytes_sent += outcome.nbytes
        _check_aligned(outcome.header)
        if outcome.header.nonfinite:
            self._drop(flight, outcome)
            return None
        if outcome.header.written:
            self.restart_due = True
            if flight.ahead:
                for row in self._rows_of(flight.sent.fragment):
                    row.turn_back()
            return None
        self.metrics.exchange_seconds = seconds
        measurements = self._learn(flight, outcome)
        rows = self._rows_of(flight.sent.fragment)
        rule, merging_seconds = self._merge(flight, rows, batch, outcome.nbytes, settles=settles)
        own_seconds = flight.own_seconds + merging_seconds
        self._local.own_seconds = own_seconds + self._core_loss.end(outcome.busy_seconds)
        self.metrics.good()
        self.metrics.event(
            "exchange",
            sent=flight.sent.batch,
            received=batch,
            fragment=flight.sent.fragment,
            seconds=seconds,
            nbytes=outcome.nbytes,
            wire=flight.sent.wire,
            **asdict(measurements) | {"own_seconds": own_seconds},
            **asdict(rule),
        )
        self._plan_anew(flight, measurements.exchange_seconds)
        return measurements

    def _plan_anew(self, flight: InFlight, seconds: float) -> None:
        """Measure links again where exchanges of one kind take longer or shorter than they did.

        All ranks agreed on the seconds. Collective over the world; blocking, where that is so.
        """
        if not self.channels.plans_follow_links:
            return
        local = self._local
        # The seconds are of the exchange before.
        kind, local.kind = local.kind, f"{flight.sent.wire} {flight.sent.fragment}"
        if not kind:
            return
        local.lately[kind] = [*local.lately.get(kind, ()), seconds][-REMEMBERED:]
        if not has_changed(local.lately[kind]):
            return
        local.lately, local.kind = {}, ""
        self.coordinator.wait(self.channels.engine.submit(self.channels.look_again()))
        self._take_plans()
        self.metrics.event("links", sent=flight.sent.batch, plan=self.plan_name)

    def _take_plans(self) -> None:
        """Take means by the plans of now; nothing may be in flight."""
        self.channels.forget_means()
        for row in self._rows_of(None):
            row.take_plan()

    def _learn(self, flight: InFlight, outcome: Outcome) -> Measurements:
        """Return what all ranks agreed on with an exchange; keep this rank's part for the next."""
        header, before = outcome.header, self._state
        if not header.same_lr:
            self.coordinator.tell_of_rates(-header.minus_lr, header.lr)
        drift, gain, clipped_gain = self.rules.statistics(before, outcome.tally, header.clipping)
        agreed = Measurements(
            header.step_seconds,
            header.exchange_seconds,
            header.lr,
            drift,
            header.own_seconds,
            gain,
            small_seconds=header.small_seconds,
            clipped_gain=clipped_gain,
        )
        self._state, measurements = self.rules.learn(before, flight.sent, agreed)
        self._local.measured = outcome.measured
        self._note_slowest(header)
        if self.wire != before.wire:
            self.metrics.event("wire", sent=flight.sent.batch, wire=self.wire)
        return measurements

    def _note_slowest(self, header: Header) -> None:
        if header.slowest:
            seconds, rank = decode_slow_rank(header.slowest, self.rank_info.world_size)
            self.coordinator.note_slowest(rank, seconds, fastest_seconds=header.step_seconds)

    @property
    def wire(self) -> str:
        """The wire of the next exchange."""
        return self._state.wire

    @property
    def plan_name(self) -> str:
        """How the mean of the largest row is taken, in words."""
        if self.settings.by_mpi:
            return "MPI's"
        return max(self._rows_of(None), key=lambda row: row.sharding.whole.numel).means.plan.name

    @property
    def kernels(self) -> str:
        """The name of the kernels, and the reason for a fallback."""
        return describe_kernels(self.coordinator.trained.device)

    def _drop(self, flight: InFlight, outcome: Outcome) -> None:
        """Set the node whose value is not finite back to the reference; say whose it is."""
        if not flight.small:
            self._state = self.rules.drop(self._state)
            self._core_loss.drop()
        element, rank = decode_culprit(outcome.header.nonfinite, self.rank_info.world_size)
        if not all(self.coordinator.topology.node_comm.allgather(outcome.sound)):
            for row in self._rows_of(None):
                row.restore()
            self._local.written = False  # what was written is gone
            zero_nonfinite(self.coordinator.trained.inner, self.coordinator.trained.named)
        elif flight.ahead:
            for row in self._rows_of(flight.sent.fragment):
                row.turn_back()
        self.coordinator.others.mend()
        self.coordinator.count_drop(
            f"parameter {self._name_at(element)} on rank {rank} is not finite; this exchange is "
            f"dropped and that node starts again from the last agreed parameters"
        )

    def _name_at(self, element: int) -> str:
        for row in self._rows_of(None):
            if element < row.sharding.whole.numel:
                return row.sharding.whole.name_at(element)
            element -= row.sharding.whole.numel
        raise AssertionError("an element outside all rows")

    # --- checkpoint --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what this rank needs to go on to the same bits, an exchange in flight included.

        Plain values and tensors. Waits until the exchange in flight is over between nodes; it is
        merged when the schedule says so, here and after loading. Not collective.
        """
        flight = self._flight
        self.note_writes(goes_on=True)
        return {
            "rows": [row.state() for row in self._at_rest()],
            "state": asdict(self._state),
            "local": asdict(self._local),
            "core_loss": self._core_loss.state(),
            "gradient_scale": self.gradient_scale and self.gradient_scale.state(),
            "writes": self._writes.history,
            "flight": flight and pack(flight),
            "route": self.channels.route and stored(self.channels.route),
            "costs": self.channels.costs and asdict(self.channels.costs),
        }

    def _at_rest(self) -> list[DeltaBuffer]:
        """Return all rows, once nothing is under way between nodes."""
        if self._flight is not None:
            self.channels.engine.wait(self._flight.handle)
        return self._rows_of(None)

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned on the same rank of a world of the same shape."""
        self._at_rest()
        if state["costs"] is not None:
            self.channels.costs = LinkCosts(**state["costs"])
        if state["route"] is not None:
            self.channels.route = restored(state["route"])
        self._take_plans()
        for row, values in zip(self._at_rest(), state["rows"], strict=True):
            row.load(values)
        self._state = ExchangeState(**state["state"])
        local = copy.deepcopy(state["local"])  # lists are the caller's
        fresh = {"measured": Tally(**local["measured"]), "marked": None}
        self._local = LocalMeasurements(**local | fresh)
        self._writes.history = state["writes"]
        self._core_loss.load(state.get("core_loss", {"loss": None, "others": 0.0}))
        if self.gradient_scale is not None and state.get("gradient_scale"):
            self.gradient_scale.load(state["gradient_scale"])
        self._flight = None if state["flight"] is None else unpack(state["flight"])
