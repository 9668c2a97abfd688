"""A step's forward and backward pass, traced into operations that run in an arena, and checked."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.func import functional_call
from torch.fx import GraphModule

from daso.errors import ConfigError
from daso.memory.captured.arena import ArenaRun
from daso.memory.captured.guards import Tensors, Whole, autocast_kinds
from daso.memory.captured.recorded import UnfitError, record
from daso.memory.captured.writes import same

__all__ = ["capture", "without_autocast"]

Values = Sequence[torch.Tensor]


def capture(
    whole: Whole, tensors: Tensors, given: Values, way: str, *, _poison: bool = False
) -> ArenaRun:
    """Return a step's forward and backward pass, to be run in an arena."""
    values = [one for one in (*tensors.read(), *given) if one is not None]
    device = given[-1].device
    if any(buffer.requires_grad for buffer in values[tensors.nparams : len(tensors.names)]):
        raise UnfitError("one of its buffers needs a gradient")
    with _left_alone(whole), torch.enable_grad():
        expected = _from_here(device, lambda: _ordinary(whole, tensors, values))
        graphs = [_from_here(device, lambda: _trace(whole, tensors, values)) for _ in range(2)]
        _check_equal(*graphs)
        with torch.no_grad(), torch.random.fork_rng(_cuda(device)), without_autocast(device):
            fixed = range(len(tensors.names), len(values))
            recording = record(graphs[0], _twins(tensors, values), fixed)
            run = ArenaRun(recording, way, device, _poison=_poison)
        found = _from_here(device, lambda: _captured(run, tensors, values))
        if not all(map(same, found, expected)):
            again = _from_here(device, lambda: _ordinary(whole, tensors, values))
            if all(map(same, again, expected)):
                raise UnfitError("its results are then others than those of an ordinary step")
    return run


def _from_here(device: torch.device, run: Callable[[], Any]) -> Any:
    """Run something, and draw its random numbers again afterwards."""
    with torch.random.fork_rng(_cuda(device)):
        found = run()
        if isinstance(found, list):
            found += [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in _cuda(device))]
    return found


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Switch autocast off: in a traced step, its casts are operations like others."""
    with ExitStack() as without:
        for kind in autocast_kinds(device):
            without.enter_context(torch.autocast(kind, enabled=False))
        yield


def _twins(tensors: Tensors, values: Values) -> list[torch.Tensor]:
    """Return copies, laid out as they are, whose changes and gradients concern nobody."""
    twins = []
    for index, one in enumerate(values):
        span = 1 + sum(
            (size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True)
        )
        flat = one.detach().as_strided((span if one.numel() else 0,), (1,)).clone()
        # No view: of a view, autocast keeps no cast.
        twin = torch.empty(0, dtype=one.dtype, device=one.device)
        twin.set_(flat.untyped_storage(), 0, one.shape, one.stride())
        twins.append(twin.requires_grad_(index < tensors.nparams and one.requires_grad))
    return twins


@contextmanager
def _left_alone(whole: Whole) -> Iterator[None]:
    """Undo what a model's forward does to its attributes and to Python's random numbers."""
    before = [(name, vars(module), {**vars(module)}) for name, module in whole.named_modules()]
    kept = [
        (name, key, one, one._version, one.detach().clone())
        for name, _, old in before
        for key, one in old.items()
        if isinstance(one, torch.Tensor)
    ]
    state = random.getstate()
    odd = ""
    try:
        yield
    finally:
        for name, now, old in before:
            keys = [key for key in {**now, **old} if now.get(key, now) is not old.get(key, old)]
            odd = odd or next((f"its forward sets {name}.{key}" for key in keys), "")
            for key in keys:
                now.pop(key, None)
            now.update(old)
        for name, key, one, version, value in kept:
            if one._version != version:
                odd = odd or f"its forward changes {name}.{key}, which is no buffer"
                one.detach().copy_(value)
        if random.getstate() != state:
            odd = odd or "its forward draws from Python's random numbers"
            random.setstate(state)
    if odd:
        raise UnfitError(odd)


def _run(
    whole: Whole, tensors: Tensors, twins: Values, backward: Callable[[torch.Tensor], Any]
) -> Any:
    """Run a step on twins; its backward pass too, which may run parts of the model again."""

    def checked(loss: Any) -> Any:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            told = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(
                f"loss_fn must return one number that depends on the parameters, not {told}"
            )
        return backward(loss)

    held = dict(zip(tensors.names, twins, strict=False))
    found = functional_call(whole, held, tuple(twins[len(held) :]), {"backward": checked})
    for name, twin in zip(tensors.names, twins, strict=False):
        if held[name] is not twin:
            raise UnfitError(f"its forward replaces {name} rather than changing it in place")
    return found


def _ordinary(whole: Whole, tensors: Tensors, values: Values) -> list[torch.Tensor | None]:
    """Return loss, gradients and then buffers of an ordinary step."""
    twins = _twins(tensors, values)

    def backward(loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        return loss.detach()

    loss = _run(whole, tensors, twins, backward)
    grads = [twin.grad for twin in twins[: tensors.nparams]]
    return [loss, *grads, *twins[tensors.nparams : len(tensors.names)]]


def _captured(run: ArenaRun, tensors: Tensors, values: Values) -> list[torch.Tensor | None]:
    """Return loss, gradients and then buffers of a captured step."""
    twins = _twins(tensors, values)
    with torch.no_grad(), without_autocast(values[-1].device):
        found = run(twins)
    run.forget(range(len(values)))
    return [*found, *twins[tensors.nparams : len(tensors.names)]]


def _trace(whole: Whole, tensors: Tensors, values: Values) -> GraphModule:
    """Return the operations of a step: of forward pass, then of backward pass."""
    from torch.fx.experimental.proxy_tensor import make_fx  # imports sympy: a second

    caches = torch.is_autocast_cache_enabled()

    def step(twins: list[torch.Tensor]) -> list[torch.Tensor | None]:
        torch.set_autocast_cache_enabled(caches)  # make_fx has switched it off
        params = twins[: tensors.nparams]
        needing = [param for param in params if param.requires_grad]
        for param in needing:  # where it is in the trace tells when the gradient is there
            param.register_hook(_marked)

        def backward(loss: torch.Tensor) -> list[torch.Tensor | None]:
            known = _marked(loss)
            grads = iter(torch.autograd.grad(loss, needing, allow_unused=True))
            return [known, *(next(grads) if param.requires_grad else None for param in params)]

        return list(_run(whole, tensors, twins, backward))

    torch.clear_autocast_cache()
    try:
        return make_fx(step)(_twins(tensors, values))
    except UnfitError:
        raise
    except Exception as error:
        told = next(iter(str(error).splitlines()), "")
        raise UnfitError(f"it cannot be traced ({type(error).__name__}: {told})") from error
    finally:
        torch.clear_autocast_cache()


def _marked(one: torch.Tensor) -> torch.Tensor:
    return one.view_as(one)


def _check_equal(one: GraphModule, other: GraphModule) -> None:
    """Check that two traces are of the same operations, on the same numbers."""
    owns = [
        [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]
        for graph in (one, other)
    ]
    if str(one.graph) != str(other.graph) or not all(map(same, *owns)):
        raise UnfitError("two traces of it differ")
