"""A training with `daso.ParameterServer`, taken again by one process from what its ranks logged.

Ranks that wait for nobody take in gradients in an order that no two runs share. The log tells which
version of every row a rank computed with, and of which gradients every version was made; with the
same batches, computing in any order that this allows gives the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from daso.errors import ConfigError
from daso.server.compression import PushCompressor
from daso.server.partition import Partition, layers_of
from daso.server.plan import Apply, Log, Plan, Read, Send
from daso.server.shard import (
    Contribution,
    MakeOptimizer,
    ParameterShard,
    first_rows,
    rows_in,
    take_up,
)

__all__ = ["Replayed", "replay"]

Backward = Callable[[torch.nn.Module, int, int], None]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came out.

    Args:
        model: With the parameters that all ranks had after their last `synchronize`.
        versions: Versions of rows that were made, and had the digest that was logged.
        oldest: Most steps that rows were behind when they were read.
    """

    model: torch.nn.Module
    versions: int
    oldest: int


@dataclass(slots=True)
class _Rank:
    """One rank's side: its model, what it read, and what it computed."""

    rank: int
    model: torch.nn.Module
    shares: Partition
    events: Mapping[int, Sequence[Read | Send]]  # by step
    loaded: list[dict[int, int]]
    meetings: Sequence[int]  # steps at each meeting
    first: int  # step
    step: int  # that it takes
    taken: int = 0  # of the step's events
    has_gradients: bool = False  # of the step
    # By step and layer.
    gradients: dict[tuple[int, int], "_Computed"] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return max(self.events, default=-1) + 1

    def between(self, meeting: int) -> tuple[int, int]:
        """Return the first step after so many meetings, and that after the next."""
        bounds = [self.first, *self.meetings, self.steps]
        return bounds[meeting], bounds[meeting + 1]


@dataclass(frozen=True, slots=True)
class _Computed:
    has: tuple[bool, ...]
    grads: tuple[torch.Tensor | None, ...]
    base: tuple[torch.Tensor, ...]
    loaded: Mapping[int, int]  # versions, by owner
    values: Sequence[Mapping[str, Any]]


def replay(
    logs: Sequence[Log],
    build: Callable[[], torch.nn.Module],
    optimizer_factory: MakeOptimizer,
    backward: Backward,
) -> Replayed:
    """Take a training again.

    Args:
        logs: Of all ranks, in rank order.
        build: Makes the model as all ranks had it at the start.
        optimizer_factory: As given to the server.
        backward: Computes a rank's gradients of a step: (model, rank, step).

    Returns:
        What came out.

    Raises:
        ConfigError: A version has other bits than were logged, or the logs do not fit together.
    """
    if [log.rank for log in logs] != [*range(len(logs))]:
        raise ConfigError(
            f"logs must be those of all ranks, in rank order, not of ranks "
            f"{[log.rank for log in logs]}"
        )
    return _Replay(logs, build, optimizer_factory, backward).run()


