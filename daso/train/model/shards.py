"""Parameters that are sharded inside a node: DTensors of FSDP2 and of tensor parallelism.

Ranks of equal place in their nodes hold the same shards, and exchange them. The sharding framework
averages gradients inside the node.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch

from daso.comm.control import STALL_SECONDS, gather_in_lane
from daso.comm.topology import Topology
from daso.errors import LayoutError
from daso.torch_private import local_tensor, sharded_like

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

REMEDY = "shard over daso.init(torch_backend=...).mesh['local'], the ranks of one node"


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a DTensor; torch.distributed is not imported for that."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def split_axes(tensor: torch.Tensor) -> tuple[bool, ...]:
    """Return a flag per mesh axis: split (True) or replicated."""
    if not is_sharded(tensor):
        return ()
    # Not is_shard(): it is False for FSDP2 shards of tensor-parallel shards.
    return tuple(not placement.is_replicate() for placement in cast("DTensor", tensor).placements)


def parts_of(tensor: torch.Tensor) -> int:
    """Return the number of ranks over which a tensor is split."""
    if not is_sharded(tensor):
        return 1
    sizes = cast("DTensor", tensor).device_mesh.shape
    return prod(size for size, split in zip(sizes, split_axes(tensor), strict=True) if split)


def sharding_of(tensor: torch.Tensor) -> str:
    """Return the sharding of a tensor as text, equal on every rank; "" if it is not sharded."""
    if not is_sharded(tensor):
        return ""
    spread = cast("DTensor", tensor)
    return f" {spread.placements} over {tuple(spread.device_mesh.shape)}"


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a parameter as a tensor-like; a plain tensor unchanged."""
    if not is_sharded(tensor):
        return tensor
    return cast("torch.Tensor", LocalShard(cast("DTensor", tensor)))


class LocalShard:
    """This rank's shard of a parameter, with the tensor methods that training needs.

    The shard is looked up at each call: FSDP2 and users may replace it.

    Args:
        param: The parameter.
    """

    def __init__(self, param: "DTensor") -> None:
        self.param = param

    def detach(self) -> torch.Tensor:
        """Return the shard as a tensor, sharing memory."""
        # Not to_local(), which is slower: called for each parameter at a step.
        return local_tensor(self.param).detach()

    def data_ptr(self) -> int:
        """Return the address of the shard."""
        return local_tensor(self.param).data_ptr()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.detach(), name)  # shape, dtype, numel(), ...

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's shard of the gradient, sharing memory.

        A gradient with other placements than the parameter (partial sums of sequence parallelism)
        is redistributed first, which is collective over the node.
        """
        grad = cast("DTensor | None", self.param.grad)
        if grad is None:
            return None
        if grad.placements != self.param.placements:
            with torch.no_grad():
                grad = grad.redistribute(placements=self.param.placements)
            self.param.grad = grad
        return local_tensor(grad)

    @grad.setter
    def grad(self, part: torch.Tensor | None) -> None:
        if part is None:
            self.param.grad = None
            return
        self.param.grad = sharded_like(part, self.param)

    def register_post_accumulate_grad_hook(self, hook: Callable[..., None]) -> Any:
        """Call a hook with this shard after each accumulation of the parameter's gradient."""
        return self.param.register_post_accumulate_grad_hook(lambda _: hook(self))


def refusal(
    named: Iterable[tuple[str, torch.Tensor]], what: str, remedy: str
) -> LayoutError | None:
    """Return the error for sharded parameters where they are unsupported, or None."""
    name = next((name for name, tensor in named if is_sharded(tensor)), None)
    if name is None:
        return None
    return LayoutError(
        f"parameters must be plain tensors {what}, but {name} is sharded; {remedy}",
        code="sharded-parameter",
    )


def check_shards(
    named: Iterable[tuple[str, torch.Tensor]],
    topology: Topology,
    timeout_seconds: float = STALL_SECONDS,
) -> bool:
    """Return whether parameters are sharded; check that all nodes shard them equally inside.

    Collective over the world; blocking.
    """
    sharded = [(name, tensor) for name, tensor in named if is_sharded(tensor)]
    if not topology.equal_on_all_ranks(bool(sharded), timeout_seconds):
        raise LayoutError(
            "a model must be sharded on every rank or on none, but it is on some; build it in the "
            "same way everywhere",
            code="sharded-on-some-ranks",
        )
    if not sharded:
        return False
    from daso.comm.process_group import ranks_of_group

    ranks = ranks_of_group(topology)
    problems = (_problem(name, cast("DTensor", param), ranks, topology) for name, param in sharded)
    problem = next(filter(None, problems), None)
    topology.raise_on_all_ranks(problem, timeout_seconds)
    # Equal places hold equal shards only if the meshes list them in the same order.
    places = [
        tuple(cast("DTensor", param).device_mesh.get_coordinate() or ()) for _, param in sharded
    ]
    same = gather_in_lane(topology, places, timeout_seconds)
    if any(other != same[0] for other in same):
        problem = LayoutError(
            f"ranks of equal place in their nodes must hold the same shards, but the meshes of "
            f"nodes have their ranks in another order; {REMEDY}",
            code="meshes-in-other-order",
        )
    topology.raise_on_all_ranks(problem, timeout_seconds)
    return True


def _problem(
    name: str, param: "DTensor", ranks: Sequence[int], topology: Topology
) -> LayoutError | None:
    """Return the reason why a sharded parameter cannot be exchanged; None if it can."""
    mesh = sorted(param.device_mesh.mesh.flatten().tolist())
    if len(set(topology.node_sizes)) > 1:
        return LayoutError(
            f"nodes must have the same number of ranks where parameters are sharded, but they have "
            f"{topology.node_sizes}; start as many on each",
            code="shards-on-unequal-nodes",
        )
    if not set(mesh) <= set(ranks):
        return LayoutError(
            f"parameters must be sharded inside a node, but {name} is over ranks {mesh} and this "
            f"node has {sorted(ranks)}; {REMEDY}: daso averages between nodes",
            code="sharded-over-nodes",
        )
    if len(mesh) != len(ranks):
        return LayoutError(
            f"parameters must be sharded over all {len(ranks)} ranks of a node, but {name} is over "
            f"{len(mesh)} of them; {REMEDY}",
            code="sharded-over-some-ranks",
        )
    if any(placement.is_partial() for placement in param.placements):
        return LayoutError(
            f"ranks must hold values of parameters, but of {name} they hold terms of a sum "
            f"({param.placements}); redistribute() it to Shard or Replicate",
            code="partial-parameter",
        )
    return None
