"""One rank's rows of a model, their optimizer, and what their updates are made of.

The rows are copies: nobody computes with them. `ParameterShard` is told of gradients, in any order
in which they come, and says which layers have a new version. It neither communicates nor waits, so
the thread that serves and a single process that replays a training use the same one.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from daso.comm.dtypes import accumulator
from daso.server.partition import HOST, Partition
from daso.server.plan import Apply, Plan, age
from daso.train.deltas.outer import build_optimizer
from daso.train.gradients.partial_step import refuse_counting, step_with

__all__ = [
    "Contribution",
    "MakeOptimizer",
    "ParameterShard",
    "Rows",
    "first_rows",
    "rows_in",
    "take_up",
]

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Values = Sequence[Mapping[str, Any]]
About = tuple[int, float, int, float]  # version, clock, behind, taken_in
INSTEAD = "use daso.DASO"
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Contribution:
    """Gradients of some layers that one rank computed in one step, for the rows of one owner.

    Args:
        source: The rank.
        step: Steps it had taken.
        layers: Which, in order.
        has: For each parameter of these, whether there is a gradient.
        read: For each layer, the version that it was computed with.
        values: Of each parameter group at that moment.
        row: The gradients (nbytes,), as `Partition.pack` made it.
        base: The rows that they were computed with, where the owner's are not the same; likewise.
    """

    source: int
    step: int
    layers: tuple[int, ...]
    has: tuple[bool, ...]
    read: tuple[int, ...]
    values: Values
    row: torch.Tensor
    base: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """A version of one owner's rows of a layer."""

    version: int  # updates that are in them
    clock: float  # steps of all contributors that are in them; infinity: all there will be
    behind: int  # the contributor with fewest
    taken_in: float  # steps of the rank that reads them that are in them
    tensors: tuple[torch.Tensor, ...]  # of each parameter of the layer; not to be written to


@dataclass(frozen=True, slots=True)
class Gradient:
    """One layer's part of a contribution."""

    of: Contribution
    read: int
    tensors: tuple[torch.Tensor | None, ...]  # (rows, ...) of each parameter
    base: tuple[torch.Tensor, ...] | None


@dataclass(slots=True)
class Ages:
    """How old gradients were when they were taken in."""

    count: int = 0
    total: float = 0.0  # steps of all ranks

    def add(self, steps: float) -> None:
        """Note a gradient."""
        self.count += 1
        self.total += steps

    @property
    def mean(self) -> float:
        """Steps of all ranks; 0 before any gradient."""
        return self.total / max(1, self.count)


