"""Gives ranks that were spare until now what rank 0 has: parameters, buffers, optimizer state."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from daso.comm.collectives import finish, first_value
from daso.comm.dtypes import byte_buffer
from daso.comm.mpi import load
from daso.comm.topology import Topology

__all__ = ["hand_over", "share_settings"]

PART_BYTES = 1 << 24  # that are sent at a time


@dataclass(frozen=True, slots=True)
class _Blank:
    """What a tensor is like, without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str  # type

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Blank":
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type)

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def share_settings(
    topology: Topology, inner: torch.optim.Optimizer, new: Sequence[int], timeout_seconds: float
) -> None:
    """Give ranks that are new what groups of rank 0's optimizer say, and room for its state.

    Also which parameters are frozen. An error is that of the new rank alone.

    Collective over the world; blocking.
    """
    told = first_value(topology, _settings(inner), timeout_seconds)
    if topology.rank in new:
        _take(inner, *told)


def hand_over(
    topology: Topology,
    inner: torch.optim.Optimizer,
    tensors: Sequence[torch.Tensor],
    new: Sequence[int],
    timeout_seconds: float,
) -> None:
    """Make tensors, and an optimizer's state, of some ranks equal to world rank 0's.

    Args:
        topology: Whose world.
        inner: The optimizer, after `share_settings`.
        tensors: As many, and of the same shapes, on all ranks.
        new: World ranks that are given them; not 0.
        timeout_seconds: How long to wait for a part at most.

    Collective over the world; blocking.
    """
    mpi, rank = load(), topology.rank
    takes_part = rank == 0 or rank in new
    comm = topology.world_comm.Split(0 if takes_part else mpi.UNDEFINED, rank)
    if not takes_part:
        return
    with torch.no_grad():
        for tensor in (*tensors, *_state_tensors(inner)):
            for part in _parts(tensor):
                row = part.cpu().contiguous()
                finish(topology, comm.Ibcast(byte_buffer(row.view(-1))), timeout_seconds)
                if rank != 0:
                    part.copy_(row)
    comm.Free()


def _parameters(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in inner.param_groups for param in group["params"]]


def _settings(
    inner: torch.optim.Optimizer,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[bool]]:
    """Return what groups say, what the state of each parameter is like, and which are trained."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
    states = [
        {
            key: _Blank.of(value) if isinstance(value, torch.Tensor) else value
            for key, value in inner.state.get(param, {}).items()
        }
        for param in _parameters(inner)
    ]
    return groups, states, [param.requires_grad for param in _parameters(inner)]


def _take(
    inner: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    states: list[dict[str, Any]],
    trained: list[bool],
) -> None:
    """Take up what groups say, and make room for the state."""
    for param, is_trained in zip(_parameters(inner), trained, strict=True):
        param.requires_grad_(is_trained)
    for group, said in zip(inner.param_groups, groups, strict=True):
        group.update(said)
    for param, state in zip(_parameters(inner), states, strict=True):
        with suppress(KeyError):
            del inner.state[param]
        if state:
            inner.state[param] = {
                key: value.make() if isinstance(value, _Blank) else value
                for key, value in state.items()
            }


def _state_tensors(inner: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for param in _parameters(inner):
        for value in inner.state.get(param, {}).values():
            if isinstance(value, torch.Tensor):
                yield value


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut what is large; views, that can be written to."""
    values = tensor.detach()
    if values.is_contiguous() and values.numel():
        yield from values.view(-1).split(max(1, PART_BYTES // values.element_size()))
    elif values.numel():
        yield values
