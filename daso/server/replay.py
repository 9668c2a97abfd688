"""Replay of a `daso.ParameterServer` training in one process from its ranks' logs.

Without synchronous steps, the order in which owners apply gradients differs between runs. The log
contains the versions of rows that each rank computed with, and the gradients in each version; with
the same batches, any order of computation consistent with it gives the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from daso.errors import ConfigError
from daso.server.compression import PushCompressor
from daso.server.partition import Partition, layers_of
from daso.server.plan import Apply, Log, Read, Send
from daso.server.rows import NO_UPDATE, load_rows, rows_in
from daso.server.shard import Contribution, MakeOptimizer, ParameterShard

Backward = Callable[[torch.nn.Module, int, int], None]


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay.

    Args:
        model: Model with the parameters of all ranks after their last `synchronize`.
        versions: Number of recomputed versions of rows, all with the logged digest.
        oldest: Maximum staleness of rows when read, in steps.
    """

    model: torch.nn.Module
    versions: int
    oldest: int


@dataclass(slots=True)
class _Rank:
    """State of one rank: its model, the rows it loaded, and its gradients."""

    rank: int
    model: torch.nn.Module
    partition: Partition
    events: Mapping[int, Sequence[Read | Send]]  # by step
    loaded: list[dict[int, int]]
    meetings: Sequence[int]  # steps at each synchronization
    first: int  # first step
    step: int  # next step
    # By step and layer.
    gradients: dict[tuple[int, int], "_Computed"] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return max(self.events, default=-1) + 1

    def round_bounds(self, meeting: int) -> tuple[int, int]:
        """Return the first step of a round between synchronizations, and of the next round."""
        bounds = [self.first, *self.meetings, self.steps]
        return bounds[meeting], bounds[meeting + 1]


@dataclass(frozen=True, slots=True)
class _Computed:
    has: tuple[bool, ...]
    grads: tuple[torch.Tensor | None, ...]
    loaded: Mapping[int, int]  # versions, by owner
    values: Sequence[Mapping[str, Any]]


