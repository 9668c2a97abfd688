"""Parameters that are sharded inside a node: DTensors of FSDP2 and of tensor parallelism.

Between nodes, ranks of equal place hold the same shards, and exchange those. Whoever shards also
averages gradients inside the node.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch

from daso.comm.topology import Topology
from daso.errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "check_shards",
    "is_sharded",
    "local_part",
    "parts_of",
    "refusal",
    "sharding_of",
    "split_axes",
]

REMEDY = "shard over daso.init(torch_backend=...).mesh['local'], the ranks of one node"


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a DTensor; torch.distributed is not imported for that."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def split_axes(tensor: torch.Tensor) -> tuple[bool, ...]:
    """Return along which axes of its mesh a tensor is split; along the others are copies."""
    if not is_sharded(tensor):
        return ()
    # Not is_shard(): what FSDP2 splits of what tensor parallelism has split says no to it.
    return tuple(not placement.is_replicate() for placement in cast("DTensor", tensor).placements)


def parts_of(tensor: torch.Tensor) -> int:
    """Return over how many ranks of a node a tensor is split."""
    if not is_sharded(tensor):
        return 1
    sizes = cast("DTensor", tensor).device_mesh.shape
    return prod(size for size, split in zip(sizes, split_axes(tensor), strict=True) if split)


def sharding_of(tensor: torch.Tensor) -> str:
    """Return how a tensor is sharded, as text that is the same on every rank; "" if it is not."""
    if not is_sharded(tensor):
        return ""
    spread = cast("DTensor", tensor)
    return f" {spread.placements} over {tuple(spread.device_mesh.shape)}"


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a parameter, in place of a tensor."""
    if not is_sharded(tensor):
        return tensor
    return cast("torch.Tensor", LocalShard(cast("DTensor", tensor)))


class LocalShard:
    """This rank's part of a sharded parameter, with what training asks of a tensor.

    The part is looked up anew each time: FSDP2 and users may replace it.

    Args:
        param: The parameter.
    """

    def __init__(self, param: "DTensor") -> None:
        self.param = param

    def detach(self) -> torch.Tensor:
        """Return the part itself, sharing memory."""
        # to_local() takes 20 times as long, and some of this is asked of each parameter at a step.
        return self.param._local_tensor.detach()

    def data_ptr(self) -> int:
        """Return where the part lies."""
        return self.param._local_tensor.data_ptr()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.detach(), name)  # shape, dtype, numel(), ...

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's part of the gradient, sharing memory.

        Where backward left it spread otherwise than the parameter (a sum that ranks hold in part,
        of sequence parallelism), it is spread alike first: collective over the node then.
        """
        grad = cast("DTensor | None", self.param.grad)
        if grad is None:
            return None
        if grad.placements != self.param.placements:
            with torch.no_grad():
                grad = grad.redistribute(placements=self.param.placements)
            self.param.grad = grad
        return grad._local_tensor

    @grad.setter
    def grad(self, part: torch.Tensor | None) -> None:
        if part is None:
            self.param.grad = None
            return
        from torch.distributed.tensor import DTensor

        # Not from_local(): it moves what FSDP2 keeps on the host to the mesh's device.
        self.param.grad = DTensor(part, self.param._spec, requires_grad=False)

    def register_post_accumulate_grad_hook(self, hook: Callable[..., None]) -> Any:
        """Call a hook with this part whenever the parameter's gradient is there."""
        return self.param.register_post_accumulate_grad_hook(lambda _: hook(self))


def refusal(named: Iterable[tuple[str, torch.Tensor]], what: str, remedy: str) -> str | None:
    """Return why parameters are refused where sharded ones cannot be; None where none is."""
    name = next((name for name, tensor in named if is_sharded(tensor)), None)
    return name and f"parameters must be plain tensors {what}, but {name} is sharded; {remedy}"


def check_shards(named: Iterable[tuple[str, torch.Tensor]], topology: Topology) -> bool:
    """Return whether parameters are sharded; check that it is inside nodes, alike on all of them.

    Collective over the world; blocking.
    """
    sharded = [(name, tensor) for name, tensor in named if is_sharded(tensor)]
    if not topology.equal_on_all_ranks(bool(sharded)):
        topology.raise_on_all_ranks(
            "a model must be sharded on every rank or on none, but it is on some; build it in the "
            "same way everywhere",
            LayoutError,
        )
    if not sharded:
        return False
    from daso.comm.process_group import ranks_of_group

    ranks = ranks_of_group(topology)
    problems = (_problem(name, cast("DTensor", one), ranks, topology) for name, one in sharded)
    topology.raise_on_all_ranks(next(filter(None, problems), None), LayoutError)
    # Equal places hold equal shards only where the mesh has them in equal order.
    places = [tuple(cast("DTensor", one).device_mesh.get_coordinate() or ()) for _, one in sharded]
    same = topology.lane_comm.allgather(places)
    topology.raise_on_all_ranks(
        None
        if all(other == same[0] for other in same)
        else f"ranks of equal place in their nodes must hold the same shards, but the meshes of "
        f"nodes have their ranks in another order; {REMEDY}",
        LayoutError,
    )
    return True


def _problem(name: str, one: "DTensor", ranks: Sequence[int], topology: Topology) -> str | None:
    """Return why a sharded parameter cannot be exchanged; None if it can."""
    mesh = sorted(one.device_mesh.mesh.flatten().tolist())
    if len(set(topology.node_sizes)) > 1:
        return (
            f"nodes must have the same number of ranks where parameters are sharded, but they have "
            f"{topology.node_sizes}; start as many on each"
        )
    if not set(mesh) <= set(ranks):
        return (
            f"parameters must be sharded inside a node, but {name} is over ranks {mesh} and this "
            f"node has {sorted(ranks)}; {REMEDY}: daso averages between nodes"
        )
    if len(mesh) != len(ranks):
        return (
            f"parameters must be sharded over all {len(ranks)} ranks of a node, but {name} is over "
            f"{len(mesh)} of them; {REMEDY}"
        )
    if any(placement.is_partial() for placement in one.placements):
        return (
            f"ranks must hold values of parameters, but of {name} they hold terms of a sum "
            f"({one.placements}); redistribute() it to Shard or Replicate"
        )
    return None
