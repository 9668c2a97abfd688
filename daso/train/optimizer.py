"""`daso.DASO`: wraps a torch optimizer and keeps its model in step with the other ranks.

It holds the user's optimizer and delegates everything to it; only `step` does more.
``param_groups``, ``state`` and ``defaults`` are the inner optimizer's own objects, always.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch._compile import _disable_dynamo

from daso.checks import Rule, check, validate_call
from daso.comm.health.survivors import losses_named
from daso.comm.topology import Topology, errors_on_all_ranks
from daso.plan.merge import MergeName
from daso.plan.options import Exchange, Gradients, Wire
from daso.plan.schedule import Policy
from daso.train.attach import unhook
from daso.train.deltas.outer import MakeOuter
from daso.train.inner.grad_scaler import Scaling
from daso.train.metrics import Report
from daso.train.misuse import InnerSteps, stepping
from daso.train.recovery.session import session_class
from daso.train.session import Session
from daso.train.setup import combined, make_setup, stall_limit

__all__ = ["DASO"]

Result = TypeVar("Result")

STATE_DICT = Rule(
    "what an optimizer's state_dict() returns, with 'state' and 'param_groups'",
    lambda value: isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys(),
)

# Where torch keeps hooks on state_dict and load_state_dict.
STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class DASO(torch.optim.Optimizer):
    """Averages gradients inside a node at every batch, and parameters between nodes seldom.

    Wrapping makes all ranks start from world rank 0's parameters and changes nothing else. With one
    rank it is the inner optimizer, bit for bit.

    Args:
        inner: The optimizer to wrap; make it after moving the model to its device. Several over
            one model, ``[muon, adamw]``, are stepped one after the other, and exchange as one.
        module: The model; gives parameter names and the buffers that `synchronize` averages.
        topology: Who is where; found from MPI if None.
        policy: Chooses how many batches lie between exchanges (skip) and how many an exchange may
            take (wait); None is `daso.Auto`, or ``Fixed(1, 0)`` where gradients go by priority or
            steps are taken layer by layer.
        wire: Encoding of deltas between nodes: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``,
            ``"int4"``, ``"int2"`` or ``"topk"``; rounding errors are kept and sent later.
            ``"auto"``: int4, and int2 where an int4 exchange of 65,536 numbers or more takes more
            than a batch with an optimizer that normalizes.
        merge: How a node takes in a mean that is some batches old: ``"daso"`` weighs its own work
            by the batches waited, ``"delta"`` keeps it whole, ``"eager"`` goes ahead and corrects
            later, a number from 0 to 1 is the weight of local parameters, ``"auto"`` chooses by
            what was measured.
        outer: Makes an optimizer for what all nodes agreed on, whose gradient is the mean of what
            the nodes did, negated: ``lambda p: torch.optim.SGD(p, 0.7, 0.9, nesterov=True)`` is
            DiLoCo. It starts anew when parameters are added, frozen or unfrozen. None: the mean
            itself.
        exchange: How nodes exchange.
        gradients: How gradients are averaged.

    Raises:
        ConfigError: A keyword has no such value.
        LayoutError: Parameters cannot be exchanged, or differ between ranks.
        TopologyError: MPI, launcher and ranks do not fit together.

    Collective over the world; blocking.
    """

    # A GradScaler calls `step` also when it met inf: every attempt counts, on every rank.
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
        session = session_class(setup).opened(inner, setup, topology)
        for one in getattr(inner, "optimizers", [inner]):
            unhook(one)
        self._hold(inner, session)

    def _hold(self, inner: torch.optim.Optimizer, session: Session) -> None:
        # Optimizer.__init__ is not called: it would copy groups and state, and let them drift.
        self.inner, self._session = inner, session
        self._inner_steps = InnerSteps(inner, session.warns)
        # Hooks on state_dict are the inner optimizer's, which makes and loads it.
        for name in STATE_HOOKS:
            setattr(self, name, getattr(inner, name, OrderedDict()))
        # Step hooks registered here run around the whole step, communication included.
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()

    # A copy carries no communicator: it sets itself up, with all ranks, at its first step.
    def __getstate__(self) -> dict[str, Any]:
        self._session.flush()
        return {
            "inner": self.inner,
            "setup": self._session.setup,
            "schedule": self._session.schedule,
            "measured": self._session.measured,
            "pre": self._optimizer_step_pre_hooks,
            "post": self._optimizer_step_post_hooks,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        topology = {"topology": self._session._topology}  # the same ranks
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo) | topology)
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        session = session_class(state["setup"]).copied(
            state["inner"],
            state["setup"],
            state["schedule"],
            state["measured"],
            state.get("topology"),
        )
        self._hold(state["inner"], session)
        self._optimizer_step_pre_hooks = state["pre"]
        self._optimizer_step_post_hooks = state["post"]

    # --- the inner optimizer's own ---------------------------------------------------------

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

        It loads into the inner optimizer alone too. An exchange in flight is stored, not merged, so
        saving changes nothing; each rank saves its own.
        """
        self._session.flush()
        return self._session.state_dict(self.inner.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class or of the inner optimizer; load the model's first.

        With every rank's own state in a world of the same shape, training goes on to the same bits
        (under `daso.Auto` and with ``wire="auto"``, which go by measured times, as long as they
        choose the same).
        Otherwise the schedule goes on from world rank 0's count, and all ranks from world rank 0's
        parameters at the next step.

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
        # Only what is not found here: the inner optimizer's own, as schedule-free's train() and
        # eval(). Steps of its own would go past the exchanges.
        inner = self.__dict__.get("inner")
        if inner is None or name.startswith("__") or not hasattr(inner, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if "step" in name and callable(getattr(inner, name)):
            raise AttributeError(
                f"{type(self).__name__} takes steps of the inner optimizer by step() alone, not by "
                f"{name}(); call optimizer.inner.{name}() where nothing shall be exchanged, or "
                f"use daso.attach, which follows the inner optimizer's step()"
            )
        return getattr(inner, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; all ranks must add the same.

        Args:
            param_group: As for the inner optimizer.

        Collective over the world; blocking: exchanges are drained and set up anew.
        """
        self._session.add_param_group(lambda: self.inner.add_param_group(param_group))

    # --- training --------------------------------------------------------------------------

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the inner optimizer, and start or finish an exchange when one is due.

        Args:
            closure: As for the inner optimizer; its loss is averaged over the ranks whose gradients
                are, so that all of them call it equally often.

        Returns:
            What the inner optimizer returns.

        Raises:
            NonFiniteError: Too many exchanges in a row met NaN or infinity; on every rank.
            ExchangeError: An exchange failed since the last step.

        Collective over the world in the sense of the schedule.
        """
        given = (self,) if closure is None else (self, closure)
        args, kwargs = self._run_pre_hooks(given, {})
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        scaling, loss = Scaling.of(self), None
        go, closure = self._session.begin(closure, scaling)
        if go:
            with stepping(self.inner), self._session.scaled_lr():
                loss = self.inner.step() if closure is None else self.inner.step(closure)
        self._session.end()
        if self._optimizer_step_post_hooks:  # they see parameters after the step
            self._session.flush()
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, args, kwargs)
        return loss

    def _run_pre_hooks(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for hook in self._optimizer_step_pre_hooks.values():
            changed = hook(self, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        return args, kwargs

    def end_epoch(self, loss: float | torch.Tensor) -> float:
        """Tell the schedule that an epoch is over; all nodes agree afterwards.

        Args:
            loss: This rank's mean loss of the epoch.

        Returns:
            The mean over all ranks, the same everywhere.

        Collective over the world; blocking.
        """
        return self._session.end_epoch(loss)

    def synchronize(self, *, optimizer_state: bool = False) -> None:
        """Finish what is in flight, and make parameters and buffers bit-identical on all ranks.

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
        """Take what is left of the last step, where layers take theirs one by one; else nothing.

        With ``Gradients(reducer="prioritized")`` or ``step="layerwise"`` call it before you read or
        write ``model.parameters()`` yourself; a forward, ``state_dict()``, `synchronize` and
        `close` do what they need.

        Collective over the world; blocking.
        """
        self._session.flush()

    def averaged(self) -> AbstractContextManager[None]:
        """Let the model be the mean of all ranks for a while, to evaluate it.

        Inside ``with optimizer.averaged():`` parameters and buffers are what `synchronize` would
        make them, on every rank; afterwards they are this rank's again, and what is in flight goes
        on. Costs a blocking exchange in full precision, and a copy of the model.

        Collective over the world; blocking, at its beginning.
        """
        return self._session.averaged()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let gradients pile up on this rank, for accumulation over several backward passes.

        The first backward outside, or `step`, averages the sum.
        """
        return self._session.no_sync()

    def on_exchange(self, call: Callable[[dict[str, Any]], object]) -> Callable[[], None]:
        """Call a function after each exchange, in the training thread of this rank.

        In synchronous phases after each look at how they go.

        Args:
            call: Takes one dict of numbers, as ``wandb.log`` does: ``batch``, ``epoch``, ``skip``,
                ``wait`` (batches), ``gain`` (of the learning rate between exchanges), ``drift``,
                ``exchange_seconds``, ``step_seconds``, ``lr`` (agreed by all ranks),
                ``exposed_seconds`` and ``bytes_sent`` (of this rank, since the last call),
                ``exchanges`` and ``dropped`` (in all), and what else was measured.

        Returns:
            What takes the function off again.

        Not collective. An error that it raises is that of `step`, or of `synchronize`, which the
        other ranks go on with: log what may fail, and do not raise it.
        """
        return self._session.on_exchange(call)

    def join(self) -> int:
        """Return how many batches were trained on; a spare rank waits first until it is needed.

        Where `daso run --spares` started spare ranks, call it on all ranks before the first step,
        when everything else is set up: there a spare waits until it takes the place of a lost
        rank. It then has the parameters, optimizer state and schedule of the others, and begins
        with the batch that they are in, which the optimizer lets pass. A spare that nobody needs
        ends here, with the job. On other ranks it does nothing.

        Returns:
            Batches done, where the loop over steps begins.

        Blocking, on a spare.
        """
        return self._session.join()

    def together(self, call: Callable[[], Result]) -> Result:
        """Call a function in which all ranks meet, and once more where a rank was lost meanwhile.

        For collectives of your own: a checkpoint, a mean of figures. Without
        ``Exchange(elastic=True)`` it is called once, and nothing else happens.

        Args:
            call: Called by every rank, after the same number of steps.

        Returns:
            What it returns.

        Collective over the world; blocking.
        """
        return self._session.together(call)

    def close(self) -> None:
        """Stop communicating and give memory back; the optimizer cannot step afterwards.

        What is in flight is finished but not merged: call `synchronize` first to agree. Gradients
        get memory of their own.

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
        # After an error the other ranks may not come: nothing collective.
        if kind is None and not self._session.was_closed:
            self.synchronize()
            self.close()

    def report(self) -> Report:
        """Return what was chosen and what happened so far, on this rank; does not communicate.

        Returns:
            Plain values, such as ``exchanges``, ``exposed_seconds`` (this rank computed nothing
            since it waited for others), ``skip_because`` and ``events``; all keys are told in
            `docs/reference/report.md`.
        """
        return self._session.report()
