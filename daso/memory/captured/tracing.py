"""Captures a step: traces it into operations, runs them in an arena, and checks the results."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.func import functional_call
from torch.fx import GraphModule

from daso.errors import ConfigError
from daso.memory.captured.arena import ArenaRun
from daso.memory.captured.guards import ModelWithLoss, ModuleTensors, autocast_kinds
from daso.memory.captured.recorded import UnfitError, record
from daso.memory.captured.writes import equal_values
from daso.torch_private import version_of

Values = Sequence[torch.Tensor]


def capture(
    whole: ModelWithLoss, tensors: ModuleTensors, inputs: Values, way: str, *, _poison: bool = False
) -> ArenaRun:
    """Trace a step into an arena run, and check that it gives the same bits."""
    values = [value for value in (*tensors.read(), *inputs) if value is not None]
    device = inputs[-1].device
    if any(buffer.requires_grad for buffer in values[tensors.nparams : len(tensors.names)]):
        raise UnfitError("one of its buffers requires a gradient")
    with _preserved(whole), torch.enable_grad():
        expected = _with_same_draws(device, lambda: _ordinary(whole, tensors, values))
        graphs = [
            _with_same_draws(device, lambda: _trace(whole, tensors, values)) for _ in range(2)
        ]
        _check_equal(*graphs)
        with torch.no_grad(), torch.random.fork_rng(_cuda(device)), without_autocast(device):
            fixed = range(len(tensors.names), len(values))
            recording = record(graphs[0], _detached_copies(tensors, values), fixed)
            run = ArenaRun(recording, way, device, _poison=_poison)
        results = _with_same_draws(device, lambda: _captured(run, tensors, values))
        if not all(map(equal_values, results, expected)):
            again = _with_same_draws(device, lambda: _ordinary(whole, tensors, values))
            if all(map(equal_values, again, expected)):
                raise UnfitError("its results then differ from those of an ordinary step")
    return run


def _with_same_draws(device: torch.device, run: Callable[[], Any]) -> Any:
    """Run a function, then restore the random number generators."""
    with torch.random.fork_rng(_cuda(device)):
        results = run()
        if isinstance(results, list):
            results += [
                torch.get_rng_state(),
                *(torch.cuda.get_rng_state(d) for d in _cuda(device)),
            ]
    return results


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Disable autocast: a traced step contains its casts as operations."""
    with ExitStack() as without:
        for kind in autocast_kinds(device):
            without.enter_context(torch.autocast(kind, enabled=False))
        yield


def _detached_copies(tensors: ModuleTensors, values: Values) -> list[torch.Tensor]:
    """Return copies of values with the same layouts, independent of the originals."""
    copies = []
    for index, value in enumerate(values):
        span = 1 + sum(
            (size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True)
        )
        flat = value.detach().as_strided((span if value.numel() else 0,), (1,)).clone()
        # Not a view: autocast does not cache casts of views.
        copy = torch.empty(0, dtype=value.dtype, device=value.device)
        copy.set_(flat.untyped_storage(), 0, value.shape, value.stride())
        copies.append(copy.requires_grad_(index < tensors.nparams and value.requires_grad))
    return copies


@contextmanager
def _preserved(whole: ModelWithLoss) -> Iterator[None]:
    """Restore attributes and Python's random state; raise if forward changed them."""
    before = [(name, vars(module), {**vars(module)}) for name, module in whole.named_modules()]
    attributes = [
        (name, key, tensor, version_of(tensor), tensor.detach().clone())
        for name, _, old in before
        for key, tensor in old.items()
        if isinstance(tensor, torch.Tensor)
    ]
    state = random.getstate()
    change = ""
    try:
        yield
    finally:
        for name, now, old in before:
            keys = [key for key in {**now, **old} if now.get(key, now) is not old.get(key, old)]
            change = change or next((f"its forward sets {name}.{key}" for key in keys), "")
            for key in keys:
                now.pop(key, None)
            now.update(old)
        for name, key, tensor, version, value in attributes:
            if version_of(tensor) != version:
                change = change or f"its forward changes {name}.{key}, which is not a buffer"
                tensor.detach().copy_(value)
        if random.getstate() != state:
            change = change or "its forward draws from Python's random numbers"
            random.setstate(state)
    if change:
        raise UnfitError(change)


def _run(
    whole: ModelWithLoss,
    tensors: ModuleTensors,
    copies: Values,
    backward: Callable[[torch.Tensor], Any],
) -> Any:
    """Run a step on copies, backward included: it may call parts of the model again."""

    def checked(loss: Any) -> Any:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(
                f"loss_fn must return one number that depends on the parameters, not {got}",
                code="captured-loss-not-number",
            )
        return backward(loss)

    held = dict(zip(tensors.names, copies, strict=False))
    results = functional_call(whole, held, tuple(copies[len(held) :]), {"backward": checked})
    for name, copy in zip(tensors.names, copies, strict=False):
        if held[name] is not copy:
            raise UnfitError(f"its forward replaces {name} instead of changing it in place")
    return results


def _ordinary(
    whole: ModelWithLoss, tensors: ModuleTensors, values: Values
) -> list[torch.Tensor | None]:
    """Return loss, gradients and then buffers of an ordinary step."""
    copies = _detached_copies(tensors, values)

    def backward(loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        return loss.detach()

    loss = _run(whole, tensors, copies, backward)
    grads = [copy.grad for copy in copies[: tensors.nparams]]
    return [loss, *grads, *copies[tensors.nparams : len(tensors.names)]]


def _captured(run: ArenaRun, tensors: ModuleTensors, values: Values) -> list[torch.Tensor | None]:
    """Return loss, gradients and then buffers of a captured step."""
    copies = _detached_copies(tensors, values)
    with torch.no_grad(), without_autocast(values[-1].device):
        results = run(copies)
    run.forget(range(len(values)))
    return [*results, *copies[tensors.nparams : len(tensors.names)]]


def _trace(whole: ModelWithLoss, tensors: ModuleTensors, values: Values) -> GraphModule:
    """Trace a step: its forward, then its backward pass."""
    from torch.fx.experimental.proxy_tensor import make_fx  # imports sympy: a second

    caches = torch.is_autocast_cache_enabled()

    def step(copies: list[torch.Tensor]) -> list[torch.Tensor | None]:
        torch.set_autocast_cache_enabled(caches)  # make_fx has disabled it
        params = copies[: tensors.nparams]
        needing = [param for param in params if param.requires_grad]
        for param in needing:  # marks in the trace when the gradient is complete
            param.register_hook(_marked)

        def backward(loss: torch.Tensor) -> list[torch.Tensor | None]:
            known = _marked(loss)
            grads = iter(torch.autograd.grad(loss, needing, allow_unused=True))
            return [known, *(next(grads) if param.requires_grad else None for param in params)]

        return list(_run(whole, tensors, copies, backward))

    torch.clear_autocast_cache()
    try:
        return make_fx(step)(_detached_copies(tensors, values))
    except UnfitError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise UnfitError(f"it cannot be traced ({type(error).__name__}: {reason})") from error
    finally:
        torch.clear_autocast_cache()


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def _check_equal(first: GraphModule, second: GraphModule) -> None:
    """Raise unless two traces have the same operations and constants."""
    owns = [
        [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]
        for graph in (first, second)
    ]
    if str(first.graph) != str(second.graph) or not all(map(equal_values, *owns)):
        raise UnfitError("two traces of it differ")
