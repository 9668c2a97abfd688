"""A sampler that divides a data set among the world's ranks; a DataLoader's `batch_sampler`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Sampler

from daso.errors import ConfigError


class Regrouped(Protocol):
    """A world that lost ranks; see `daso.comm.topology.Regrouped`."""

    @property
    def rank(self) -> int:
        """Return the new world rank."""

    @property
    def world_size(self) -> int:
        """Return the new world size."""

    @property
    def most(self) -> Callable[[int], int]:
        """Return a collective function: the largest of all ranks' numbers."""

    @property
    def first(self) -> Callable[[Any], Any]:
        """Return a collective function: the value passed by world rank 0."""

    @property
    def is_new(self) -> bool:
        """Return whether this rank was a spare until now."""


@dataclass(frozen=True, slots=True)
class _Deal:
    """Assignment of samples to ranks, from a batch on."""

    batch: int  # the first batch of this deal
    sample: int  # the first sample of that batch
    rank: int
    size: int  # ranks


class ShardedSampler(Sampler[list[int]]):
    """Batches of indices for one rank; all ranks have the same number and size of batches.

    Each epoch has one permutation of the data set, the same on all ranks. A global batch is the
    next size * batch_size elements of it, and world rank r takes the r-th part; a remainder at the
    end is dropped. So a step has the same samples for any number of ranks with the same global
    batch.

    Only `set_epoch` changes the epoch.

    Args:
        length: Samples of the data set.
        rank: World rank.
        size: World size.
        batch_size: Samples per batch of one rank.
        seed: Draws the permutations, with the epoch; the same on all ranks, not negative.
        shuffle: Whether to permute the data set, or keep its order.

    Raises:
        ConfigError: A number is out of its range, or the data set below one global batch.
    """

    def __init__(
        self,
        length: int,
        *,
        rank: int,
        size: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        _check(length, rank, size, batch_size, seed)
        self._length, self._batch_size = length, batch_size
        self._deals = [_Deal(0, 0, rank, size)]  # of this epoch; the last one is current
        self._seed = seed if shuffle else None
        self._epoch = 0
        self._batch = 0  # batches yielded this epoch
        self._start: int | None = 0  # first batch of the next iteration; None: 0, a whole epoch

    def __len__(self) -> int:
        """Return the batches of a whole epoch, even if an iteration begins in the middle of one."""
        last = self._deals[-1]
        return last.batch + max(0, self._length - last.sample) // self._global_batch

    @property
    def _global_batch(self) -> int:
        return self._deals[-1].size * self._batch_size

    @property
    def batches_done(self) -> int:
        """Return the number of batches yielded this epoch."""
        return self._batch

    @property
    def epoch(self) -> int:
        """Return the epoch of the next batch, from 0."""
        return self._epoch

    def regroup(self, world: "Regrouped") -> None:
        """Divide the rest of the epoch among other ranks, after ranks were lost or joined.

        Register it with ``topology.on_regroup``. All ranks change after the last batch that any of
        them has drawn, so that no sample is used twice; a lost rank's part of these batches is not
        used. A new rank begins with the last of these batches, which its optimizer skips, in the
        `epoch` of the others. No DataLoader may draw batches ahead then (``num_workers=0``).

        Args:
            world: Has ``rank``, ``world_size`` (ranks), ``most(number)``, the largest of all ranks'
                numbers, ``first(value)``, world rank 0's, and ``is_new``.

        Collective over the world; blocking.
        """
        batch = world.most(self._batch)
        epoch, deals = world.first((self._epoch, self._deals))
        if world.is_new:
            self._epoch, self._batch = epoch, max(0, batch - 1)
            self._start = self._batch
            # The rank is unused: this rank joins after the batches of these deals.
            self._deals = [replace(deal, rank=0) for deal in deals]
        # After the last batch no samples are left; some ranks may have ended the epoch.
        sample = self._length if batch >= len(self) else self._place(batch)[0]
        self._deals.append(_Deal(batch, sample, world.rank, world.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        if self._start is None:  # repeats the epoch
            self._begin(self._epoch, 0)
        start, self._start = self._start or 0, None
        self._batch = start
        return self._batches(self._order(), start)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next iteration; a different epoch begins at batch 0.

        Args:
            epoch: Epoch, from 0. The epoch restored by `load_state_dict` keeps its position.

        Raises:
            ConfigError: The epoch is negative.
        """
        if epoch < 0:
            raise ConfigError(
                f"epoch counts from 0, not {epoch}; pass the loop's counter",
                code="epoch-below-zero",
            )
        if epoch != self._epoch:
            self._begin(epoch, 0)

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch, the same on all ranks after the same number of batches.

        Returns:
            "epoch", and "batch": the batches yielded in it. A DataLoader with workers draws
            batches ahead: there, save the number of batches trained on as "batch" instead.
            After a loss of ranks in this epoch, "batch" counts as if they had never existed.
        """
        batch = self._batch
        if len(self._deals) > 1:
            batch = self._place(batch)[0] // self._global_batch
        return {"epoch": self._epoch, "batch": batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue, in the next iteration, after the batches counted in the state.

        Args:
            state: State of `state_dict`, for the same data set, seed and global batch.

        Raises:
            ConfigError: The position does not exist in an epoch of this data set.
        """
        epoch, batch = state["epoch"], state["batch"]
        most = self._length // self._global_batch
        if epoch < 0 or not 0 <= batch <= most:
            raise ConfigError(
                f"a state of this sampler has an epoch from 0 and a batch of 0..{most}, not "
                f"{epoch} and {batch}; resume with the data set and global batch it was saved with",
                code="sampler-state-invalid",
            )
        self._begin(epoch, batch)

    def _begin(self, epoch: int, batch: int) -> None:
        """Begin the next iteration after `batch` batches of an epoch, with one deal."""
        last = self._deals[-1]
        self._epoch, self._batch, self._start = epoch, batch, batch
        self._deals = [_Deal(0, 0, last.rank, last.size)]

    def _place(self, batch: int) -> tuple[int, int]:
        """Return the first sample of a global batch, and this rank's index in it."""
        deal = next(candidate for candidate in reversed(self._deals) if candidate.batch <= batch)
        return deal.sample + (batch - deal.batch) * deal.size * self._batch_size, deal.rank

    def _order(self) -> torch.Tensor:
        if self._seed is None:
            return torch.arange(self._length, device="cpu")
        # Not seed + epoch: seed 0 in epoch 1 would repeat seed 1 in epoch 0.
        mixed = np.random.SeedSequence(self._seed, spawn_key=(self._epoch,)).generate_state(1)
        generator = torch.Generator().manual_seed(int(mixed[0]))
        return torch.randperm(self._length, generator=generator, device="cpu")

    def _batches(self, order: torch.Tensor, start: int) -> Iterator[list[int]]:
        batch = start
        while batch < len(self):  # changes when ranks are lost
            begin, rank = self._place(batch)
            begin += rank * self._batch_size
            batch += 1
            self._batch = batch
            yield order[begin : begin + self._batch_size].tolist()


def _check(length: int, rank: int, size: int, batch_size: int, seed: int) -> None:
    if not 0 <= rank < size:
        raise ConfigError(
            f"rank is one of 0..size-1, not {rank} of {size}; pass the world's",
            code="sampler-rank-invalid",
        )
    if batch_size < 1:
        raise ConfigError(
            f"batch_size is at least 1, not {batch_size}; raise it", code="batch-size-too-small"
        )
    if seed < 0:
        raise ConfigError(
            f"seed is not negative, but {seed}; choose 0 or above", code="seed-below-zero"
        )
    if length < size * batch_size:
        raise ConfigError(
            f"an epoch needs one batch for every rank: {size} ranks x batch_size {batch_size} = "
            f"{size * batch_size} samples, and the data set has {length}; lower batch_size or the "
            "number of ranks, or use more data",
            code="data-set-too-small",
        )
