"""Bytes that are there all through a step."""

import gc
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from daso.errors import ConfigError
from daso.memory.observe import has_storage
from daso.train.deltas.buffer import DeltaBuffer
from daso.train.optimizer import DASO

__all__ = ["Static", "static_bytes"]


class Static(NamedTuple):
    """Bytes that are there all the time.

    Args:
        parameters: And buffers.
        gradients: One of each trained parameter, and one of the largest while it is added.
        optimizer: What it keeps, or will.
        batch: What the model is given.
        casts: Of parameters to another type, which autocast keeps.
    """

    parameters: int
    gradients: int
    optimizer: int
    batch: int
    casts: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def static_bytes(
    model: torch.nn.Module, optimizer: Any, batch: Any, casts: Mapping[int, int] | None = None
) -> Static:
    """Return the bytes that a model, its gradients, its optimizer and a batch take."""
    params = [param for param in model.parameters() if param.requires_grad]
    return Static(
        _bytes((*model.parameters(), *model.buffers())),
        sum(param.nbytes for param in params) + max(param.nbytes for param in params),
        0 if optimizer is None else _kept_bytes(optimizer),
        _bytes(leaf for leaf in tree_leaves(batch) if has_storage(leaf)),
        sum((casts or {}).values()),
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of storages, each once; of one that was given back what it had."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        known = storages.get(storage._cdata, 0)
        storages[storage._cdata] = max(known, storage.nbytes() or tensor.nbytes)
    return sum(storages.values())


def _kept_bytes(optimizer: Any) -> int:
    """Return what an optimizer keeps, or will after its first step."""
    found = 0
    if isinstance(optimizer, DASO):
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        inside, rows = _reachable(optimizer, params)
        optimizer = optimizer.inner
        kept = {id(leaf) for leaf in tree_leaves([*optimizer.state.values()])}
        found = _bytes(tensor for tensor in inside if id(tensor) not in kept)
        found += sum(row.unmade_bytes for row in rows)
    return found + sum(map(_states_bytes, getattr(optimizer, "optimizers", [optimizer])))


def _states_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state, as it is or will be."""
    if any(optimizer.state.values()):
        states = tree_leaves([*optimizer.state.values()])
        return _bytes(leaf for leaf in states if isinstance(leaf, torch.Tensor))
    return sum(
        _state_bytes(optimizer, group, param)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad
    )


def _reachable(start: object, without: set[int]) -> tuple[list[torch.Tensor], list[DeltaBuffer]]:
    """Return the tensors that the toolkit's own objects hold, its buffers, and its rows."""
    found, rows = list[torch.Tensor](), list[DeltaBuffer]()
    seen, left = {id(start), *without}, [start]
    while left:
        for one in gc.get_referents(left.pop()):
            if id(one) in seen:
                continue
            seen.add(id(one))
            if isinstance(one, torch.Tensor):
                found.append(one)
            elif isinstance(one, CONTAINERS) or type(one).__module__.startswith("daso."):
                left.append(one)
                rows += [one] if isinstance(one, DeltaBuffer) else []
    return found, rows


CONTAINERS = (dict, list, tuple, set, deque)


def _state_bytes(optimizer: Any, group: dict[str, Any], param: torch.Tensor) -> int:
    """Return what an optimizer will keep of a parameter, as it does of a small one like it."""
    # Muon takes matrices alone.
    shape = (PROBE // 8, 8) if param.ndim == 2 else (PROBE,)
    probe = torch.zeros(shape, dtype=param.dtype, device=param.device, requires_grad=True)
    options = {key: value for key, value in group.items() if key in optimizer.defaults}
    probe.grad = torch.zeros_like(probe)
    try:
        one = type(optimizer)([{"params": [probe], **options}])
        one.step()
    except (TypeError, RuntimeError, ValueError, AssertionError, AttributeError) as error:
        raise ConfigError(
            f"what {type(optimizer).__name__} keeps must be known, but it could not be tried on a "
            f"small parameter ({error}); take one step before you plan"
        ) from error
    leaves = [leaf for leaf in tree_leaves([*one.state.values()]) if isinstance(leaf, torch.Tensor)]
    per_element = sum(leaf.nbytes for leaf in leaves if leaf.shape == probe.shape) // PROBE
    return per_element * param.numel()


PROBE = 64
