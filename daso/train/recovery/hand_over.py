"""Copies parameters, buffers and optimizer state from rank 0 to former spare ranks."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from daso.comm.control import broadcast, broadcast_row
from daso.comm.mpi import load
from daso.comm.topology import Topology

PART_BYTES = 1 << 24  # maximum size of a message


@dataclass(frozen=True, slots=True)
class _Blank:
    """Shape, type and device of a tensor, without its values."""

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
    """Copy rank 0's parameter group settings to new ranks, and allocate its optimizer state there.

    Also the set of frozen parameters. An error is raised on the new rank only.

    Collective over the world; blocking.
    """
    settings = broadcast(topology, _settings(inner), timeout_seconds)
    if topology.rank in new:
        _take(inner, *settings)


def hand_over(
    topology: Topology,
    inner: torch.optim.Optimizer,
    tensors: Sequence[torch.Tensor],
    new: Sequence[int],
    timeout_seconds: float,
) -> None:
    """Copy tensors, and an optimizer's state, from world rank 0 to new ranks.

    Args:
        topology: The ranks and nodes.
        inner: The optimizer, after `share_settings`.
        tensors: Tensors, of the same number and shapes on all ranks.
        new: World ranks that receive the values; not 0.
        timeout_seconds: Limit of each wait for a part.

    Collective over the world; blocking.
    """
    mpi, rank = load(), topology.rank
    is_member = rank == 0 or rank in new
    comm = topology.world_comm.Split(0 if is_member else mpi.UNDEFINED, rank)
    if not is_member:
        return
    with torch.no_grad():
        for tensor in (*tensors, *_state_tensors(inner)):
            for part in _parts(tensor):
                row = part.cpu().contiguous()
                broadcast_row(topology, row.view(-1), 0, timeout_seconds, comm)
                if rank != 0:
                    part.copy_(row)
    comm.Free()


def _parameters(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in inner.param_groups for param in group["params"]]


def _settings(
    inner: torch.optim.Optimizer,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[bool]]:
    """Return group settings, the shape of each parameter's state, and flags of trained ones."""
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
    """Apply group settings, and allocate the optimizer state."""
    for param, is_trained in zip(_parameters(inner), trained, strict=True):
        param.requires_grad_(is_trained)
    for group, settings in zip(inner.param_groups, groups, strict=True):
        group.update(settings)
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
    """Yield writable views of a tensor, of at most `PART_BYTES` each if it is contiguous."""
    values = tensor.detach()
    if values.is_contiguous() and values.numel():
        yield from values.view(-1).split(max(1, PART_BYTES // values.element_size()))
    elif values.numel():
        yield values
