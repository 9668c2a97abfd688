"""Carries out what the schedule says: averages in the node; sends, receives, merges between nodes.

The optimizer in front of it only calls `before_step` and `after_step`. Parameters are written here,
by the training thread, at step boundaries, and nowhere else.
"""

import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from daso import trace
from daso.comm.collectives import first_value, gather_in_node
from daso.comm.emulation import stretch
from daso.comm.health.survivors import raise_where_lost
from daso.comm.node.select import choose_node
from daso.comm.step_timer import HostTimestamp
from daso.comm.topology import Topology
from daso.errors import ConfigError, ExchangeError, NonFiniteError
from daso.plan.bucket_search import BucketSizeSearch
from daso.plan.cost_model import efficient_portion_bytes
from daso.plan.options import MiB, Settings
from daso.plan.schedule import Action, Measurements, State
from daso.train.channels import Channels
from daso.train.coordinator import Coordinator
from daso.train.deltas.exchange import Exchanges
from daso.train.deltas.outer import MakeOuter
from daso.train.gradients.averaging import GradientAveraging
from daso.train.gradients.bucket_tuner import BucketTuner, first_size
from daso.train.gradients.buckets import Cuts
from daso.train.gradients.host_reducer import HostReducer
from daso.train.gradients.layerwise_step import INSTEAD, LayerwiseStep
from daso.train.gradients.reducer import BackwardCallbacks, GradientReducer
from daso.train.inner.grad_scaler import Scaling, is_probe
from daso.train.metrics import Metrics
from daso.train.misuse import has_batch_norm
from daso.train.model.changes import ParameterChanges
from daso.train.model.params import Trained
from daso.train.model.writes import ParameterWrites
from daso.train.startup import make_background, start_alike

__all__ = ["SessionCallbacks", "Synchronizer"]

logger = logging.getLogger("daso")
CUTS: dict[str, Cuts] = {"bucketed": "none", "host": "last", "prioritized": "all"}


@dataclass(frozen=True, slots=True)
class SessionCallbacks:
    """Questions to the session, and to all sessions.

    Args:
        absorbs: Whether an error in a backward is left to the step to come.
        elsewhere: The ids of parameters that wrapped optimizers train.
    """

    absorbs: Callable[[Exception], bool]
    elsewhere: Callable[[], Container[int]]


