"""Hooks on a model: gradients of finished layers leave while backward goes on, and rows come in.

Before a layer's forward the newest rows of all owners are copied into its parameters, once in a
step; nobody else writes to them. After a layer's backward its gradients are copied out, and leave
with those of the next layers, as many as the pace says.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from daso import trace
from daso.errors import ConfigError
from daso.server.departures import Departures
from daso.server.finite import FiniteChecks
from daso.server.partition import Partition
from daso.server.plan import Log, Plan, Read, Send, first_pace
from daso.server.service import STEPS_WAITING, ServerThread
from daso.server.shard import Contribution, Rows, take_up
from daso.server.shard_server import pinned_on
from daso.train.gradients.module_params import ModuleParameters
from daso.train.gradients.partial_step import same_values, values_of
from daso.train.model.hooks import Hook

__all__ = ["ServerHooks"]


@dataclass(frozen=True, slots=True)
class _Layers:
    """Names and places of a model's layers."""

    names: Sequence[str]
    of_param: Mapping[int, int]  # the layer of each parameter
    room_bytes: int  # that may wait to leave

    @classmethod
    def of(cls, names: Sequence[str], shares: Partition, ranks: int) -> "_Layers":
        """Return them as all ranks see them."""
        layers = range(len(names))
        return cls(
            names=names,
            of_param={at: layer for layer, params in enumerate(shares.layers) for at in params},
            # Rows come back as well, or go out where gradients do not.
            room_bytes=STEPS_WAITING * 2 * max(shares.nbytes(r, layers) for r in range(ranks)),
        )


def _receivers(shares: Partition, rank: int, plan: Plan) -> list[tuple[int, ...]]:
    """Return for each layer the ranks to which a rank's gradients go."""
    if plan.mode == "sharded":
        return list(shares.owners)
    return [(rank,) if rank in owners else () for owners in shares.owners]


@dataclass(slots=True)
class _Step:
    """What a step has done so far."""

    missing: list[set[int]]  # of each layer, parameters without a gradient
    taken: set[int] = field(default_factory=set)  # layers that were taken up
    left: dict[int, tuple[int, int]] = field(default_factory=dict)  # stamps, by parameter
    values: list[dict[str, Any]] | None = None  # of parameter groups


@dataclass(slots=True)
class _Progress:
    """Steps of this rank, counted."""

    steps: int = 0  # since the start
    met_at: int = 0  # steps at the last meeting of all ranks
    meetings: list[int] = field(default_factory=list)  # steps at each

    @property
    def since_meeting(self) -> int:
        """Steps since the last meeting."""
        return self.steps - self.met_at

    def meet(self) -> None:
        """All ranks have met."""
        self.met_at = self.steps
        self.meetings.append(self.steps)


