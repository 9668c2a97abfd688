"""Chooses a model's units from a forward, and probes which of them can be recomputed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from daso.memory.away import MIN_BYTES, Away, is_movable
from daso.memory.recompute import ChangedBuffers, Rewound, buffer_names
from daso.memory.storages import View, bytes_of, tensors_in
from daso.memory.tiers import Tier
from daso.memory.units import Call, Segment, followed, segments_of, surveyed
from daso.torch_private import version_of


def _offloaded(tier: Tier, device: torch.device, on_save: Callable[[torch.Tensor], None]) -> Any:
    """Return hooks that move saved tensors to the second memory."""

    def pack(tensor: torch.Tensor) -> Any:
        on_save(tensor)
        if not is_movable(tensor, device) or tensor.untyped_storage().nbytes() < MIN_BYTES:
            return tensor.detach()
        return Away(tier, bytes_of(tensor.detach())), View.of(tensor)

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        away, view = saved
        placed: torch.Tensor = view.on(away.content())
        return placed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def choose_segments(model: torch.nn.Module, args: Any, kwargs: Any, tier: Tier) -> list[Segment]:
    """Run a forward; return the model's units, chosen by the bytes that modules saved."""
    device = next(model.parameters()).device
    with surveyed(model) as survey, _offloaded(tier, device, survey.saved):
        model(*args, **kwargs)
    return segments_of(model, survey)


def recomputable(
    model: torch.nn.Module, segments: Sequence[Segment], args: Any, kwargs: Any, tier: Tier
) -> dict[Segment, ChangedBuffers]:
    """Run a forward in which every unit is computed twice.

    Returns:
        Units with bitwise equal results that do not change their inputs, and the buffers that they
        change.
    """
    device = next(model.parameters()).device
    check = _Check(model, device)
    with followed(model, segments, check), _offloaded(tier, device, lambda _: None):
        model(*args, **kwargs)
    return {
        segment: buffers for segment, buffers in check.buffers.items() if segment not in check.unfit
    }


class _Check:
    """Runner that computes every unit twice and compares the results."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self.buffers: dict[Segment, ChangedBuffers] = {}
        self.unfit: set[Segment] = set()
        self._inputs: list[tuple[Segment, torch.Tensor, int]] = []
        self._inside = False  # a unit's forward runs

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's forward."""
        output = call(*args, **kwargs)
        changed = (
            segment for segment, tensor, version in self._inputs if version_of(tensor) != version
        )
        self.unfit.update(changed)
        return output

    def unit(
        self, segment: Segment, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a unit's forward twice; a unit inside another one belongs to the outer one."""
        if self._inside:
            return call(*args, **kwargs)
        self._inside = True
        try:
            return self._twice(segment, call, args, kwargs)
        finally:
            self._inside = False

    def _twice(
        self, segment: Segment, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        inputs = [
            (segment, tensor.detach(), version_of(tensor)) for tensor in tensors_in((args, kwargs))
        ]
        self._inputs += inputs
        modules = segment.modules(self._model)
        rewound, state = Rewound(modules, buffer_names(modules)), _random_state(self._device)
        output = call(*args, **kwargs)
        self.buffers[segment] = rewound.changed
        if any(version_of(tensor) != version for _, tensor, version in inputs):
            self.unfit.add(segment)
            return output
        with rewound, _with_random_state(state, self._device):
            again = call(*args, **kwargs)
        if not _same(tensors_in(output), tensors_in(again)):
            self.unfit.add(segment)
        return output


def _same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 0, 0, equal_nan=True)
        for a, b in zip(left, right, strict=True)
    )


def _random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), own


@contextmanager
def _with_random_state(
    state: tuple[torch.Tensor, torch.Tensor | None], device: torch.device
) -> Iterator[None]:
    """Set torch's default generators to a state; restore them at the end."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], device)
        yield
