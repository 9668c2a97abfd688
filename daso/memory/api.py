"""A plan of memory, made and carried out."""

import logging
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from daso.errors import ConfigError
from daso.memory.activation_trace import ActivationTrace, write_script
from daso.memory.passes import Follower, Pass, PlanMetrics, Steps
from daso.memory.planner import Course, Link, Plan, choose, decision, floor
from daso.memory.profile import Loss, default_loss, profile
from daso.memory.sizes import parse_bytes
from daso.memory.static import Static, static_bytes
from daso.memory.tiers import Second, measure, open_tier

logger = logging.getLogger("daso")

__all__ = ["Applied", "MemoryPlan", "apply", "plan"]

LEAST_BYTES = 4096


@dataclass(frozen=True)
class MemoryPlan:
    """What becomes of what a model saves for backward, and what that comes to.

    Args:
        budget_bytes: That all may take.
        static: Bytes that are there all the time.
        link: Measured way to the second memory.
        second: The second memory.
        script: What the model does in a step.
        chosen: What becomes of each unit.
        plain: What it would come to if all were kept.
        model: The model.
    """

    budget_bytes: int
    static: Static
    link: Link
    second: Second
    script: ActivationTrace = field(repr=False)
    chosen: Plan = field(repr=False)
    plain: Course = field(repr=False)
    model: torch.nn.Module = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """Bytes that all takes, at most, as planned."""
        return self.static.total + self.chosen.course.peak_bytes

    @property
    def plain_bytes(self) -> int:
        """Bytes that all would take if all were kept."""
        return self.static.total + self.plain.peak_bytes

    @property
    def slowdown(self) -> float:
        """Predicted seconds of forward and backward over those if all were kept."""
        return self.chosen.course.seconds / max(self.plain.seconds, 1e-12)

    def bytes_of(self, way: str) -> int:
        """Return the bytes that are kept, swapped or recomputed (``way``)."""
        units = zip(self.script.units, self.chosen.ways, strict=True)
        return sum(
            group.nbytes
            for unit, chosen in units
            for name, group in (("head", unit.head), ("tail", unit.tail))
            if decision(chosen, name) == way
        )


def plan(
    model: torch.nn.Module,
    batch: Any,
    budget: float | str,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    policy: str = "search",
    second: Second = "host",
    units: Sequence[str] = (),
) -> MemoryPlan:
    """Decide what of a model's activations is kept, swapped or recomputed to fit a budget.

    Goes through forward and backward twice; the model, its gradients, buffers and torch's default
    random number generators are afterwards what they were. Nothing crosses between ranks: each
    plans for itself.

    Args:
        model: The model, in the mode in which it is trained.
        batch: What its forward is given: a tensor, a tuple of arguments, or a dict of named ones.
        budget: Bytes that all may take: parameters, gradients, what the optimizer keeps, and
            activations; a number, or text such as ``"8GiB"``.
        loss: Makes one number of what the model gives; its sum by default.
        optimizer: Whose memory counts too, that of `daso.DASO` included.
        policy: One of `daso.memory.planner.POLICIES`.
        second: The second memory: ``"host"`` (pinned, for GPUs), ``"file:FOLDER"``,
            ``"neighbour:8GiB"`` (so much shared memory of the node's next rank; then `plan` and
            `apply`'s ``with`` are collective over the node, and block), or what makes a
            `daso.memory.tiers.Tier` for a device.
        units: Names of modules that are kept, swapped or recomputed as wholes; by default units
            begin with operations that cost much (convolutions, products of matrices).

    Raises:
        ConfigError: The budget is below what any plan needs, an argument is none of the above, or
            the model does not do the same in every step.

    Source: US12645941B2; PoocH, arXiv 1907.05013.
    """
    _check(model)
    args, kwargs = arguments(batch)
    whole = parse_bytes("budget", budget)
    device = next(model.parameters()).device
    tier = open_tier(second, device)
    try:
        iteration = profile(
            model, args, kwargs, loss or default_loss, tier, least=LEAST_BYTES, inside=units
        )
        link = Link(*measure(tier, device))
    finally:
        tier.close()
    script = write_script(iteration, LEAST_BYTES)
    static = static_bytes(model, optimizer, (args, kwargs), iteration.observer.casts)
    least = static.total + floor(script.units)
    if whole < least:
        raise ConfigError(
            f"budget must be at least {least:,} bytes for this model and batch "
            f"({static.total:,} of them parameters, gradients and what the optimizer keeps), not "
            f"{whole:,}; take a smaller batch"
        )
    chosen = choose(script.units, whole - static.total, link, policy)
    plain = choose(script.units, float("inf"), link, "all_keep").course
    return MemoryPlan(whole, static, link, second, script, chosen, plain, model)


