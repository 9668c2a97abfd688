"""Runs one forward and backward pass of a model under a memory plan."""

import weakref
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from daso.memory.away import is_movable
from daso.memory.course import BOTH, KEEP, RECOMPUTE, SWAP
from daso.memory.planner import Plan
from daso.memory.profile import StepTrace
from daso.memory.recompute import (
    CHANGED,
    ChangedBuffers,
    Modules,
    Rewound,
    buffer_names,
    call_checkpointed,
)
from daso.memory.storages import View, bytes_of
from daso.memory.tiers import PendingCopy, Tier
from daso.memory.units import Call, Segment
from daso.torch_private import storage_key, version_of


@dataclass(slots=True)
class PlanMetrics:
    """Counts of the passes that followed a plan.

    Args:
        passes: Number of forwards.
        diverged: Passes whose units or saved tensors differed from the plan.
        swapped_bytes: Bytes copied to the second memory.
        recomputed: Number of recomputed units.
    """

    passes: int = 0
    diverged: int = 0
    swapped_bytes: int = 0
    recomputed: int = 0


class PlanIndex:
    """Lookup tables of a plan, by position and unit."""

    def __init__(self, model: torch.nn.Module, trace: StepTrace, plan: Plan) -> None:
        self.trace, self.plan = trace, plan
        self.modules = {segment: segment.modules(model) for segment in trace.calls}
        self.count = len(trace.names)
        self.swaps = any(way in (SWAP, BOTH) for way in plan.ways)
        self.has_effect = any(way != KEEP for way in plan.ways)

    def way(self, position: int) -> str:
        """Return the way of a position; keep if it saves no movable storage."""
        moves = max(self.trace.packs[position], default=-1) >= 0
        return self.plan.ways[self.trace.units[position]] if moves else KEEP


class SavedStorage:
    """A saved storage, in the device's or in the second memory."""

    def __init__(self, tensor: torch.Tensor, owner: "Pass", leaves: int) -> None:
        self.nbytes, self.leaves, self._owner = tensor.untyped_storage().nbytes(), leaves, owner
        self.returns = -1  # the last unit that saves it
        self._base: torch.Tensor | None = tensor.detach()
        self._version = version_of(tensor)
        self._leaving: PendingCopy | None = None
        self._coming: PendingCopy | None = None
        self._reading: PendingCopy | None = None  # a copy out that could not be cancelled
        self._at = -1  # offset in the second memory

    @property
    def is_in_memory(self) -> bool:
        """True until its memory is freed by a copy out."""
        return self._base is not None

    def is_in(self, key: int) -> bool:
        """Return whether its memory is still that of a storage: a new storage may reuse a key."""
        return self._base is not None and storage_key(self._base.untyped_storage()) == key

    def send(self) -> None:
        """Start the copy to the second memory."""
        assert self._base is not None
        tier = self._owner.tier
        self._at = tier.lease(self.nbytes)
        self._leaving = tier.out(bytes_of(self._base), self._at)
        self._owner.counts.swapped_bytes += self.nbytes

    def leave(self) -> None:
        """Free its memory after the copy out; blocks until that has ended."""
        if self._leaving is None:
            return
        self._leaving.wait()
        self._check()
        self._base, self._leaving = None, None

    def _check(self) -> None:
        if self._base is not None and version_of(self._base) != self._version:
            raise RuntimeError(CHANGED.format(self.nbytes))

    def come(self) -> None:
        """Start the copy back, unless its memory was not freed."""
        self._cancel_leaving()
        if self._base is None:
            self._base = torch.empty(self.nbytes, dtype=torch.uint8, device=self._owner.device)
            self._coming = self._owner.tier.back(self._base, self._at)

    def _cancel_leaving(self) -> None:
        if self._leaving is not None and not self._leaving.drop():
            self._reading = self._leaving
        self._leaving = None

    def content(self) -> torch.Tensor:
        """Return a tensor in its storage; blocks until the copy back has ended."""
        self.come()
        assert self._base is not None
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
            self._version = version_of(self._base)  # the copy itself changed it
        self._check()
        return self._base

    def __del__(self) -> None:
        self._cancel_leaving()
        if self._reading is not None:
            self._reading.wait()  # the copy holds its memory
        if self._at >= 0:
            self._owner.tier.release(self._at, self.nbytes)


class SavedTensor(NamedTuple):
    """Stands for a tensor that stays in memory, in autograd's graph."""

    tensor: torch.Tensor
    version: int


class SavedView(NamedTuple):
    """Stands for a tensor whose storage has a decision, in autograd's graph."""

    held: SavedStorage
    view: View
    user: int  # unit whose backward reads it


