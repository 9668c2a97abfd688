"""Trained tensors and their names, and the tensors that ranks have in common.

Caches and masks of a model may differ in length between ranks, and some tensors have no separate
memory to write to: daso logs their names once and does not change them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from daso.comm.control import STALL_SECONDS, broadcast, broadcast_row, gather_unlike
from daso.comm.topology import Topology
from daso.errors import LayoutError
from daso.plan.layout import Layout, Slot, first_difference, lay_out
from daso.train.model.shards import check_shards, is_sharded, local_part, sharding_of

Named = Sequence[tuple[str, torch.Tensor]]
NAMES = 3  # in one message
UNFIT = "is "  # prefix of the description of a tensor that cannot be averaged in place
logger = logging.getLogger("daso")


@dataclass(frozen=True)
class Trained:
    """Optimizer, model, and trained parameters."""

    inner: torch.optim.Optimizer
    module: torch.nn.Module | None
    named: Named  # trained parameters, each once, in the order of the optimizer's groups

    @classmethod
    def by(cls, inner: torch.optim.Optimizer, module: torch.nn.Module | None) -> "Trained":
        """List the parameters that an optimizer trains."""
        names = {id(p): name for name, p in module.named_parameters()} if module else {}
        trained: dict[int, tuple[str, torch.Tensor]] = {}
        for group, settings in enumerate(inner.param_groups):
            for index, param in enumerate(settings["params"]):
                if param.requires_grad:
                    trained.setdefault(id(param), (names.get(id(param), f"{group}.{index}"), param))
        return cls(inner, module, list(trained.values()))

    @property
    def local(self) -> Named:
        """Trained parameters, with this rank's shard of each sharded one."""
        return [(name, local_part(tensor)) for name, tensor in self.named]

    @cached_property
    def is_sharded(self) -> bool:
        """True if any trained parameter is sharded."""
        return any(is_sharded(tensor) for _, tensor in self.named)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.named[0][1].device

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the model's buffers (BatchNorm statistics) by name."""
        return list(self.module.named_buffers()) if self.module is not None else []

    def others(self) -> list[tuple[str, torch.Tensor]]:
        """Return frozen parameters and buffers by name: they must start equal too."""
        if self.module is None:
            return []
        trained = {id(tensor) for _, tensor in self.named}
        params = [pair for pair in self.module.named_parameters() if id(pair[1]) not in trained]
        return [*params, *self.buffers()]


def check_sharding(
    trained: Trained, topology: Topology, timeout_seconds: float = STALL_SECONDS
) -> bool:
    """Return whether any parameter is sharded, frozen ones too; check that shards stay in nodes.

    Collective over the world; blocking.
    """
    any_sharded = check_shards([*trained.named, *trained.others()], topology, timeout_seconds)
    same = topology.equal_on_all_ranks(trained.is_sharded, timeout_seconds)
    problem = None
    if not same:
        problem = LayoutError(
            "the same sharded parameters must be trained on every rank, but some train none; "
            "freeze the same ones everywhere",
            code="sharded-parameters-differ",
        )
    topology.raise_on_all_ranks(problem, timeout_seconds)
    return any_sharded


def layout_of(named: Named) -> Layout:
    """Return the layout of concatenated tensors."""
    return lay_out([_slot(name, tensor) for name, tensor in named])


def _slot(name: str, tensor: torch.Tensor) -> Slot:
    dtype = str(tensor.dtype).removeprefix("torch.") + sharding_of(tensor)
    return Slot(name, tuple(tensor.shape), tuple(tensor.stride()), dtype)


def check_same_layout(
    trained: Trained, topology: Topology, timeout_seconds: float = STALL_SECONDS
) -> None:
    """Check that every rank trains the same parameters and that they can be exchanged.

    Collective over the world; blocking.
    """
    problem = _problem(trained.local, trained.module)
    topology.raise_on_all_ranks(problem, timeout_seconds)
    layout = layout_of(trained.named)
    if topology.equal_on_all_ranks(layout.digest, timeout_seconds):
        return
    first = broadcast(topology, layout.slots, timeout_seconds)
    difference = first_difference(layout, lay_out(first))
    if difference:
        problem = LayoutError(
            f"parameters must be the same in name, shape, type and order on every rank, but here "
            f"{difference} on rank 0; build the model in the same way everywhere",
            code="parameters-differ-between-ranks",
        )
    topology.raise_on_all_ranks(problem, timeout_seconds)
    raise AssertionError("digests differ where layouts do not")


def _device_problem(named: Named) -> LayoutError | None:
    first, device = named[0][0], named[0][1].device
    for name, tensor in named:
        if tensor.device != device:
            return LayoutError(
                f"parameters of one rank must be on one device, but {first} is on {device} and "
                f"{name} on {tensor.device}; move the whole model to one before wrapping its "
                f"optimizer",
                code="parameters-on-several-devices",
            )
    return None


def _problem(named: Named, module: torch.nn.Module | None) -> LayoutError | None:
    if not named:
        return LayoutError(
            "an optimizer must train at least one parameter, but none requires a gradient",
            code="no-trained-parameter",
        )
    problems = (_tensor_problem(name, tensor) for name, tensor in named)
    if problem := next(filter(None, problems), None):
        return problem
    if problem := _device_problem(named):
        return problem
    for name, layer in module.named_modules() if module is not None else ():
        if getattr(layer, "sparse", False) is True:
            return LayoutError(
                f"gradients must be dense, but layer {name or 'the module'} was made with "
                f"sparse=True; make it with sparse=False",
                code="gradient-is-sparse",
            )
    return None


