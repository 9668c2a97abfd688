"""Units of a model: modules that are kept, swapped or recomputed, and hooks on their calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from daso.errors import ConfigError
from daso.memory.storages import Storages, has_storage, tensors_in
from daso.torch_private import own_modules, version_of

# Fractions of all saved bytes: larger modules are split if modules inside save most of their
# bytes; runs of a Sequential are joined up to the smaller one.
LARGE, SMALL = 1 / 6, 1 / 48


@dataclass(frozen=True, slots=True)
class Segment:
    """A unit: a module, or a run of a Sequential's children.

    Args:
        name: As in ``named_modules()``; of a run with its first and last child: ``features.3-5``.
        path: Name of the module, or of the Sequential.
        start: First child of a run.
        stop: End of a run, exclusive; 0: the module itself.
    """

    name: str
    path: str
    start: int = 0
    stop: int = 0

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return its modules and their submodules, by their names in it."""
        module = model.get_submodule(self.path)
        if not self.stop:
            return dict(module.named_modules())
        children = nn.ModuleList(filter(None, own_modules(module).values()))[self.start : self.stop]
        return dict(children.named_modules())


# --- survey of saved bytes ------------------------------------------------------------------------


class Survey:
    """Saved bytes and in-place changes of each module in one forward."""

    def __init__(self, model: nn.Module) -> None:
        self.nbytes: dict[nn.Module, int] = {}  # saved for backward, with submodules; if called
        self.changing: set[nn.Module] = set()  # modules that change their inputs in place
        self._storages = Storages()
        for tensor in (*model.parameters(), *model.buffers()):
            self._storages.number(tensor)
        self._seen = {*range(len(self._storages.nbytes))}
        self._running: list[tuple[nn.Module, list[tuple[torch.Tensor, int]]]] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the start of a module's forward."""
        self.nbytes.setdefault(module, 0)
        inputs = [(tensor, version_of(tensor)) for tensor in tensors_in((args, kwargs))]
        self._running.append((module, inputs))

    def leave(self, module: nn.Module, *_: object) -> None:
        """Record the end of a module's forward."""
        inputs = self._running.pop()[1]
        if any(version_of(tensor) != version for tensor, version in inputs):
            self.changing.add(module)

    def saved(self, tensor: torch.Tensor) -> None:
        """Record a tensor that is saved for backward; each storage once."""
        number = self._storages.number(tensor) if has_storage(tensor) else 0
        if number not in self._seen:
            self._seen.add(number)
            for opened in {module for module, _ in self._running}:
                self.nbytes[opened] += self._storages.nbytes[number]


@contextmanager
def surveyed(model: nn.Module) -> Iterator[Survey]:
    """Survey the calls of all modules of a model."""
    survey, hooks = Survey(model), list[Any]()
    try:
        for module in model.modules():
            before = module.register_forward_pre_hook
            hooks.append(before(survey.enter, prepend=True, with_kwargs=True))
            hooks.append(module.register_forward_hook(survey.leave, always_call=True))
        yield survey
    finally:
        for hook in hooks:
            hook.remove()


# --- which modules are units ----------------------------------------------------------------------


def named_segments(model: nn.Module, names: Sequence[str]) -> list[Segment]:
    """Return the units for module names."""
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules or not name:
            raise ConfigError(
                f"units must be names of the model's modules, and {name!r} is not; "
                "model.named_modules() lists them",
                code="unknown-unit",
            )
        inside = [other for other in names if name.startswith(f"{other}.")]
        if inside:
            raise ConfigError(
                f"units must not be nested, but {name!r} is inside {inside[0]!r}; leave either out",
                code="nested-units",
            )
    return [Segment(name, name) for name in names]


def segments_of(model: nn.Module, survey: Survey) -> list[Segment]:
    """Return the units of a model, by the bytes that its modules save."""
    return _Splitter(survey, survey.nbytes[model]).inside(model, "")


