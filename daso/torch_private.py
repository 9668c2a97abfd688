"""Private names of torch behind daso's own names; no other module uses private names.

Tests checked all of them on torch 2.6, 2.13 and 2.15 unless noted. If a new version of torch
changes one, only this module changes.
"""

from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _autograd, _profiler
from torch._compile import _disable_dynamo as disable_dynamo
from torch._ops import OpOverload
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "ALLOCATION",
    "BUFFERS",
    "COMPILED_INSIDE",
    "MODULES",
    "MODULE_HOOKS",
    "PARAMETERS",
    "TO_COPY",
    "BatchNorm",
    "Dropout",
    "Hooks",
    "OpOverload",
    "TorchDispatchMode",
    "all_hooks",
    "any_global_module_hook",
    "disable_dynamo",
    "foreach_add",
    "foreach_copy",
    "gradient_hooks",
    "gradients_of",
    "has_step_hooks",
    "in_backward",
    "is_compiled",
    "load_compiler",
    "load_state_hooks",
    "local_tensor",
    "mark_memory_log",
    "module_hooks",
    "own_buffers",
    "own_modules",
    "own_parameters",
    "own_post_step_hooks",
    "own_pre_step_hooks",
    "post_step_hooks",
    "pre_step_hooks",
    "queue_callback",
    "schema_of",
    "set_state_hooks",
    "set_step_hooks",
    "sharded_like",
    "start_memory_log",
    "state_hooks",
    "stop_memory_log",
    "storage_key",
    "storage_uses",
    "tensor_hooks",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "version_of",
]

Hooks = MutableMapping[int, Callable[..., Any]]

# --- the compiler --------------------------------------------------------------------------------

COMPILED_INSIDE = "_orig_mod"  # attribute of a compiled module: the original module


def load_compiler() -> None:
    """Import the compiler, which takes seconds; otherwise an optimizer's first step does."""
    import torch._dynamo  # noqa: F401


def is_compiled(module: object) -> bool:
    """Return whether a module was made by `torch.compile`; imports the compiler."""
    return isinstance(module, torch._dynamo.OptimizedModule)


# --- tensors and storages ------------------------------------------------------------------------

foreach_copy = torch._foreach_copy_  # (targets, sources): copies lists of tensors in one call
foreach_add = torch._foreach_add_  # (targets, terms): adds lists of tensors in place in one call

# (tensor): the number of in-place writes to a tensor that autograd has counted.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
# (storage): an integer that identifies a storage for as long as it exists.
storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
# (storage key): the reference count of a storage; None on a torch without it.
storage_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def tensor_hooks(tensor: torch.Tensor) -> Hooks | None:
    """Return the hooks of `Tensor.register_hook` on a tensor, or None."""
    return tensor._backward_hooks


def gradient_hooks(param: torch.Tensor) -> Sequence[Callable[[torch.Tensor], object]]:
    """Return the hooks of ``register_post_accumulate_grad_hook`` on a parameter."""
    hooks = param._post_accumulate_grad_hooks
    return [*hooks.values()] if hooks else []


def local_tensor(sharded: "DTensor") -> torch.Tensor:
    """Return this rank's shard; ``to_local()`` takes 20 times as long."""
    return sharded._local_tensor


def sharded_like(part: torch.Tensor, param: "DTensor") -> "DTensor":
    """Return a DTensor of this rank's part, sharded like a parameter.

    Unlike ``from_local()`` it leaves a part on the host if FSDP2 keeps it there.
    """
    from torch.distributed.tensor import DTensor

    return DTensor(part, param._spec, requires_grad=False)


# --- autograd and dispatch -----------------------------------------------------------------------

TO_COPY = torch.ops.aten._to_copy.default  # the operation behind `Tensor.to`


# (function): autograd calls it at the end of the current backward; DDP uses it too.
queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


def in_backward() -> bool:
    """Return whether this thread is running a backward."""
    return torch._C._current_graph_task_id() != -1


