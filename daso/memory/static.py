"""Bytes that are allocated throughout a step: parameters, gradients, optimizer, batch."""

import gc
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from daso.errors import ConfigError
from daso.memory.storages import has_storage
from daso.torch_private import storage_key, tree_leaves
from daso.train.deltas.buffer import DeltaBuffer
from daso.train.optimizer import DASO


class Static(NamedTuple):
    """Bytes that are allocated throughout a step.

    Args:
        parameters: Of parameters and buffers.
        gradients: Of one gradient for each trained parameter.
        optimizer: Of the optimizer's state, as it is or will be after the first step.
        batch: Of the model's inputs.
    """

    parameters: int
    gradients: int
    optimizer: int
    batch: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(self)


def static_bytes(model: torch.nn.Module, optimizer: Any, batch: Any) -> Static:
    """Return the bytes that a model, its gradients, its optimizer and a batch take."""
    return Static(
        _bytes((*model.parameters(), *model.buffers())),
        sum(param.nbytes for param in model.parameters() if param.requires_grad),
        0 if optimizer is None else _optimizer_bytes(optimizer),
        _bytes(leaf for leaf in tree_leaves(batch) if has_storage(leaf)),
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of distinct storages; a freed one counts with its former size."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        known = storages.get(key, 0)
        storages[key] = max(known, storage.nbytes() or tensor.nbytes)
    return sum(storages.values())


def _optimizer_bytes(optimizer: Any) -> int:
    """Return the bytes of an optimizer's state, as it is or will be after the first step."""
    nbytes = 0
    if isinstance(optimizer, DASO):
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        inside, rows = _reachable(optimizer, params)
        optimizer = optimizer.inner
        inner_state = {id(leaf) for leaf in tree_leaves([*optimizer.state.values()])}
        nbytes = _bytes(tensor for tensor in inside if id(tensor) not in inner_state)
        nbytes += sum(row.unmade_bytes for row in rows)
    return nbytes + sum(map(_all_state_bytes, getattr(optimizer, "optimizers", [optimizer])))


def _all_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of a torch optimizer's state, measured or probed."""
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
    """Return the tensors and delta buffers reachable through daso's objects."""
    tensors, rows = list[torch.Tensor](), list[DeltaBuffer]()
    visited, left = {id(start), *without}, [start]
    while left:
        for referent in gc.get_referents(left.pop()):
            if id(referent) in visited:
                continue
            visited.add(id(referent))
            if isinstance(referent, torch.Tensor):
                tensors.append(referent)
            elif isinstance(referent, CONTAINERS) or type(referent).__module__.startswith("daso."):
                left.append(referent)
                rows += [referent] if isinstance(referent, DeltaBuffer) else []
    return tensors, rows


CONTAINERS = (dict, list, tuple, set, deque)


def _state_bytes(optimizer: Any, group: dict[str, Any], param: torch.Tensor) -> int:
    """Return the bytes of state for a parameter, from a step with a small probe like it."""
    # Muon accepts only matrices.
    shape = (PROBE // 8, 8) if param.ndim == 2 else (PROBE,)
    probe = torch.zeros(shape, dtype=param.dtype, device=param.device, requires_grad=True)
    options = {key: value for key, value in group.items() if key in optimizer.defaults}
    probe.grad = torch.zeros_like(probe)
    try:
        probe_optimizer = type(optimizer)([{"params": [probe], **options}])
        probe_optimizer.step()
    except (TypeError, RuntimeError, ValueError, AssertionError, AttributeError) as error:
        raise ConfigError(
            f"the state size of {type(optimizer).__name__} must be known, but a trial step with a "
            f"small parameter failed ({error}); take one step before you plan",
            code="optimizer-state-unknown",
        ) from error
    states = tree_leaves([*probe_optimizer.state.values()])
    leaves = [leaf for leaf in states if isinstance(leaf, torch.Tensor)]
    per_element = sum(leaf.nbytes for leaf in leaves if leaf.shape == probe.shape) // PROBE
    return per_element * param.numel()


PROBE = 64
