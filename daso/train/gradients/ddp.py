"""torch's gradient reducers (DDP) around the model whose optimizer is wrapped.

A user may make DDP before or after the optimizer is wrapped, and pass `daso.DASO` either module, or
none. So the process is searched for DDP modules.
"""

import gc
import weakref
from collections.abc import Iterable

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from daso.errors import ConfigError

_every: "weakref.WeakSet[DistributedDataParallel] | None" = None  # of this process, once asked for


def _note(parent: torch.nn.Module, _name: str, _child: torch.nn.Module | None) -> None:
    """Note a DDP as it is being made: it registers its module."""
    if _every is not None and isinstance(parent, DistributedDataParallel):
        _every.add(parent)


def _every_ddp() -> "weakref.WeakSet[DistributedDataParallel]":
    """Return all DDP modules of this process: a search, once, and a note of each made later."""
    global _every  # noqa: PLW0603 - one note of each, for all models
    if _every is None:
        _every = weakref.WeakSet()
        register_module_module_registration_hook(_note)
        # Not isinstance: it asks objects that pretend to be of another class.
        kind = DistributedDataParallel
        _every.update(obj for obj in gc.get_objects() if issubclass(type(obj), kind))
    return _every


class DdpFinder:
    """Finds the DDP modules that average the gradients of one model.

    The first search of a process that has a process group takes tens of milliseconds.

    Args:
        params: The parameters that are trained.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._params = {id(param) for param in params}

    def around(self) -> list[DistributedDataParallel]:
        """Return the DDP modules that hold one of these parameters."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return []
        return [
            ddp
            for ddp in _every_ddp()
            if any(id(param) in self._params for param in ddp.parameters())
        ]

    def refuse_wide(self, local_size: int) -> None:
        """Check that no DDP averages gradients over more ranks than a node has."""
        for ddp in self.around():
            size = torch.distributed.get_world_size(ddp.process_group)
            if size > local_size:
                raise ConfigError(
                    f"DDP must average inside a node only, but the model's DDP averages over "
                    f"{size} ranks, and a node has {local_size}; leave it out, since DASO averages "
                    f"inside a node too, or make it with "
                    f"process_group=torch.distributed.new_group(RANKS OF THE NODE)",
                    code="ddp-across-nodes",
                )
