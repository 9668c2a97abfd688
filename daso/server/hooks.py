"""Hooks on a model that push gradients of finished layers during backward, and load new rows.

Before a layer's forward the newest rows of all owners are copied into its parameters, once per
step; only these hooks write to parameters. After a layer's backward its gradients are copied, and
pushed together with those of the next layers, as many as the pace requires.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from daso import trace
from daso.errors import ConfigError
from daso.server.finite import FiniteChecks
from daso.server.partition import Partition
from daso.server.plan import Log, Plan, PushScheduler, Read, Send, first_pace
from daso.server.rows import Rows, load_rows
from daso.server.service import STEPS_WAITING, ServerThread
from daso.server.shard import Contribution
from daso.torch_private import in_backward, version_of
from daso.train.gradients.partial_step import same_values, values_of
from daso.train.model.module_params import ModuleParameters
from daso.train.model.one_copy import Hook


@dataclass(frozen=True, slots=True)
class _Layers:
    """Names of a model's layers, and the layer of each parameter."""

    names: Sequence[str]
    of_param: Mapping[int, int]  # the layer of each parameter
    room_bytes: int  # limit of bytes waiting to be sent

    @classmethod
    def of(cls, names: Sequence[str], partition: Partition, ranks: int) -> "_Layers":
        """Return the layers, the same on all ranks."""
        layers = range(len(names))
        return cls(
            names=names,
            of_param={at: layer for layer, params in enumerate(partition.layers) for at in params},
            # Rows are received as well, or sent if gradients are not.
            room_bytes=STEPS_WAITING * 2 * max(partition.nbytes(r, layers) for r in range(ranks)),
        )


def _receivers(partition: Partition, rank: int, plan: Plan) -> list[tuple[int, ...]]:
    """Return for each layer the ranks that receive a rank's gradients."""
    if plan.mode == "sharded":
        return list(partition.owners)
    return [(rank,) if rank in owners else () for owners in partition.owners]


@dataclass(slots=True)
class _Step:
    """The progress of one step."""

    missing: list[set[int]]  # by layer: parameters without a gradient
    loaded: set[int] = field(default_factory=set)  # layers with current rows
    pushed: dict[int, tuple[int, int]] = field(default_factory=dict)  # stamps, by parameter
    values: list[dict[str, Any]] | None = None  # of parameter groups


@dataclass(slots=True)
class _Progress:
    """Counts this rank's steps."""

    steps: int = 0  # since the start
    met_at: int = 0  # steps at the last synchronization of all ranks
    meetings: list[int] = field(default_factory=list)  # steps at each synchronization

    @property
    def since_meeting(self) -> int:
        """Return the steps since the last synchronization."""
        return self.steps - self.met_at

    def meet(self) -> None:
        """Record that all ranks have synchronized."""
        self.met_at = self.steps
        self.meetings.append(self.steps)


