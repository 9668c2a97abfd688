"""Keeps `torch.distributed.checkpoint` from mixing what nodes hold apart.

It saves one copy of what all ranks hold: some rank's of each tensor. Between exchanges nodes hold
parameters of their own, and their optimizers states of their own.
"""

import json
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from daso.errors import CheckpointError
from daso.train.model.hooks import Hook, nothing

__all__ = ["KEY", "OneCopy", "is_saving_one_copy", "packed", "refuse", "unpacked"]

logger = logging.getLogger("daso")
SAVER = "torch.distributed.checkpoint"  # modules whose calls want one copy of all ranks
LOADER = f"{SAVER}.state_dict_loader"
LOADS = {"_load_optim_state_dict", "_load_model_state_dict"}  # ask what there is, to overwrite it
KEY = "daso"  # of our part of a state_dict


def is_saving_one_copy() -> bool:
    """Return whether torch.distributed.checkpoint asks for a state now, to save it."""
    frame, saves = sys._getframe(1), False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(SAVER):
            saves = True
            if frame.f_code.co_name in LOADS or module == LOADER:
                return False
        frame = frame.f_back  # type: ignore[assignment]
    return saves


class OneCopy:
    """Looks at who asks for a model's state while nodes hold parameters of their own.

    Args:
        module: The model; what wraps it (DDP, a compiled module) may be given too.
        apart: Asked whether nodes hold different parameters; not kept alive.
        warns: Asked whether this rank says what is wrong; not kept alive.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        apart: Callable[[], bool],
        warns: Callable[[], bool],
    ) -> None:
        self._apart, self._warns = weakref.WeakMethod(apart), weakref.WeakMethod(warns)
        self._told = False
        inside = (getattr(module, name, None) for name in ("module", "_orig_mod"))
        models = (module, *(one for one in inside if isinstance(one, torch.nn.Module)))
        scripted = torch.jit.ScriptModule  # has no such hooks: nothing is noticed there
        self._handles = [
            one.register_state_dict_pre_hook(self)
            for one in models
            if not isinstance(one, scripted)
        ]
        weakref.finalize(apart.__self__, _remove, self._handles).atexit = False  # type: ignore[attr-defined]

    def __call__(self, *_: object) -> None:
        """Look at who asks for the model's state."""
        apart = self._apart()
        if apart is None or not apart():
            return
        if is_saving_one_copy():
            refuse("parameters", "synchronize()")
        warns = self._warns()
        if self._told or warns is None or not warns() or not _is_one_world():
            return
        self._told = True
        logger.warning(
            "model.state_dict() has this node's parameters, which differ from other nodes' between "
            "exchanges: torch.distributed.checkpoint would mix them; call optimizer.synchronize() "
            "before it"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (nothing,)  # a copy of the model has no optimizer

    def close(self) -> None:
        """Take the hook off; idempotent."""
        _remove(self._handles)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def refuse(what: str, remedy: str) -> None:
    """Raise: what nodes hold is not the same."""
    raise CheckpointError(
        f"{SAVER} keeps one copy for all ranks, so {what} must be the same on all nodes, but "
        f"between exchanges they differ; call optimizer.{remedy} before it, or save each rank's "
        f"own state_dict() by torch.save"
    )


def packed(state_dict: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict whose first group carries a session's state: other keys are lost."""
    first, *rest = state_dict["param_groups"]
    return {**state_dict, "param_groups": [{**first, KEY: json.dumps(state)}, *rest]}


def unpacked(state_dict: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return a state_dict without what `packed` added, and that; None if there is none."""
    groups = state_dict.get("param_groups")
    if not isinstance(groups, list) or not any(KEY in group for group in groups):
        return state_dict, None
    text = next(group[KEY] for group in groups if KEY in group)
    bare = [{key: value for key, value in group.items() if key != KEY} for group in groups]
    try:
        return {**state_dict, "param_groups": bare}, json.loads(text)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the key 'daso' of a parameter group must be what {SAVER} was given, but it is "
            f"{text!r:.60}; leave it out to load the inner optimizer's state alone"
        ) from error


def _is_one_world() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