class ParameterShard:
    """Keeps one rank's rows up to date.

    Args:
        rank: Whose rows.
        shares: Which rows these are.
        plan: How gradients are taken in.
        make: Makes their optimizer.
    """

    def __init__(self, rank: int, shares: Partition, plan: Plan, make: MakeOptimizer) -> None:
        self.rank, self.shares, self.plan = rank, shares, plan
        self.stand_ins = shares.stand_ins(rank)
        self.contributors = plan.contributors(rank, shares.ranks)
        states = self.contributors if plan.per_rank else (rank,)
        self.optimizers = {
            source: build_optimizer("optimizer_factory", make, self.stand_ins) for source in states
        }
        if len(self.optimizers) > 1:
            for optimizer in self.optimizers.values():
                _look_ahead(optimizer)
        self.versions = [0] * len(shares.layers)
        self.ages = Ages()
        self.logs = False  # its versions
        self.log: list[Apply] = []
        self._counts: list[dict[int, float]] = []  # of each layer: steps of each that are in it
        self._waiting: dict[tuple[int, int], dict[int, Gradient]] = {}  # by layer and step
        self.begin()

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer whose state is that of this rank's own gradients, or of all."""
        return self.optimizers[self.rank]

    def begin(self) -> None:
        """Count steps anew: all ranks have the same rows."""
        self._counts = [dict.fromkeys(self.contributors, 0.0) for _ in self.shares.layers]

    def clock(self, layer: int) -> float:
        """Return how many steps of every contributor are in a layer; of those that go on."""
        return min(self._counts[layer].values())

    def ahead(self, source: int, layer: int) -> float:
        """Return how many steps a contributor is ahead of the slowest, in a layer."""
        return self._counts[layer][source] - self.clock(layer)

    def about(self, layer: int, reader: int) -> About:
        """Return what is in a layer's rows, for a rank that is to read them; see `Rows`."""
        counts = self._counts[layer]
        behind = min(counts, key=counts.__getitem__)
        return self.versions[layer], self.clock(layer), behind, counts.get(reader, NEVER)

    def finish(self, source: int) -> None:
        """Note that a rank takes no more steps: nobody waits for it."""
        if source in self.contributors:
            for counts in self._counts:
                counts[source] = NEVER

    def contribute(self, contribution: Contribution) -> list[int]:
        """Take in gradients."""
        gradients = dict(zip(contribution.layers, self._gradients(contribution), strict=True))
        if not self.plan.together:
            self._apply_alone(contribution, gradients)
            return list(gradients)
        ready: dict[int, list[Gradient]] = {}
        for layer, gradient in gradients.items():
            there = self._waiting.setdefault((layer, contribution.step), {})
            there[contribution.source] = gradient
            if len(there) == len(self.contributors):
                del self._waiting[layer, contribution.step]
                ready[layer] = [there[source] for source in self.contributors]
        if ready:
            self._apply_together(ready)
        return list(ready)

    def _gradients(self, contribution: Contribution) -> Iterator[Gradient]:
        """Cut a contribution into its layers'."""
        unpack, layers = self.shares.unpack, contribution.layers
        rows = [part for _, part in unpack(self.rank, layers, contribution.row)]
        base = None
        if contribution.base is not None:
            base = [part for _, part in unpack(self.rank, layers, contribution.base)]
        at = 0
        for layer, read in zip(layers, contribution.read, strict=True):
            until = at + len(self.shares.layers[layer])
            parts = zip(rows[at:until], contribution.has[at:until], strict=True)
            tensors = tuple(part if has else None for part, has in parts)
            mine = None if base is None else tuple(base[at:until])
            yield Gradient(contribution, read, tensors, mine)
            at = until

    def _apply_together(self, ready: Mapping[int, Sequence[Gradient]]) -> None:
        """Step with the mean of the contributors' gradients."""
        grads: dict[int, torch.Tensor] = {}
        for layer, gradients in ready.items():
            self._rebase(layer, gradients[0])
            for at, index in enumerate(self.shares.layers[layer]):
                tensors = [one.tensors[at] for one in gradients]
                there = [tensor for tensor in tensors if tensor is not None]
                if there:
                    grads[index] = _mean(there, len(gradients))
        first = next(iter(ready.values()))[0]
        self._step(self.inner, grads, first.of.values)
        for layer, gradients in ready.items():
            self._note(layer, gradients)

    def _apply_alone(self, contribution: Contribution, gradients: Mapping[int, Gradient]) -> None:
        """Step with one rank's gradient: a share of a step of all."""
        by_scale: dict[float, dict[int, torch.Tensor]] = {}
        for layer, gradient in gradients.items():
            self.ages.add(age(self.versions[layer], gradient.read, len(self.contributors)))
            self._rebase(layer, gradient)
            grads = by_scale.setdefault(self._scale(layer, gradient), {})
            for index, tensor in zip(self.shares.layers[layer], gradient.tensors, strict=True):
                if tensor is not None:
                    grads[index] = tensor
        optimizer = self.optimizers.get(contribution.source, self.inner)
        for scale, grads in by_scale.items():
            self._step(optimizer, grads, [_scaled(group, scale) for group in contribution.values])
        for layer, gradient in gradients.items():
            self._note(layer, [gradient])

    def _scale(self, layer: int, gradient: Gradient) -> float:
        """Return by what the learning rate is multiplied: all ranks' steps add up to one."""
        ranks = len(self.contributors)
        if not self.plan.scale_by_staleness:
            return 1 / ranks
        return 1 / ranks / (1 + age(self.versions[layer], gradient.read, ranks))

    def _rebase(self, layer: int, gradient: Gradient) -> None:
        """Start from the rows that a gradient was computed with."""
        if gradient.base is not None:
            with torch.no_grad():
                for index, base in zip(self.shares.layers[layer], gradient.base, strict=True):
                    self.stand_ins[index].copy_(base)

    def _step(
        self, optimizer: torch.optim.Optimizer, grads: Mapping[int, torch.Tensor], values: Values
    ) -> None:
        if not grads:
            return
        for index, grad in grads.items():
            self.stand_ins[index].grad = grad
        params = {id(self.stand_ins[index]) for index in grads}
        step_with(
            optimizer, params, values, HOST, lambda: refuse_counting(optimizer, values, INSTEAD)
        )
        for index in grads:
            self.stand_ins[index].grad = None

    def _note(self, layer: int, gradients: Sequence[Gradient]) -> None:
        self.versions[layer] += 1
        for gradient in gradients:
            source = gradient.of.source
            if self._counts[layer][source] != NEVER:
                self._counts[layer][source] += 1
        if self.logs:
            of = tuple((one.of.source, one.of.step) for one in gradients)
            self.log.append(Apply(layer, self.versions[layer], of, self.digest(layer)))

    def digest(self, layer: int) -> str:
        """Return a hash of this rank's rows of a layer, bit for bit."""
        hasher = hashlib.sha256()
        for index in self.shares.layers[layer]:
            flat = self.stand_ins[index].detach().contiguous().view(-1)
            hasher.update(flat.view(torch.uint8).numpy().tobytes())
        return hasher.hexdigest()

    def packed(self, layers: Sequence[int]) -> torch.Tensor:
        """Return a copy of this rank's rows of layers, as `Partition.pack` makes it."""
        mine = [self.stand_ins[index].detach() for index in self.shares.params(layers)]
        return self.shares.pack(self.rank, layers, mine)


