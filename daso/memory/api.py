"""`daso.memory.plan` and `daso.memory.apply`: make a memory plan, and follow it."""

import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from daso.errors import ConfigError
from daso.memory.course import Link, SimulatedStep, StepProfile, decision, floor
from daso.memory.meter import open_meter
from daso.memory.observe import Loss, default_loss, freed_gradients, restored, scalar_of
from daso.memory.passes import Pass, PlanIndex, PlanMetrics
from daso.memory.planner import Plan, choose
from daso.memory.profile import StepTrace, profiled
from daso.memory.sizes import parse_bytes
from daso.memory.static import Static, static_bytes
from daso.memory.storages import tensors_in
from daso.memory.tiers import Second, Tier, measure, open_tier
from daso.memory.units import Call, Segment, followed
from daso.torch_private import is_compiled

logger = logging.getLogger("daso")

MAX_REHEARSALS = 5


@dataclass(frozen=True)
class MemoryPlan:
    """A decision for every unit of a model, with the predicted memory and time of a step.

    Args:
        budget_bytes: Limit of all memory of a step.
        static: Bytes that are allocated throughout a step.
        link: Measured link to the second memory.
        second: The second memory.
        profile: Measurements of the model's units.
        trace: The order of its units, for `apply`.
        chosen: The decision for each unit.
        plain: Simulated step that keeps everything.
        model: The model.
        measured_bytes: Peak memory of a step that followed the plan; 0: not measured.
    """

    budget_bytes: int
    static: Static
    link: Link
    second: Second
    profile: StepProfile = field(repr=False)
    trace: StepTrace = field(repr=False)
    chosen: Plan = field(repr=False)
    plain: SimulatedStep = field(repr=False)
    model: torch.nn.Module = field(repr=False)
    measured_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Predicted peak memory of a step."""
        return self.static.total + self.chosen.simulated.peak_bytes

    @property
    def plain_bytes(self) -> int:
        """Predicted peak memory of a step that keeps everything."""
        return self.static.total + self.plain.peak_bytes

    @property
    def slowdown(self) -> float:
        """Predicted time of a step, divided by that of a step that keeps everything."""
        return self.chosen.simulated.seconds / max(self.plain.seconds, 1e-12)

    @property
    def ways(self) -> dict[str, str]:
        """The decision for each unit by module name: keep, swap or recompute."""
        return dict(zip(self.trace.names, self.chosen.ways, strict=True))

    def bytes_of(self, way: str) -> int:
        """Return the bytes that are kept, swapped or recomputed (``way``)."""
        total = 0
        for group in self.profile.groups:
            outcome = decision(group, self.chosen.ways)
            if outcome is None and not group.saved:
                continue
            total += group.nbytes if way == (outcome.way if outcome else "recompute") else 0
        return total


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
    """Decide which of a model's modules keep, swap or recompute their activations, to fit a budget.

    Runs two forwards and some steps. The last steps follow the plan: their memory is measured, and
    must be within the budget. The model, its gradients, buffers and torch's default random number
    generators are restored afterwards. Does not communicate: each rank plans for itself.

    Args:
        model: The model, in the mode in which it is trained.
        batch: Arguments of its forward: a tensor, a tuple of arguments, or a dict of named ones.
        budget: Limit in bytes for forward and backward: parameters, gradients, optimizer state and
            activations; a number, or text such as ``"8GiB"``.
        loss: Returns one number for the model's output; by default the output's sum.
        optimizer: Optimizer whose memory is counted, including that of `daso.DASO`.
        policy: One of `daso.memory.planner.POLICIES`.
        second: The second memory: ``"host"`` (pinned, for GPUs), ``"file:FOLDER"``,
            ``"neighbour:8GiB"`` (shared memory of this size on the node's next rank; then `plan`
            and `apply`'s ``with`` are collective over the node, and block), or a function that
            makes a `daso.memory.tiers.Tier` for a device.
        units: Names of modules that are units; by default blocks that save up to a sixth of all
            bytes, and runs of a Sequential's layers that end with a convolution or a linear layer.

    Raises:
        ConfigError: The budget is too small for any plan, an argument is invalid, or the model does
            not run the same operations in every step.

    Source: US12645941B2; PoocH, arXiv 1907.05013.
    """
    _check(model)
    args, kwargs = arguments(batch)
    whole = parse_bytes("budget", budget)
    device, loss = next(model.parameters()).device, loss or default_loss
    tier = open_tier(second, device)
    try:
        profile, trace = profiled(model, args, kwargs, loss, tier, units)
        link = Link(*measure(tier, device))
        static = static_bytes(model, optimizer, (args, kwargs))
        _check_floor(whole, static, floor(profile))
        plain = choose(profile, math.inf, link, "all_keep")
        memory_plan = MemoryPlan(
            whole, static, link, second, profile, trace, plain, plain.simulated, model
        )
        capacity = whole - static.total
        for _ in range(MAX_REHEARSALS):
            memory_plan = replace(memory_plan, chosen=choose(profile, capacity, link, policy))
            peak = _rehearse(memory_plan, args, kwargs, loss, tier)
            memory_plan = replace(memory_plan, measured_bytes=static.total + peak)
            over = memory_plan.measured_bytes - whole
            if over <= 0:
                return memory_plan
            capacity = min(capacity, memory_plan.chosen.simulated.peak_bytes) - over
            _check_floor(whole, static, floor(profile) + whole - static.total - capacity)
    finally:
        tier.close()
    raise ConfigError(
        f"a plan must hold its budget of {whole:,} bytes, but {MAX_REHEARSALS} plans for less and "
        f"less took more, the last {memory_plan.measured_bytes:,}; allow some more, or set units=",
        code="plan-exceeds-budget",
    )


def _check(model: torch.nn.Module) -> None:
    if is_compiled(model):
        raise ConfigError(
            "memory is planned for a model that is not compiled; pass the module that "
            "torch.compile was given",
            code="planned-model-is-compiled",
        )
    if len({param.device for param in model.parameters()}) > 1:
        raise ConfigError(
            "memory is planned for a model on one device, but its parameters are on several; plan "
            "for each part by itself",
            code="planned-model-on-devices",
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(
            "the model must have parameters that are trained, and it has none; set requires_grad "
            "of some",
            code="planned-model-without-parameters",
        )


def _check_floor(whole: int, static: Static, least: int) -> None:
    if whole < static.total + least:
        raise ConfigError(
            f"budget must be at least {static.total + least:,} bytes for this model and batch "
            f"({static.total:,} of them parameters, gradients and what the optimizer keeps), not "
            f"{whole:,}; take a smaller batch",
            code="budget-too-small",
        )


def _rehearse(
    memory_plan: MemoryPlan, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Loss, tier: Tier
) -> int:
    """Run a step that follows a plan; return its peak of allocated bytes."""
    model, meter = memory_plan.model, open_meter(next(memory_plan.model.parameters()).device)
    within = Applied(memory_plan, tier)
    torch.clear_autocast_cache()  # a step of training casts weights itself
    with torch.enable_grad(), restored(model, (args, kwargs)), within, meter:
        output = model(*args, **kwargs)
        torch.clear_autocast_cache()  # as at the end of autocast, where backward begins
        value = scalar_of(loss, output)
        with freed_gradients(model) as params:
            torch.autograd.grad(value, params, allow_unused=True)
        del output, value
    return max(interval.peak for interval in meter.intervals)


@dataclass(frozen=True, slots=True)
class ForwardArguments:
    """Positional and named arguments of a model's forward."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return positional and named arguments of a model's forward."""
    if isinstance(batch, ForwardArguments):
        return batch.args, batch.kwargs
    if isinstance(batch, Mapping):
        return (), batch
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


class Applied:
    """Context in which every call of a model follows its memory plan.

    Args:
        memory_plan: The plan.
        tier: The second memory, which stays open; None: the plan's, opened by ``with``.
    """

    def __init__(self, memory_plan: MemoryPlan, tier: Tier | None = None) -> None:
        self._plan, self._counts, self._given = memory_plan, PlanMetrics(), tier
        self._index = PlanIndex(memory_plan.model, memory_plan.trace, memory_plan.chosen)
        self._stack: ExitStack | None = None
        self._pass: Pass | None = None  # the pass whose forward runs
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._warned = False

    def __enter__(self) -> "Applied":
        if self._stack is not None:
            raise ConfigError(
                "a plan can be applied once at a time; call daso.memory.apply again",
                code="plan-applied-already",
            )
        model = self._plan.model
        self._device = next(model.parameters()).device
        self._tier = self._given or open_tier(self._plan.second, self._device)
        self._stack = ExitStack()
        if self._index.has_effect:
            segments = list(dict.fromkeys(self._plan.trace.calls))
            self._stack.enter_context(followed(model, segments, self))
        return self

    def __exit__(self, *_: object) -> None:
        assert self._stack is not None
        self._stack.close()
        self._stack = self._pass = None
        if self._given is not None:
            return
        # Passes whose backward is pending keep the second memory open until then.
        passes, self._passes = list(self._passes), weakref.WeakSet()
        left, tier = len(passes), self._tier

        def end_pass() -> None:
            nonlocal left
            left -= 1
            if not left:
                tier.close()

        for pending in passes:
            weakref.finalize(pending, end_pass)
        if not passes:
            tier.close()

    def report(self) -> PlanMetrics:
        """Return counts of passes, diverged passes, swapped bytes and recomputed units."""
        return self._counts

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's forward under the plan; called in its place."""
        if not torch.is_grad_enabled() or not _accepts_hooks():
            return call(*args, **kwargs)
        before, self._pass = self._pass, Pass(self._index, self._tier, self._counts, self._device)
        current = self._pass
        self._passes.add(current)
        self._counts.passes += 1
        try:
            if sum(tensor.nbytes for tensor in tensors_in((args, kwargs))) > (
                self._plan.trace.batch_bytes
            ):
                current.diverge()
            with current.hooks():
                output = call(*args, **kwargs)
            current.end()
        finally:
            self._pass = before
        if current.diverged and not self._warned:
            self._warned = True
            logger.warning(DIVERGED)
        return output

    def unit(
        self, segment: Segment, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a unit's forward under the plan; called in its place."""
        if self._pass is None:  # recomputed, or called by itself
            return call(*args, **kwargs)
        return self._pass.unit(segment, call, args, kwargs)


def _accepts_hooks() -> bool:
    """Return whether saved tensors can have hooks: not inside transforms of torch.func."""
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return True
    except RuntimeError:
        return False


DIVERGED = (
    "daso: this model ran other operations than its memory was planned for; tensors saved from "
    "there on are kept, and memory may exceed the budget: plan again with the batch and the mode "
    "(train, autocast) in which it is trained"
)


def apply(memory_plan: MemoryPlan) -> Applied:
    """Return a context for the training loop in which the model follows its plan.

    In it every call of the model with gradients follows the plan: recomputed modules are called
    through `torch.utils.checkpoint`, without reentrance. Losses, gradients, parameters and buffers
    are those of plain training, bit for bit. The budget holds for one forward and its backward at
    a time, without ``retain_graph``. Does not communicate.

    Args:
        memory_plan: A plan by `plan`.
    """
    return Applied(memory_plan)