class _Splitter:
    """Splits a model into units."""

    def __init__(self, survey: Survey, total: int) -> None:
        self._survey, self._total = survey, total
        self._visited: set[nn.Module] = set()

    def inside(self, module: nn.Module, name: str) -> list[Segment]:
        """Return the units inside a module."""
        if _is_plain_sequential(module) and module in self._survey.nbytes:
            return self._runs(module, name)
        children = module.named_children()
        return [
            unit for child, inner in children for unit in self._units(inner, _join(name, child))
        ]

    def _units(self, module: nn.Module, name: str) -> list[Segment]:
        """Return a module as a unit, or the units inside it."""
        if module in self._visited or isinstance(module, torch.jit.ScriptModule):
            return []
        self._visited.add(module)
        nbytes = self._survey.nbytes.get(module)
        if nbytes is None or self._is_split(module):
            return self.inside(module, name)
        return [Segment(name, name)] if nbytes else []

    def _is_split(self, module: nn.Module) -> bool:
        nbytes = self._survey.nbytes.get(module, 0)
        if nbytes <= LARGE * self._total:
            return False
        if _is_plain_sequential(module):
            return len(own_modules(module)) > 1
        return 2 * sum(self._composite(child) for child in module.children()) >= nbytes

    def _composite(self, module: nn.Module) -> int:
        """Return the bytes of a module that has submodules; 0 for a leaf."""
        if module in self._survey.nbytes:
            return self._survey.nbytes[module] if own_modules(module) else 0
        return sum(map(self._composite, module.children()))

    def _runs(self, module: nn.Module, name: str) -> list[Segment]:
        """Return runs of a Sequential's children; each run ends with a child that has weights.

        The cheap children before it are then recomputed from the result of the run before.
        """
        segments, children = list[Segment](), list(own_modules(module).items())
        start = nbytes = before = 0  # bytes of this run, and of the previous one

        def close(stop: int) -> None:
            nonlocal start, nbytes, before
            if nbytes:
                joined = segments and segments[-1].path == name and segments[-1].stop == start
                if joined and before + nbytes <= SMALL * self._total:
                    last = segments.pop()
                    start, nbytes = last.start, before + nbytes
                ends = [children[at][0] for at in (start, stop - 1)]
                text = _join(name, "-".join(dict.fromkeys(ends)))
                segments.append(Segment(text, name, start, stop))
            start, before, nbytes = stop, nbytes, 0

        for at, (child_name, child) in enumerate(children):
            assert child is not None
            if self._is_split(child):
                close(at)
                segments += self._units(child, _join(name, child_name))
                start = at + 1
                continue
            if own_modules(child) and not self._changes(children, at):
                close(at)
            nbytes += self._survey.nbytes.get(child, 0)
            if _has_weights(child) and not self._changes(children, at + 1):
                close(at + 1)
        close(len(children))
        return segments

    def _changes(self, children: Sequence[tuple[str, nn.Module | None]], at: int) -> bool:
        """Return whether a child changes its input in place: then it joins the previous run."""
        return any(child in self._survey.changing for _, child in children[at : at + 1])


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _is_plain_sequential(module: nn.Module) -> bool:
    """Return whether a module's forward is that of `torch.nn.Sequential`."""
    plain = type(module).forward is getattr(nn.Sequential, "forward", None)
    return isinstance(module, nn.Sequential) and plain and "forward" not in vars(module)


def _has_weights(module: nn.Module) -> bool:
    """Return whether a module has matrices, and is therefore expensive to recompute."""
    return any(param.ndim > 1 for param in module.parameters())


# --- following calls ------------------------------------------------------------------------------

Call = Callable[..., Any]


class Runner(Protocol):
    """Runs the forwards of a model and of its units, in place of the plain calls."""

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's forward."""
        ...

    def unit(
        self, segment: Segment, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a unit's forward."""
        ...


class _Forward:
    """A module's forward while it is followed; copies of the module get the plain forward."""

    def __init__(self, plain: Call, followed: Call) -> None:
        self._plain, self._followed = plain, followed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._followed(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self._plain,)


def _itself(plain: Call) -> Call:
    return plain


@contextmanager
def followed(model: nn.Module, segments: Sequence[Segment], runner: Runner) -> Iterator[None]:
    """Route the forwards of a model and of its units to a runner, until the end of the block."""
    forwards: dict[nn.Module, Call] = {}
    runs: dict[nn.Module, list[Segment]] = {}
    for segment in segments:
        module = model.get_submodule(segment.path)
        if segment.stop:
            runs.setdefault(module, []).append(segment)
        else:
            forwards[module] = _unit_forward(segment, module.forward, runner)
    forwards |= {module: _run_forward(module, some, runner) for module, some in runs.items()}
    whole = forwards.get(model, model.forward)
    forwards[model] = lambda *args, **kwargs: runner.forward(whole, args, kwargs)
    before = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = _Forward(module.forward, forward)
        yield
    finally:
        for module, own in before.items():
            if own is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = own


def _unit_forward(segment: Segment, plain: Call, runner: Runner) -> Call:
    return lambda *args, **kwargs: runner.unit(segment, plain, args, kwargs)


def _run_forward(module: nn.Module, segments: Sequence[Segment], runner: Runner) -> Call:
    """Return a forward of a Sequential that routes some runs to the runner."""

    def forward(x: Any) -> Any:
        children, at = [*filter(None, own_modules(module).values())], 0
        for segment in segments:
            x = _in_turn(children[at : segment.start])(x)
            x = runner.unit(segment, _in_turn(children[segment.start : segment.stop]), (x,), {})
            at = segment.stop
        return _in_turn(children[at:])(x)

    return forward


def _in_turn(children: Sequence[nn.Module]) -> Call:
    def call(x: Any) -> Any:
        for child in children:
            x = child(x)
        return x

    return call
