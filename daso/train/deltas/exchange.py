"""Exchanges of parameters between nodes: starting, finishing, merging, dropping.

One exchange is in flight at a time. Parameters are written here, by the training thread, at step
boundaries, and nowhere else.
"""

import time
from dataclasses import asdict, replace
from typing import Any

from daso import trace
from daso.comm.control import gather_numbers_in_node
from daso.comm.node.base import NodeTransport
from daso.kernels.choice import describe_kernels
from daso.plan.exchange import ExchangeRules, ExchangeState, Merge, Tally
from daso.plan.header import decode_culprit
from daso.plan.schedule import Action, Measurements, State
from daso.plan.small_tensors import SMALL_WAIT
from daso.train.coordinator import Coordinator
from daso.train.deltas.buffer import DeltaBuffer, anchor_rows
from daso.train.deltas.divergence import refuse_divergence
from daso.train.deltas.in_flight import InFlight, Outcome, Votes, carry_out, name_at, pack, unpack
from daso.train.deltas.meter import ExchangeMeter
from daso.train.deltas.outer import MakeOuter
from daso.train.deltas.rows import make_rows
from daso.train.inner.step_restoration import Restorations
from daso.train.model.changes import Change, GradientScaleMeter, ParameterWrites
from daso.train.model.state_sync import zero_nonfinite

DIGESTS = 2**48  # a digest travels in a float64 and must survive there exactly


