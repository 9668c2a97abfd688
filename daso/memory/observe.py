"""Observes a step: the tensors that each unit saves for backward, its time and its bytes."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from daso.errors import ConfigError
from daso.memory.away import MIN_BYTES, Away, is_movable
from daso.memory.meter import Interval, Meter
from daso.memory.recompute import ChangedBuffers, Rewound, call_checkpointed, inputs_of
from daso.memory.storages import Storages, View, bytes_of, has_storage, storage_bytes, tensors_in
from daso.memory.tiers import Tier
from daso.memory.units import Call, Segment, followed
from daso.torch_private import own_buffers, version_of

Loss = Callable[[Any], torch.Tensor]


class _ObservedStorage:
    """A saved storage, in the device's or in the second memory."""

    def __init__(self, base: torch.Tensor, owner: int) -> None:
        self.base: torch.Tensor | None = base
        self.owner = self.returns = owner
        self.version = version_of(base)
        self.away: Away | None = None


class _Saved(NamedTuple):
    """Stands for a saved tensor in autograd's graph."""

    number: int  # of its storage
    row: _ObservedStorage
    view: View
    position: int


class StepObserver:
    """Observes one step, with all saved tensors moved to the second memory meanwhile.

    Positions of forward: even ones are between units, odd ones are calls of units.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        segments: Sequence[Segment],
        tier: Tier,
        meter: Meter | None = None,
        recomputed: Mapping[Segment, ChangedBuffers] | None = None,
    ) -> None:
        self.model, self.segments, self.tier, self.meter = model, segments, tier, meter
        self.recomputed = recomputed or {}
        self.device = next(model.parameters()).device
        self.calls: list[Segment] = []
        self.packs: list[list[int]] = [[]]  # by position: numbers of saved storages; -1: not moved
        self.inputs: dict[int, list[int]] = {}
        self.freed_at: dict[int, int] = {}  # position in which each storage was freed
        self.storages = Storages(self._note_free)
        self.forward_seconds = [0.0]
        self.backward_seconds: dict[int, float] = {}
        self.recompute_seconds: dict[int, float] = {}
        self.moments: list[int] = []  # by mark: position, or -1 - position in backward
        self._outside: set[int] = set()
        self._rows: dict[int, _ObservedStorage] = {}
        self._position, self._back, self._started, self._again = -1, 0, 0.0, 0.0
        self._inside = False  # a unit's forward runs

    @property
    def count(self) -> int:
        """The number of positions, without the loss."""
        return len(self.packs)

    def internal_bytes(self, position: int) -> int:
        """Return the bytes that a call of a unit saved, without its inputs."""
        inner = {*self.packs[position]} - {*self.inputs[position], -1}
        return sum(self.storages.nbytes[number] for number in inner)

    def worthwhile(self) -> set[Segment]:
        """Return the units that save more than their inputs."""
        calls = enumerate(self.calls)
        return {segment for at, segment in calls if self.internal_bytes(2 * at + 1)}

    def intervals(self, backward: bool) -> dict[int, Interval]:
        """Return the measured interval of each position."""
        assert self.meter is not None
        measured = zip(self.moments, self.meter.intervals[1:], strict=True)
        return {
            -1 - moment if backward else moment: interval
            for moment, interval in measured
            if (moment < 0) == backward
        }

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Loss) -> None:
        """Run the step: forward, loss and backward."""
        torch.clear_autocast_cache()  # a step of training casts weights itself
        with followed(self.model, self.segments, self), self.meter or nullcontext():
            output = self.model(*args, **kwargs)
            torch.clear_autocast_cache()  # as at the end of autocast, where backward begins
            self._mark(self.count)
            value = scalar_of(loss, output)
            self._mark(-1 - self.count)
            self._back = self.count
            with freed_gradients(self.model) as params:
                torch.autograd.grad(value, params, allow_unused=True)
            self._end_moment()
            del output, value

    # --- forward ----------------------------------------------------------------------------------

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's forward."""
        here = (*self.model.parameters(), *self.model.buffers(), *tensors_in((args, kwargs)))
        self._outside = {self.storages.number(tensor) for tensor in here if has_storage(tensor)}
        self._position = 0
        self._mark(0)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            output = call(*args, **kwargs)
        self._end_position()
        self._position = -1
        return output

    def unit(
        self, segment: Segment, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a unit's forward; a unit inside another one belongs to the outer one."""
        if self._inside or self._position < 0:
            return call(*args, **kwargs)
        self._next_position()
        self.calls.append(segment)
        inputs = [tensor for tensor in inputs_of(args, kwargs) if tensor.numel()]
        self.inputs[self._position] = [*map(self._number, inputs)]
        self._inside = True
        try:
            if segment in self.recomputed and torch.is_grad_enabled():
                plain = Rewound(segment.modules(self.model), self.recomputed[segment])
                rewound = _TimedRewind(plain, self, self._position)
                output = call_checkpointed(call, args, kwargs, rewound)
            else:
                output = call(*args, **kwargs)
        finally:
            self._inside = False
        self._next_position()
        return output

    def _number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage; -1 if it is not moved."""
        if not is_movable(tensor, self.device):
            return -1
        number = self.storages.number(tensor)
        small = self.storages.nbytes[number] < MIN_BYTES
        return -1 if small or number in self._outside else number

    def _note_free(self, number: int) -> None:
        if self._position >= 0:
            # Inputs of the unit before: its frame ends only after the next position has begun.
            before = self._position > 0 and self._position % 2 == 0
            early = before and not self.packs[self._position]
            self.freed_at[number] = self._position - early

    def _next_position(self) -> None:
        self._end_position()
        self._position += 1
        self.packs.append([])
        self.forward_seconds.append(0.0)
        self._mark(self._position)

    def _end_position(self) -> None:
        """Record the time; move the saved storages to the second memory."""
        self._synchronize()
        self.forward_seconds[self._position] = time.perf_counter() - self._started
        for number in self.packs[self._position]:
            row = self._rows.get(number)
            if row is not None and row.base is not None:
                row.away, row.base = Away(self.tier, row.base), None

    def _pack(self, tensor: torch.Tensor) -> Any:
        number = self._number(tensor)
        self.packs[self._position].append(number)
        if number < 0 or self._position < 0:
            return tensor.detach()
        row = self._rows.get(number)
        if row is None or row.version != version_of(tensor):
            row = self._rows[number] = _ObservedStorage(bytes_of(tensor.detach()), self._position)
            row.version = version_of(tensor)
        row.returns = self._position
        return _Saved(number, row, View.of(tensor), self._position)

    # --- backward ---------------------------------------------------------------------------------

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            tensor: torch.Tensor = saved
            return tensor
        if self._position < 0:  # else forward itself computes a gradient
            self.come_to(saved.position)
        self._fetch(saved.number, saved.row)
        assert saved.row.base is not None
        return saved.view.on(saved.row.base)

    def come_to(self, position: int) -> None:
        """Begin the backward of a position, and of later ones that were skipped."""
        for moment in range(self._back - 1, position - 1, -1):
            self._begin_moment(moment)
        self._back = min(self._back, position)

    def _begin_moment(self, position: int) -> None:
        self._end_moment()
        self._back = position
        self._mark(-1 - position)
        for number, row in self._rows.items():
            if row.returns == position:
                self._fetch(number, row)
        self._started = time.perf_counter()

    def _end_moment(self) -> None:
        self._synchronize()
        seconds = time.perf_counter() - self._started
        self.backward_seconds[self._back] = max(0.0, seconds - self._again)
        self._again = 0.0
        for row in self._rows.values():
            if row.owner == self._back:
                row.base = None

    def _fetch(self, number: int, row: _ObservedStorage) -> None:
        if row.base is None:
            living = self.storages.living(number)
            if living is not None:
                row.base = storage_bytes(living, self.device)
            elif row.away is not None:
                row.base = row.away.content()

    def note_recompute(self, position: int, seconds: float) -> None:
        """Record the time of recomputing a unit."""
        self._again += seconds
        self.recompute_seconds[position] = seconds

    def _mark(self, moment: int) -> None:
        self.moments.append(moment)
        if self.meter is not None:
            self.meter.mark()
        self._started = time.perf_counter()

    def _synchronize(self) -> None:
        if self.device.type == "cuda" and self.meter is None:
            torch.cuda.synchronize(self.device)


class _TimedRewind:
    """A context that times the recomputation of a unit."""

    def __init__(self, inner: Rewound, observer: StepObserver, position: int) -> None:
        self._inner, self._observer, self._position = inner, observer, position

    def __enter__(self) -> None:
        self._observer.come_to(self._position)
        self._inner.__enter__()
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._observer._synchronize()
        self._observer.note_recompute(self._position, time.perf_counter() - self._start)
        self._inner.__exit__()


# --- around a step --------------------------------------------------------------------------------


def scalar_of(loss: Loss, output: Any) -> torch.Tensor:
    """Return the loss of an output."""
    value = loss(output)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise ConfigError(
            f"loss must return one number, not {type(value).__name__}",
            code="loss-returns-no-number",
        )
    return value


@contextmanager
def freed_gradients(model: torch.nn.Module) -> Iterator[list[torch.nn.Parameter]]:
    """Free gradients of a model's trained parameters where they would have been accumulated."""

    def shrunk(grad: torch.Tensor) -> torch.Tensor | None:
        return grad.new_zeros(1).expand(grad.shape) if has_storage(grad) else None

    params = [param for param in model.parameters() if param.requires_grad]
    hooks = [param.register_hook(shrunk) for param in params]
    try:
        yield params
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def restored(model: torch.nn.Module, batch: object = ()) -> Iterator[None]:
    """Restore a model's buffers, a batch and torch's random number generators at the end."""
    inputs = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in tensors_in(batch)]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    devices = {param.device for param in model.parameters() if param.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                own_buffers(module)[name] = buffer  # forward may have replaced it
                buffer.copy_(before)
            for tensor, version, before in inputs:
                if version_of(tensor) != version:  # forward changed it in place
                    tensor.copy_(before)


def default_loss(output: Any) -> torch.Tensor:
    """Return the sum of all outputs that require a gradient."""
    some = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not some:
        raise ConfigError(
            "no output of the model requires a gradient; set loss=", code="output-without-gradient"
        )
    return torch.stack([tensor.sum().float() for tensor in some]).sum()
