"""Make state outside the parameters equal on all ranks: buffers, the inner optimizer's state."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from daso.comm.allreduce import deterministic_allreduce
from daso.comm.compression import Cast
from daso.comm.dtypes import accumulator
from daso.comm.engine import Work
from daso.comm.reduction import Row
from daso.comm.topology import Topology
from daso.plan.layout import message_chunks
from daso.train.model.params import Named, broadcast

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "average_tensors",
    "drop_partial_state",
    "mend_buffers",
    "state_digest",
    "state_tensors",
    "zero_nonfinite",
]


def average_tensors(
    tensors: Sequence[torch.Tensor],
    topology: Topology,
    comm: "MPI.Comm",
    run: Callable[[Work[int]], int],
    chunk_bytes: int,
) -> int:
    """Set floating tensors to their mean over all ranks and other tensors to world rank 0's.

    Differences from rank 0 are added in rank order, so every rank gets the same bits.

    Collective over the world; blocking.
    """
    broadcast([tensor for tensor in tensors if not tensor.is_floating_point()], topology)
    nbytes = 0
    for dtype in (torch.float32, torch.float64):
        members = [t for t in tensors if t.is_floating_point() and accumulator(t.dtype) == dtype]
        row = torch.cat(
            [t.detach().reshape(-1).to("cpu", dtype) for t in members]
            or [torch.empty(0, device="cpu")]
        )
        # The mean of differences from rank 0 leaves alone what is equal everywhere, to the bit.
        first = row.clone()
        broadcast([first], topology)
        row = torch.where(row == first, 0.0, row - first)  # equal infinities too
        size = topology.world_size
        mean = deterministic_allreduce(comm, Cast(dtype, dtype), [1] * size, size)
        chunks = message_chunks(chunk_bytes // dtype.itemsize, row.numel(), size)
        sent = run(mean.run(Row(row), chunks))
        # The parts of a row are equal, so the share that leaves the node is the share of ranks.
        others = size - topology.local_size
        nbytes += sent * others // max(1, size - 1)
        row = torch.where(row == 0, first, row + first)
        with torch.no_grad():
            sizes = [t.numel() for t in members]
            for tensor, part in zip(members, torch.split(row, sizes), strict=True):
                tensor.copy_(part.view(tensor.shape))
    return nbytes


def mend_buffers(
    tensors: Sequence[torch.Tensor], average: Callable[[list[torch.Tensor]], None]
) -> None:
    """Replace values of buffers that are not finite by the mean of the ranks where they are.

    Collective over the world; blocking.
    """
    buffers = [tensor for tensor in tensors if tensor.is_floating_point()]
    sound = [buffer.isfinite() for buffer in buffers]
    values = [torch.where(ok, b, 0.0) for b, ok in zip(buffers, sound, strict=True)]
    shares = [ok.to(b.dtype) for b, ok in zip(buffers, sound, strict=True)]
    average([*values, *shares])
    for buffer, ok, value, share in zip(buffers, sound, values, shares, strict=True):
        # What is finite on no rank is meant to be so: a mask of -inf.
        mend = ~ok & (share > 0)
        buffer[mend] = (value / share)[mend]


def state_tensors(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, torch.Tensor]:
    """List the tensors in an optimizer's state."""
    found: dict[str, torch.Tensor] = {}
    for name, param in named:
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}/{key} {tuple(value.shape)} {value.dtype}"] = value
    return found


def state_digest(optimizer: torch.optim.Optimizer, named: Named) -> str:
    """Return a hash of the tensors in an optimizer's state, bit for bit."""
    hasher = hashlib.sha256()
    for key, tensor in state_tensors(optimizer, named).items():
        hasher.update(key.encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        hasher.update(flat.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def drop_partial_state(
    optimizer: torch.optim.Optimizer, named: Named, everyones: Sequence[Iterable[str]]
) -> None:
    """Forget the state of parameters for which not every rank has the same.

    A parameter that some node never used has no momentum there; starting it anew everywhere is the
    one choice that leaves all nodes equal.
    """
    sets = [set(keys) for keys in everyones]
    shared = sets[0].intersection(*sets)
    partial = {key.rpartition("/")[0] for keys in sets for key in keys - shared}
    for name, param in named:
        if name in partial:
            optimizer.state.pop(param, None)


def zero_nonfinite(optimizer: torch.optim.Optimizer, named: Named) -> None:
    """Set state tensors that hold NaN or infinity to zero."""
    for tensor in state_tensors(optimizer, named).values():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            tensor.zero_()
