"""Equalizes state outside the parameters: buffers, and the inner optimizer's state."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from daso.comm.allreduce.direct import deterministic_allreduce
from daso.comm.control import STALL_SECONDS
from daso.comm.engine import Work
from daso.comm.reduction import Row, accumulator, sum_buffer
from daso.comm.topology import Topology
from daso.kernels.codecs import exact_codec
from daso.plan.allreduce_plan import direct_plan
from daso.plan.cost_model import choose_plan
from daso.plan.layout import split
from daso.torch_private import tree_leaves
from daso.train.model.params import Named, broadcast_tensors
from daso.train.model.shards import local_part

PART = 1 << 22  # numbers that are averaged at a time


def average_tensors(
    tensors: Sequence[torch.Tensor],
    topology: Topology,
    run: Callable[[Work[int]], int],
    chunk_bytes: int,
    ranks: int | None = None,
    timeout_seconds: float = STALL_SECONDS,
) -> int:
    """Set floating tensors to their mean over all ranks and other tensors to world rank 0's.

    Differences from rank 0 are added over each node in rank order, then over nodes, so every rank
    gets the same bits. Tensors are processed in parts, to limit the additional memory.

    Args:
        tensors: Of the same shapes on all ranks.
        topology: The ranks and nodes.
        run: Runs engine work to its end.
        chunk_bytes: Bytes in a message.
        ranks: Number of ranks that count; the others hold copies of rank 0. None: all.
        timeout_seconds: Limit of each wait.

    Returns:
        The bytes that this rank sent to other nodes.

    Collective over the world; blocking.
    """
    whole_numbers = [tensor for tensor in tensors if not tensor.is_floating_point()]
    broadcast_tensors(whole_numbers, topology, timeout_seconds)
    nbytes = 0
    for dtype in (torch.float32, torch.float64):
        members = [t for t in tensors if t.is_floating_point() and accumulator(t.dtype) == dtype]
        for part in _parts(members):
            row = torch.cat([piece.reshape(-1).to("cpu", dtype) for piece in part])
            # The mean of differences from rank 0 keeps the bits of values that are already equal.
            first = row.clone()
            broadcast_tensors([first], topology, timeout_seconds)
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
    """Group small tensors, and split large ones, into parts of about `PART` numbers."""
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
    """Replace a row by its sum over the world, divided: in nodes, over lanes, and back.

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
        own_part = row[slice(*spans[rank_info.lane])]
        plan = choose_plan("auto", rank_info.nodes, own_part.nbytes)
        means = deterministic_allreduce(
            topology.lane_comm,
            codec,
            weights=[1] * rank_info.nodes,
            total=divisor,
            plan=plan,
        )
        nbytes = yield from means.run(Row(own_part), plan.chunks(own_part.numel(), message))
    if size > 1:
        yield [
            node.Ibcast(sum_buffer(row[slice(*span)]), root=lane) for lane, span in enumerate(spans)
        ]
    return nbytes


def repair_buffers(
    tensors: Sequence[torch.Tensor], average: Callable[[list[torch.Tensor]], None]
) -> None:
    """Replace non-finite values of buffers by the mean of the ranks with finite values.

    Collective over the world; blocking.
    """
    buffers = [tensor for tensor in tensors if tensor.is_floating_point()]
    sound = [buffer.isfinite() for buffer in buffers]
    values = [torch.where(ok, b, 0.0) for b, ok in zip(buffers, sound, strict=True)]
    shares = [ok.to(b.dtype) for b, ok in zip(buffers, sound, strict=True)]
    average([*values, *shares])
    for buffer, ok, value, share in zip(buffers, sound, values, shares, strict=True):
        # Values that are finite on no rank are intended: a mask of -inf.
        mend = ~ok & (share > 0)
        buffer[mend] = (value / share)[mend]


def state_tensors(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, torch.Tensor]:
    """List the tensors in an optimizer's state; this rank's shard of sharded ones."""
    tensors: dict[str, torch.Tensor] = {}
    for name, param in named:
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{key} {tuple(value.shape)} {value.dtype}"] = local_part(value)
    return tensors


def coded_state(optimizer: torch.optim.Optimizer, named: Named) -> list[torch.Tensor]:
    """List the state of parameters with quantized (8-bit) moments, which have no mean."""
    coded = {
        name
        for name, param in named
        for value in optimizer.state.get(param, {}).values()
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.numel() > 1
    }
    tensors = state_tensors(optimizer, named)
    return [tensor for key, tensor in tensors.items() if key.rpartition("/")[0] in coded]


def state_keys(optimizer: torch.optim.Optimizer, named: Named) -> list[str]:
    """List keys that must match between ranks before an optimizer's state is averaged.

    Tensors in lists, such as the history of LBFGS, are not averaged: their keys hold a hash, and
    the parameter's state is dropped unless it is equal on all ranks.
    """
    keys = [*state_tensors(optimizer, named)]
    for name, param in named:
        for key, value in optimizer.state.get(param, {}).items():
            if tensors := _nested(value):
                keys.append(f"{name}/{key} {_hash(tensors)}")
    return keys


def _nested(value: object) -> list[torch.Tensor]:
    """Return the tensors in lists and other containers."""
    leaves = [] if isinstance(value, torch.Tensor) else tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _hash(tensors: Iterable[torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for tensor in tensors:
        flat = local_part(tensor).detach().cpu().contiguous().view(-1)
        hasher.update(flat.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def state_digest(optimizer: torch.optim.Optimizer, named: Named) -> str:
    """Return a hash of the bits of the tensors in an optimizer's state."""
    hasher = hashlib.sha256()
    for key, tensor in state_tensors(optimizer, named).items():
        hasher.update(f"{key} {_hash([tensor])}".encode())
    return hasher.hexdigest()


def drop_partial_state(
    optimizer: torch.optim.Optimizer, named: Named, everyones: Sequence[Iterable[str]]
) -> None:
    """Drop the state of parameters whose keys differ between ranks.

    A parameter that a node never used has no momentum there; only a restart on all nodes keeps
    them equal.
    """
    sets = [set(keys) for keys in everyones]
    shared = sets[0].intersection(*sets)
    partial = {key.rpartition("/")[0] for keys in sets for key in keys - shared}
    for name, param in named:
        if name in partial:
            optimizer.state.pop(param, None)


def zero_nonfinite(optimizer: torch.optim.Optimizer, named: Named) -> None:
    """Zero state tensors that hold NaN or infinity; drop the state if they are nested."""
    for _, param in named:
        nested = [
            leaf for value in optimizer.state.get(param, {}).values() for leaf in _nested(value)
        ]
        if not all(bool(leaf.isfinite().all()) for leaf in nested):
            optimizer.state.pop(param)
    for tensor in state_tensors(optimizer, named).values():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            tensor.zero_()
