"""Deals a data set out to the ranks of the world; give it to a DataLoader as `batch_sampler`."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch.utils.data import Sampler

from daso.errors import ConfigError

__all__ = ["ShardedSampler"]


class ShardedSampler(Sampler[list[int]]):
    """Batches of indices for one rank: as many, and as large, as every other rank's.

    Each epoch has one permutation of the data set, the same on all ranks. A global batch is the
    next size * batch_size elements of it, and world rank r takes the r-th part; what is left over
    at the end is dropped. So the same samples meet in a step however many ranks share the global
    batch.

    The epoch moves on by `set_epoch` alone.

    Args:
        length: Samples of the data set.
        rank: World rank.
        size: World size.
        batch_size: Samples per batch of one rank.
        seed: Draws the permutations, with the epoch; the same on all ranks, not negative.
        shuffle: Whether to permute, or else to keep the order of the data set.

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
        self._length = length
        self._global_batch = size * batch_size
        self._part = slice(rank * batch_size, (rank + 1) * batch_size)  # of a global batch
        self._seed = seed if shuffle else None
        self._epoch = 0
        self._batch = 0  # batches yielded this epoch
        self._start = 0  # the batch that the next iteration begins with

    def __len__(self) -> int:
        """Batches of a whole epoch, also where an iteration begins in the middle of one."""
        return self._length // self._global_batch

    def __iter__(self) -> Iterator[list[int]]:
        start, self._start = self._start, 0
        self._batch = start
        return self._batches(self._order(), start)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next iteration; another epoch than now begins at batch 0.

        Args:
            epoch: Epoch, from 0. The one that `load_state_dict` restored keeps its place.

        Raises:
            ConfigError: The epoch is negative.
        """
        if epoch < 0:
            raise ConfigError(f"epoch counts from 0, not {epoch}: pass the loop's counter")
        if epoch != self._epoch:
            self._epoch, self._batch, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """Return the place in the epoch, the same on all ranks that have done as many batches.

        Returns:
            "epoch", and "batch": the batches yielded in it. A DataLoader with workers draws
            batches ahead: there, save the number of batches trained on as "batch" instead.
        """
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on, in the next iteration, behind the batches that the state has counted.

        Args:
            state: What `state_dict` returned, for the same data set, seed and global batch.

        Raises:
            ConfigError: The state is of no place in an epoch of this data set.
        """
        epoch, batch = state["epoch"], state["batch"]
        if epoch < 0 or not 0 <= batch <= len(self):
            raise ConfigError(
                f"a state of this sampler has an epoch from 0 and a batch of 0..{len(self)}, not "
                f"{epoch} and {batch}: resume with the data set and global batch it was saved with"
            )
        self._epoch, self._batch, self._start = epoch, batch, batch

    def _order(self) -> torch.Tensor:
        if self._seed is None:
            return torch.arange(self._length, device="cpu")
        # Not seed + epoch: seed 0 in epoch 1 would repeat seed 1 in epoch 0.
        mixed = np.random.SeedSequence(self._seed, spawn_key=(self._epoch,)).generate_state(1)
        generator = torch.Generator().manual_seed(int(mixed[0]))
        return torch.randperm(self._length, generator=generator, device="cpu")

    def _batches(self, order: torch.Tensor, start: int) -> Iterator[list[int]]:
        for batch in range(start, len(self)):
            begin = batch * self._global_batch
            self._batch = batch + 1
            yield order[begin : begin + self._global_batch][self._part].tolist()


def _check(length: int, rank: int, size: int, batch_size: int, seed: int) -> None:
    if not 0 <= rank < size:
        raise ConfigError(f"rank is one of 0..size-1, not {rank} of {size}: pass the world's")
    if batch_size < 1:
        raise ConfigError(f"batch_size is at least 1, not {batch_size}: raise it")
    if seed < 0:
        raise ConfigError(f"seed is not negative, but {seed}: choose 0 or above")
    if length < size * batch_size:
        raise ConfigError(
            f"an epoch needs one batch for every rank: {size} ranks x batch_size {batch_size} = "
            f"{size * batch_size} samples, and the data set has {length}: lower batch_size or the "
            "number of ranks, or use more data"
        )