class ServerHooks:
    """Pushes gradients and loads rows on one rank's training thread."""

    def __init__(
        self,
        module: torch.nn.Module,
        names: Sequence[str],  # names of its layers
        partition: Partition,
        plan: Plan,
        serving: ServerThread,
        groups: Callable[[], Sequence[dict[str, Any]]],  # values of the next steps
    ) -> None:
        self.partition, self.plan, self.serving = partition, plan, serving
        self._groups = groups
        self._progress = _Progress()
        self.checks = FiniteChecks(
            names,
            serving.rank,
            at_once=plan.exchange.nonfinite == "raise",
            copies=serving.service.copies,
        )
        self._log: list[Read | Send] | None = None  # reads and sends, if logging is on
        self._layers = _Layers.of(names, partition, partition.ranks)
        self.pushes = PushScheduler(
            _receivers(partition, serving.rank, plan),
            lambda owner, layer: partition.nbytes(owner, [layer]),
            first_pace(plan.push_every, len(names)),
        )
        # By layer and owner: the version in the parameters.
        self._loaded = [dict.fromkeys(owners, 0) for owners in partition.owners]
        self._keeps = False  # whether gradients are accumulated, not pushed
        self._stepped_at = time.perf_counter()
        self._uses = ModuleParameters(module, partition.named)
        self._frozen = [
            (name, param) for name, param in module.named_parameters() if not param.requires_grad
        ]
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(partial(self._ready, index))
            for index, (_, tensor) in enumerate(partition.named)
        ]
        self._hooks += [
            # Before user hooks, which may compute a weight (weight_norm, pruning).
            submodule.register_forward_pre_hook(Hook(partial(self._before, name)), prepend=True)
            for name, submodule in module.named_modules()
        ]
        self._hooks += [
            submodule.register_load_state_dict_pre_hook(Hook(_refuse_loading))
            for submodule in module.modules()
        ]
        self._begin()

    @property
    def steps(self) -> int:
        """Return the steps since the start."""
        return self._progress.steps

    def resume(self, steps: int) -> None:
        """Continue after this number of steps, at whose end all ranks synchronized."""
        self._progress.steps = self._progress.met_at = steps

    def _begin(self) -> None:
        self._step = _Step([set(params) for params in self.partition.layers])

    # --- loading of rows ---------------------------------------------------------------------

    def _before(self, name: str) -> None:
        """Load the rows that a module's forward needs."""
        needed = self._uses.called(name)
        self.serving.ensure_serving()  # other ranks may train while this rank evaluates
        if not torch.is_grad_enabled():
            return  # an evaluation uses the parameters of the last step
        if not self._step.loaded:
            needed += self._uses.nowhere
        for layer in sorted({self._layers.of_param[index] for index in needed} - self._step.loaded):
            self._update_layer(layer)

    def _update_layer(self, layer: int) -> None:
        if in_backward():
            raise ConfigError(
                f"parameters must not change during backward, but layer "
                f"{self._layers.names[layer]!r} runs its first forward of the step there; use "
                f"checkpoint(..., use_reentrant=False)",
                code="parameters-changed-in-backward",
            )
        self.serving.ensure_serving()
        self._step.loaded.add(layer)
        self._load(layer, self.serving.wait_for(layer, self._progress.since_meeting))
        if self._log is not None:
            self._log.append(Read(self.steps, layer, tuple(self._loaded[layer].values())))

    def _load(self, layer: int, rows: Mapping[int, Rows]) -> None:
        pinned = self.serving.service.copies is not None
        load_rows(self.partition, layer, rows, self._loaded[layer], pinned=pinned)

    def meet(self) -> None:
        """Load the last rows of all ranks. Collective over the world; blocking."""
        if self.pushes.has_finished_layers:
            raise ConfigError(
                "ranks must meet between two steps, but gradients were computed since the last; "
                "call step() first",
                code="gradients-before-meeting",
            )
        self.serving.meet(self._progress.since_meeting)
        self._progress.meet()
        for layer in range(len(self._layers.names)):
            self._load(layer, self.serving.service.rows.newest(layer))
        self._begin()

    # --- pushing of gradients ----------------------------------------------------------------

    def keep(self, *, keeps: bool) -> None:
        """Accumulate gradients on this rank, or push those of the next backward."""
        self._keeps = keeps

    def _ready(self, index: int, tensor: torch.Tensor) -> None:
        if self._keeps:
            return
        self._step.pushed[index] = _stamp(tensor)
        layer = self._layers.of_param[index]
        if layer not in self._step.loaded:
            raise ConfigError(
                f"parameters must be used by a module's forward, where the newest rows are loaded, "
                f"but {self.partition.named[index][0]} got a gradient without one; call its module",
                code="parameter-without-forward",
            )
        if not self._step.missing[layer]:
            raise ConfigError(
                f"a step must have one backward where gradients leave during it, but layer "
                f"{self._layers.names[layer]!r} got a second gradient; use no_sync() for all but "
                f"the last",
                code="second-backward-in-step",
            )
        if self._step.values is None:  # all gradients of a step use the same values
            self._step.values = values_of(self._groups())
        self._step.missing[layer].discard(index)
        if not self._step.missing[layer]:
            self._finish(layer)

    def _finish(self, layer: int) -> None:
        self.checks.check(layer, self._gradients([layer]))
        # The backlog of the link, not of copies from the device.
        backlog = self.serving.service.queue.backlog_bytes
        leaving = self.pushes.finish(layer, backlog_bytes=backlog, now=time.perf_counter())
        self._send(leaving)

    def _gradients(self, layers: Sequence[int]) -> list[torch.Tensor | None]:
        return [self.partition.named[index][1].grad for index in self.partition.params(layers)]

    def _send(self, leaving: Mapping[int, tuple[int, ...]]) -> None:
        """Push the gradients of layers, by owner."""
        if leaving:
            self.serving.ensure_serving()
            self.serving.wait_for_norm(self._progress.since_meeting)
        if self._step.values is None:
            self._step.values = values_of(self._groups())
        for owner, layers in leaving.items():
            self._send_to(owner, layers, self._step.values)

    def _send_to(self, owner: int, layers: tuple[int, ...], values: list[dict[str, Any]]) -> None:
        grads, device = self._gradients(layers), self.serving.device
        contribution = Contribution(
            source=self.serving.rank,
            step=self.steps,
            layers=layers,
            has=tuple(grad is not None for grad in grads),
            read=tuple(self._loaded[layer][owner] for layer in layers),
            values=values,
            row=self.partition.pack(owner, layers, grads, device),
        )
        self.serving.service.give(owner, contribution, self.checks.of(layers, device))
        if self._log is not None:
            every = self.pushes.pace.layers
            self._log.append(Send(self.steps, owner, layers, every, tuple(values)))

    def step(self) -> None:
        """End a step: push the remaining gradients. Blocks while over two steps' messages queue."""
        self._refuse_edits()
        self._refuse_unfrozen()
        for layer, missing in enumerate(self._step.missing):
            if missing:
                self.checks.check(layer, self._gradients([layer]))
        if self._step.values is not None and not same_values(self._groups(), self._step.values):
            raise ConfigError(
                "values of parameter groups must be set before backward, where gradients leave "
                "with them, but they changed between backward and step; step schedulers after it",
                code="group-changed-after-backward",
            )
        self._send(self.pushes.end())
        for layer in set(range(len(self._layers.names))) - self._step.loaded:
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
        """Raise `ConfigError` if gradients were changed after they were pushed in backward."""
        for index, stamp in self._step.pushed.items():
            name, tensor = self.partition.named[index]
            if tensor.grad is not None and _stamp(tensor) != stamp:
                raise ConfigError(
                    f"gradients must be left alone between backward and step, since they leave in "
                    f"backward, but that of {name} was changed; clip with the server's "
                    f"clip_value= or clip_norm=, or use daso.DASO",
                    code="gradient-changed-after-backward",
                )

    def _refuse_unfrozen(self) -> None:
        """Raise `ConfigError` if a frozen parameter is now trained: ranks have no rows of it."""
        for name, tensor in self._frozen:
            if tensor.requires_grad:
                raise ConfigError(
                    f"parameters must be trained from the start, but {name} was frozen when the "
                    f"daso.ParameterServer was made; close it, and make another one",
                    code="parameter-frozen-at-start",
                )

    def keep_log(self) -> None:
        """Start logging the reads and sends of this rank."""
        self._log = [] if self._log is None else self._log

    def logged(self) -> Log:
        """Return this rank's log, in the order of each thread."""
        events = (*(self._log or ()), *self.serving.service.shard.log)
        return Log(self.serving.rank, self.plan, tuple(self._progress.meetings), events)

    def close(self) -> None:
        """Remove the hooks and stop serving. Collective over the world; blocking; idempotent."""
        self._remove_hooks()
        self.serving.close()

    def abandon(self) -> None:
        """Remove the hooks and stop the thread; not collective: ranks may be missing."""
        self._remove_hooks()
        self.serving.engine.abandon()

    def open_state(self) -> object:
        """Return a value that must be equal on ranks that close together; None: serving failed."""
        # A serving rank abandons its thread on close.
        return self.serving.serves if self.serving.engine.sound else None

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a stamp that changes when a gradient is written to or replaced."""
    assert tensor.grad is not None, "a hook was called with it"
    return tensor.grad.data_ptr(), version_of(tensor.grad)


def _refuse_loading() -> None:
    raise ConfigError(
        "a model must be loaded before its ParameterServer is made, which has its own rows, loaded "
        "by the next forward; close the server, load, and make another one",
        code="model-loaded-too-late",
    )