class _Replay:
    def __init__(
        self,
        logs: Sequence[Log],
        build: Callable[[], torch.nn.Module],
        factory: MakeOptimizer,
        backward: Backward,
    ) -> None:
        plan, ranks = logs[0].plan, len(logs)
        self._plan, self._backward = plan, backward
        self._ranks = [_rank(log, build(), ranks, plan) for log in logs]
        self._owners = [
            ParameterShard(rank, one.shares, plan, factory) for rank, one in enumerate(self._ranks)
        ]
        self._compressor = [PushCompressor(one.shares, plan.wire) for one in self._ranks]
        self._todo = [[e for e in log.events if isinstance(e, Apply)] for log in logs]
        # By owner, layer and version.
        self._rows = {
            (owner, layer, 0): rows
            for owner, server in enumerate(self._owners)
            for layer, rows in first_rows(server).items()
        }
        self._steps_in: dict[tuple[int, int, int], dict[int, int]] = {}
        self._oldest = 0

    def run(self) -> Replayed:
        while any(self._go_on()):
            pass
        left = sum(map(len, self._todo))
        if left or any(one.step < one.steps for one in self._ranks):
            raise ConfigError(
                f"logs must be those of all ranks of one training, but {left} versions of rows "
                f"cannot be made from them"
            )
        first = self._ranks[0]
        for layer in range(len(first.shares.layers)):
            newest = [self._owners[owner].versions[layer] for owner in first.shares.owners[layer]]
            self._load(first, layer, newest)
        versions = sum(sum(server.versions) for server in self._owners)
        return Replayed(first.model, versions, self._oldest)

    def _go_on(self) -> list[bool]:
        went_on = [self._train(one) for one in self._ranks]
        return went_on + [self._update(owner) for owner in range(len(self._owners))]

    # --- ranks compute -----------------------------------------------------------------------

    def _train(self, one: _Rank) -> bool:
        """Go on in a rank's step, as far as what it read is there; return whether it went on.

        What no forward came to is read when gradients have left, and others have gone on by them.
        """
        if one.step >= one.steps:
            return False
        before, events = one.taken, one.events.get(one.step, ())
        for event in events[before:]:
            if isinstance(event, Send):
                self._leave(one, event)
            elif self._is_there(one, event):
                self._load(one, event.layer, event.versions)
                self._measure(one, event)
            else:
                return one.taken > before
            one.taken += 1
        self._compute(one)
        one.step, one.taken, one.has_gradients = one.step + 1, 0, False
        return True

    def _compute(self, one: _Rank) -> None:
        """Compute the gradients of a rank's step, once."""
        if one.has_gradients:
            return
        for _, tensor in one.shares.named:
            tensor.grad = None
        self._backward(one.model, one.rank, one.step)
        one.has_gradients = True

    def _leave(self, one: _Rank, send: Send) -> None:
        self._compute(one)
        for layer in send.layers:
            one.gradients[one.step, layer] = self._computed(one, layer, send)

    def _is_there(self, one: _Rank, read: Read) -> bool:
        owners = one.shares.owners[read.layer]
        return all(
            (owner, read.layer, version) in self._rows
            for owner, version in zip(owners, read.versions, strict=True)
        )

    def _load(self, one: _Rank, layer: int, versions: Sequence[int]) -> None:
        owners = one.shares.owners[layer]
        rows = {
            owner: self._rows[owner, layer, version]
            for owner, version in zip(owners, versions, strict=True)
        }
        take_up(one.shares, layer, rows, one.loaded[layer], whole=self._plan.whole)

    def _measure(self, one: _Rank, read: Read) -> None:
        """Note how many steps of the slowest contributor rows were behind their reader.

        Counted since the last meeting; who takes no more steps until the next is not behind.
        """
        meeting = sum(met <= read.step for met in one.meetings)
        owners = one.shares.owners[read.layer]
        for owner, version in zip(owners, read.versions, strict=True):
            steps = self._steps_in.get((owner, read.layer, version), {})
            for source in self._owners[owner].contributors:
                first, last = self._ranks[source].between(meeting)
                taken = max(0, steps.get(source, 0) - first)
                if taken < last - first:
                    behind = read.step - one.between(meeting)[0] - taken
                    self._oldest = max(self._oldest, behind)

    def _computed(self, one: _Rank, layer: int, send: Send) -> _Computed:
        tensors = [one.shares.named[index][1] for index in one.shares.layers[layer]]
        grads = [None if p.grad is None else p.grad.clone() for p in tensors]
        if any(g is not None and not bool(g.isfinite().all()) for g in grads):
            grads = [None] * len(grads)
        return _Computed(
            has=tuple(grad is not None for grad in grads),
            grads=tuple(grads),
            base=tuple(p.detach().clone() for p in tensors),
            loaded=dict(one.loaded[layer]),
            values=send.values,
        )

    # --- owners update -----------------------------------------------------------------------

    def _update(self, owner: int) -> bool:
        """Make the next version of an owner's rows, if its gradients are there."""
        todo = self._todo[owner]
        if not todo:
            return False
        apply = todo[0]
        found = [self._ranks[s].gradients.get((step, apply.layer)) for s, step in apply.of]
        if any(one is None for one in found):
            return False
        server = self._owners[owner]
        for (source, step), one in zip(apply.of, found, strict=True):
            assert one is not None
            server.contribute(self._contribution(owner, apply.layer, source, step, one))
        if (server.versions[apply.layer], server.digest(apply.layer)) != (
            apply.version,
            apply.digest,
        ):
            raise ConfigError(
                f"a replay must give the bits that were logged, but version {apply.version} of "
                f"layer {apply.layer} on rank {owner} differs; backward must compute the same "
                f"batches with the same random numbers"
            )
        self._keep(owner, apply)
        del todo[0]
        return True

    def _contribution(
        self, owner: int, layer: int, source: int, step: int, one: _Computed
    ) -> Contribution:
        shares = self._ranks[owner].shares
        return Contribution(
            source=source,
            step=step,
            layers=(layer,),
            has=one.has,
            read=(one.loaded[owner],),
            values=one.values,
            row=self._crossed(source, owner, layer, one),
            base=shares.pack(owner, [layer], one.base) if self._plan.whole else None,
        )

    def _crossed(self, source: int, owner: int, layer: int, one: _Computed) -> torch.Tensor:
        """Return gradients as they came to their owner."""
        wired, row = (
            self._compressor[source],
            self._ranks[source].shares.pack(owner, [layer], one.grads),
        )
        return wired.decode(owner, [layer], wired.encode(owner, [layer], one.has, row))

    def _keep(self, owner: int, apply: Apply) -> None:
        server, layer, version = self._owners[owner], apply.layer, apply.version
        row = server.packed([layer])
        rows = rows_in(server.shares, owner, [layer], [server.about(layer, owner)], row)
        self._rows[owner, layer, version] = rows[layer]
        after = dict(self._steps_in.get((owner, layer, version - 1), {}))
        for source, step in apply.of:
            after[source] = max(after.get(source, 0), step + 1)
        self._steps_in[owner, layer, version] = after


def _rank(log: Log, model: torch.nn.Module, ranks: int, plan: Plan) -> _Rank:
    events: dict[int, list[Read | Send]] = {}
    for event in log.events:
        if not isinstance(event, Apply):
            events.setdefault(event.step, []).append(event)
    _, named, layers = layers_of(model)
    shares = Partition(named, layers, ranks, whole=plan.whole)
    loaded = [dict.fromkeys(owners, 0) for owners in shares.owners]
    first = min(events, default=0)
    return _Rank(log.rank, model, shares, events, loaded, log.meetings, first, first)