def _check(model: torch.nn.Module) -> None:
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ConfigError(
            "memory is planned for a model that is not compiled; pass the module that "
            "torch.compile was given"
        )
    if len({param.device for param in model.parameters()}) > 1:
        raise ConfigError(
            "memory is planned for a model on one device, but its parameters are on several; plan "
            "for each part by itself"
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError("the model must have parameters that are trained, and it has none")


@dataclass(frozen=True, slots=True)
class Call:
    """What a model's forward was given, as it was: positional and named arguments."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return positional and named arguments of a model's forward."""
    if isinstance(batch, Call):
        return batch.args, batch.kwargs
    if isinstance(batch, Mapping):
        return (), batch
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


class Applied:
    """A plan that is carried out whenever its model is called, between ``with`` and its end.

    Args:
        made: The plan.
    """

    def __init__(self, made: MemoryPlan) -> None:
        self._plan, self._counts = made, PlanMetrics()
        self._steps = Steps(made.script, made.chosen)
        self._hooks: list[Any] = []
        self._entered: list[tuple[Pass, Any, Follower] | None] = []
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._said = False

    def __enter__(self) -> "Applied":
        if self._hooks:
            raise ConfigError("a plan is carried out once at a time: call daso.memory.apply again")
        model = self._plan.model
        self._device = next(model.parameters()).device
        self._tier = open_tier(self._plan.second, self._device)
        self._hooks = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        while self._entered:  # Ctrl-C in forward
            self._end()
        # What is still to be taken backward keeps the second memory until then.
        passes, self._passes = list(self._passes), weakref.WeakSet()
        left, tier = len(passes), self._tier

        def end_pass() -> None:
            nonlocal left
            left -= 1
            if not left:
                tier.close()

        for one in passes:
            weakref.finalize(one, end_pass)
        if not passes:
            tier.close()

    def __reduce__(self) -> Any:
        """Let copies of the model that is inside follow no plan."""
        return _inert, ()

    def report(self) -> PlanMetrics:
        """Return what was done so far: passes, bytes swapped, tails made again, bytes there."""
        return self._counts

    def _begin(self, *_: object) -> None:
        if not self._hooks or not torch.is_grad_enabled() or not self._steps.follows:
            self._entered.append(None)
            return
        self._entered.append(None)
        one = Pass(self._steps, self._tier, self._counts, self._device)
        hooks = torch.autograd.graph.saved_tensors_hooks(one.pack, one.unpack)
        follower = Follower(one)
        try:
            hooks.__enter__()
        except RuntimeError:  # inside a transform of torch.func, which takes no such hooks
            return
        self._passes.add(one)
        self._counts.passes += 1
        self._entered[-1] = one, hooks, follower
        follower.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *_: object) -> None:
        entered = self._entered.pop()
        if entered is None:
            return
        one, hooks, follower = entered
        hooks.__exit__(None, None, None)
        follower.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if sys.exc_info()[0] is not None:  # it stopped in the middle
            one.drop()
            return
        one.end()
        if one.beyond and not self._said:
            self._said = True
            logger.warning(STRAYED)


def _inert() -> Applied:
    """Return what does nothing, for the hooks of a copy."""
    made = Applied.__new__(Applied)
    made._hooks, made._entered = [], []
    return made


STRAYED = (
    "daso: this model did not do what its memory was planned for; what it saved from there on is "
    "kept, and memory may go beyond the budget: plan again with the batch and the mode (train, "
    "autocast) in which it is trained"
)


def apply(made: MemoryPlan) -> Applied:
    """Return a context in which a plan is carried out, to go around the training loop.

    In it every call of the model with gradients follows the plan. Losses, gradients, parameters and
    buffers are those of plain training, bit for bit. The budget holds for one forward and its
    backward at a time, without ``retain_graph``. Does not communicate.

    Args:
        made: What `plan` gave.
    """
    return Applied(made)
