"""Memory of gradients: its type, and whether the program holds it besides the parameter."""

import sys
from collections.abc import Mapping

import torch
import torch.utils.dlpack

__all__ = ["gradient_dtype", "is_held", "is_kept", "second_storage"]

_uses_of_storage = getattr(torch._C, "_storage_Use_Count", None)


def gradient_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the type of a parameter's gradients: its ``grad_dtype``, else its own."""
    return getattr(tensor, "grad_dtype", None) or tensor.dtype


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the references to the gradient of a tensor, and the uses of its storage."""
    grad = tensor.grad
    assert grad is not None, "the caller has looked"
    uses = _uses_of_storage(grad.untyped_storage()._cdata) if _uses_of_storage else 0
    return sys.getrefcount(grad), uses


def _references(tensors: Mapping[int, torch.Tensor], index: int) -> int:
    """Return the references to a tensor that a dictionary has."""
    tensor = tensors[index]
    return sys.getrefcount(tensor)


def _least_counts() -> tuple[int, int, int]:
    """Return the counts where nothing else holds a gradient: interpreters differ."""
    with torch.inference_mode(mode=False):
        tensor = torch.zeros(1, device="cpu")
        tensor.grad = torch.zeros(1, device="cpu")
        return *_counts(tensor), _references({0: torch.zeros(1, device="cpu")}, 0)


_LEAST_REFERENCES, _LEAST_USES, _OWN_REFERENCES = _least_counts()


def is_kept(tensors: Mapping[int, torch.Tensor], index: int) -> bool:
    """Return whether more than the dictionary refers to one of its tensors."""
    return _references(tensors, index) > _OWN_REFERENCES


def is_held(tensor: torch.Tensor) -> bool:
    """Return whether more than the parameter refers to its gradient.

    Such a gradient lies in a buffer of the program, in a list, in a graph (``create_graph=True``),
    or in memory that processes share. The caller must hold no reference of its own.
    """
    if not isinstance(tensor, torch.Tensor):  # a shard, whose gradient FSDP2 makes and holds
        return False
    references, uses = _counts(tensor)
    if references > _LEAST_REFERENCES or uses > _LEAST_USES:
        return True
    return tensor.grad is not None and tensor.grad.requires_grad


def second_storage(row: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory whose storage torch may replace by itself.

    ``share_memory_()`` replaces the memory behind a storage, for all tensors that have it. Memory
    of a device is shared already.
    """
    if row.device.type != "cpu":
        # Its version counts what the program writes alone.
        where = row.storage_offset(), row.shape, row.stride()
        return row.new_empty(0).set_(row.untyped_storage(), *where)
    return torch.utils.dlpack.from_dlpack(row)