def replay(
    logs: Sequence[Log],
    build: Callable[[], torch.nn.Module],
    optimizer_factory: MakeOptimizer,
    backward: Backward,
) -> Replayed:
    """Replay a training.

    Args:
        logs: Logs of all ranks, in rank order.
        build: Creates the model with the initial weights of the training.
        optimizer_factory: The server's factory.
        backward: Computes a rank's gradients of a step: (model, rank, step).

    Returns:
        The result.

    Raises:
        ConfigError: A version has other bits than logged, or the logs are inconsistent.
    """
    if [log.rank for log in logs] != [*range(len(logs))]:
        raise ConfigError(
            f"logs must be those of all ranks, in rank order, not of ranks "
            f"{[log.rank for log in logs]}",
            code="server-logs-incomplete",
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
        self._backward = backward
        self._ranks = [_rank(log, build(), ranks) for log in logs]
        self._owners = [
            ParameterShard(rank, rank_state.partition, plan, factory)
            for rank, rank_state in enumerate(self._ranks)
        ]
        self._compressor = [
            PushCompressor(rank_state.partition, plan.wire) for rank_state in self._ranks
        ]
        self._pending = [[e for e in log.events if isinstance(e, Apply)] for log in logs]
        # By owner, layer and version.
        self._rows = {
            (owner, layer, 0): NO_UPDATE
            for owner, server in enumerate(self._owners)
            for layer in server.partition.owned(owner)
        }
        self._steps_in: dict[tuple[int, int, int], dict[int, int]] = {}
        self._oldest = 0

    def run(self) -> Replayed:
        while any(self._advance()):
            pass
        left = sum(map(len, self._pending))
        if left or any(rank.step < rank.steps for rank in self._ranks):
            raise ConfigError(
                f"logs must be those of all ranks of one training, but {left} versions of rows "
                f"cannot be recomputed from them",
                code="server-logs-of-others",
            )
        first = self._ranks[0]
        for layer in range(len(first.partition.layers)):
            newest = [
                self._owners[owner].versions[layer] for owner in first.partition.owners[layer]
            ]
            self._load(first, layer, newest)
        versions = sum(sum(server.versions) for server in self._owners)
        return Replayed(first.model, versions, self._oldest)

    def _advance(self) -> list[bool]:
        progress = [self._train(rank) for rank in self._ranks]
        return progress + [self._update(owner) for owner in range(len(self._owners))]

    # --- ranks compute -----------------------------------------------------------------------

    def _train(self, rank: _Rank) -> bool:
        """Replay a rank's step if the rows it read then are computed; return whether they are."""
        if rank.step >= rank.steps:
            return False
        events = rank.events.get(rank.step, ())
        reads = [event for event in events if isinstance(event, Read)]
        if not all(self._has_rows(rank, read) for read in reads):
            return False
        for read in reads:
            self._load(rank, read.layer, read.versions)
            self._measure(rank, read)
        for _, tensor in rank.partition.named:
            tensor.grad = None
        self._backward(rank.model, rank.rank, rank.step)
        for send in (event for event in events if isinstance(event, Send)):
            for layer in send.layers:
                rank.gradients[rank.step, layer] = self._computed(rank, layer, send)
        rank.step += 1
        return True

    def _has_rows(self, rank: _Rank, read: Read) -> bool:
        owners = rank.partition.owners[read.layer]
        return all(
            (owner, read.layer, version) in self._rows
            for owner, version in zip(owners, read.versions, strict=True)
        )

    def _load(self, rank: _Rank, layer: int, versions: Sequence[int]) -> None:
        owners = rank.partition.owners[layer]
        rows = {
            owner: self._rows[owner, layer, version]
            for owner, version in zip(owners, versions, strict=True)
        }
        load_rows(rank.partition, layer, rows, rank.loaded[layer])

    def _measure(self, rank: _Rank, read: Read) -> None:
        """Record the staleness of rows read, in steps of their slowest contributor.

        It counts from the last synchronization; a rank without further steps until the next does
        not count.
        """
        meeting = sum(met <= read.step for met in rank.meetings)
        owners = rank.partition.owners[read.layer]
        for owner, version in zip(owners, read.versions, strict=True):
            steps = self._steps_in.get((owner, read.layer, version), {})
            for source in self._owners[owner].contributors:
                first, last = self._ranks[source].round_bounds(meeting)
                done = max(0, steps.get(source, 0) - first)
                if done < last - first:
                    behind = read.step - rank.round_bounds(meeting)[0] - done
                    self._oldest = max(self._oldest, behind)

    def _computed(self, rank: _Rank, layer: int, send: Send) -> _Computed:
        tensors = [rank.partition.named[index][1] for index in rank.partition.layers[layer]]
        grads = [None if p.grad is None else p.grad.clone() for p in tensors]
        if any(g is not None and not bool(g.isfinite().all()) for g in grads):
            grads = [None] * len(grads)
        return _Computed(
            has=tuple(grad is not None for grad in grads),
            grads=tuple(grads),
            loaded=dict(rank.loaded[layer]),
            values=send.values,
        )

    # --- owners update -----------------------------------------------------------------------

    def _update(self, owner: int) -> bool:
        """Create the next version of an owner's rows if its gradients are available."""
        todo = self._pending[owner]
        if not todo:
            return False
        apply = todo[0]
        computed = [self._ranks[s].gradients.get((step, apply.layer)) for s, step in apply.of]
        if any(gradients is None for gradients in computed):
            return False
        server = self._owners[owner]
        for (source, step), gradients in zip(apply.of, computed, strict=True):
            assert gradients is not None
            server.contribute(self._contribution(owner, apply, source, step, gradients))
        if (server.versions[apply.layer], server.digest(apply.layer)) != (
            apply.version,
            apply.digest,
        ):
            raise ConfigError(
                f"a replay must give the bits that were logged, but version {apply.version} of "
                f"layer {apply.layer} on rank {owner} differs; backward must compute the same "
                f"batches with the same random numbers",
                code="server-replay-differs",
            )
        self._store_version(owner, apply)
        del todo[0]
        return True

    def _contribution(
        self, owner: int, apply: Apply, source: int, step: int, computed: _Computed
    ) -> Contribution:
        return Contribution(
            source=source,
            step=step,
            layers=(apply.layer,),
            has=computed.has,
            read=(computed.loaded[owner],),
            values=computed.values,
            row=self._decoded(source, owner, apply.layer, computed),
            clip=apply.clip,
        )

    def _decoded(self, source: int, owner: int, layer: int, computed: _Computed) -> torch.Tensor:
        """Return gradients as received by their owner, after compression."""
        compressor = self._compressor[source]
        row = self._ranks[source].partition.pack(owner, [layer], computed.grads)
        payload = compressor.encode(owner, [layer], computed.has, row)
        return compressor.decode(owner, [layer], payload)

    def _store_version(self, owner: int, apply: Apply) -> None:
        server, layer, version = self._owners[owner], apply.layer, apply.version
        row = server.packed([layer])
        rows = rows_in(server.partition, owner, [layer], [server.row_state(layer, owner)], row)
        self._rows[owner, layer, version] = rows[layer]
        after = dict(self._steps_in.get((owner, layer, version - 1), {}))
        for source, step in apply.of:
            after[source] = max(after.get(source, 0), step + 1)
        self._steps_in[owner, layer, version] = after


def _rank(log: Log, model: torch.nn.Module, ranks: int) -> _Rank:
    events: dict[int, list[Read | Send]] = {}
    for event in log.events:
        if not isinstance(event, Apply):
            events.setdefault(event.step, []).append(event)
    _, named, layers = layers_of(model)
    partition = Partition(named, layers, ranks)
    loaded = [dict.fromkeys(owners, 0) for owners in partition.owners]
    first = min(events, default=0)
    return _Rank(log.rank, model, partition, events, loaded, log.meetings, first, first)
