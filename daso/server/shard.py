"""A rank's shard of a model's rows, and the optimizer that updates it.

The rows are copies that forwards do not read. `ParameterShard` applies gradients in any order and
returns the layers with a new version. It neither communicates nor waits: the serving thread and a
replay in one process share it.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from daso.comm.reduction import accumulator
from daso.errors import ConfigError
from daso.server.clipping import clip, squared_norm
from daso.server.partition import HOST, Partition
from daso.server.plan import Apply, Plan, age
from daso.server.rows import RowState
from daso.train.deltas.outer import build_optimizer
from daso.train.gradients.partial_step import refuse_counting, step_with

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Values = Sequence[Mapping[str, Any]]
INSTEAD = "use daso.DASO"
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Contribution:
    """Gradients of some layers from one rank in one step, for the rows of one owner."""

    source: int  # rank
    step: int  # steps that the rank had taken
    layers: tuple[int, ...]  # in order
    has: tuple[bool, ...]  # for each parameter of the layers, whether it has a gradient
    read: tuple[int, ...]  # for each layer, the version of rows used to compute the gradient
    values: Values  # of each parameter group at that moment
    row: torch.Tensor  # the gradients (nbytes,), packed by `Partition.pack`
    clip: float = 1.0  # factor of the gradients, from the last step's norm


@dataclass(frozen=True, slots=True)
class Gradient:
    """Gradients of one layer, a part of a contribution."""

    of: Contribution
    read: int
    tensors: tuple[torch.Tensor | None, ...]  # (rows, ...) of each parameter


@dataclass(slots=True)
class Ages:
    """Mean age of gradients when they were applied."""

    count: int = 0
    total: float = 0.0  # steps of all ranks

    def add(self, steps: float) -> None:
        """Count a gradient."""
        self.count += 1
        self.total += steps

    @property
    def mean(self) -> float:
        """Return the mean in steps of all ranks; 0 before any gradient."""
        return self.total / max(1, self.count)


class ParameterShard:
    """Updates one rank's rows with gradients."""

    def __init__(self, rank: int, partition: Partition, plan: Plan, make: MakeOptimizer) -> None:
        self.rank, self.partition, self.plan = rank, partition, plan
        self.stand_ins = partition.stand_ins(rank)
        self.contributors = plan.contributors(rank, partition.ranks)
        states = self.contributors if plan.has_state_per_rank else (rank,)
        self.optimizers = {
            source: build_optimizer("optimizer_factory", make, self.stand_ins) for source in states
        }
        if len(self.optimizers) > 1:
            for optimizer in self.optimizers.values():
                _use_nesterov(optimizer)
        self.versions = [0] * len(partition.layers)
        self.squares = [0.0] * len(partition.layers)  # squared norms of the last mean gradients
        self.ages = Ages()
        self.logs = False  # whether versions are logged
        self.log: list[Apply] = []
        self._counts: list[
            dict[int, float]
        ] = []  # by layer: steps of each contributor that it contains
        self._waiting: dict[tuple[int, int], dict[int, Gradient]] = {}  # by layer and step
        self.begin()

    @property
    def inner(self) -> torch.optim.Optimizer:
        """Return the optimizer with the state of this rank's own gradients, or of all ranks'."""
        return self.optimizers[self.rank]

    def begin(self) -> None:
        """Restart the count of steps: all ranks have the same rows."""
        self._counts = [dict.fromkeys(self.contributors, 0.0) for _ in self.partition.layers]

    def clock(self, layer: int) -> float:
        """Return the steps of every active contributor that a layer contains."""
        return min(self._counts[layer].values())

    def ahead(self, source: int, layer: int) -> float:
        """Return the steps that a contributor is ahead of the slowest, in a layer."""
        return self._counts[layer][source] - self.clock(layer)

    def row_state(self, layer: int, reader: int) -> RowState:
        """Return the state of a layer's rows for a reading rank; see `Rows`."""
        counts = self._counts[layer]
        behind = min(counts, key=counts.__getitem__)
        return self.versions[layer], self.clock(layer), behind, counts.get(reader, NEVER)

    def finish(self, source: int) -> None:
        """Record that a rank takes no more steps, so that clocks ignore it."""
        if source in self.contributors:
            for counts in self._counts:
                counts[source] = NEVER

    def contribute(self, contribution: Contribution) -> list[int]:
        """Apply gradients; return the layers with a new version."""
        gradients = dict(zip(contribution.layers, self._gradients(contribution), strict=True))
        if not self.plan.is_synchronous:
            self._apply_alone(contribution, gradients)
            return list(gradients)
        ready: dict[int, list[Gradient]] = {}
        for layer, gradient in gradients.items():
            received = self._waiting.setdefault((layer, contribution.step), {})
            received[contribution.source] = gradient
            if len(received) == len(self.contributors):
                del self._waiting[layer, contribution.step]
                ready[layer] = [received[source] for source in self.contributors]
        if ready:
            self._apply_together(ready)
        return list(ready)

    def _gradients(self, contribution: Contribution) -> Iterator[Gradient]:
        """Split a contribution into gradients of its layers."""
        layers = contribution.layers
        rows = [part for _, part in self.partition.unpack(self.rank, layers, contribution.row)]
        at = 0
        for layer, read in zip(layers, contribution.read, strict=True):
            until = at + len(self.partition.layers[layer])
            parts = zip(rows[at:until], contribution.has[at:until], strict=True)
            tensors = tuple(part if has else None for part, has in parts)
            yield Gradient(contribution, read, tensors)
            at = until

    def _apply_together(self, ready: Mapping[int, Sequence[Gradient]]) -> None:
        """Apply the mean of all contributors' gradients."""
        grads: dict[int, torch.Tensor] = {}
        for layer, gradients in ready.items():
            for at, index in enumerate(self.partition.layers[layer]):
                tensors = [gradient.tensors[at] for gradient in gradients]
                present = [tensor for tensor in tensors if tensor is not None]
                if present:
                    grads[index] = _mean(present, len(gradients))
            if self.plan.clips_mean_norm:
                params = self.partition.layers[layer]
                self.squares[layer] = squared_norm(grads[i] for i in params if i in grads)
        first = next(iter(ready.values()))[0]
        self._step(self.inner, grads, first.of.values, first.of.clip)
        for layer, gradients in ready.items():
            self._record_version(layer, gradients)

    def _apply_alone(self, contribution: Contribution, gradients: Mapping[int, Gradient]) -> None:
        """Apply one rank's gradient as a share of a common step."""
        by_scale: dict[float, dict[int, torch.Tensor]] = {}
        for layer, gradient in gradients.items():
            self.ages.add(age(self.versions[layer], gradient.read, len(self.contributors)))
            grads = by_scale.setdefault(self._scale(layer, gradient), {})
            for index, tensor in zip(self.partition.layers[layer], gradient.tensors, strict=True):
                if tensor is not None:
                    grads[index] = tensor
        optimizer = self.optimizers.get(contribution.source, self.inner)
        for scale, grads in by_scale.items():
            values = [_scaled(group, scale) for group in contribution.values]
            self._step(optimizer, grads, values, contribution.clip)
        for layer, gradient in gradients.items():
            self._record_version(layer, [gradient])

    def _scale(self, layer: int, gradient: Gradient) -> float:
        """Return the factor of the learning rate, so that all ranks' steps add up to one."""
        ranks = len(self.contributors)
        if not self.plan.scale_by_staleness:
            return 1 / ranks
        return 1 / ranks / (1 + age(self.versions[layer], gradient.read, ranks))

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        grads: Mapping[int, torch.Tensor],
        values: Values,
        factor: float,
    ) -> None:
        if not grads:
            return
        clip(grads.values(), factor, self.plan.clip_value)
        for index, grad in grads.items():
            self.stand_ins[index].grad = grad
        params = {id(self.stand_ins[index]) for index in grads}
        step_with(
            optimizer, params, values, HOST, lambda: refuse_counting(optimizer, values, INSTEAD)
        )
        for index in grads:
            self.stand_ins[index].grad = None

    def _record_version(self, layer: int, gradients: Sequence[Gradient]) -> None:
        self.versions[layer] += 1
        for gradient in gradients:
            source = gradient.of.source
            if self._counts[layer][source] != NEVER:
                self._counts[layer][source] += 1
        if self.logs:
            of = tuple((gradient.of.source, gradient.of.step) for gradient in gradients)
            factor, digest = gradients[0].of.clip, self.digest(layer)
            self.log.append(Apply(layer, self.versions[layer], of, digest, factor))

    def problem(self) -> ConfigError | None:
        """Return the error for a factory's optimizer of other parameters, or None."""
        own = {id(param) for param in self.stand_ins}
        param_ids = {id(param) for group in self.inner.param_groups for param in group["params"]}
        if param_ids <= own:
            return None
        return ConfigError(
            "optimizer_factory must make an optimizer of the parameters it is given, but it took "
            "others; pass on its argument",
            code="factory-ignores-parameters",
        )

    def share(self) -> dict[str, Any]:
        """Return the identity of these rows and states, which a loaded state must match."""
        ranks = self.partition.ranks
        return {
            "mode": self.plan.mode,
            "rank": self.rank,
            "ranks": ranks,
            "states": [*self.optimizers],
        }

    def inner_states(self, groups: Values) -> dict[int, dict[str, Any]]:
        """Return each optimizer's state, with these values of groups."""
        return {
            source: _with_values(optimizer, groups) for source, optimizer in self.optimizers.items()
        }

    def digest(self, layer: int) -> str:
        """Return a hash of this rank's rows of a layer, bit for bit."""
        hasher = hashlib.sha256()
        for index in self.partition.layers[layer]:
            flat = self.stand_ins[index].detach().contiguous().view(-1)
            hasher.update(flat.view(torch.uint8).numpy().tobytes())
        return hasher.hexdigest()

    def packed(self, layers: Sequence[int]) -> torch.Tensor:
        """Return a copy of this rank's rows of layers, packed by `Partition.pack`."""
        rows = [self.stand_ins[index].detach() for index in self.partition.params(layers)]
        return self.partition.pack(self.rank, layers, rows)


def _mean(tensors: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Return the sum, in order, divided by a count, accumulated in fp32 or fp64."""
    first = tensors[0]
    total = first.to(accumulator(first.dtype), copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return total.div_(count).to(first.dtype)


def _use_nesterov(optimizer: torch.optim.Optimizer) -> None:
    """Use SGD's momentum in Nesterov's form."""
    # With a state per rank, rows then include all ranks' future momentum steps, which compensates
    # for late gradients: DANA-Slim (Hakimi et al., arXiv 1907.11612).
    for group in optimizer.param_groups:
        if group.get("nesterov") is False and group.get("momentum") and not group.get("dampening"):
            group["nesterov"] = True


def _with_values(inner: torch.optim.Optimizer, groups: Values) -> dict[str, Any]:
    state = inner.state_dict()
    merged = [
        {**group, "params": saved["params"]}
        for group, saved in zip(groups, state["param_groups"], strict=True)
    ]
    return {**state, "param_groups": merged}


def _scaled(group: Mapping[str, Any], scale: float) -> dict[str, Any]:
    return {**group, "lr": group["lr"] * scale} if "lr" in group else dict(group)
