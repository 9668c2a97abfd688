"""Session of one model's training over all ranks, behind `daso.DASO` and `daso.attach`.

Both entry points call `begin` before and `end` after the inner optimizer's step; the other methods
are those that they offer.

Coquelin et al., "Accelerating neural network training with distributed asynchronous and selective
optimization (DASO)", J. Big Data 9:14 (2022), doi 10.1186/s40537-021-00556-1.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, TypeVar, cast

import torch

from daso.checks import Rule, check
from daso.comm.topology import Topology
from daso.errors import ConfigError
from daso.plan.schedule import State, after_epoch
from daso.train.build import warn_of_slow_kernels
from daso.train.coordinator import check_same_options
from daso.train.inner.step_restoration import StepRestoration
from daso.train.inner.steps import Scaling, is_probe
from daso.train.listeners import Listener
from daso.train.metrics import Metrics, Report
from daso.train.model.params import Trained
from daso.train.owner import PartsOwner, Watcher
from daso.train.parts import Parts, take_over
from daso.train.restart import Restart
from daso.train.runner import ScheduleRunner
from daso.train.setup import Setup

logger = logging.getLogger("daso")
Closure = Callable[[], Any]
Result = TypeVar("Result")
LOSS = Rule(
    "a number, or a tensor of one",
    lambda loss: (
        loss.numel() == 1 and not loss.is_complex()
        if isinstance(loss, torch.Tensor)
        else isinstance(loss, int | float) or hasattr(loss, "__float__")
    ),
)
CLOSED = "was closed"

# A caller may be in inference mode, whose tensors other threads cannot write to.
_as_in_training = torch.inference_mode(mode=False)


class Session:
    """Keeps a model in step with the other ranks around the steps of an optimizer.

    Args:
        inner: The user's optimizer.
        setup: Its keywords.
        topology: The ranks and nodes; found from MPI if None.
        watcher: Recovery from lost ranks, if any; held by a weak reference.

    Collective over the world; blocking.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        setup: Setup,
        topology: Topology | None,
        watcher: Watcher | None = None,
    ) -> None:
        self.inner, self.setup = inner, setup
        self.owner = PartsOwner(inner, setup, topology, watcher)
        self.runner = ScheduleRunner(self.owner)
        self.scaled_lr = self.runner.scaled_lr
        self.restart = restart = Restart(self.runner)
        self.state_dict, self.load_state_dict = restart.state_dict, restart.load_state_dict
        self.load, self.go_on_from = restart.load, restart.go_on_from
        self._probing = False
        self._over: str | None = None  # reason why the session is unusable
        # Choices and the reason for skip, as reported at `close`.
        self._final_report: tuple[dict[str, Any], str] | None = None

    def open(self) -> None:
        """Check options on all ranks, and build the parts. Collective over the world; blocking."""
        runner, setup, topology = self.runner, self.setup, self.topology
        if topology.reserve is not None and not setup.settings.exchange.elastic:
            raise ConfigError(
                "spare ranks need exchange=daso.Exchange(elastic=True), but this optimizer was "
                "wrapped without it; pass it, or leave --spares out",
                code="spares-need-elastic-exchange",
            )
        if topology.world_size == 1:
            return
        self.owner.meet()
        trained = Trained.by(self.inner, setup.module)
        limit = setup.settings.exchange.timeout_seconds
        take_over(trained, topology, limit)
        check_same_options(trained, topology, setup.text(), limit)
        runner.open(Metrics())
        warn_of_slow_kernels(trained, topology, setup.settings)
        if topology.rank == 0:
            self._log_choices()

    def _log_choices(self) -> None:
        ranks, nodes = self.topology.world_size, self.topology.nodes
        logger.info("%d ranks on %d nodes; chosen: %s", ranks, nodes, self._choices())
        if nodes == 1:
            logger.warning(
                "%d ranks on 1 node: gradients are averaged at every batch, and exchanges between "
                "nodes do not take place",
                ranks,
            )

    @property
    def schedule(self) -> State:
        """State of the schedule."""
        return self.runner.schedule

    @property
    def topology(self) -> Topology:
        """Topology of the ranks."""
        return self.owner.topology

    @property
    def _parts(self) -> Parts | None:
        return self.owner.parts

    def warns(self) -> bool:
        """Return whether this rank logs warnings about this training."""
        return not self._over and self.owner.warns()

    # --- one step ----------------------------------------------------------------------------

    def begin(
        self, closure: Closure | None, scaling: Scaling | None
    ) -> tuple[bool, Closure | None]:
        """Prepare the inner optimizer's step.

        Args:
            closure: The user's closure, if any.
            scaling: Settings of a GradScaler, if any.

        Returns:
            Whether to step, and the closure to step with.

        Collective over the world in the sense of the schedule.
        """
        self._check_open()
        self._probing = closure is None and is_probe(self.inner) and not self._made_gradients()
        if self._probing:
            return True, closure
        if self.runner.stale:
            self.restart.reopen_if_stale()
        self.runner.follow_changes()
        parts = self.owner.parts
        if parts is None:
            return scaling is None or scaling.unscale(self.inner), closure
        if closure is not None:
            parts.gradients.before_closure()
            return True, self._averaged(closure)
        if parts.gradients.layers is None:
            return parts.gradients.before_step(scaling), None
        with self.scaled_lr(hooks=False):  # layers may step inside
            return parts.gradients.before_step(scaling), None

    def _made_gradients(self) -> bool:
        return self._parts is not None and self._parts.gradients.made_gradients()

    @property
    def scaling(self) -> StepRestoration | None:
        """Restoration that scales learning rates in the next step; None if they are not scaled."""
        return self.runner.scaling

    @property
    def is_probing(self) -> bool:
        """True if the current step is a probe by torch.distributed.checkpoint."""
        return self._probing

    @property
    def was_closed(self) -> bool:
        """True after `close`."""
        return self._over == CLOSED

    def _check_open(self) -> None:
        """Raise if the session is closed or failed."""
        parts = self.owner.parts
        over = self._over or (parts is not None and parts.over)
        if over:
            raise ConfigError(
                f"an optimizer must be open to train and to synchronize, but this one {over}; wrap "
                f"the inner optimizer again",
                code="optimizer-is-closed",
            )

    def end(self) -> None:
        """Count a step, and start or finish an exchange when one is due.

        Collective over the world in the sense of the schedule; blocks for receives.
        """
        if not self._probing:
            self.runner.end_step()

    def _averaged(self, closure: Closure) -> Closure:
        """Return a closure whose loss is averaged over the same ranks as the gradients.

        Optimizers whose calls depend on the loss (LBFGS) then call it equally often on all ranks.
        """

        def averaged() -> Any:
            parts, restoration = self._parts, self.runner.scaling
            assert parts is not None
            parts.gradients.reducer.begin_closure()
            if restoration is not None:
                restoration.end()  # the closure sees the user's learning rate
            loss = closure()
            if restoration is not None:
                restoration.begin(self.schedule.step_gain)
            parts.gradients.after_closure()
            return loss if loss is None else parts.gradients.mean_loss(loss)

        return averaged

    def flush(self) -> None:
        """Finish a layerwise step, and a backward that raised. Collective; blocking."""
        self.runner.flush()

    def zero_grad(self, set_to_none: bool) -> None:
        """Reset gradients; those that a layerwise step still needs, after that step."""
        parts = self._parts
        if parts is not None:
            parts.gradients.reducer.finish_aborted_round()
        layers = None if parts is None else parts.gradients.layers
        if layers is None or not layers.zero_grad(set_to_none):
            self.inner.zero_grad(set_to_none)

    # --- between steps -----------------------------------------------------------------------

    @_as_in_training
    def add_param_group(
        self, add: Callable[[], None], synchronize: Callable[[], None] | None = None
    ) -> None:
        """Add parameters by ``add``, after ``synchronize``; all ranks must add the same.

        Collective over the world; blocking: exchanges are drained and set up again.
        """
        self._check_open()
        if self._parts is None:
            add()
            return
        self.runner.follow_changes()  # otherwise parameters frozen since would go unnoticed
        (synchronize or self.synchronize)()
        add()
        self.runner.reopen()

    @_as_in_training
    def end_epoch(self, loss: float | torch.Tensor) -> float:
        """End an epoch of the schedule; all nodes agree afterwards.

        Args:
            loss: This rank's mean loss of the epoch.

        Returns:
            The mean over all ranks, the same everywhere.

        Collective over the world; blocking.
        """
        check("loss", loss, LOSS)
        self._check_open()
        self.restart.reopen_if_stale()
        self.runner.settle()
        mean = float(loss) if self._parts is None else self._parts.coordinator.mean(float(loss))
        self.runner.perform(*after_epoch(self.setup.policy, self.schedule, mean))
        return mean

    @_as_in_training
    def synchronize(self, *, optimizer_state: bool = False) -> None:
        """Finish exchanges in flight, and make parameters and buffers bit-identical on all ranks.

        Call it before evaluating, saving, and at the end. Parameters become the mean of all nodes;
        the module's floating buffers (BatchNorm statistics), and frozen parameters that ranks
        changed differently, become the mean of all ranks.

        Args:
            optimizer_state: Make the inner optimizer's state (its moments) the mean of all ranks
                too, as `torch.distributed.checkpoint` needs, which saves one copy for all. Always
                with an optimizer that has ``eval()`` (schedule-free), which uses its state.

        Collective over the world; blocking.
        """
        self._check_open()
        self.restart.reopen_if_stale()
        self.runner.equalize(optimizer_state=optimizer_state)

    def join(self) -> int:
        """Return the number of batches done."""
        return self.schedule.batch

    def together(self, call: Callable[[], Result]) -> Result:
        """Call a collective function; `ElasticSession` repeats it if a rank was lost."""
        return call()

    def on_exchange(self, call: Listener) -> Callable[[], None]:
        """Call a function after each exchange; return a function that removes it."""
        remove = self.runner.listeners.add(call)
        self.runner.reset_records()
        return remove

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Average the model over all ranks inside the context; restore this rank's model after it.

        Collective over the world; blocking, both at its beginning and its end.
        """
        self._check_open()
        self.restart.reopen_if_stale()
        self.runner.settle()
        parts = self._parts
        if parts is None:
            yield
            return
        parts.note_agreed()
        if parts.deltas is not None:
            parts.deltas.note_writes(goes_on=True)
        # A new context each time: several threads cannot enter the same object.
        with torch.inference_mode(mode=False), ExitStack() as stack:
            stack.enter_context(parts.coordinator.averaged())
            until_the_end = stack.pop_all()
        with parts.writes.paused(), until_the_end:
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients over backward passes without averaging.

        The first backward outside, or `step`, averages the sum.
        """
        if self._parts is None:
            yield
            return
        with self._parts.gradients.reducer.no_sync():
            yield

    @_as_in_training
    def close(self) -> None:
        """Stop communicating and release memory.

        Exchanges in flight are finished but not merged: call `synchronize` first to agree.
        Gradients move to separate memory.

        Collective over the world; blocking; idempotent.
        """
        if self._over is None:
            self._final_report = self._choices(), self._why()
        self._over = CLOSED if self._over is None else self._over
        self.runner.close()

    def report(self) -> Report:
        """Return choices and counters so far, on this rank."""
        history, chooses = self.runner.history, self.setup.settings.gradients.wire == "auto"
        report: dict[str, Any] = {
            **self._choices(),
            "batches": self.schedule.batch,
            "in_flight": self.schedule.sent is not None,
            "skip_history": list(history.skip),
            "small_history": list(history.small),
            "wide_history": list(history.wide) if chooses else [(0, False)],
            "skip_because": self._why(),
            "gain": self.schedule.gain,
            "measurements": asdict(self.schedule.measurements),
        }
        metrics = self.owner.metrics or Metrics()
        exposed_seconds = metrics.exposed_seconds
        if self._parts is not None:
            report["bucket_bytes"] = self._parts.gradients.reducer.rows.bucket_bytes
            exposed_seconds = self._parts.exposed_seconds
        report |= {
            "exchanges": metrics.exchanges,
            "small_exchanges": metrics.small_exchanges,
            "dropped": metrics.dropped,
            "global_bytes_sent": metrics.global_bytes_sent,
            "exposed_seconds": exposed_seconds,
            "slowest": metrics.slowest and asdict(metrics.slowest),
            "events": list(metrics.events),
        }
        return cast(Report, report)

    def _why(self) -> str:
        """Return the reason for the current skip."""
        if self._final_report is not None:
            return self._final_report[1]
        return self.runner.why()

    def _choices(self) -> dict[str, Any]:
        """Return the choices that follow from the keywords, the world and the device."""
        if self._final_report is not None:
            return self._final_report[0]
        chosen = {} if self._parts is None else self._parts.chosen()
        return {**self.setup.choices(self.owner.rank_info), **chosen}