class DeltaExchange:
    """Exchanges of one model between nodes.

    Args:
        coordinator: Collectives of all ranks; has the model, the world and the links.
        node: The node whose ranks share rows.
        outer: Makes an optimizer for the reference.
        writes: Detects that the program writes parameters between steps.
        restorations: Restorations of the inner optimizer's steps.
        clipping: Measures clipping; None: steps are not restored by it.

    Collective over the node; blocking.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        node: NodeTransport,
        outer: MakeOuter | None,
        writes: ParameterWrites,
        restorations: Restorations,
        clipping: GradientScaleMeter | None,
    ) -> None:
        self.coordinator, self.channels = coordinator, coordinator.channels
        self.metrics, self.settings = coordinator.metrics, coordinator.channels.settings
        self.rank_info = coordinator.topology.rank_info
        self._node, self._writes, self.restorations = node, writes, restorations
        self.restart_due = False  # all ranks agreed that parameters were written between steps
        # The gain is measured of tensors that were apart for the same number of batches.
        may_select = restorations.always is None
        self.rows = make_rows(coordinator, node, outer, may_select=may_select)
        self._all_rows = [row for rows in self.rows.values() for row in rows]
        self._small_rows = [row for row in self._all_rows if row.is_small]
        numels = [sum(row.numel for row in rows) for rows in self.rows.values()]
        self.numel = sum(numels)
        self.small_numel = sum(row.numel for row in self._small_rows)  # exchanged alone, too
        self._flight: InFlight | None = None
        digest = sum(row.sharding.whole.digest for row in self._all_rows) % DIGESTS
        self._votes = Votes(self.channels)
        self._meter = ExchangeMeter(coordinator, clipping, digest)
        self.rules = ExchangeRules(
            self.settings, self.rank_info.nodes, tuple(numels), *restorations.momentums
        )
        self._state = self.rules.start()

    def _rows_of(self, fragment: int | None) -> list[DeltaBuffer]:
        return self._all_rows if fragment is None else self.rows[fragment]

    # --- actions of the schedule -------------------------------------------------------------

    def perform(self, action: Action, state: State) -> Measurements | None:
        """Carry out an action; return the measurements that all ranks agreed on with it.

        Collective over the world; blocks if the action finishes an exchange.
        """
        if action is Action.SEND:
            self.start(state.batch, state.fragment, wait=state.sent_wait)
        elif action is Action.SEND_ALL:
            self.start(state.batch, None, wait=0)
        elif action is Action.SEND_SMALL:
            self.start(state.batch, None, wait=SMALL_WAIT, small=True)
        elif action is Action.MEASURE:
            return self.measure(state.batch)
        elif action is Action.ANCHOR:
            self.anchor(state.agreed)  # not a rank's own count, where ranks were lost
        else:
            return self.finish(state.batch, settles=action is Action.SETTLE)
        return None

    def anchor(self, batch: int) -> None:
        """Take the parameters as the reference. Collective over the world; blocking."""
        self._meter.anchor(anchor_rows(self._all_rows, self.coordinator) or 1.0)
        self._state = self.rules.start(batch, self._state)

    def rest(self) -> None:
        """Give memory back until `anchor`: nodes average gradients. Does not communicate."""
        for row in self._all_rows:
            row.rest()

    def measure(self, batch: int) -> Measurements:
        """Return the agreed measurements of synchronous steps since the last call.

        Collective over the world; blocking.
        """
        header = self._meter.synchronous_header(batch, self.channels.engine.busy_seconds)
        with self.channels.watchdog.meeting(batch):
            work = self._votes.combine(header)
            agreed, _ = self.coordinator.wait(self.channels.engine.submit(work), of_step=False)
        agreed.check_aligned()
        self.coordinator.note_slowest(agreed)
        measurements = Measurements(
            agreed.step_seconds, lr=agreed.lr, exposed_seconds=agreed.exposed_seconds
        )
        self.metrics.event("measured", batch=batch, **asdict(measurements))
        return measurements

    # --- one exchange ------------------------------------------------------------------------

    def start(self, batch: int, fragment: int | None, *, wait: int, small: bool = False) -> None:
        """Start an exchange of a fragment, of everything (None), or of small tensors alone.

        Collective over the world; non-blocking, but for the node where nodes go ahead.
        """
        begun, waited = time.perf_counter(), self._node.waited_seconds
        ahead = self.settings.eager and wait > 0 and not small
        rows = self._small_rows if small else self._rows_of(fragment)
        if small:
            sent = self.rules.send_small(self._state, batch, wait=wait)
        else:
            sent = self.rules.send(self._state, batch, fragment, wait=wait)
        for row in rows:
            row.encode(sent.wire, dense=fragment is None and not small, keeps=sent.keeps)
        if ahead:
            for row in rows:
                row.go_ahead()
        self._meter.started(during_training=wait > 0, small=small)
        header = self._meter.header(batch) if small else self._meter.measured_header(batch)
        work = carry_out(
            self.channels,
            self._votes,
            self._all_rows,
            rows,
            header,
            tally=None if small else self._meter.tally(),
            size=self._meter.local.size,
        )
        number = self.metrics.send()
        own_seconds = time.perf_counter() - begun - (self._node.waited_seconds - waited)
        trace.record(trace.SEND, begun, key=number)
        due_seconds = wait * self._state.step_seconds
        handle = self.channels.engine.submit(work, key=number, due_seconds=due_seconds)
        self._flight = InFlight(handle, sent, ahead, own_seconds, small)

    def finish(self, batch: int, *, settles: bool = False) -> Measurements | None:
        """Finish the exchange in flight and merge it; return its measurements.

        With ``settles`` a blocking exchange of all later work follows. Collective over the world;
        blocking.
        """
        flight = self._flight
        assert flight is not None, "the schedule receives only what was sent"
        measurements = self._finish(flight, batch, settles=settles)
        # A blocking exchange promises that all nodes agree: repeat it when it was dropped.
        blocking = flight.sent.batch == batch and not flight.small
        while measurements is None and blocking and not self.restart_due:
            self.start(batch, flight.sent.fragment, wait=0)
            measurements = self._finish(self._flight, batch)
        return measurements

    def _finish(
        self, flight: InFlight | None, batch: int, *, settles: bool = False
    ) -> Measurements | None:
        """Finish an exchange; return its measurements if they were taken and it was merged."""
        assert flight is not None, "it was started"
        self._flight, begun = None, time.perf_counter()
        outcome = self.coordinator.wait(flight.handle)
        exposed_seconds = time.perf_counter() - begun
        self.metrics.global_bytes_sent += outcome.nbytes
        outcome.header.check_aligned()
        if not (outcome.header.same_references and outcome.tally.payloads_arrived):
            refuse_divergence(self.coordinator, self._all_rows, outcome.tally)
            self._discard(flight)
            self._turn_back(flight)
            return None
        if outcome.header.nonfinite:
            self._drop(flight, outcome)
            return None
        if flight.small:
            _, own_seconds = self._merge(flight, batch, outcome.nbytes, settles=settles)
            self._meter.merged_small(own_seconds, outcome.busy_seconds, exposed_seconds)
            self.metrics.small_exchanges += 1
            return None
        if outcome.header.written:
            self.restart_due = True
            self._turn_back(flight)
            return None
        seconds = flight.handle.seconds - outcome.made_seconds
        self.metrics.note(exchange_seconds=seconds)
        measurements = self._learn(flight, outcome)
        rule, own_seconds = self._merge(flight, batch, outcome.nbytes, settles=settles)
        self._meter.merged(own_seconds, outcome.busy_seconds)
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
        if self.channels.plans_follow_links and self._meter.link_changed(flight.sent, measurements):
            self._plan_again(flight)
        return measurements

    def _merge(
        self, flight: InFlight, batch: int, nbytes: int, *, settles: bool
    ) -> tuple[Merge, float]:
        """Merge an exchange; return how, and its seconds of this thread in all.

        Collective over the node; blocking.
        """
        begun, waited, sent = time.perf_counter(), self._node.waited_seconds, flight.sent
        rows = self._small_rows if flight.small else self._rows_of(sent.fragment)
        rule = self.rules.merge(waited=batch - sent.batch, keeps=sent.keeps, settles=settles)
        applies = not self._meter.local.written  # else the mean is of parameters that were dropped
        for row in rows:
            row.merge(rule, applies=applies)
        trace.record(trace.MERGE, begun, key=flight.handle.key, nbytes=nbytes)
        seconds = time.perf_counter() - begun - (self._node.waited_seconds - waited)
        return rule, flight.own_seconds + seconds

    def _learn(self, flight: InFlight, outcome: Outcome) -> Measurements:
        """Return the agreed measurements of an exchange; keep this rank's part for the next."""
        header, before = outcome.header, self._state
        agreed = header.measurements()
        if not header.same_lr:
            self.coordinator.warn_of_rates(-header.minus_lr, header.lr)
        drift, gain, clipped_gain = self.rules.statistics(before, outcome.tally, header.clipping)
        agreed = replace(agreed, drift=drift, required_gain=gain, clipped_gain=clipped_gain)
        self._state, measurements = self.rules.learn(before, flight.sent, agreed)
        self._meter.local.measured = outcome.measured
        self.coordinator.note_slowest(header)
        if self._state.wire != before.wire:
            self.metrics.event("wire", sent=flight.sent.batch, wire=self._state.wire)
        return measurements

    def _plan_again(self, flight: InFlight) -> None:
        """Measure links again, and plan for them. Collective over the world; blocking."""
        self.coordinator.wait(self.channels.engine.submit(self.channels.look_again()))
        self._take_plans()
        self.metrics.event("links", sent=flight.sent.batch, plan=self.plan_name)

    def _take_plans(self) -> None:
        """Use the current plans; no exchange may be in flight."""
        self.channels.forget_means()
        for row in self._all_rows:
            row.take_plan()

    # --- errors ------------------------------------------------------------------------------

    def forget(self) -> None:
        """Wait for the exchange in flight, and discard its result. Blocking."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self.metrics.global_bytes_sent += self.coordinator.wait(flight.handle).nbytes

    def _turn_back(self, flight: InFlight) -> None:
        """Undo the prediction of a node that went ahead. Collective over the node; blocking."""
        if flight.ahead:
            for row in self._rows_of(flight.sent.fragment):
                row.turn_back()

    def _discard(self, flight: InFlight) -> None:
        """Forget the measurements of an exchange that is not merged."""
        if not flight.small:
            self._state = self.rules.drop(self._state)
            self._meter.contention.drop()

    def _drop(self, flight: InFlight, outcome: Outcome) -> None:
        """Reset the node with a non-finite value to the reference, and report its rank."""
        self._discard(flight)
        element, rank = decode_culprit(outcome.header.nonfinite, self.rank_info.world_size)
        limit = self.settings.exchange.timeout_seconds
        if not all(gather_numbers_in_node(self.coordinator.topology, outcome.sound, limit)):
            for row in self._all_rows:
                row.restore()
            self._meter.local.written = False  # the reference replaced the writes
            zero_nonfinite(self.coordinator.trained.inner, self.coordinator.trained.named)
        else:
            self._turn_back(flight)
        self.coordinator.others.mend()
        name = name_at(self._all_rows, element)
        self.coordinator.count_drop(
            f"parameter {name} on rank {rank} is not finite; this exchange is dropped and that "
            f"node starts again from the last agreed parameters"
        )

    def note_writes(self, *, goes_on: bool = False) -> None:
        """Check whether the program wrote parameters, and record it."""
        self.note_change(self._writes.changed(goes_on=goes_on))

    def note_change(self, change: Change) -> None:
        """Record a write of the program to parameters until all nodes restart from them."""
        # Before the first exchange no delta of the old parameters is under way.
        if change == "loaded" or (change and (self._flight is not None or self._state.batches)):
            self._meter.local.written = True
            if change == "written":
                self._writes.widen()

    def agree_on_writes(self) -> None:
        """Make a restart due if any rank wrote parameters. Collective over the world; blocking."""
        if self.coordinator.extremes(float(self._meter.local.written))[1]:
            self.restart_due = True

    # --- reports and checkpoints -------------------------------------------------------------

    @property
    def small_share(self) -> float:
        """Return the largest share of all bytes that small tensors take."""
        return self.settings.small_share(self.small_numel, self.numel)

    @property
    def measured(self) -> tuple[Tally, int]:
        """Tally of the last exchange on this rank, and its batches; the next exchange sums it."""
        return self._meter.local.measured, self._state.batches

    def go_on_from(self, measured: tuple[Tally, int]) -> None:
        """Take over `measured` of an optimizer of which this one's is a copy."""
        self._meter.local.measured, batches = measured
        self._state = replace(self._state, batches=batches)

    @property
    def plan_name(self) -> str:
        """Name of the plan that averages the largest row."""
        if self.settings.by_mpi:
            return "MPI's"
        return max(self._all_rows, key=lambda row: row.numel).means.plan.name

    def chosen(self, gradient_wire: str) -> dict[str, str]:
        """Return the choices of exchanges, for reports."""
        restored = self.restorations.always is not None
        small, numel = self.small_numel, self.numel
        return {
            "wire": self._state.wire,
            "allreduce": self.plan_name,
            "gradient_wire": gradient_wire,
            "step_restoration": "a measured gain on the learning rate" if restored else "none",
            "small_tensors": f"{small} of {numel} numbers alone, too" if small else "none",
            "kernels": describe_kernels(self.coordinator.trained.device),
        }

    def state(self) -> dict[str, Any]:
        """Return the state of this rank for a checkpoint, with the exchange in flight.

        Waits until its communication is over; the schedule merges it, here and after loading.
        """
        self.note_writes(goes_on=True)
        flight = self._end_flight()
        return self._meter.state() | {
            "rows": [row.state() for row in self._all_rows],
            "state": asdict(self._state),
            "writes": self._writes.history,
            "flight": flight and pack(flight),
            **self.channels.state(),
        }

    def _end_flight(self) -> InFlight | None:
        """Return the exchange in flight, if any, once it is over between nodes."""
        if self._flight is not None:
            self.channels.engine.wait(self._flight.handle)
        return self._flight

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned on the same rank of a world of the same shape."""
        self._end_flight()
        self.channels.load(state)
        self._take_plans()
        for row, values in zip(self._all_rows, state["rows"], strict=True):
            row.load(values)
        self._state = ExchangeState(**state["state"])
        self._meter.load(state)
        self._writes.history = state["writes"]
        self._flight = None if state["flight"] is None else unpack(state["flight"])
