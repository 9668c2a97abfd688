"""Gradients of each step: the ranks that average them, and the check before the step."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch

from daso.comm.control import gather_numbers_in_node
from daso.comm.health.step_watchdog import Position
from daso.errors import ConfigError
from daso.plan.bucket_search import BucketSizeSearch
from daso.plan.schedule import State
from daso.train.channels import Channels
from daso.train.coordinator import Coordinator
from daso.train.gradients.averaging import BackwardCallbacks, GradientAveraging, Phase
from daso.train.gradients.bucket_tuner import BucketTuner
from daso.train.gradients.cuts import Cuts
from daso.train.gradients.host_reducer import HostReducer
from daso.train.gradients.layerwise_step import INSTEAD, LayerwiseStep
from daso.train.gradients.reducer import GradientReducer
from daso.train.inner.steps import Scaling
from daso.train.model.changes import GradientScaleMeter, ParameterChanges

logger = logging.getLogger("daso")
CUTS: dict[str, Cuts] = {"bucketed": "none", "host": "last", "prioritized": "all"}


class GradientStep:
    """Averages the gradients of each step, and checks them for the inner optimizer.

    Args:
        coordinator: Meetings of all ranks.
        averaging: Averages gradients.
        changes: Detects that parameters got another layout.
        clipping: Measures clipping where it shortens the mean of nodes; None: it does not.
        absorbs: Returns whether the next step handles an error of a backward.
        buckets: Initial bytes of a bucket, and the search for a better size; None: it is fixed.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        averaging: GradientAveraging,
        changes: ParameterChanges,
        clipping: GradientScaleMeter | None,
        absorbs: Callable[[Exception], bool],
        *,
        buckets: tuple[int, BucketSizeSearch | None],
    ) -> None:
        self.coordinator, self.averaging = coordinator, averaging
        self.channels: Channels = coordinator.channels
        self.trained, self.metrics = coordinator.trained, coordinator.metrics
        self._settings, self._nodes = self.channels.settings, coordinator.topology.nodes
        bucket_bytes, search = buckets
        self.reducer = GradientReducer(
            self.trained.local,
            averaging.node,
            averaging.plan,
            bucket_bytes=bucket_bytes,
            same_order=coordinator.same_order,
            callbacks=BackwardCallbacks(
                self._others_average,
                changes.layout_changed,
                absorbs,
                begin=None if self._settings.whole else self._begin_layers,
                watched=None if clipping is None else (clipping.index, clipping.note),
            ),
            cuts=CUTS[self._settings.gradients.reducer],
        )
        self._check_threads = (averaging.background or self.channels.engine).check
        with ExitStack() as hooks:
            hooks.callback(self.reducer.close)
            self.layers = self._layers()
            hooks.pop_all()  # kept until `close`
        self.defers = self.layers is not None or averaging.background is not None
        self.tuner: BucketTuner | None = None  # None: the size of buckets is given
        if search is not None:
            groups = self.reducer.rows.groups
            self.tuner = BucketTuner(search, coordinator, self.cut, groups)
        self.clipping = clipping
        self._batch = 0  # steps taken
        self._stepping: Literal["", "step", "closure"] = ""  # under way
        self._stepped_with = 0  # backward passes before that step
        self._keeps: object = None  # alive as long as the hooks on parameters
        self.channels.watchdog.follow(self.position)
        # (synchronous, hidden, wide) of the schedule, by which gradients are averaged now.
        self._choice: tuple[bool, bool, bool] | None = None
        self._counts_closure = False  # as an averaged step

    def _layers(self) -> LayerwiseStep | None:
        """Return the layerwise step; None if steps are for the whole model."""
        if self._settings.whole:
            return None
        if self._nodes > 1:
            drop, good = self.coordinator.count_drop, self.metrics.good
            return LayerwiseStep(self.trained, self.reducer, drop, good)
        # Gradients that stay in the node are not checked for NaN.
        inside = isinstance(self.averaging.background, HostReducer)
        return LayerwiseStep(self.trained, self.reducer) if inside else None

    # --- phases ------------------------------------------------------------------------------

    def enter(self, state: State) -> bool:
        """Follow the phase of the schedule; return whether it changed."""
        self._batch, self._stepping = state.batch, ""
        before, self._choice = self._choice, (state.synchronous, state.hidden, state.sync.wide)
        if self._choice != before:
            by_layers = state.synchronous and self.layers is not None
            self.averaging.enter(state, by_layers=by_layers)
        self.reducer.set_phase(self._phase)
        return self._choice != before

    @property
    def _phase(self) -> Phase:
        """Phase of gradients during backward."""
        # Nodes whose GradScalers went apart average between them after unscaling.
        between = self.averaging.synchronous and not self._scales_apart
        return Phase.WORLD if between else Phase.NODE

    @property
    def _scales_apart(self) -> bool:
        return self.metrics.recent.scales_apart and self.layers is None

    def pause(self) -> None:
        """Average nothing until the next batch."""
        self.reducer.set_phase(Phase.PAUSED)

    def settle(self) -> None:
        """Wait for all gradients that are under way. Collective over the world; blocking."""
        self.flush()
        self.reducer.carried.collect(range(len(self.trained.named)))
        self.averaging.finish()

    def cut(self, bucket_bytes: int) -> None:
        """Cut buckets to another size, between two rounds. Collective over the world; blocking."""
        self.flush()
        self.reducer.rows.cut(bucket_bytes)
        self.averaging.compressor.forget()

    def flush(self) -> None:
        """Finish a step that is taken layer by layer. Collective over the world; blocking."""
        if self.layers is not None:
            self.layers.flush()
        if self.averaging.background is not None and not self.reducer.carried.under_way():
            self.averaging.finish()

    # --- backward ----------------------------------------------------------------------------

    def _begin_layers(self) -> None:
        """Finish the last layerwise step before a backward or a step begins."""
        if self.layers is not None:
            self.layers.begin()

    def position(self) -> Position:
        """Return the position of this rank for the watchdog; also called on the engine's thread.

        A backward without a step holds up its node only, if it averages inside the node.
        """
        in_round, stepping = self.reducer.in_round, self._stepping
        if stepping == "step" and self.reducer.backwards != self._stepped_with:
            stepping = ""  # that step raised, and another backward began
        alone = in_round and stepping != "step" and not self.averaging.synchronous
        relevant = self.coordinator.topology.rank_info.ranks_of_node if alone else None
        return Position(self._batch + bool(stepping or in_round), self.reducer.rounds, relevant)

    def _others_average(self) -> bool:
        """Return whether DDP or FSDP2 may still average gradients that hooks reported.

        On the host, FSDP2 averages a gradient before its hook runs.
        """
        if self.coordinator.is_sharded:
            return self.trained.device.type != "cpu"
        return bool(self.coordinator.ddps.around())

    def is_averaged_everywhere(self) -> bool:
        """Return whether the last backward averaged gradients on every rank. Collective."""
        return self.coordinator.extremes(float(self.reducer.round_finished))[0] == 1.0

    def take_gradients_of(self, other: "GradientStep", *, averaged: bool) -> None:
        """Take over gradients that another object averaged for the next step.

        A second average would round them again on a narrow wire. A layerwise step needs gradients
        in rows, which do not exist yet.
        """
        known = {id(param) for _, param in other.trained.named}
        same = all(id(param) in known for _, param in self.trained.named)
        wider = self.averaging.synchronous and not other.averaging.synchronous
        averaged = averaged and same and not wider and self.layers is None
        self.reducer.skip_round(averaged=averaged)

    # --- one step ----------------------------------------------------------------------------

    def before_step(self, scaling: Scaling | None) -> bool:
        """Average gradients that no backward averaged, and unscale them.

        Returns:
            Whether the inner optimizer may step.

        Collective over the world in the sense of the schedule.
        """
        self._stepping, self._stepped_with = "step", self.reducer.backwards
        self._begin_layers()
        self._check_threads()
        if not self.coordinator.first_step_checked:
            self.coordinator.check_first_step(averages=not self.reducer.averages_nothing)
        if self.clipping is not None:
            self.clipping.measure()
        late = self._finish_round(scaling)
        if self.layers is not None and self.averaging.by_layers:
            self._refuse("GradScalers", scaling is not None)
            self.layers.step()
            return False
        if scaling is None:
            return self._sound_unscaled()
        return self._sound_scaled(scaling, late=late)

    def _sound_unscaled(self) -> bool:
        """Return whether a step without a GradScaler may be taken."""
        apart = self.metrics.recent.scales_apart
        if apart:
            self.metrics.note(scales_apart=False)
        if apart and self.averaging.synchronous:
            self._average_unscaled()
        # Without a scaler no scales are apart, whatever was loaded: from the next step on nodes
        # average before users see gradients, and clip them.
        return self._is_sound()

    def _sound_scaled(self, scaling: Scaling, *, late: bool) -> bool:
        """Return whether the step of a GradScaler may be taken, on every rank alike."""
        finite = scaling.unscale(self.trained.inner)
        synchronous = self.averaging.synchronous
        if not synchronous:
            self.metrics.note(scales_apart=True)
        elif self.metrics.recent.scales_apart:
            self._average_unscaled()
            late = True
        if late:
            finite = self._nonfinite_gradient() is None
        if self.coordinator.is_sharded:  # each rank saw a part
            timeout_seconds = self._settings.exchange.timeout_seconds
            topology = self.coordinator.topology
            finite = all(gather_numbers_in_node(topology, float(finite), timeout_seconds))
        if synchronous and finite:
            self.metrics.good()
        return finite

    def _finish_round(self, scaling: Scaling | None) -> bool:
        """Average the remaining gradients; return whether a scaler checked them before."""
        reducer = self.reducer
        if reducer.round_finished or reducer.averages_nothing:
            return False
        late = scaling is not None
        if late and reducer.has_unreduced_grads:
            raise ConfigError(
                "a GradScaler must look at gradients that are averaged, but the last backward was "
                "inside no_sync(), and step() averages after it has looked; leave the last "
                "backward outside of no_sync()",
                code="scaler-inside-no-sync",
            )
        reducer.finish_round()
        return late

    def _is_sound(self, *, counts: bool = True) -> bool:
        """Return whether a synchronous step may be taken; gradients are the same everywhere."""
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
        name = self.reducer.rows.first_nonfinite()
        if not self.coordinator.is_sharded:
            return name
        names = ["", *(known for known, _ in self.trained.named)]
        last = self.coordinator.extremes(float(names.index(name or "")), of_step=True)[1]
        return names[int(last)] or None

    def _average_unscaled(self) -> None:
        """Average the node means between nodes, after each node has unscaled its gradients."""
        self.reducer.set_phase(Phase.WORLD)
        self.reducer.finish_round()
        self.reducer.set_phase(Phase.NODE)

    def end_step(self, batch: int) -> None:
        """Forget the gradients of a step; ``batch`` steps are done."""
        self._batch, self._stepping = batch, ""
        self.reducer.begin_step(self._phase)
        if self.clipping is not None:
            self.clipping.forget()  # the program did not see a mean that the step took by itself

    def tune(self, state: State) -> None:
        """Search the size of buckets.

        Collective over the world in the sense that all ranks call it after the same batches.
        """
        if self.tuner is not None and not self.reducer.averages_nothing:
            self.tuner.after_step(state.batch, state.wait)

    # --- closures ----------------------------------------------------------------------------

    def before_closure(self) -> None:
        """Get ready for a step that calls backward itself."""
        self._stepping = "closure"
        self._begin_layers()
        self._check_threads()
        self._refuse("closures", self.averaging.by_layers)
        self.reducer.set_phase(Phase.WORLD if self.averaging.synchronous else Phase.NODE)
        self._counts_closure = True

    def after_closure(self) -> None:
        """Average after a closure whose backward passes did not, such as inside `no_sync`.

        The optimizer finds no gradients where a step must not be taken.
        """
        if not self.reducer.round_finished:
            self.reducer.finish_round()
        if not self.coordinator.first_step_checked:
            self.coordinator.check_first_step(averages=not self.reducer.averages_nothing)
        if self._is_sound(counts=self._counts_closure):
            self._counts_closure = False  # others of the same step are no more exchanges
            return
        for _, param in self.trained.named:
            param.grad = None

    def mean_loss(self, loss: Any) -> Any:
        """Return a loss averaged over the ranks whose gradients are; number or 0-dim tensor.

        Collective over the node, in synchronous phases over the world; blocking.
        """
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if self.averaging.synchronous:
            value = self.coordinator.mean(value, of_step=True)
        else:
            limit = self._settings.exchange.timeout_seconds
            values = gather_numbers_in_node(self.coordinator.topology, value, limit)
            value = sum(values) / len(values)
        return loss.detach().clone().fill_(value) if isinstance(loss, torch.Tensor) else value

    # --- misuse ------------------------------------------------------------------------------

    def made_gradients(self) -> bool:
        """Return whether a current gradient comes from a backward that daso observed."""
        return any(p.grad is not None and self.reducer.owns(p.grad) for _, p in self.trained.local)

    def _refuse(self, what: str, met: bool) -> None:
        if met:
            raise ConfigError(
                f"a step must need no gradient but a layer's own where no step waits for all of "
                f"them, but {what} need all; {INSTEAD}",
                code="step-needs-all-gradients",
            )

    # --- end ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state of gradient averaging on this rank: plain values and tensors."""
        return self.averaging.compressor.state() | {"rows": self.reducer.rows.arrangement()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned on the same rank of a world of the same shape."""
        self._choice = None
        self.reducer.rows.arrange(*state["rows"])
        self.averaging.compressor.load(state)

    def keep_alive(self, parts: object) -> None:
        """Keep an object alive as long as hooks on parameters are."""
        self._keeps = parts

    def close(self) -> None:
        """Leave the user's model without hooks; idempotent."""
        if self.layers is not None:
            self.layers.close()
        self.reducer.close()