class Synchronizer:
    """Keeps one model the same on all ranks, or as near as the schedule asks.

    Args:
        trained: The optimizer and what it trains.
        topology: Who is where; more than one rank.
        settings: How to exchange.
        metrics: Where everything is counted.
        outer: Makes an optimizer for the reference.
        callbacks: Of its session.
        looked: Whether an earlier one of the same training looked around at its first step.

    Collective over the world; blocking.
    """

    def __init__(
        self,
        trained: Trained,
        topology: Topology,
        settings: Settings,
        metrics: Metrics,
        *,
        outer: MakeOuter | None = None,
        callbacks: SessionCallbacks,
        looked: bool = False,
    ) -> None:
        replicas = start_alike(trained, topology, settings)
        self.trained, self.topology = trained, topology
        self.metrics, self.changes = metrics, ParameterChanges(trained)
        self.channels = Channels(topology, settings, replicas)
        self.coordinator = Coordinator(
            trained, topology, replicas, self.channels, metrics, callbacks.elsewhere
        )
        self.writes = ParameterWrites(trained)
        self._one_node = topology.rank_info.nodes == 1
        self.over: str | None = None  # why it can do nothing any more
        self.apart = False  # nodes hold other parameters, and the program asked for no mean since
        self._batch = 0  # steps taken
        self.looked = looked  # around, at the first step
        self.coordinator.compares_batches = not looked
        self._counts_closure = False  # as an averaged step
        self.averaging, portion_bytes = self._open_averaging(replicas)
        bucket_bytes, search = first_size(
            settings,
            sum(p.nbytes for _, p in trained.local),
            on_gpu=trained.device.type == "cuda",
            portion_bytes=portion_bytes,
        )
        self.buckets = GradientReducer(
            trained.local,
            self.averaging.node,
            self.averaging.plan(between=False),
            bucket_bytes=bucket_bytes,
            same_order=self.coordinator.same_order,
            callbacks=BackwardCallbacks(
                partial(self._begin_step, in_backward=True),
                self._others_average,
                self.changes.layout_changed,
                callbacks.absorbs,
                self._gradient_made,
                self._count_round,
            ),
            cuts=CUTS[settings.gradients.reducer],
        )
        self.layers = self._layers()
        self._tuner = self._make_tuner(search)
        self._stretch = stretch()
        self.exchanges: Exchanges | None = None
        try:
            if topology.nodes > 1:
                self.exchanges = Exchanges(self.coordinator, self.buckets.node, outer, self.writes)
        except Exception:  # no memory: leave the user's model without hooks
            self.averaging.close()
            self.channels.engine.close()
            self.buckets.node.abandon()
            self.unhook()
            raise

    def _open_averaging(self, replicas: Topology) -> tuple[GradientAveraging, int | None]:
        """Return what averages gradients, and `_portion_bytes`; give back what is held on errors.

        Collective over the world; blocking.
        """
        background = make_background(self.channels, self.metrics, self.channels.settings)
        try:
            portion_bytes = self._portion_bytes()
            node = choose_node(
                replicas,
                self.trained.device,
                self.channels.settings.gradients.reducer,
                self.channels.settings.exchange.timeout_seconds,
                self.channels.late,
            )
        except Exception:
            if background is not None:
                background.close()
            self.channels.engine.close()
            raise
        return GradientAveraging(self.coordinator, node, background), portion_bytes

    def _portion_bytes(self) -> int | None:
        """Return how large portions are, where that follows from what messages cost.

        Collective over the world, then blocking.
        """
        gradients = self.channels.settings.gradients
        if not gradients.sizes_portions or self.topology.nodes == 1:
            return None
        costs = self.channels.measured_costs()
        return efficient_portion_bytes(gradients.link_efficiency, self.channels.plan(MiB), costs)

    def _others_average(self) -> bool:
        """Return whether others may still average gradients that are there: wait for all.

        FSDP2 has averaged a gradient on the host before it tells that it is there.
        """
        if self.coordinator.is_sharded:
            return self.trained.device.type != "cpu"
        return bool(self.coordinator.ddps.around())

    def _make_tuner(self, search: BucketSizeSearch | None) -> BucketTuner | None:
        """Return what searches the size of buckets; None where it is given."""
        if search is None:
            return None
        return BucketTuner(search, self.coordinator, self._cut, self.buckets.rows.groups)

    def _layers(self) -> LayerwiseStep | None:
        """Return how steps are taken layer by layer; None where they are always whole."""
        if self.channels.settings.whole:
            return None
        if self.topology.nodes > 1:
            return LayerwiseStep(
                self.trained, self.buckets, self.coordinator.count_drop, self.metrics.good
            )
        # Of gradients that stay in the node nobody looks whether they are finite.
        inside = isinstance(self.averaging.background, HostReducer)
        return LayerwiseStep(self.trained, self.buckets) if inside else None

    def start_watch(self) -> None:
        """Begin a step, by the clock of what computes here."""
        copies = self.buckets.node.copies
        self.metrics.watch.start(HostTimestamp if copies is None else copies.stamp)

    # --- gradients ---------------------------------------------------------------------------

    def enter(self, state: State) -> None:
        """Take over the schedule's state: it says where gradients are averaged from now on."""
        self.metrics.epoch, self._batch = state.epoch, state.batch
        self.apart = self.exchanges is not None and not state.alike
        self.channels.watchdog.steps, self.channels.watchdog.heeds = state.batch, None
        by_layers = state.synchronous and self.layers is not None
        self.averaging.enter(state, by_layers=by_layers)
        if self.exchanges is not None and state.synchronous:
            self.exchanges.rest()
        # Nodes whose GradScalers went apart average between them after unscaling.
        apart = self.metrics.scales_apart and self.layers is None
        between = self.averaging.synchronous and not apart
        plan = self.averaging.plan(between=between)
        if plan != self.buckets.reduce_plan:  # what was averaged was not as it is from now on
            self.buckets.fresh = False
        self.buckets.reduce_plan = plan

    # --- one step ----------------------------------------------------------------------------

    def _begin_step(self, *, in_backward: bool = False) -> None:
        """Say that this rank is in a step now, see `StepWatchdog`; the last one ends here.

        No step need follow a backward, and where that averages in its node, others may meet.
        """
        watchdog, node = self.channels.watchdog, self.topology.rank_info
        watchdog.steps = self._batch + 1
        alone = in_backward and not self.averaging.synchronous
        watchdog.heeds = node.ranks_of_node if alone else None
        if in_backward:
            self._count_round()
        if self.layers is not None:
            self.layers.begin()

    def _count_round(self) -> None:
        """Count an average over all ranks. Nodes may average by themselves differently often."""
        apart = self.metrics.scales_apart and self.layers is None
        apart = apart or not self.averaging.synchronous
        if self._one_node or not apart:
            self.channels.watchdog.rounds += 1

    def _gradient_made(self, index: int | None) -> None:
        """Keep a gradient that the program may change before the step; see `GradientScaleMeter`."""
        meter = None if self.exchanges is None else self.exchanges.gradient_scale
        if meter is not None and index in (None, meter.index):
            meter.note()

    def is_averaged_everywhere(self) -> bool:
        """Return whether the last backward averaged gradients on every rank. Collective."""
        return self.coordinator.extremes(float(self.buckets.fresh))[0] == 1.0

    def take_gradients_of(self, other: "Synchronizer", *, averaged: bool) -> None:
        """Leave gradients as they are that another synchronizer averaged for the next step.

        A second average would round them again, on a narrow wire. Layers step with gradients in
        rows, which are not made yet.
        """
        known = {id(param) for _, param in other.trained.named}
        same = all(id(param) in known for _, param in self.trained.named)
        wider = self.averaging.synchronous and not other.averaging.synchronous
        self.buckets.fresh = averaged and same and not wider and self.layers is None

    def note_agreed(self) -> None:
        """Note that the program has the mean of nodes, or a state to resume from, until a step."""
        self.apart = False

    def settle(self) -> None:
        """Wait for all gradients that are under way. Collective over the world; blocking."""
        self.flush()
        self.buckets.collect(range(len(self.trained.named)))
        self.averaging.finish()

    def _cut(self, bucket_bytes: int) -> None:
        """Cut buckets anew, between two rounds. Collective over the world; blocking."""
        self.flush()
        self.buckets.cut(bucket_bytes)
        self.averaging.compressor.forget()

    def flush(self) -> None:
        """Take what is left of a step that is taken layer by layer. Collective over the world."""
        if self.layers is not None:
            self.layers.flush()
        if not self.buckets.under_way():
            self.averaging.finish()

    def before_closure(self) -> None:
        """Get ready for a step that calls backward itself."""
        self._begin_step()
        if self.exchanges is not None:
            self.exchanges.note_writes()
        self.averaging.check()
        self._refuse("closures", self.averaging.by_layers)
        self.buckets.reduce_plan = self.averaging.plan(between=self.averaging.synchronous)
        self._counts_closure = True

    def after_closure(self) -> None:
        """Join the averaging if no backward of a closure did: all were inside `no_sync`, say.

        The optimizer finds no gradients where a step must not be taken.
        """
        if not self.buckets.fresh:
            self.buckets.finish_round()
        self._look_around()
        if self._gradients_sound(counts=self._counts_closure):
            self._counts_closure = False  # others of the same step are no more exchanges
            return
        for _, param in self.trained.named:
            param.grad = None

    def _look_around(self) -> None:
        """Look once, at the first step, at what may have been made after this; see `misuse`."""
        if self.looked:
            return
        self.looked = True
        rank_info, named = self.topology.rank_info, self.trained.named
        if rank_info.nodes > 1:
            self.coordinator.ddps.refuse_wide(rank_info.local_size)
        if self.coordinator.is_sharded:
            self.coordinator.check_same_in_node()
        if self.buckets.reduce_plan.alone:  # no average comes by that could look
            self.coordinator.look_for_same_batches(range(len(named)))
        if self.trained.module is None and self.coordinator.leads and has_batch_norm(named):
            logger.warning(
                "the statistics of BatchNorm must be averaged too, but daso was not given the "
                "model that has them, so that they differ between ranks; pass module=model"
            )

    def _refuse(self, what: str, met: bool) -> None:
        if met:
            raise ConfigError(
                f"a step must need no gradient but a layer's own where no step waits for all of "
                f"them, but {what} need all; {INSTEAD}"
            )

    def before_step(self, scaling: Scaling) -> bool:
        """Join the averaging if no backward did since the last step; take scaling off gradients.

        Collective over the world in the sense of the schedule.
        """
        self._begin_step()
        self.averaging.check()
        self._look_around()
        if self.exchanges is not None:
            self.exchanges.before_step()
        late = self._finish_round(scaling)
        if self.layers is not None and self.averaging.by_layers:
            self._refuse("GradScalers", scaling.active)
            self.layers.step()
            return False
        finite = scaling.unscale(self.trained.inner)
        synchronous = self.averaging.synchronous
        self.metrics.scales_apart |= scaling.active and not synchronous
        if synchronous and self.metrics.scales_apart:
            self._average_unscaled()
            late = True
        if late:
            finite = self._nonfinite_gradient() is None
        # Without a scaler no scales are apart, whatever was loaded: from the next step on nodes
        # average before users see gradients, and clip them.
        self.metrics.scales_apart &= scaling.active
        if not scaling.active:
            return self._gradients_sound()
        if self.coordinator.is_sharded:  # each rank saw a part
            timeout_seconds = self.channels.settings.exchange.timeout_seconds
            finite = all(gather_in_node(self.topology, float(finite), timeout_seconds))
        if synchronous and finite:
            self.metrics.good()
        return finite

    def _finish_round(self, scaling: Scaling) -> bool:
        """Average what no backward did; return whether a scaler looked at gradients before."""
        if self.buckets.fresh:
            return False
        late = scaling.active and not self.buckets.reduce_plan.alone
        if late and self.buckets.piled_up:
            raise ConfigError(
                "a GradScaler must look at gradients that are averaged, but the last backward was "
                "inside no_sync(), and step() averages after it has looked; leave the last "
                "backward outside of no_sync()"
            )
        self.buckets.finish_round()
        return late

    def _gradients_sound(self, *, counts: bool = True) -> bool:
        """Tell whether a synchronous step may be taken; its gradients are the same everywhere."""
        if not self.averaging.synchronous:
            return True
        name = self._nonfinite_gradient()
        if name is None:
            if counts:
                self.metrics.good()
            return True
        self.coordinator.count_drop(
            f"the mean gradient of {name} is not finite; this step is dropped"
        )
        return False

    def _nonfinite_gradient(self) -> str | None:
        """Return the name of a parameter whose mean gradient is not finite, the same on all ranks.

        Collective over the world, and blocking, where ranks hold parts.
        """
        name = self.buckets.rows.first_nonfinite()
        if not self.coordinator.is_sharded:
            return name
        names = ["", *(one for one, _ in self.trained.named)]
        last = self.coordinator.extremes(float(names.index(name or "")), of_step=True)[1]
        return names[int(last)] or None

    def _average_unscaled(self) -> None:
        """Average node means between nodes, after each node divided by a scale of its own."""
        self.buckets.reduce_plan = self.averaging.plan(between=True)
        self.buckets.finish_round()
        self.buckets.reduce_plan = self.averaging.plan(between=False)

    def mean_loss(self, loss: Any) -> Any:
        """Return a loss averaged over the ranks whose gradients are; number or 0-dim tensor.

        Collective over the node, in synchronous phases over the world; blocking.
        """
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if self.averaging.synchronous:
            value = self.coordinator.mean(value, of_step=True)
        else:
            values = gather_in_node(
                self.topology, value, self.channels.settings.exchange.timeout_seconds
            )
            value = sum(values) / len(values)
        return loss.detach().clone().fill_(value) if isinstance(loss, torch.Tensor) else value

    def is_probe(self) -> bool:
        """Return whether the step to come is torch's own; see `grad_scaler.is_probe`."""
        if not is_probe(self.trained.inner):
            return False
        return not any(
            p.grad is not None and self.buckets.owns(p.grad) for _, p in self.trained.local
        )

    def after_step(self, acts: Sequence[Action], state: State) -> Measurements | None:
        """Carry out what is due after a batch.

        Collective over the world in the sense of the schedule; blocks for receives.
        """
        self.buckets.fresh = False
        if self.exchanges is not None and self.exchanges.gradient_scale is not None:
            self.exchanges.gradient_scale.forget()
        stepped_at = self.metrics.stepped_at
        self._stretch.after_step(stepped_at, self.exposed_seconds)
        self.metrics.step()
        trace.record(trace.STEP, stepped_at, key=state.batch)
        if acts or not state.synchronous:
            self.flush()
        measurements = self.perform(acts, state)
        if self._tuner is not None and not self.buckets.reduce_plan.alone:
            self._tuner.after_step(state.batch, state.wait)
        return measurements

    def mark_writes(self, *, has_modes: bool) -> None:
        """Watch for changes of parameters by the program until the next step.

        Args:
            has_modes: `eval()` and `train()` of the inner optimizer write parameters.
        """
        if self.exchanges is not None:
            self.writes.mark(by_layers=self.averaging.by_layers or has_modes)

    def pass_batch(self, state: State, *, aside: bool) -> None:
        """Go on to a batch in which nothing is due here; gradients stay on this rank if aside."""
        self.buckets.fresh = False
        self.metrics.step()
        self.enter(state)
        if aside:
            self.stand_aside()

    def stand_aside(self) -> None:
        """Average nothing until the next batch."""
        self.buckets.reduce_plan = replace(self.averaging.plan(between=False), alone=True)

    def perform(self, acts: Sequence[Action], state: State) -> Measurements | None:
        """Carry out acts in order, then go on from ``state``; return what was agreed on last."""
        measurements, error = None, None
        for act in acts:
            try:
                measurements = self._carry_out(act, state) or measurements
            except NonFiniteError as caught:  # on all ranks: what else is due keeps them in step
                error = caught
        self.enter(state)
        if error is not None:
            raise error
        return measurements

    def _carry_out(self, act: Action, state: State) -> Measurements | None:
        exchanges = self.exchanges
        if act is Action.JOIN:
            self.coordinator.join()
        elif exchanges is None:  # one node: nothing goes between nodes
            return None
        elif act is Action.ANCHOR:
            exchanges.anchor(state.agreed)  # not a rank's own count, where ranks were lost
        elif act in (Action.RECEIVE, Action.SETTLE):
            return exchanges.receive(state.batch, settles=act is Action.SETTLE)
        elif act is Action.MEASURE:
            return exchanges.measure(state.batch)
        else:
            _send(act, state, exchanges)
        return None

    def equalize(self, state: State) -> None:
        """Make parameters bit-identical on all ranks where something else than steps changed them.

        Collective over the world; blocking.
        """
        if self.coordinator.equalize():
            return
        if state.synchronous:
            self.coordinator.join()
        elif self.exchanges is not None:
            self.exchanges.anchor(state.batch)

    def forget(self) -> None:
        """Let the exchange in flight end, and leave what it brought. Blocking."""
        if self.exchanges is not None:
            self.exchanges.forget()

    # --- checkpoint --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what this rank needs to go on to the same bits: plain values and tensors."""
        return {
            "exchanges": None if self.exchanges is None else self.exchanges.state(),
            "counts": self.metrics.state(),
            "gradients": self.averaging.compressor.state() | {"rows": self.buckets.arrangement()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned on the same rank of a world of the same shape."""
        if self.exchanges is not None:
            self.exchanges.load(state["exchanges"])
        self.writes.forget()  # what was loaded belongs to this state
        self.metrics.load(state["counts"])
        self.buckets.arrange(*state["gradients"]["rows"])
        self.averaging.compressor.load(state["gradients"])

    @property
    def exposed_seconds(self) -> float:
        """Seconds that this rank computed nothing since it waited for others."""
        return self.metrics.exposed_seconds + self.buckets.node.idle_seconds

    def chosen(self) -> dict[str, str]:
        """Return what is chosen here, some of it anew while training goes on; for reports."""
        found = {"node_transport": self.buckets.node.name}
        if self.exchanges is not None:
            found["wire"], found["allreduce"] = self.exchanges.wire, self.exchanges.plan_name
            found["gradient_wire"] = self.averaging.wire
            restored = self.exchanges.restorations.always is not None
            found["step_restoration"] = (
                "a measured gain on the learning rate" if restored else "none"
            )
            small, numel = self.exchanges.small_numel, self.exchanges.numel
            found["small_tensors"] = f"{small} of {numel} numbers alone, too" if small else "none"
            found["kernels"] = self.exchanges.kernels
        return found

    def close(self) -> bool:
        """Stop the threads and give everything back. Collective over the world; idempotent.

        Returns:
            Whether all work ended well; where it did not, threads may go on.
        """
        self.over = self.over or "was closed"
        self.unhook()
        sound = self.averaging.close()
        sound = self.channels.close() and sound  # until here an exchange in flight may go on
        if sound:
            self.buckets.node.free()
        self.exchanges = None
        return sound

    def lose(self) -> None:
        """Let go of everything but the node's memory, where a rank is lost. Does not block long."""
        self.over = "lost a rank"
        self.channels.lose()
        self.unhook()
        self.exchanges = None

    def go_on_from(self, other: "Synchronizer | None") -> None:
        """Take the place of one that lost a rank, where this rank had one; give back its memory.

        Collective over the world; blocking.
        """
        self.looked = True  # as it had
        # Now, where all are: later some ranks train alone.
        order = first_value(
            self.topology,
            None if other is None else other.buckets.order,
            self.channels.settings.exchange.timeout_seconds,
        )
        raise_where_lost(self.topology)  # or a rank of this node may not come
        if order:
            self.buckets.order = order
            self.buckets.rows.make(order, self.buckets.bucket_bytes)
        if other is not None:
            other.buckets.node.free()

    def sound_steps(self) -> int | None:
        """Return the steps taken, if nothing failed here; None if something did."""
        try:
            self.averaging.check()
        except ExchangeError:
            return None
        return self.channels.watchdog.steps

    def abandon(self) -> None:
        """Stop all threads whatever is under way; for the end of the process."""
        self.averaging.abandon()

    def unhook(self) -> None:
        """Leave the user's model without hooks; idempotent."""
        self.writes.close()
        if self.layers is not None:
            self.layers.close()
        self.buckets.close()


def _send(act: Action, state: State, exchanges: Exchanges) -> None:
    """Start an exchange of what is due."""
    if act is Action.SEND:
        exchanges.send(state.batch, state.fragment, wait=state.sent_wait)
    elif act is Action.SEND_ALL:
        exchanges.send(state.batch, None, wait=0)
    else:
        assert act is Action.SEND_SMALL
        exchanges.send_small(state.batch)
