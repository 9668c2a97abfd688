"""Which tensors are trained, under which names, and whether they can be exchanged."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from daso.comm.collectives import byte_pieces, gather_unlike
from daso.comm.dtypes import byte_buffer
from daso.comm.topology import Topology
from daso.errors import LayoutError
from daso.plan.layout import Layout, Slot, first_difference, lay_out
from daso.train.model.shards import check_shards, is_sharded, local_part, sharding_of
from daso.train.model.shared import common_tensors

__all__ = [
    "Trained",
    "broadcast",
    "check_same_layout",
    "check_sharding",
    "flat_view",
    "layout_of",
    "start_equal",
    "view_like",
    "writes_of",
]

Named = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Trained:
    """An optimizer, its model, and what it trains."""

    inner: torch.optim.Optimizer
    module: torch.nn.Module | None
    named: Named  # trained parameters, each once, in the order of the optimizer's groups

    @classmethod
    def by(cls, inner: torch.optim.Optimizer, module: torch.nn.Module | None) -> "Trained":
        """List what an optimizer trains."""
        names = {id(p): name for name, p in module.named_parameters()} if module else {}
        seen: dict[int, tuple[str, torch.Tensor]] = {}
        for group, settings in enumerate(inner.param_groups):
            for index, param in enumerate(settings["params"]):
                if param.requires_grad:
                    seen.setdefault(id(param), (names.get(id(param), f"{group}.{index}"), param))
        return cls(inner, module, list(seen.values()))

    @property
    def local(self) -> Named:
        """The same, with this rank's part of each that is sharded."""
        return [(name, local_part(tensor)) for name, tensor in self.named]

    @property
    def is_sharded(self) -> bool:
        """Whether ranks of a node hold parts of parameters."""
        return any(is_sharded(tensor) for _, tensor in self.named)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.named[0][1].device

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the model's buffers (BatchNorm statistics) by name."""
        return list(self.module.named_buffers()) if self.module is not None else []

    def others(self) -> list[tuple[str, torch.Tensor]]:
        """Return what must start equal beside what is trained: frozen parameters and buffers."""
        if self.module is None:
            return []
        trained = {id(tensor) for _, tensor in self.named}
        params = [one for one in self.module.named_parameters() if id(one[1]) not in trained]
        return [*params, *self.buffers()]


def check_sharding(trained: Trained, topology: Topology) -> bool:
    """Return whether any parameter is sharded, frozen ones too; check that it is inside nodes.

    Collective over the world; blocking.
    """
    found = check_shards([*trained.named, *trained.others()], topology)
    same = topology.equal_on_all_ranks(trained.is_sharded)
    topology.raise_on_all_ranks(
        None
        if same
        else "the same sharded parameters must be trained on every rank, but some "
        "train none; freeze the same ones everywhere",
        LayoutError,
    )
    return found


def layout_of(named: Named) -> Layout:
    """Return the layout of tensors one after the other."""
    return lay_out([_slot(name, tensor) for name, tensor in named])


def _slot(name: str, tensor: torch.Tensor) -> Slot:
    dtype = str(tensor.dtype).removeprefix("torch.") + sharding_of(tensor)
    return Slot(name, tuple(tensor.shape), tuple(tensor.stride()), dtype)


def check_same_layout(trained: Trained, topology: Topology) -> None:
    """Check that every rank trains the same parameters and that they can be exchanged.

    Collective over the world; blocking.
    """
    topology.raise_on_all_ranks(_problem(trained.local, trained.module), LayoutError)
    layout = layout_of(trained.named)
    if topology.equal_on_all_ranks(layout.digest):
        return
    first = topology.world_comm.bcast(layout.slots)
    difference = first_difference(layout, lay_out(first))
    topology.raise_on_all_ranks(
        difference
        and f"parameters must be the same in name, shape, type and order on every rank, but here "
        f"{difference} on rank 0; build the model in the same way everywhere",
        LayoutError,
    )
    raise AssertionError("digests differ where layouts do not")