class ServerHooks:
    """One rank's training thread, towards the server.

    Args:
        module: The model.
        names: Of its layers.
        shares: Which rows are whose.
        plan: How.
        serving: Where gradients go and rows come from.
        groups: Returns the parameter groups whose values steps are to be taken with.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        names: Sequence[str],
        shares: Partition,
        plan: Plan,
        serving: ServerThread,
        groups: Callable[[], Sequence[dict[str, Any]]],
    ) -> None:
        self.shares, self.plan, self.serving = shares, plan, serving
        self._groups = groups
        self._progress = _Progress()
        self.checks = FiniteChecks(
            names,
            serving.rank,
            at_once=plan.exchange.nonfinite == "raise",
            copies=serving.service.copies,
        )
        self._log: list[Read | Send] | None = None  # what it does, where that is kept
        self._layers = _Layers.of(names, shares, shares.ranks)
        self.departures = Departures(
            _receivers(shares, serving.rank, plan),
            lambda owner, layer: shares.nbytes(owner, [layer]),
            first_pace(plan.push_every, len(names)),
        )
        # Of each layer, by owner: the version in the parameters.
        self._loaded = [dict.fromkeys(owners, 0) for owners in shares.owners]
        self._keeps = False  # gradients, for accumulation
        self._stepped_at = time.perf_counter()
        self._uses = ModuleParameters(module, shares.named)
        self._frozen = [one for one in module.named_parameters() if not one[1].requires_grad]
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(partial(self._ready, index))
            for index, (_, tensor) in enumerate(shares.named)
        ]
        self._hooks += [
            # Before the user's own, which may compute a weight (weight_norm, pruning).
            one.register_forward_pre_hook(Hook(partial(self._before, name)), prepend=True)
            for name, one in module.named_modules()
        ]
        self._hooks += [
            one.register_load_state_dict_pre_hook(Hook(_refuse_loading)) for one in module.modules()
        ]
        self._begin()

    @property
    def steps(self) -> int:
        """Steps since the start."""
        return self._progress.steps

    def resume(self, steps: int) -> None:
        """Go on after so many steps, at whose end all ranks met."""
        self._progress.steps = self._progress.met_at = steps

    def _begin(self) -> None:
        self._step = _Step([set(params) for params in self.shares.layers])

    # --- rows come in ------------------------------------------------------------------------

    def _before(self, name: str) -> None:
        """Take up what a module's forward needs."""
        needed = self._uses.called(name)
        self.serving.go_on()  # others may be training while this rank evaluates
        if not torch.is_grad_enabled():
            return  # an evaluation sees what training left
        if not self._step.taken:
            needed += self._uses.nowhere
        for layer in sorted({self._layers.of_param[index] for index in needed} - self._step.taken):
            self._take_up(layer)

    def _take_up(self, layer: int) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise ConfigError(
                f"parameters must not change while backward goes on, but layer "
                f"{self._layers.names[layer]!r} runs forward in it for the first time; use "
                f"checkpoint(..., use_reentrant=False)"
            )
        self.serving.go_on()
        self._step.taken.add(layer)
        self._load(layer, self.serving.wait_for(layer, self._progress.since_meeting))
        if self._log is not None:
            self._log.append(Read(self.steps, layer, tuple(self._loaded[layer].values())))

    def _load(self, layer: int, rows: Mapping[int, Rows]) -> None:
        copies = self.serving.service.copies
        pinned = None if copies is None else partial(pinned_on, copies)
        take_up(self.shares, layer, rows, self._loaded[layer], whole=self.plan.whole, pinned=pinned)

    def meet(self) -> None:
        """Take up the last rows of all ranks. Collective over the world; blocking."""
        if self.departures.began:
            raise ConfigError(
                "ranks must meet between two steps, but gradients were computed since the last; "
                "call step() first"
            )
        self.serving.meet(self._progress.since_meeting)
        self._progress.meet()
        for layer in range(len(self._layers.names)):
            self._load(layer, self.serving.service.rows.newest(layer))
        self._begin()

    # --- gradients leave ---------------------------------------------------------------------

    def keep(self, *, keeps: bool) -> None:
        """Let gradients pile up here, or leave again after the next backward."""
        self._keeps = keeps

    def _ready(self, index: int, tensor: torch.Tensor) -> None:
        if self._keeps:
            return
        self._step.left[index] = _stamp(tensor)
        layer = self._layers.of_param[index]
        if layer not in self._step.taken:
            raise ConfigError(
                f"parameters must be used by a module's forward, where the newest rows are taken "
                f"up, but {self.shares.named[index][0]} got a gradient without one; call its module"
            )
        if not self._step.missing[layer]:
            raise ConfigError(
                f"a step must have one backward where gradients leave during it, but layer "
                f"{self._layers.names[layer]!r} got a second gradient; use no_sync() for all but "
                f"the last"
            )
        if self._step.values is None:  # all gradients of a step leave with the same
            self._step.values = values_of(self._groups())
        self._step.missing[layer].discard(index)
        if not self._step.missing[layer]:
            self._finish(layer)

    def _finish(self, layer: int) -> None:
        self.checks.look(layer, self._gradients([layer]))
        backlog = (
            self.serving.service.queue.backlog_bytes
        )  # what the link is behind, not the device
        leaving = self.departures.finish(layer, backlog_bytes=backlog, now=time.perf_counter())
        self._send(leaving)

    def _gradients(self, layers: Sequence[int]) -> list[torch.Tensor | None]:
        return [self.shares.named[index][1].grad for index in self.shares.params(layers)]

    def _send(self, leaving: Mapping[int, tuple[int, ...]]) -> None:
        """Hand over the gradients of layers, by owner."""
        if leaving:
            self.serving.go_on()
        if self._step.values is None:
            self._step.values = values_of(self._groups())
        for owner, layers in leaving.items():
            self._send_to(owner, layers, self._step.values)

    def _send_to(self, owner: int, layers: tuple[int, ...], values: list[dict[str, Any]]) -> None:
        grads, there = self._gradients(layers), self.serving.device
        one = Contribution(
            source=self.serving.rank,
            step=self.steps,
            layers=layers,
            has=tuple(grad is not None for grad in grads),
            read=tuple(self._loaded[layer][owner] for layer in layers),
            values=values,
            row=self.shares.pack(owner, layers, grads, there),
            base=self._base(owner, layers),
        )
        self.serving.service.give(owner, one, self.checks.of(layers, there))
        if self._log is not None:
            every = self.departures.pace.layers
            self._log.append(Send(self.steps, owner, layers, every, tuple(values)))

    def _base(self, owner: int, layers: Sequence[int]) -> torch.Tensor | None:
        """Return the parameters that updates start from, where every rank has its own."""
        if not self.plan.whole:
            return None
        for layer in set(layers) - self._step.taken:  # that no forward came to
            self._take_up(layer)
        now = [self.shares.named[index][1].detach() for index in self.shares.params(layers)]
        return self.shares.pack(owner, layers, now, self.serving.device)

    def step(self) -> None:
        """End a step: what has not left leaves, and layers without a gradient are told of.

        Blocks while more than two steps' messages have not left.
        """
        self._refuse_edits()
        self._refuse_unfrozen()
        for layer, missing in enumerate(self._step.missing):
            if missing:
                self.checks.look(layer, self._gradients([layer]))
        if self._step.values is not None and not same_values(self._groups(), self._step.values):
            raise ConfigError(
                "values of parameter groups must be set before backward, where gradients leave "
                "with them, but they changed between backward and step; step schedulers after it"
            )
        self._send(self.departures.end())
        for layer in set(range(len(self._layers.names))) - self._step.taken:
            self.serving.service.rows.skip(layer, self._progress.since_meeting)
        trace.record(trace.STEP, self._stepped_at, key=self.steps)
        self._stepped_at = time.perf_counter()
        step = self.steps
        self._progress.steps += 1
        self.serving.service.round.step = self._progress.since_meeting
        self._begin()
        self.checks.end(step, self.serving.device)
        self.serving.engine.check()
        self.serving.wait_for_room(self._layers.room_bytes)

    def _refuse_edits(self) -> None:
        """Refuse gradients that were changed since backward: they left in it."""
        for index, stamp in self._step.left.items():
            name, tensor = self.shares.named[index]
            if tensor.grad is not None and _stamp(tensor) != stamp:
                raise ConfigError(
                    f"gradients must be left alone between backward and step, since they leave in "
                    f"backward, but that of {name} was changed (clipping, scaling?); use daso.DASO"
                )

    def _refuse_unfrozen(self) -> None:
        """Refuse a parameter that is trained now: no rank has rows of it."""
        for name, tensor in self._frozen:
            if tensor.requires_grad:
                raise ConfigError(
                    f"parameters must be trained from the start, but {name} was frozen when the "
                    f"daso.ParameterServer was made; close it, and make another one"
                )

    def keep_log(self) -> None:
        """Keep from now on what this rank does."""
        self._log = [] if self._log is None else self._log

    def logged(self) -> Log:
        """Return what this rank did, in the order of each thread."""
        events = (*(self._log or ()), *self.serving.service.shard.log)
        return Log(self.serving.rank, self.plan, tuple(self._progress.meetings), events)

    def close(self) -> None:
        """Take the hooks off; idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what changes when somebody writes to a gradient, or puts another in its place."""
    assert tensor.grad is not None, "a hook was called with it"
    return tensor.grad.data_ptr(), tensor.grad._version


def _refuse_loading() -> None:
    raise ConfigError(
        "a model must be loaded before its ParameterServer is made, which has rows of its own that "
        "the next forward takes up; close the server, load, and make another one"
    )
