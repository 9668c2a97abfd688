"""Hooks on modules; one prevents `torch.distributed.checkpoint` from mixing nodes' parameters.

It saves a single copy of each tensor, from some rank. Between exchanges, parameters and optimizer
state differ between nodes.
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
from daso.torch_private import COMPILED_INSIDE, disable_dynamo

logger = logging.getLogger("daso")
SAVER = "torch.distributed.checkpoint"  # package whose calls save one copy for all ranks
LOADER = f"{SAVER}.state_dict_loader"
LOADS = {"_load_optim_state_dict", "_load_model_state_dict"}  # read a state to overwrite it
KEY = "daso"  # of daso's part of a state_dict


def is_saving_one_copy() -> bool:
    """Return whether torch.distributed.checkpoint is reading a state now, to save it."""
    frame, saves = sys._getframe(1), False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(SAVER):
            saves = True
            if frame.f_code.co_name in LOADS or module == LOADER:
                return False
        frame = frame.f_back  # type: ignore[assignment]
    return saves


class Hook:
    """Hook that calls a function; in a copy of the module it does nothing."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    @disable_dynamo
    def __call__(self, *_: Any) -> None:
        """Call the function."""
        self._call()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (nothing,)


def nothing() -> None:
    """Do nothing."""


class OneCopy:
    """Guards reads of a model's state while parameters differ between nodes.

    Args:
        module: The model, or a wrapper of it (DDP, a compiled module).
        apart: Returns whether nodes hold different parameters; held by a weak reference.
        warns: Returns whether this rank logs warnings; held by a weak reference.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        apart: Callable[[], bool],
        warns: Callable[[], bool],
    ) -> None:
        self._apart, self._warns = weakref.WeakMethod(apart), weakref.WeakMethod(warns)
        self._warned = False
        inside = (getattr(module, name, None) for name in ("module", COMPILED_INSIDE))
        models = (module, *(model for model in inside if isinstance(model, torch.nn.Module)))
        scripted = torch.jit.ScriptModule  # has no such hooks
        self._handles = [
            model.register_state_dict_pre_hook(self)
            for model in models
            if not isinstance(model, scripted)
        ]
        weakref.finalize(apart.__self__, _remove, self._handles).atexit = False  # type: ignore[attr-defined]

    def __call__(self, *_: object) -> None:
        """Raise or warn if the state is read while parameters differ between nodes."""
        apart = self._apart()
        if apart is None or not apart():
            return
        if is_saving_one_copy():
            refuse("parameters", "synchronize()")
        warns = self._warns()
        if self._warned or warns is None or not warns() or not _is_one_world():
            return
        self._warned = True
        logger.warning(
            "model.state_dict() has this node's parameters, which differ from other nodes' between "
            "exchanges: torch.distributed.checkpoint would mix them; call optimizer.synchronize() "
            "before it"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (nothing,)  # a copy of the model has no optimizer

    def close(self) -> None:
        """Remove the hooks; idempotent."""
        _remove(self._handles)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def refuse(what: str, remedy: str) -> None:
    """Raise CheckpointError because nodes differ."""
    raise CheckpointError(
        f"{SAVER} keeps one copy for all ranks, so {what} must be the same on all nodes, but "
        f"between exchanges they differ; call optimizer.{remedy} before it, or save each rank's "
        f"own state_dict() by torch.save",
        code="saved-between-exchanges",
    )


def packed(state_dict: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict with a session's state in its first group; other keys are lost."""
    first, *rest = state_dict["param_groups"]
    return {**state_dict, "param_groups": [{**first, KEY: json.dumps(state)}, *rest]}


def unpacked(state_dict: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return a state_dict without the state that `packed` added, and that state or None."""
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
            f"{text!r:.60}; leave it out to load the inner optimizer's state alone",
            code="group-key-not-daso",
        ) from error


def _is_one_world() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
