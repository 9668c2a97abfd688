"""`daso.DASO`: wraps a torch optimizer and keeps its model in step with the other ranks.

It holds the user's optimizer and delegates everything to it; only `step` does more.
``param_groups``, ``state`` and ``defaults`` are the inner optimizer's own objects, always.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from daso.checks import check, validate_call
from daso.comm.health.survivors import losses_named
from daso.comm.topology import Topology, errors_on_all_ranks
from daso.plan.options import Exchange, Gradients, MergeName, Wire
from daso.plan.schedule import Policy
from daso.torch_private import (
    disable_dynamo,
    own_post_step_hooks,
    own_pre_step_hooks,
    set_state_hooks,
    set_step_hooks,
)
from daso.train.attach import unhook
from daso.train.deltas.outer import MakeOuter
from daso.train.inner.steps import InnerSteps, Scaling, run_pre_step_hooks, stepping
from daso.train.metrics import Report
from daso.train.recovery.session import AnySession, make_session
from daso.train.setup import STATE_DICT, combined, make_setup, stall_limit

Result = TypeVar("Result")


class DASO(torch.optim.Optimizer):
    """Averages gradients inside a node at every batch, and parameters between nodes infrequently.

    Wrapping makes all ranks start from world rank 0's parameters and changes nothing else. With one
    rank it is the inner optimizer, bit for bit.

    Args:
        inner: The optimizer to wrap; create it after moving the model to its device. Several over
            one model, ``[muon, adamw]``, step one after the other, and exchange as one.
        module: The model; gives parameter names and the buffers that `synchronize` averages.
        topology: The ranks and nodes; found from MPI if None.
        policy: Chooses the batches between exchanges (skip) and the batches that an exchange may
            overlap (wait). None: `daso.Auto`, or ``Fixed(1, 0)`` with prioritized gradients or
            layerwise steps.
        wire: Encoding of deltas between nodes: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``,
            ``"int4"``, ``"int2"`` or ``"topk"``; rounding errors are kept and sent later.
            ``"auto"``: int4, and int2 where an int4 exchange of 65,536 numbers or more takes more
            than a batch with an optimizer that normalizes.
        merge: How a node merges a mean that is some batches old. ``"daso"`` weighs local work by
            the batches waited, ``"delta"`` keeps it whole, ``"eager"`` moves first and corrects
            later, a number from 0 to 1 is the weight of local parameters, ``"auto"`` chooses by
            measurements.
        outer: Creates an optimizer of the reference, whose gradient is the negated mean of the
            nodes' deltas: ``lambda p: torch.optim.SGD(p, 0.7, 0.9, nesterov=True)`` is DiLoCo. It
            restarts when parameters are added, frozen or unfrozen. None: the mean itself.
        exchange: How nodes exchange.
        gradients: How gradients are averaged.

    Raises:
        ConfigError: A keyword has no such value.
        LayoutError: Parameters cannot be exchanged, or differ between ranks.
        TopologyError: MPI, launcher and ranks do not fit together.

    Collective over the world; blocking.
    """

    # A GradScaler then calls `step` even after inf: every attempt counts, on every rank.
    _step_supports_amp_scaling = True

    @validate_call
    @losses_named("wrap an optimizer")
    def __init__(  # noqa: PLR0913 - a ninth keyword would be a missing record
        self,
        inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        module: torch.nn.Module | None = None,
        topology: Topology | None = None,
        policy: Policy | None = None,
        wire: Wire = "auto",
        merge: MergeName | float = "auto",
        outer: MakeOuter | None = None,
        exchange: Exchange | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        with errors_on_all_ranks(topology, "wrap an optimizer", stall_limit(exchange)):
            inner = combined(inner)
            setup = make_setup(
                inner,
                topology,
                module=module,
                policy=policy,
                wire=wire,
                merge=merge,
                outer=outer,
                exchange=exchange,
                gradients=gradients,
            )
        session = make_session(inner, setup, topology)
        session.open()
        for each in getattr(inner, "optimizers", [inner]):
            unhook(each)
        self._hold(inner, session)

    def _hold(self, inner: torch.optim.Optimizer, session: AnySession) -> None:
        # Optimizer.__init__ is not called: it would create separate groups and state.
        self.inner, self._session = inner, session
        self._inner_steps = InnerSteps(inner, session.warns)
        # state_dict hooks are the inner optimizer's, which creates and loads the state.
        set_state_hooks(self, inner)
        # Step hooks registered here run around the whole step, communication included.
        set_step_hooks(self)

    # A copy carries no communicator: all ranks set it up at its first step.
    def __getstate__(self) -> dict[str, Any]:
        self._session.flush()
        return {
            "inner": self.inner,
            "setup": self._session.setup,
            "schedule": self._session.schedule,
            "measured": self._session.restart.measured,
            "pre": own_pre_step_hooks(self),
            "post": own_post_step_hooks(self),
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        topology = {"topology": self._session.runner.owner.known_topology}  # the same ranks
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo) | topology)
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        session = make_session(state["inner"], state["setup"], state.get("topology"))
        session.go_on_from(state["schedule"], state["measured"])
        self._hold(state["inner"], session)
        set_step_hooks(self, state["pre"], state["post"])

    # --- delegation to the inner optimizer -------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups, the same object."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state, the same object."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults, the same object."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the inner optimizer's parameters."""
        self._session.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state_dict with one more key, ``"daso"``, of this rank.

        The inner optimizer can load it too. An exchange in flight is stored, not merged, so that
        saving does not change training. Each rank saves its own state.
        """
        self._session.flush()
        return self._session.state_dict(self.inner.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class or of the inner optimizer; load the model's first.

        With every rank's own state in a world of the same shape, training resumes bit for bit
        (`daso.Auto` and ``wire="auto"`` depend on measured times: as long as they choose the same).
        Otherwise the schedule resumes from world rank 0's count, and all ranks start from world
        rank 0's parameters at the next step.

        Collective over the world; blocking.
        """
        check("state_dict", state_dict, STATE_DICT)
        self._session.flush()
        inner, ours = self._session.load_state_dict(state_dict)
        self.inner.load_state_dict(inner)
        self._session.load(ours)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def __getattr__(self, name: str) -> Any:
        # Other attributes are the inner optimizer's, such as schedule-free's train() and eval().
        # Its other step methods would bypass the exchanges.
        inner = self.__dict__.get("inner")
        if inner is None or name.startswith("__") or not hasattr(inner, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if "step" in name and callable(getattr(inner, name)):
            raise AttributeError(
                f"{type(self).__name__} takes steps of the inner optimizer by step() alone, not by "
                f"{name}(); call optimizer.inner.{name}() for a step without an exchange, or use "
                f"daso.attach, which follows the inner optimizer's step()"
            )
        return getattr(inner, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; all ranks must add the same.

        Args:
            param_group: As for the inner optimizer.

        Collective over the world; blocking: exchanges are drained and set up again.
        """
        self._session.add_param_group(lambda: self.inner.add_param_group(param_group))

    # --- training --------------------------------------------------------------------------

    @disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the inner optimizer, and start or finish an exchange when one is due.

        Args:
            closure: As for the inner optimizer. Its loss is averaged over the same ranks as the
                gradients, so that all of them call it equally often.

        Returns:
            What the inner optimizer returns.

        Raises:
            NonFiniteError: Too many exchanges in a row met NaN or infinity; on every rank.
            ExchangeError: An exchange failed since the last step.

        Collective over the world in the sense of the schedule.
        """
        args, kwargs = run_pre_step_hooks(self, closure)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        scaling, loss = Scaling.of(self), None
        takes_step, closure = self._session.begin(closure, scaling)
        if takes_step:
            with self._session.scaled_lr(), stepping(self.inner):
                loss = self.inner.step() if closure is None else self.inner.step(closure)
        self._session.end()
        hooks = own_post_step_hooks(self)
        if hooks:  # they read the parameters after the step
            self._session.flush()
        for hook in hooks.values():
            hook(self, args, kwargs)
        return loss

    def end_epoch(self, loss: float | torch.Tensor) -> float:
        """End an epoch of the schedule; all nodes agree afterwards.

        Args:
            loss: This rank's mean loss of the epoch.

        Returns:
            The mean over all ranks, the same everywhere.

        Collective over the world; blocking.
        """
        return self._session.end_epoch(loss)

    def synchronize(self, *, optimizer_state: bool = False) -> None:
        """Finish exchanges in flight, and make parameters and buffers bit-identical on all ranks.

        Call it before evaluating, saving, and at the end. Parameters become the mean of all nodes;
        the module's floating buffers (BatchNorm statistics), and frozen parameters that ranks
        changed differently, become the mean of all ranks.

        Args:
            optimizer_state: Make the inner optimizer's state (its moments) the mean of all ranks
                too, as `torch.distributed.checkpoint` needs, which saves one copy for all.

        Collective over the world; blocking.
        """
        self._session.synchronize(optimizer_state=optimizer_state)

    def flush(self) -> None:
        """Complete the last step of all layers, with layerwise steps; else do nothing.

        Call it before you read or write ``model.parameters()`` yourself; a forward,
        ``state_dict()``, `synchronize` and `close` call it where needed.

        Collective over the world; blocking.
        """
        self._session.flush()

    def averaged(self) -> AbstractContextManager[None]:
        """Average the model over all ranks inside a ``with`` block, to evaluate it.

        Inside, parameters and buffers are equal on all ranks, as after `synchronize`; afterwards
        they are this rank's again, and exchanges in flight continue. Costs a blocking exchange in
        full precision, and a copy of the model. Collective over the world; blocking at its start.
        """
        return self._session.averaged()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients over backward passes; the first one outside averages the sum."""
        return self._session.no_sync()

    def on_exchange(self, call: Callable[[dict[str, Any]], object]) -> Callable[[], None]:
        """Call a function after each exchange, in the training thread of this rank.

        In synchronous phases it is called after each measurement of them.

        Args:
            call: Takes one dict of numbers, as ``wandb.log`` does: ``batch``, ``epoch``, ``skip``,
                ``wait`` (batches), ``gain`` (of the learning rate between exchanges), ``drift``,
                ``exchange_seconds``, ``step_seconds``, ``lr`` (agreed by all ranks),
                ``exposed_seconds`` and ``bytes_sent`` (of this rank, since the last call),
                ``exchanges`` and ``dropped`` (in all), and what else was measured.

        Returns:
            A function that removes it.

        Not collective. `step` or `synchronize` raises an error of the function on this rank alone,
        while the other ranks continue: log errors in it instead of raising them.
        """
        return self._session.on_exchange(call)

    def join(self) -> int:
        """Return the number of batches done; a spare rank waits first until it is needed.

        With spare ranks (`daso run --spares`), call it on all ranks before the first step, when
        everything else is set up. A spare waits until it replaces a lost rank. It then has the
        parameters, optimizer state and schedule of the others, and begins with their current batch,
        which the optimizer skips. A spare that is not needed ends here, with the job. On other
        ranks it does nothing.

        Returns:
            Batches done, from which the loop over steps starts.

        Blocking, on a spare.
        """
        return self._session.join()

    def together(self, call: Callable[[], Result]) -> Result:
        """Call a collective function, and repeat the call if a rank was lost meanwhile.

        For your own collectives. Without ``Exchange(elastic=True)`` the function is called once.

        Args:
            call: Called by every rank, after the same number of steps.

        Returns:
            What it returns.

        Collective over the world; blocking.
        """
        return self._session.together(call)

    def close(self) -> None:
        """Stop communicating and release memory; the optimizer cannot step afterwards.

        Exchanges in flight are finished but not merged: call `synchronize` first to agree.
        Gradients move to separate memory.

        Collective over the world; blocking; idempotent.
        """
        self._inner_steps.close()
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error the other ranks may never join a collective operation: call none.
        if kind is None and not self._session.was_closed:
            self.synchronize()
            self.close()

    def report(self) -> Report:
        """Return choices and counters so far, on this rank; does not communicate.

        Returns:
            Plain values, such as ``exchanges``, ``exposed_seconds`` (this rank waited for others
            and computed nothing), ``skip_because`` and ``events``; see `docs/reference/report.md`.
        """
        return self._session.report()