def rows_in(
    shares: Partition,
    owner: int,
    layers: Sequence[int],
    about: Iterable[About],
    row: torch.Tensor,
) -> dict[int, Rows]:
    """Return an owner's rows of layers as they lie in a message."""
    parts = iter(shares.unpack(owner, layers, row))
    return {
        layer: Rows(*one, tuple(next(parts)[1] for _ in shares.layers[layer]))
        for layer, one in zip(layers, about, strict=True)
    }


def first_rows(server: ParameterShard) -> dict[int, Rows]:
    """Return an owner's rows of its layers before any update; whole ones alone are looked at."""
    layers = server.shares.owned(server.rank)
    if not server.plan.whole:
        return {layer: Rows(0, 0.0, 0, 0.0, ()) for layer in layers}
    about = [server.about(layer, server.rank) for layer in layers]
    return rows_in(server.shares, server.rank, layers, about, server.packed(layers))


def take_up(
    shares: Partition,
    layer: int,
    rows: Mapping[int, Rows],
    loaded: dict[int, int],
    *,
    whole: bool,
    pinned: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Copy the newest rows of a layer into its parameters, and note their versions.

    Does not block where rows are pinned, whatever the device.

    Args:
        shares: Which rows are whose.
        layer: Which layer.
        rows: Of each of its owners, in rank order.
        loaded: By owner, the version that is in the parameters; changed.
        whole: Every owner has all rows: their mean is taken.
        pinned: Rows are, and this returns what is and holds the same.
    """
    new = [owner for owner, one in rows.items() if one.version != loaded[owner]]
    with torch.no_grad():
        for at, index in enumerate(shares.layers[layer] if new else ()):
            tensor = shares.named[index][1]
            if whole:
                mean = _mean([one.tensors[at] for one in rows.values()], len(rows))
                mean = mean if pinned is None else pinned(mean)
                shares.of(0, index, tensor).copy_(mean, non_blocking=pinned is not None)
                continue
            for owner in new:
                mine = rows[owner].tensors[at]
                shares.of(owner, index, tensor).copy_(mine, non_blocking=pinned is not None)
    loaded.update({owner: one.version for owner, one in rows.items()})


def _mean(tensors: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Return the sum in order over a count, added in fp32 or fp64."""
    first = tensors[0]
    total = first.to(accumulator(first.dtype), copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return total.div_(count).to(first.dtype)


def _look_ahead(optimizer: torch.optim.Optimizer) -> None:
    """Take SGD's momentum in Nesterov's form.

    With a state for each rank, rows are then those to which all ranks' momenta lead, which makes up
    for gradients that are late: DANA-Slim (Hakimi et al., arXiv 1907.11612).
    """
    for group in optimizer.param_groups:
        if group.get("nesterov") is False and group.get("momentum") and not group.get("dampening"):
            group["nesterov"] = True


def _scaled(group: Mapping[str, Any], scale: float) -> dict[str, Any]:
    return {**group, "lr": group["lr"] * scale} if "lr" in group else dict(group)
