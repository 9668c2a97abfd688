"""torch's own reducers of gradients (DDP), around the model whose optimizer is wrapped.

A user may make DDP before or after the optimizer is wrapped, and give `daso.DASO` either module, or
none: what is there is looked for, not what was given.
"""

import gc
from collections.abc import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from daso.errors import ConfigError

__all__ = ["may_be_at_work", "refuse_wide"]


def may_be_at_work() -> bool:
    """Return whether DDP may average gradients: of its hooks, parameters do not tell."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def refuse_wide(params: Iterable[torch.Tensor], local_size: int) -> None:
    """Check that no DDP averages between nodes what is averaged between them here.

    Looks at all objects of the process: tens of milliseconds.
    """
    if not may_be_at_work():
        return
    ours = {id(param) for param in params}
    for one in gc.get_objects():
        # Not isinstance: it asks objects that pretend to be of another class.
        if not issubclass(type(one), DistributedDataParallel):
            continue
        size = torch.distributed.get_world_size(one.process_group)
        if size > local_size and any(id(param) in ours for param in one.parameters()):
            raise ConfigError(
                f"DDP must average inside a node only, but the model's DDP averages over {size} "
                f"ranks, and a node has {local_size}; leave it out, since DASO averages inside a "
                f"node too, or make it with process_group=torch.distributed.new_group(RANKS OF "
                f"THE NODE)"
            )
