"""Profile of a step, from observing it: units, their saved storages, times and bytes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from daso.errors import ConfigError
from daso.memory.course import BOTH, SWAP, Group, StepProfile, Unit, residents
from daso.memory.meter import open_meter
from daso.memory.observe import Loss, StepObserver, restored
from daso.memory.probes import choose_segments, recomputable
from daso.memory.recompute import ChangedBuffers
from daso.memory.storages import tensors_in
from daso.memory.tiers import Tier
from daso.memory.units import Segment, named_segments

LOSS = "(loss)"  # name of the last unit


@dataclass(frozen=True)
class StepTrace:
    """The calls of units and the saved tensors of one forward, by position.

    Args:
        calls: Units in the order of their calls: positions 1, 3, 5 and so on.
        units: Number of the profile's unit, by position.
        packs: For each saved tensor of a position, the unit after whose forward the model releases
            it; -1: it is not moved.
        inputs: The same for each input of a call.
        buffers: Units that can be recomputed, and the buffers that they change.
        names: Names of the profile's units.
        batch_bytes: Bytes of the batch.
    """

    calls: tuple[Segment, ...]
    units: tuple[int, ...]
    packs: tuple[tuple[int, ...], ...]
    inputs: Mapping[int, tuple[int, ...]]
    buffers: Mapping[Segment, ChangedBuffers]
    names: tuple[str, ...]
    batch_bytes: int


def profiled(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Loss,
    tier: Tier,
    names: Sequence[str] = (),
) -> tuple[StepProfile, StepTrace]:
    """Run two forwards and three steps; return the profile and its trace.

    The model, its gradients and random numbers are restored.
    """
    batch, device = (args, kwargs), next(model.parameters()).device
    segments = named_segments(model, names)
    with torch.enable_grad():
        if not segments:
            with restored(model, batch):
                segments = choose_segments(model, args, kwargs, tier)
        with restored(model, batch):
            buffers = recomputable(model, segments, args, kwargs, tier)
        watched = StepObserver(model, segments, tier, open_meter(device))
        with restored(model, batch):
            watched.run(args, kwargs, loss)
        buffers = {
            segment: buffers[segment] for segment in watched.worthwhile() if segment in buffers
        }
        lean = StepObserver(model, segments, tier, open_meter(device), buffers)
        timed = StepObserver(model, segments, tier, None, buffers)
        for watch in (lean, timed):
            with restored(model, batch):
                watch.run(args, kwargs, loss)
    if not watched.calls == lean.calls == timed.calls:
        raise ConfigError(
            "memory can be planned for a model that runs the same operations in every step, but "
            "this one did not, with the same batch and the same random numbers; take branches "
            "that depend on anything else out of its forward",
            code="model-changes-between-steps",
        )
    return _Profile(watched, lean, timed, buffers).make(
        sum(tensor.nbytes for tensor in tensors_in(batch))
    )


class _Profile:
    """Builds the profile from three observed steps."""

    def __init__(
        self,
        watched: StepObserver,
        lean: StepObserver,
        timed: StepObserver,
        buffers: Mapping[Segment, ChangedBuffers],
    ) -> None:
        self._watched, self._lean, self._timed, self._buffers = watched, lean, timed, buffers
        self._count = watched.count
        self._saves = [
            {number for number in packs if self._moves(number)} for packs in watched.packs
        ]
        self._takes = {
            at: {number for number in inputs if self._moves(number)}
            for at, inputs in watched.inputs.items()
        }
        saving = [at for at in range(self._count) if self._saves[at]]
        # A position that saves nothing belongs to the next unit.
        self._units = [sum(1 for other in saving if other < at) for at in range(self._count)]
        self._positions = saving
        self._leaves: dict[int, int] = {}  # of storages that move
        self._groups = self._grouped()

    def _moves(self, number: int) -> bool:
        """Return whether a storage can be moved: forward frees it unless it is saved."""
        return number >= 0 and number in self._watched.freed_at

    def _grouped(self) -> list[Group]:
        """Group the storages by their users."""
        saved, inputs = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
        for at, numbers in enumerate(self._saves):
            for number in numbers:
                saved[number].add(self._units[at])
        for at, numbers in self._takes.items():
            if self._recomputed_bytes(at):
                for number in numbers:
                    inputs[number].add(self._units[at])
        sizes = defaultdict[Any, list[int]](list)
        for number in sorted({*saved, *inputs}):
            users = tuple(sorted(saved[number])), tuple(sorted(inputs[number]))
            last = self._leaves[number] = max(
                self._units[self._watched.freed_at[number]], *users[0], *users[1]
            )
            sizes[(last, *users)].append(self._watched.storages.nbytes[number])
        return [Group(sum(some), len(some), *users) for users, some in sizes.items()]

    def _recomputed_bytes(self, at: int) -> int:
        """Return the bytes that a call of a unit could recompute."""
        if at % 2 == 0 or not self._saves[at] or self._watched.calls[at // 2] not in self._buffers:
            return 0
        return self._watched.internal_bytes(at)

    def _state_bytes(self, at: int) -> int:
        """Return the bytes of random states and buffers that a recomputed call keeps."""
        if not self._recomputed_bytes(at):
            return 0
        segment = self._watched.calls[at // 2]
        modules = segment.modules(self._watched.model)
        buffers = (modules[inside].get_buffer(name) for inside, name in self._buffers[segment])
        return torch.get_rng_state().nbytes + sum(buffer.nbytes for buffer in buffers)

    def make(self, batch_bytes: int) -> tuple[StepProfile, StepTrace]:
        """Return the profile, and the trace by which a pass follows it."""
        count = len(self._positions)
        units = [
            Unit(
                self._seconds(dict(enumerate(self._timed.forward_seconds)), number),
                self._seconds(self._timed.backward_seconds, number),
                self._timed.recompute_seconds.get(at, 0.0),
                self._recomputed_bytes(at),
                state_bytes=self._state_bytes(at),
            )
            for number, at in enumerate(self._positions)
        ]
        # The loss with its backward: a pass has no hook between them.
        units.append(Unit(self._timed.backward_seconds.get(self._count, 0.0), 0.0))
        profile = StepProfile(tuple(self._with_bytes(units)), tuple(self._groups))
        trace = StepTrace(
            tuple(self._watched.calls),
            (*self._units, count),
            tuple(self._leaving(packs) for packs in self._watched.packs),
            {at: self._leaving(inputs) for at, inputs in self._watched.inputs.items()},
            self._buffers,
            (*self._names(), LOSS),
            batch_bytes,
        )
        return profile, trace

    def _leaving(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._leaves.get(number, -1) for number in numbers)

    def _seconds(self, by_position: Mapping[int, float], number: int) -> float:
        return sum(
            by_position.get(at, 0.0) for at in range(self._count) if self._units[at] == number
        )

    def _with_bytes(self, units: list[Unit]) -> list[Unit]:
        """Return the units with their measured bytes, without those of groups."""
        empty, count = StepProfile(tuple(units), tuple(self._groups)), len(units)
        plain = self._without_groups(self._watched, residents(empty, (SWAP,) * count))
        again = self._without_groups(self._lean, residents(empty, (BOTH,) * count))
        return [
            unit._replace(forward_bytes=a, backward_bytes=b, lean_bytes=c, recompute_bytes=d)
            for unit, a, b, c, d in zip(units, *plain, *again, strict=True)
        ]

    def _without_groups(
        self, watch: StepObserver, groups: tuple[list[int], list[int]]
    ) -> tuple[list[int], list[int]]:
        """Return the bytes of each unit's forward and backward, without those of groups."""
        count = len(groups[0])
        for group in self._groups:
            if group.leaves not in (group.first, *group.saved):
                groups[0][group.leaves] -= group.nbytes  # may be freed before the peak
        peaks = [0] * count, [0] * count
        for backward in (False, True):
            for at, interval in watch.intervals(backward).items():
                # The loss and its backward are one moment: a pass has no hook between them.
                number = self._units[at] if at < self._count else count - 1
                some = peaks[backward and at < self._count]
                some[number] = max(some[number], interval.peak)
        pairs = (zip(*two, strict=True) for two in zip(peaks, groups, strict=True))
        forward, backward_ = (
            [max(0, peak - of_groups) for peak, of_groups in some] for some in pairs
        )
        return forward, backward_

    def _names(self) -> list[str]:
        """Return the names of units: of their module, or of the modules around them."""
        calls, names, counts = self._watched.calls, list[str](), dict[str, int]()

        def numbered(name: str) -> str:
            counts[name] = counts.get(name, 0) + 1
            return name if counts[name] == 1 else f"{name} ({counts[name]})"

        for at in range(self._count):
            if at % 2:
                name = numbered(calls[at // 2].name)
            elif at:
                name = numbered(f"after {calls[at // 2 - 1].name}")
            else:
                name = f"before {calls[0].name}" if calls else "(model)"
            if at in self._positions:
                names.append(name)
        return names