def _tensor_problem(name: str, tensor: torch.Tensor) -> LayoutError | None:
    if getattr(tensor, "_fsdp_flattened", False):
        return LayoutError(
            f"parameters must be sharded by FSDP2, but {name} is by FSDP1; use "
            f"torch.distributed.fsdp.fully_shard(model, mesh=daso.init(torch_backend=...)"
            f".mesh['local'])",
            code="sharded-by-fsdp1",
        )
    if tensor.is_complex():
        return LayoutError(
            f"parameters must be real, but {name} is {tensor.dtype}; use torch.view_as_real",
            code="complex-parameter",
        )
    if not _is_dense(tensor):
        return LayoutError(
            f"parameters must not overlap themselves, but {name} does; call contiguous()",
            code="overlapping-parameter",
        )
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill contiguous memory, each once, in any order of axes."""
    expected = 1
    axes = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, length in axes:
        if length == 0:
            return True
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor as a flat view in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def view_like(row: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a row (numel) in the shape and strides of ``tensor``."""
    return row.as_strided(tensor.shape, tensor.stride(), row.storage_offset())


def start_equal(
    trained: Trained,
    topology: Topology,
    timeout_seconds: float,
    lane: Topology,
    keeps_own: Callable[[str], bool] = lambda _: False,
) -> None:
    """Broadcast world rank 0's parameters, frozen ones too, and buffers.

    Args:
        trained: The optimizer and its parameters.
        topology: All ranks.
        timeout_seconds: Limit of each wait.
        lane: Ranks that hold the same shards as this one; they get those of the first node.
        keeps_own: Returns whether a frozen parameter or buffer, by name, stays local to each rank.

    Collective over the world; blocking.
    """

    def unlike(value: dict[str, str]) -> list[dict[str, str]]:
        return gather_unlike(topology, value, timeout_seconds)

    warns = topology.rank == 0
    everything = [*trained.named, *trained.others()]
    apart = [local_part(tensor) for _, tensor in everything if is_sharded(tensor)]
    broadcast_tensors(apart, lane, timeout_seconds)
    plain = [
        (name, tensor)
        for name, tensor in trained.others()
        if not is_sharded(tensor) and not keeps_own(name)
    ]
    others = common_tensors(plain, unlike, set(), warns=warns)
    together = [*(t for _, t in trained.named if not is_sharded(t)), *others]
    broadcast_tensors(together, topology, timeout_seconds)


def broadcast_tensors(
    tensors: Iterable[torch.Tensor], topology: Topology, timeout_seconds: float = STALL_SECONDS
) -> None:
    """Broadcast tensors from world rank 0. Collective over the world; blocking."""
    with torch.no_grad():
        for tensor in _distinct(tensors):
            values = tensor.detach()
            row = values.cpu().contiguous()
            broadcast_row(topology, row.view(-1), 0, timeout_seconds)
            if row.data_ptr() != values.data_ptr():
                values.copy_(row)


def _distinct(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    ids: set[int] = set()
    for tensor in tensors:
        if tensor.numel() and id(tensor) not in ids:
            ids.add(id(tensor))
            yield tensor


def common_tensors(
    named: Iterable[tuple[str, torch.Tensor]],
    gather: Callable[[dict[str, str]], Sequence[Mapping[str, str]]],
    warned: set[str],
    *,
    warns: bool,
) -> list[torch.Tensor]:
    """Return the tensors that every rank has in the same shape and type, and can write to.

    ``gather`` returns every rank's value, or a single one if all are equal.

    Collective over the world; blocking.
    """
    own_tensors = dict(named)
    everyones = gather({name: _described(tensor) for name, tensor in own_tensors.items()})
    names = dict.fromkeys(name for descriptions in everyones for name in descriptions)
    problems = {name: text for name in names if (text := _difference(name, everyones))}
    if warns:
        _say({name: text for name, text in problems.items() if name not in warned})
    warned.update(problems)
    return [_real(tensor) for name, tensor in own_tensors.items() if name not in problems]


def _say(problems: Mapping[str, str]) -> None:
    if not problems:
        return
    first = [f"{name} {text}" for name, text in problems.items()][:NAMES]
    more = f"; and {len(problems) - NAMES} more" if len(problems) > NAMES else ""
    logger.warning(
        "buffers and frozen parameters must be plain tensors of the same shape and type on every "
        "rank to be made equal, but %s%s; each rank keeps its own",
        "; ".join(first),
        more,
    )


def _difference(name: str, everyones: Sequence[Mapping[str, str]]) -> str | None:
    """Return the reason why ranks cannot share a tensor; None if they can."""
    first = everyones[0].get(name, "missing")
    for rank, descriptions in enumerate(everyones):
        here = descriptions.get(name, "missing")
        if here.startswith(UNFIT):
            return here
        if here != first:
            return f"is {first} on rank 0 and {here} on rank {rank}"
    return None


def _described(tensor: torch.Tensor) -> str:
    """Return shape and type, or the reason why a tensor cannot be averaged in place."""
    if tensor.is_inference():
        return f"{UNFIT}an inference tensor"
    if tensor.is_meta:
        return f"{UNFIT}on the meta device"
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return f"{UNFIT}sparse, nested or quantized"
    if tensor.is_conj() or tensor.is_neg():
        return f"{UNFIT}a conjugated or negated view"
    if any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        return f"{UNFIT}expanded"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def is_unfit(tensor: torch.Tensor) -> bool:
    """Return whether a tensor cannot be averaged in place."""
    return _described(tensor).startswith(UNFIT)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
