"""Detects misuse of an optimizer that torch does not report."""

import gc
import zlib
from collections.abc import Iterable, Iterator

import torch

from daso.torch_private import BatchNorm, own_parameters
from daso.train.model.params import Named

FIRST = 8  # gradients that are compared: those of the last layers


def checksum(tensors: Iterable[torch.Tensor]) -> float:
    """Return a checksum of the bits of tensors, as a float."""
    crc = 0
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.detach().cpu().reshape(-1)
            crc = zlib.crc32(flat.view(torch.uint8).numpy().data, crc)
    return float(crc)


def gradient_checksum(named: Named, ready: Iterable[int]) -> float:
    """Return a `checksum` of the first gradients that became ready; 0 where all are zero."""
    grads = [grad for index in ready if (grad := named[index][1].grad) is not None][:FIRST]
    return checksum(grads) if any(bool(grad.any()) for grad in grads) else 0.0


def first_nonfinite(named: Named) -> int:
    """Return the index of the first tensor with NaN or infinity, or -1."""
    for index, (_, tensor) in enumerate(named):
        if not bool(tensor.detach().isfinite().all()):
            return index
    return -1


def has_batch_norm(named: Named) -> bool:
    """Return whether a BatchNorm with running statistics has any of these parameters.

    Inspects all objects of the process: tens of milliseconds.
    """
    ours, kinds = {id(tensor) for _, tensor in named}, frozenset(_kinds(BatchNorm))
    return any(
        module.track_running_stats
        and any(id(param) in ours for param in own_parameters(module).values())
        for module in gc.get_objects()
        if type(module) in kinds
    )


def _kinds(kind: type[object]) -> Iterator[type[object]]:
    """Yield a class and all its subclasses."""
    yield kind
    for subclass in kind.__subclasses__():
        yield from _kinds(subclass)