def gradients_of(
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """Return `torch.autograd.grad` without its checks, which cost as much as a small layer.

    The gradient of an unused input is None.
    """
    run = torch.autograd.Variable._execution_engine.run_backward
    grads_of_inputs: tuple[torch.Tensor | None, ...] = run(
        outputs, grads, False, False, inputs, True, accumulate_grad=False
    )
    return grads_of_inputs


def schema_of(op: Any) -> Any:
    """Return the schema of an operation of `torch.ops`: its name, arguments and results."""
    return op._schema


# --- the allocator of the CPU --------------------------------------------------------------------

ALLOCATION = "[memory]"  # name of log entries for allocations and frees


def start_memory_log() -> None:
    """Log allocations on the CPU in this thread, and in backwards that it starts.

    It uses the older of torch's profilers; the newer one prints to standard error.
    """
    plain = _profiler.ProfilerState.CPU, False, True, False, False, False
    config = _profiler.ProfilerConfig(*plain, _profiler._ExperimentalConfig())
    _autograd._enable_profiler_legacy(config)


def mark_memory_log(name: str) -> None:
    """Add an entry to the log."""
    with torch.autograd.profiler.record_function(name):
        pass


def stop_memory_log() -> list[tuple[str, int]]:
    """End the log; return its entries in order: a name, and bytes (negative when freed)."""
    entries: list[tuple[str, int]] = []
    for event in chain.from_iterable(_autograd._disable_profiler_legacy()):
        kind: Any = event.kind()  # a str, despite its annotation
        if kind == "memory_alloc":
            entries.append((ALLOCATION, event.cpu_memory_usage()))
        elif kind == "push":
            entries.append((event.name(), 0))
    return entries


# --- modules -------------------------------------------------------------------------------------

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"  # attributes: dicts by name
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return a module's own dict of parameters, without submodules."""
    return module._parameters


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own dict of buffers, without submodules."""
    return module._buffers


def own_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return a module's own dict of direct submodules."""
    return module._modules


def module_hooks(module: torch.nn.Module) -> list[Hooks]:
    """Return a module's own dicts of forward and backward hooks."""
    return [getattr(module, kind) for kind in MODULE_HOOKS]


def any_global_module_hook() -> bool:
    """Return whether a forward or backward hook is set on all modules."""
    return any(getattr(_module, f"_global{kind}") for kind in MODULE_HOOKS)


# --- optimizers ----------------------------------------------------------------------------------

PRE_STEP, POST_STEP = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
STATE = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
LOAD_STATE = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


def all_hooks(optimizer: object) -> list[Hooks]:
    """Return all of an optimizer's own dicts of hooks, on steps and on states."""
    return [
        value
        for name, value in vars(optimizer).items()
        if name.endswith(("pre_hooks", "post_hooks"))
    ]


# (optimizer): the dicts of step hooks of an optimizer that has them.
own_pre_step_hooks: Callable[[object], Hooks] = attrgetter(PRE_STEP)
own_post_step_hooks: Callable[[object], Hooks] = attrgetter(POST_STEP)


def has_step_hooks(optimizer: object) -> bool:
    """Return whether step hooks can be registered; not if torch's __init__ was not called."""
    return hasattr(optimizer, POST_STEP)


def pre_step_hooks(optimizer: object) -> Hooks:
    """Return an optimizer's own dict of hooks before steps; empty where it has none."""
    hooks: Hooks = getattr(optimizer, PRE_STEP, {})
    return hooks


def post_step_hooks(optimizer: object) -> Hooks:
    """Return an optimizer's own dict of hooks after steps; empty where it has none."""
    hooks: Hooks = getattr(optimizer, POST_STEP, {})
    return hooks


def set_step_hooks(optimizer: object, pre: Hooks | None = None, post: Hooks | None = None) -> None:
    """Give an optimizer dicts of step hooks; new ones for None."""
    setattr(optimizer, PRE_STEP, OrderedDict() if pre is None else pre)
    setattr(optimizer, POST_STEP, OrderedDict() if post is None else post)


def set_state_hooks(optimizer: object, source: object = None) -> None:
    """Give an optimizer the state hooks of another one, or new dicts."""
    for name in (*STATE, *LOAD_STATE):
        setattr(optimizer, name, getattr(source, name, OrderedDict()))


def state_hooks(optimizer: object) -> tuple[Hooks, Hooks]:
    """Return an optimizer's own dicts of hooks before and after ``state_dict``."""
    return getattr(optimizer, STATE[0]), getattr(optimizer, STATE[1])


def load_state_hooks(optimizer: object) -> tuple[Hooks, Hooks]:
    """Return an optimizer's own dicts of hooks before and after ``load_state_dict``."""
    return getattr(optimizer, LOAD_STATE[0]), getattr(optimizer, LOAD_STATE[1])