class Pass:
    """Pass through a model: forward, and backward of the units it reaches."""

    def __init__(
        self, index: PlanIndex, tier: Tier, counts: PlanMetrics, device: torch.device
    ) -> None:
        self.index, self.tier, self.counts, self.device = index, tier, counts, device
        self.diverged = False
        self._position, self._way = 0, index.way(0)
        self._expected = index.trace.packs[0]
        self._packed = 0  # in this position
        self._is_lost = False  # a unit was called that is not next in the plan
        self._inside = False  # a unit's forward is under way
        self._saves_inputs = False  # in a recomputed unit, where only inputs are saved
        self._unit = -1  # whose forward runs
        self._back = index.count  # whose backward runs
        self._held = weakref.WeakValueDictionary[tuple[int, int], SavedStorage]()
        self._swapped = defaultdict[int, list[weakref.ref[SavedStorage]]](list)  # by unit
        self._begin(0)

    def hooks(self) -> AbstractContextManager[object]:
        """Return the context of the model's forward."""
        if not self.index.swaps:  # saved tensors stay in memory, or are recomputed
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    # --- forward ----------------------------------------------------------------------------------

    def unit(
        self, segment: Segment, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a unit's forward; a unit inside another one belongs to the outer one."""
        if self._inside or not self._enter(segment):
            return call(*args, **kwargs)
        position, self._inside = self._position, True
        try:
            if self._way not in (RECOMPUTE, BOTH) or not torch.is_grad_enabled():
                return call(*args, **kwargs)
            self._expected, self._saves_inputs = self.index.trace.inputs[position], True
            # All buffers: in another mode a module may change more buffers than in planning.
            modules = self.index.modules[segment]
            rewound = _CountedRewind(modules, buffer_names(modules), self, self._unit)
            return call_checkpointed(call, args, kwargs, rewound)
        finally:
            self._inside = self._saves_inputs = False
            self._go_to(position + 1)

    def _enter(self, segment: Segment) -> bool:
        """Move to the position of a unit's call; return whether the plan has it."""
        calls, following = self.index.trace.calls, (self._position + 1) // 2
        if segment not in calls[following:]:
            self.diverge()
            self._is_lost = True
            return False
        self._go_to(2 * calls.index(segment, following) + 1)  # the units between were not called
        return True

    def _go_to(self, position: int) -> None:
        self._position, self._packed = position, 0
        self._way, self._expected = self.index.way(position), self.index.trace.packs[position]
        self._begin(self.index.trace.units[position])

    def _begin(self, unit: int) -> None:
        """Begin the forward of a unit: start and finish the copies out that are due."""
        for before in range(self._unit, unit):
            for held in self._swapped_by(before):
                held.send()
            self._leave(before + 1)
        self._unit = max(self._unit, unit)

    def end(self) -> None:
        """End forward."""
        self._begin(self.index.count - 1)

    def _leave(self, moment: int) -> None:
        """Wait for the copies out that must have ended before a moment."""
        for part in self.index.plan.simulated.waits[moment]:
            for held in self._swapped_by(part.owner):
                if (held.returns, held.leaves) == (part.returns, part.leaves):
                    held.leave()

    def _swapped_by(self, unit: int) -> list[SavedStorage]:
        """Return the living swapped storages that a unit was the first to save."""
        some = (reference() for reference in self._swapped.get(unit, ()))
        return [held for held in some if held is not None]

    def diverge(self) -> None:
        """Record that the model runs other operations than planned."""
        self.counts.diverged += not self.diverged
        self.diverged = True

    def pack(self, tensor: torch.Tensor) -> Any:
        """Saved-tensor hook: return the object that autograd keeps for a tensor."""
        if self._saves_inputs and not tensor.numel():  # saved by some versions of checkpoint
            return SavedTensor(tensor.detach(), version_of(tensor))
        place = self._packed
        self._packed += 1
        if place >= len(self._expected):
            self.diverge()
        elif not self._is_lost and self._expected[place] >= 0 and is_movable(tensor, self.device):
            return SavedView(self._hold(tensor, self._expected[place]), View.of(tensor), self._unit)
        return SavedTensor(tensor.detach(), version_of(tensor))  # itself would hold its history

    def _hold(self, tensor: torch.Tensor, leaves: int) -> SavedStorage:
        key = storage_key(tensor.untyped_storage()), version_of(tensor)
        held = self._held.get(key)
        if held is None or not held.is_in(key[0]):
            held = self._held[key] = SavedStorage(tensor, self, leaves)
            if self._way in (SWAP, BOTH):
                self._swapped[self._unit].append(weakref.ref(held))
        held.returns = self._unit
        return held

    # --- backward ---------------------------------------------------------------------------------

    def unpack(self, saved: SavedView | SavedTensor) -> torch.Tensor:
        """Saved-tensor hook: return the tensor; blocks until it is in memory."""
        if isinstance(saved, SavedTensor):
            if version_of(saved.tensor) != saved.version:
                raise RuntimeError(CHANGED.format(saved.tensor.nbytes))
            return saved.tensor
        self.come_to(saved.user)
        return saved.view.on(saved.held.content())

    def come_to(self, user: int) -> None:
        """Begin the backward of a unit, and of later units that were skipped."""
        for unit in range(self._back - 1, user - 1, -1):
            self._begin_backward(unit)
        self._back = min(self._back, user)

    def _begin_backward(self, unit: int) -> None:
        """Begin the backward of one unit: finish copies out, start copies back."""
        moment = 2 * self.index.count - 1 - unit
        self._leave(moment)
        for part in self.index.plan.simulated.fetches[moment]:
            for held in self._swapped_by(part.owner):
                if (held.returns, held.leaves) == (part.returns, part.leaves):
                    held.come()


class _CountedRewind(Rewound):
    """A context that counts the recomputation of a unit in its pass."""

    def __init__(self, modules: Modules, buffers: ChangedBuffers, owner: Pass, unit: int) -> None:
        super().__init__(modules, buffers)
        self._owner, self._unit = owner, unit

    def __enter__(self) -> None:
        self._owner.counts.recomputed += 1
        self._owner.come_to(self._unit)
        super().__enter__()