def _device_problem(named: Named) -> str | None:
    first, there = named[0][0], named[0][1].device
    for name, tensor in named:
        if tensor.device != there:
            return (
                f"parameters of one rank must be on one device, but {first} is on {there} and "
                f"{name} on {tensor.device}; move the whole model to one before wrapping its "
                f"optimizer"
            )
    return None


def _problem(named: Named, module: torch.nn.Module | None) -> str | None:
    if not named:
        return "an optimizer must train at least one parameter, but none requires a gradient"
    problems = (_tensor_problem(name, tensor) for name, tensor in named)
    if problem := next(filter(None, problems), None):
        return problem
    if problem := _device_problem(named):
        return problem
    for name, layer in module.named_modules() if module is not None else ():
        if getattr(layer, "sparse", False) is True:
            return (
                f"gradients must be dense, but layer {name or 'the module'} was made with "
                f"sparse=True; make it with sparse=False"
            )
    return None


def _tensor_problem(name: str, tensor: torch.Tensor) -> str | None:
    if getattr(tensor, "_fsdp_flattened", False):
        return (
            f"parameters must be sharded by FSDP2, but {name} is by FSDP1; use "
            f"torch.distributed.fsdp.fully_shard(model, mesh=daso.init(torch_backend=...)"
            f".mesh['local'])"
        )
    if tensor.is_complex():
        return f"parameters must be real, but {name} is {tensor.dtype}; use torch.view_as_real"
    if not _is_dense(tensor):
        return f"parameters must not overlap themselves, but {name} does; call contiguous()"
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one run of memory, each once, in any order of axes."""
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
    """Return the elements of a dense tensor as one row in the order of memory, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def writes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return numbers that differ after each write to a tensor that torch counts."""
    return tensor.data_ptr(), tensor._version


def view_like(row: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a row (numel) in the shape and order of axes of ``tensor``, without a copy."""
    return row.as_strided(tensor.shape, tensor.stride(), row.storage_offset())


def start_equal(
    trained: Trained,
    topology: Topology,
    timeout_seconds: float,
    lane: Topology,
    keeps_own: Callable[[str], bool] = lambda _: False,
) -> None:
    """Give all ranks world rank 0's parameters, frozen ones and buffers.

    Args:
        trained: Whose.
        topology: All ranks.
        timeout_seconds: How long to wait at most.
        lane: The ranks that hold the same shards as this one, where parameters are sharded: they
            get those of the first node.
        keeps_own: Tells which frozen parameters and buffers, by name, stay each rank's own.

    Collective over the world; blocking.
    """

    def unlike(mine: dict[str, str]) -> list[dict[str, str]]:
        return gather_unlike(topology, mine, timeout_seconds)

    says = topology.rank == 0
    everything = [*trained.named, *trained.others()]
    apart = [local_part(tensor) for _, tensor in everything if is_sharded(tensor)]
    broadcast(apart, lane)
    plain = [
        (name, tensor)
        for name, tensor in trained.others()
        if not is_sharded(tensor) and not keeps_own(name)
    ]
    others = common_tensors(plain, unlike, set(), says=says)
    broadcast([*(t for _, t in trained.named if not is_sharded(t)), *others], topology)


def broadcast(tensors: Iterable[torch.Tensor], topology: Topology) -> None:
    """Make tensors equal to world rank 0's. Collective over the world; blocking."""
    with torch.no_grad():
        for tensor in _distinct(tensors):
            values = tensor.detach()
            row = values.cpu().contiguous()
            for piece in byte_pieces(row.view(-1)):
                topology.world_comm.Bcast(byte_buffer(piece))
            if row.data_ptr() != values.data_ptr():
                values.copy_(row)


def _distinct(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    for tensor in tensors:
        if tensor.numel() and id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor
