"""Forwards of units under `torch.utils.checkpoint`, with buffers and modes restored."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from daso.torch_private import (
    own_buffers,
    own_parameters,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version_of,
)

CHANGED = (
    "a saved tensor must not change before backward, but one of {:,} bytes was modified "
    "by an inplace operation; change a copy of it"
)
REPLACED = (
    "a recomputed module must have the same parameters in backward as in forward, but {!r} was "
    "replaced; exclude that module with units=, or call backward before replacing it"
)
Modules = Mapping[str, torch.nn.Module]  # of a unit, by their names in it
ChangedBuffers = Sequence[
    tuple[str, str]
]  # names of module and buffer, of buffers that a unit's forward changes


class Rewound:
    """A context that restores a unit's buffers and modes from before its forward; reentrant."""

    def __init__(self, modules: Modules, buffers: ChangedBuffers) -> None:
        self._modules = modules
        self._modes = [module.training for module in modules.values()]
        self._params = [
            (module, name, param, version_of(param))
            for module in modules.values()
            for name, param in own_parameters(module).items()
            if param is not None
        ]
        self._buffers = [
            (inside, name, buffer, buffer.detach().clone())
            for inside, name in buffers
            if (buffer := own_buffers(modules[inside])[name]) is not None
        ]
        self._now: list[tuple[list[bool], list[torch.Tensor | None]]] = []

    @property
    def changed(self) -> ChangedBuffers:
        """The buffers that forward changed, by value: batch norm does not increase versions."""
        return [
            (inside, name)
            for inside, name, tensor, before in self._buffers
            if own_buffers(self._modules[inside])[name] is not tensor
            or not torch.allclose(tensor, before, 0, 0, equal_nan=True)
        ]

    def __enter__(self) -> None:
        for module, name, param, version in self._params:
            if own_parameters(module).get(name) is not param:
                raise RuntimeError(REPLACED.format(name))
            if version_of(param) != version:
                raise RuntimeError(CHANGED.format(param.nbytes))
        modes = [module.training for module in self._modules.values()]
        buffers = [own_buffers(self._modules[inside])[name] for inside, name, *_ in self._buffers]
        self._now.append((modes, buffers))
        self._set(self._modes, [before.clone() for *_, before in self._buffers])

    def __exit__(self, *_: object) -> None:
        self._set(*self._now.pop())

    def _set(self, modes: Sequence[bool], buffers: Sequence[torch.Tensor | None]) -> None:
        for module, mode in zip(self._modules.values(), modes, strict=True):
            module.training = mode
        for (inside, name, *_), buffer in zip(self._buffers, buffers, strict=True):
            own_buffers(self._modules[inside])[name] = buffer


def buffer_names(modules: Modules) -> ChangedBuffers:
    """Return the names of all buffers of a unit."""
    return [(inside, name) for inside, module in modules.items() for name in own_buffers(module)]


def inputs_of(args: object, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the distinct input tensors of a unit: modules may test inputs for identity."""
    leaves = tree_leaves((args, dict(kwargs)))
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


def call_checkpointed(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rewound: Any,
) -> Any:
    """Run a unit's forward without saving; its backward begins with a recomputation.

    Its inputs are saved like any tensors: saved-tensor hooks get them, in order.
    """
    leaves, spec = tree_flatten((args, dict(kwargs)))
    tensors = inputs_of(args, kwargs)
    indices = {id(tensor): index for index, tensor in enumerate(tensors)}
    places = {at: indices[id(leaf)] for at, leaf in enumerate(leaves) if id(leaf) in indices}
    rest = [None if at in places else leaf for at, leaf in enumerate(leaves)]
    original = [(args, kwargs)]  # forward gets the original containers

    def run(*inputs: torch.Tensor) -> Any:
        if original:
            first, named = original.pop()
            return call(*first, **named)
        filled = [inputs[places[at]] if at in places else leaf for at, leaf in enumerate(rest)]
        again, named = tree_unflatten(filled, spec)
        return call(*again, **named)

    return checkpoint(
        run, *tensors, use_reentrant=False, context_fn=lambda: (nullcontext(), rewound)
    )
