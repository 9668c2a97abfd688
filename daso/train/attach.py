"""`daso.attach`: `daso.DASO` as hooks on an existing optimizer, for frameworks that create it."""

from types import TracebackType
from typing import Any, Self

import torch

from daso.checks import validate_call
from daso.comm.health.survivors import losses_named
from daso.comm.topology import Topology, errors_on_all_ranks
from daso.errors import ConfigError
from daso.plan.options import Exchange, Gradients, MergeName, Wire
from daso.plan.schedule import Policy
from daso.torch_private import disable_dynamo, has_step_hooks, pre_step_hooks
from daso.train.deltas.outer import MakeOuter
from daso.train.inner.step_restoration import StepRestoration, first_post_hook
from daso.train.inner.steps import NATIVE, Scaling
from daso.train.recovery.session import AnySession, make_session
from daso.train.setup import make_setup, stall_limit


@validate_call
@losses_named("wrap an optimizer")
def attach(  # noqa: PLR0913 - the keywords of DASO
    inner: torch.optim.Optimizer,
    *,
    module: torch.nn.Module | None = None,
    topology: Topology | None = None,
    policy: Policy | None = None,
    wire: Wire = "auto",
    merge: MergeName | float = "auto",
    outer: MakeOuter | None = None,
    exchange: Exchange | None = None,
    gradients: Gradients | None = None,
) -> "Attached":
    """Keep an optimizer's model in step with the other ranks, by hooks on the optimizer.

    For frameworks that create the optimizer themselves: the object stays the same, and its own
    ``step``, ``state_dict`` and ``load_state_dict`` do what those of `daso.DASO` do.

    Args:
        inner: The optimizer; see `daso.DASO` for it and for all keywords.
        module: As for `daso.DASO`.
        topology: As for `daso.DASO`.
        policy: As for `daso.DASO`.
        wire: As for `daso.DASO`.
        merge: As for `daso.DASO`.
        outer: As for `daso.DASO`.
        exchange: As for `daso.DASO`.
        gradients: As for `daso.DASO`.

    Returns:
        A handle with ``synchronize``, ``averaged``, ``no_sync``, ``end_epoch``, ``report``,
        ``on_exchange``, ``together``, ``join``, ``close``, and a context manager, as `daso.DASO`.

    Raises:
        ConfigError: A keyword has no such value.
        LayoutError: Parameters cannot be exchanged, or differ between ranks.
        TopologyError: MPI, launcher and ranks do not fit together.

    Collective over the world; blocking.
    """
    with errors_on_all_ranks(topology, "wrap an optimizer", stall_limit(exchange)):
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
        if not has_step_hooks(inner):
            raise ConfigError(
                f"an optimizer that is attached must have the hooks of torch.optim.Optimizer, but "
                f"{type(inner).__name__} does not call its __init__; wrap it with daso.DASO",
                code="attached-without-hooks",
            )
        if not setup.settings.whole:
            raise ConfigError(
                f"an optimizer that is attached must step as a whole, but "
                f"{setup.settings.gradients!r} has it step layer by layer; wrap it with daso.DASO, "
                f"or pass step='model'",
                code="attached-steps-by-layer",
            )
    session = make_session(inner, setup, topology)
    session.open()
    return Attached(inner, session)


class Attached:
    """An optimizer's session, and the hooks that drive it.

    Args:
        inner: The user's optimizer.
        session: Its session, open.
    """

    def __init__(self, inner: torch.optim.Optimizer, session: AnySession) -> None:
        self.inner, self._session = inner, session
        self.synchronize, self.end_epoch = session.synchronize, session.end_epoch
        self.no_sync, self.report = session.no_sync, session.report
        self.averaged, self.on_exchange = session.averaged, session.on_exchange
        self.together, self.join = session.together, session.join
        self._set_aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._loading: Any = None
        self._restoration: StepRestoration | None = None  # of the step under way
        unhook(inner)
        self._hooks = [
            inner.register_step_pre_hook(self._before_step),
            first_post_hook(inner, lambda _: self._unscale_lr()),
            inner.register_step_post_hook(self._after_step),
            inner.register_state_dict_pre_hook(lambda _: self._unscale_lr()),
            inner.register_state_dict_post_hook(self._add_state),
            inner.register_load_state_dict_pre_hook(self._take_state),
            inner.register_load_state_dict_post_hook(self._load_state),
        ]
        self._borrowed = not getattr(inner, NATIVE, False)
        if self._borrowed:
            setattr(inner, NATIVE, True)

    @disable_dynamo
    def _before_step(self, inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._unscale_lr()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        scaling = Scaling.of(inner)
        takes_step, averaged = self._session.begin(closure, scaling)
        if scaling is not None:
            # Gradients are unscaled already: a fused optimizer must not unscale them again.
            inner.grad_scale = inner.found_inf = None  # type: ignore[attr-defined]
        if not takes_step:  # without gradients the optimizer changes nothing
            params = [p for group in inner.param_groups for p in group["params"]]
            self._set_aside = [(p, p.grad) for p in params if p.grad is not None]
            for param, _ in self._set_aside:
                param.grad = None
        self._restoration = self._session.scaling
        if self._restoration is not None:
            self._restoration.begin(self._session.schedule.step_gain)
        return None if averaged is closure else ((inner,), {"closure": averaged})

    @disable_dynamo
    def _after_step(self, *_: Any) -> None:
        self._unscale_lr()
        for param, grad in self._set_aside:
            param.grad = grad
        self._set_aside = []
        self._session.end()

    def _unscale_lr(self) -> None:
        """Restore the user's learning rates, also after a step that raised."""
        if self._restoration is not None:
            self._restoration.end()

    def _add_state(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict.update(self._session.state_dict(state_dict))

    def _take_state(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        inner, self._loading = self._session.load_state_dict(state_dict)
        return inner

    def _load_state(self, _: torch.optim.Optimizer) -> None:
        state, self._loading = self._loading, None
        self._session.load(state)

    def close(self) -> None:
        """Remove the hooks, stop communicating and release memory.

        Exchanges in flight are finished but not merged: call `synchronize` first to agree.

        Collective over the world; blocking; idempotent.
        """
        self.unhook()
        self._session.close()

    def unhook(self) -> None:
        """Remove the hooks. Does not communicate; idempotent."""
        for hook in self._hooks:
            hook.remove()
        if self._hooks and self._borrowed:
            delattr(self.inner, NATIVE)
        self._hooks = []

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


def unhook(inner: torch.optim.Optimizer) -> None:
    """Remove the hooks of earlier handles from an optimizer that is wrapped again."""
    owners = [getattr(hook, "__self__", None) for hook in pre_step_hooks(inner).values()]
    for owner in owners:
        if isinstance(owner, Attached):
            owner.unhook()
