"""Make state outside the parameters equal on all ranks: buffers, the inner optimizer's state."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.utils._pytree import tree_leaves

from daso.comm.allreduce.direct import deterministic_allreduce
from daso.comm.dtypes import accumulator, sum_buffer
from daso.comm.engine import Work
from daso.comm.reduction import Row
from daso.comm.topology import Topology
from daso.kernels.codecs import exact_codec
from daso.plan.allreduce_plan import direct_plan
from daso.plan.cost_model import choose_plan
from daso.plan.layout import split
from daso.train.model.params import Named, broadcast
from daso.train.model.shards import local_part

__all__ = [
    "average_tensors",
    "coded_state",
    "drop_partial_state",
    "mend_buffers",
    "state_digest",
    "state_keys",
    "state_tensors",
    "zero_nonfinite",
]

PART = 1 << 22  # numbers that are averaged at a time


def average_tensors(
    tensors: Sequence[torch.Tensor],
    topology: Topology,
    run: Callable[[Work[int]], int],
    chunk_bytes: int,
    ranks: int | None = None,
) -> int:
    """Set floating tensors to their mean over all ranks and other tensors to world rank 0's.

    Differences from rank 0 are added over each node in rank order, then over nodes, so every rank
    gets the same bits. In parts, so that little memory is needed beside the tensors.

    Args:
        tensors: Of the same shapes on all ranks.
        topology: Whose world.
        run: Carries out the work.
        chunk_bytes: Bytes in a message.
        ranks: How many count; the others have what rank 0 has. None: all.

    Returns:
        The bytes that this rank sent to other nodes.

    Collective over the world; blocking.
    """
    broadcast([tensor for tensor in tensors if not tensor.is_floating_point()], topology)
    nbytes = 0
    for dtype in (torch.float32, torch.float64):
        members = [t for t in tensors if t.is_floating_point() and accumulator(t.dtype) == dtype]
        for part in _parts(members):
            row = torch.cat([piece.reshape(-1).to("cpu", dtype) for piece in part])
            # The mean of differences from rank 0 leaves alone what is equal everywhere, to the bit.
            first = row.clone()
            broadcast([first], topology)
            row = torch.where(row == first, 0.0, row - first)  # equal infinities too
            divisor = topology.world_size if ranks is None else ranks
            nbytes += run(_mean_over_world(row, topology, chunk_bytes, divisor))
            row = torch.where(row == 0, first, row + first)
            with torch.no_grad():
                sizes = [piece.numel() for piece in part]
                for piece, mean in zip(part, torch.split(row, sizes), strict=True):
                    piece.copy_(mean.view(piece.shape))
    return nbytes


def _parts(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group tensors that are small, and cut large ones, into parts of about `PART` numbers."""
    group: list[torch.Tensor] = []
    numel = 0
    for tensor in tensors:
        values = tensor.detach()
        pieces = values.view(-1).split(PART) if values.is_contiguous() else (values,)
        for piece in pieces:
            if group and numel + piece.numel() > PART:
                yield group
                group, numel = [], 0
            group.append(piece)
            numel += piece.numel()
    if group:
        yield group


def _mean_over_world(
    row: torch.Tensor, topology: Topology, chunk_bytes: int, divisor: int
) -> Work[int]:
    """Replace a row by its sum over the world, divided: first in nodes, then over lanes, and back.

    Collective over the world; non-blocking, as work for an engine.
    """
    rank_info, node = topology.rank_info, topology.node_comm
    codec, message = exact_codec(row.dtype), chunk_bytes // row.itemsize
    size, alone = rank_info.local_size, rank_info.nodes == 1
    if size > 1:
        plan = direct_plan(size)
        sums = deterministic_allreduce(node, codec, [1] * size, divisor if alone else 1, plan=plan)
        yield from sums.run(Row(row), plan.chunks(row.numel(), message))
    if alone:
        return 0
    nbytes, spans = 0, split(row.numel(), rank_info.lanes)
    if rank_info.lane is not None:
        mine = row[slice(*spans[rank_info.lane])]
        plan = choose_plan("auto", rank_info.nodes, mine.nbytes)
        means = deterministic_allreduce(
            *(topology.lane_comm, codec, [1] * rank_info.nodes, divisor), plan=plan
        )
        nbytes = yield from means.run(Row(mine), plan.chunks(mine.numel(), message))
    if size > 1:
        yield [
            node.Ibcast(sum_buffer(row[slice(*span)]), root=lane) for lane, span in enumerate(spans)
        ]
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
    """List the tensors in an optimizer's state: of sharded ones this rank's part."""
    found: dict[str, torch.Tensor] = {}
    for name, param in named:
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}/{key} {tuple(value.shape)} {value.dtype}"] = local_part(value)
    return found


def coded_state(optimizer: torch.optim.Optimizer, named: Named) -> list[torch.Tensor]:
    """List the state of parameters that holds codes (8-bit moments): a mean of it says nothing."""
    coded = {
        name
        for name, param in named
        for value in optimizer.state.get(param, {}).values()
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.numel() > 1
    }
    found = state_tensors(optimizer, named)
    return [tensor for key, tensor in found.items() if key.rpartition("/")[0] in coded]


def state_keys(optimizer: torch.optim.Optimizer, named: Named) -> list[str]:
    """List what ranks must have alike to average an optimizer's state: names, and what is nested.

    Tensors in lists, as LBFGS keeps its history, are not averaged: they are bit for bit alike, or
    the parameter's state is dropped.
    """
    keys = [*state_tensors(optimizer, named)]
    for name, param in named:
        for key, value in optimizer.state.get(param, {}).items():
            if tensors := _nested(value):
                keys.append(f"{name}/{key} {_hash(tensors)}")
    return keys


def _nested(value: object) -> list[torch.Tensor]:
    """Return the tensors in lists and the like."""
    leaves = [] if isinstance(value, torch.Tensor) else tree_leaves(value)
    return [one for one in leaves if isinstance(one, torch.Tensor)]


def _hash(tensors: Iterable[torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for tensor in tensors:
        flat = local_part(tensor).detach().cpu().contiguous().view(-1)
        hasher.update(flat.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def state_digest(optimizer: torch.optim.Optimizer, named: Named) -> str:
    """Return a hash of the tensors in an optimizer's state, bit for bit."""
    hasher = hashlib.sha256()
    for key, tensor in state_tensors(optimizer, named).items():
        hasher.update(f"{key} {_hash([tensor])}".encode())
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
    """Set state tensors that hold NaN or infinity to zero; begin anew where they are nested."""
    for _, param in named:
        nested = [
            one for value in optimizer.state.get(param, {}).values() for one in _nested(value)
        ]
        if not all(bool(one.isfinite().all()) for one in nested):
            optimizer.state.pop(param)
    for tensor in state_tensors(optimizer, named).values():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            tensor.zero_()
