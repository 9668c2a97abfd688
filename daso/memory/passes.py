"""A plan carried out: one pass through a model, forward and backward."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from daso.memory.activation_trace import ActivationTrace, Closure
from daso.memory.observe import bytes_of, counts, has_storage, tensors_in
from daso.memory.planner import KEEP, RECOMPUTE, SWAP, Part, Plan, decision
from daso.memory.profile import View
from daso.memory.recompute import RecomputeSegment
from daso.memory.tiers import Copying, Tier
from daso.plan.layout import aligned

__all__ = ["Follower", "Pass", "PlanMetrics", "Steps"]


@dataclass(slots=True)
class PlanMetrics:
    """What passes did so far.

    Args:
        passes: How many there were.
        strayed: Passes in which the model did not do what was planned for, or had more to save.
        swapped_bytes: To the second memory.
        made_again: Tails.
        resident_bytes: Of all that was saved and goes some way, now.
        most_resident_bytes: At most.
    """

    passes: int = 0
    strayed: int = 0
    swapped_bytes: int = 0
    made_again: int = 0
    resident_bytes: int = 0
    most_resident_bytes: int = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that came, or went."""
        self.resident_bytes += nbytes
        self.most_resident_bytes = max(self.most_resident_bytes, self.resident_bytes)


class Steps:
    """What a plan says, by what it is asked for.

    Args:
        script: The model's.
        plan: For its units.
    """

    def __init__(self, script: ActivationTrace, plan: Plan) -> None:
        self.script, self.plan, self.count = script, plan, len(script.units)
        self.decisions = {
            one: decision(plan.ways[unit], name) for one, (unit, name) in script.groups.items()
        }
        self.parts = {one: Part(*group) for one, group in script.groups.items()}
        self.swapped = defaultdict[Part, list[int]](list)  # storages
        swapped = [one for one, way in self.decisions.items() if way == SWAP]
        for one in swapped:
            self.swapped[self.parts[one]].append(one)
        spans = aligned([script.nbytes[one] for one in swapped])
        self.at = {one: span.start for one, span in zip(swapped, spans, strict=True)}
        self.slab_bytes = spans[-1].stop if spans else 0  # in the second memory, of a pass
        self.sends = defaultdict[int, list[Part]](list)  # after whose forward
        for part in self.swapped:
            self.sends[getattr(script.units[part.unit], part.name).leaves].append(part)
        self.closures = {
            unit: closure
            for unit, closure in script.closures.items()
            if decision(plan.ways[unit], "tail") == RECOMPUTE
        }
        self.noted = _users(self.closures, lambda closure: closure.ops)  # units, by operation
        self.anchors = _users(self.closures, lambda closure: closure.anchors)  # by storage

    @property
    def follows(self) -> bool:
        """Whether anything goes."""
        return any(way != KEEP for way in self.decisions.values())


def _users(
    closures: Mapping[int, Closure], of: Callable[[Closure], Iterable[int]]
) -> dict[int, list[int]]:
    """Return the units whose closures have something, by that."""
    found: dict[int, list[int]] = {}
    for unit, closure in closures.items():
        for one in of(closure):
            found.setdefault(one, []).append(unit)
    return found


class SavedTensor:
    """A saved storage, wherever it is.

    Args:
        number: Of the storage.
        nbytes: Its size.
        owner: The pass.
        tail: What makes it again; None: it is kept, or goes to the second memory.
    """

    __slots__ = (
        "__weakref__",
        "_away",
        "_base",
        "_coming",
        "_leaving",
        "_owner",
        "_tail",
        "_version",
        "nbytes",
        "number",
    )

    def __init__(
        self, number: int, nbytes: int, owner: "Pass", tail: RecomputeSegment | None
    ) -> None:
        self.number, self.nbytes, self._owner, self._tail = number, nbytes, owner, tail
        self._base: torch.Tensor | None = None
        self._leaving: Copying | None = None
        self._coming: Copying | None = None
        self._away = False
        self._version = 0

    def fill(self, tensor: torch.Tensor) -> None:
        """Take a tensor that lies in it: it is there."""
        self._owner.counts.add(self.nbytes)
        self._base = tensor.detach()
        self._version = self._base._version

    def send(self) -> None:
        """Begin to copy it to the second memory."""
        assert self._base is not None
        self._leaving = self._owner.tier.out(bytes_of(self._base), self._owner.at(self.number))
        self._owner.copies[self.number] = self._leaving
        self._owner.counts.swapped_bytes += self.nbytes

    def leave(self) -> None:
        """Go, when the copy to the second memory has ended; blocks until then."""
        if self._leaving is None:
            return
        self._leaving.wait()
        self._check()
        self._base, self._leaving, self._away = None, None, True
        self._owner.counts.add(-self.nbytes)

    def _check(self) -> None:
        if self._base is not None and self._base._version != self._version:
            raise RuntimeError(CHANGED.format(self.nbytes))

    def come(self) -> None:
        """Begin to copy it back, unless it has not left."""
        self._stay()
        if self._away:
            self._away = False
            row = torch.empty(self.nbytes, dtype=torch.uint8, device=self._owner.device)
            self.fill(row)
            self._coming = self._owner.tier.back(row, self._owner.at(self.number))

    def _stay(self) -> None:
        if self._leaving is not None:
            self._leaving.drop()
            self._leaving = None

    def content(self) -> torch.Tensor:
        """Return a tensor that lies in it; blocks until it is there."""
        if self._base is None and self._tail is not None:
            self._owner.counts.made_again += 1
            self._tail.make()
        self.come()
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
            assert self._base is not None
            self._version = self._base._version  # the copy itself changed it
        self._check()
        assert self._base is not None
        return self._base

    def __del__(self) -> None:
        self._stay()
        if self._base is not None:
            self._owner.counts.add(-self.nbytes)


CHANGED = (
    "what autograd saved must not change before backward, but a tensor of {:,} bytes was modified "
    "by an inplace operation; change a copy of it"
)


class Kept(NamedTuple):
    """What autograd keeps of a tensor that stays as it is."""

    tensor: torch.Tensor
    version: int


class Handle(NamedTuple):
    """What autograd keeps of a tensor."""

    held: SavedTensor
    view: View
    user: int  # unit whose backward reads it


class _Storages:
    """Which storage of a plan a tensor of this pass lies in.

    Args:
        script: The plan's.
    """

    def __init__(self, script: ActivationTrace) -> None:
        self._script = script
        self._numbers: dict[int, int] = {}  # by address
        self._outside: set[int] = set()  # that were met

    def is_number(self, tensor: torch.Tensor, number: int) -> bool:
        """Return whether a tensor lies in the storage that the plan means."""
        if not has_storage(tensor):
            return False
        address = tensor.untyped_storage()._cdata
        if number in self._script.outside and number not in self._outside:
            self._outside.add(number)
            self._numbers[address] = number
        return self._numbers.get(address) == number

    def reads(self, tensors: list[torch.Tensor], number: int) -> bool:
        """Return whether an operation reads what the plan means."""
        expected = self._script.reads[number]
        return len(tensors) == len(expected) and all(map(self.is_number, tensors, expected))

    def made(self, tensors: list[torch.Tensor], number: int) -> bool:
        """Take what an operation made; return whether it is as much as the plan means."""
        expected = self._script.makes[number]
        for tensor, one in zip(tensors, expected, strict=False):
            self._numbers[tensor.untyped_storage()._cdata] = one
        return len(tensors) == len(expected)


class Pass:
    """One pass through a model.

    Args:
        steps: What to do when.
        tier: The second memory.
        counts: What passes did so far.
        device: Where the model is.
    """

    def __init__(self, steps: Steps, tier: Tier, counts: PlanMetrics, device: torch.device) -> None:
        self.steps, self.tier, self.counts, self.device = steps, tier, counts, device
        self.held: weakref.WeakValueDictionary[int, SavedTensor] = weakref.WeakValueDictionary()
        self._tails = {unit: RecomputeSegment(closure) for unit, closure in steps.closures.items()}
        self.unit = -1  # whose forward it is
        self.back = steps.count  # whose backward it is
        self.strayed = self.beyond = False
        self._saved = 0
        self.storages = _Storages(steps.script)
        self._swapped: dict[Part, list[weakref.ref[SavedTensor]]] = {}
        self.copies: dict[int, Copying] = {}  # to the second memory, by storage
        self._lease = tier.lease(steps.slab_bytes) if steps.slab_bytes else 0
        if steps.slab_bytes:
            weakref.finalize(self, tier.release, self._lease, steps.slab_bytes)

    def at(self, number: int) -> int:
        """Return where a storage lies in the second memory."""
        return self._lease + self.steps.at[number]

    # --- forward ----------------------------------------------------------------------------------

    def begin(self, unit: int) -> None:
        """Begin the forward of a unit: what has to go begins to, what must have gone has."""
        for before in range(self.unit, unit):
            self._send(before)
        self.unit = unit
        self._leave(self.steps.plan.course.waits[unit])

    def end(self) -> None:
        """End forward."""
        for unit in range(self.unit, self.steps.count):
            self._send(unit)
        if not self.strayed and self._saved != len(self.steps.script.packs):
            self.diverge()
        self._tails.clear()  # they belong to what is made of them

    def drop(self) -> None:
        """Forget about forward, which failed."""
        self._tails.clear()

    def _send(self, unit: int) -> None:
        for part in self.steps.sends.get(unit, ()):
            for held in self._those(part):
                held.send()

    def _leave(self, parts: tuple[Part, ...]) -> None:
        for part in parts:
            for held in self._those(part):
                held.leave()
            for number in self.steps.swapped[part]:  # of what nobody needs any more, too
                if number in self.copies:
                    self.copies.pop(number).wait()

    def _those(self, part: Part) -> list[SavedTensor]:
        """Return what is still needed of what goes to the second memory together."""
        some = (reference() for reference in self._swapped.get(part, ()))
        return [held for held in some if held is not None]

    def diverge(self) -> None:
        """Leave the plan: what is saved from here on stays."""
        if not self.strayed:
            with _disable_current_modes():
                for tail in self._tails.values():
                    tail.make_early()
        self.strayed = True
        self._count_as_strayed()

    def _count_as_strayed(self) -> None:
        self.counts.strayed += not self.beyond
        self.beyond = True

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take what autograd saves."""
        script, index = self.steps.script, self._saved
        self._saved += 1
        number = -1 if self.strayed or index >= len(script.packs) else script.packs[index]
        if number >= 0 and not self.storages.is_number(tensor, number):
            self.diverge()
            number = -1
        with _disable_current_modes():  # what is done here is not the model's
            if number < 0:  # stays as it is; itself would hold its own history
                return Kept(tensor.detach(), tensor._version)
            held = self.held.get(number)
            if held is None:
                held = self._hold(number, tensor)
        return Handle(held, View.of(tensor), script.users[index])

    def _hold(self, number: int, tensor: torch.Tensor) -> SavedTensor:
        part, way = self.steps.parts[number], self.steps.decisions[number]
        nbytes = tensor.untyped_storage().nbytes()
        larger = nbytes > self.steps.script.nbytes[number]
        if larger:
            self._count_as_strayed()
        tail = self._tails[part.unit] if way == RECOMPUTE else None
        self.held[number] = held = SavedTensor(number, nbytes, self, tail)
        if tail is not None:
            tail.items[number] = held
            return held
        held.fill(tensor)
        for unit in self.steps.anchors.get(number, ()):
            self._tails[unit].anchor(number, held)
        if way == SWAP and not larger:
            self._swapped.setdefault(part, []).append(weakref.ref(held))
        return held

    def take(self, number: int, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation; note it where it may run again."""
        script = self.steps.script
        tails = [self._tails[unit] for unit in self.steps.noted.get(number, ())]
        taken = [tail.take(number, func, args, kwargs, script.reads[number]) for tail in tails]
        found = func(*args, **kwargs)
        for tail, one in zip(tails, taken, strict=True):
            tail.note(one, found, script.makes[number])
        return found

    # --- backward ---------------------------------------------------------------------------------

    def unpack(self, saved: Handle | Kept) -> torch.Tensor:
        """Give autograd what it saved; blocks until it is there."""
        if isinstance(saved, Kept):
            if saved.tensor._version != saved.version:
                raise RuntimeError(CHANGED.format(saved.tensor.nbytes))
            return saved.tensor
        for unit in range(self.back - 1, saved.user - 1, -1):
            self._moment(unit)
        self.back = min(self.back, saved.user)
        return saved.view.on(saved.held.content())

    def _moment(self, unit: int) -> None:
        """Begin the backward of a unit."""
        course, moment = self.steps.plan.course, 2 * self.steps.count - 1 - unit
        self._leave(course.waits[moment])
        for part in course.fetches[moment]:
            for held in self._those(part):
                held.come()


class Follower(TorchDispatchMode):
    """Goes with a model's forward, operation by operation.

    Args:
        one: The pass.
    """

    def __init__(self, one: Pass) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pass, self._steps = one, one.steps
        self._next = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry an operation out; note it where it may run again."""
        kwargs = kwargs or {}
        if self._pass.strayed or not counts(func, args):
            return func(*args, **kwargs)
        number, script = self._next, self._steps.script
        self._next += 1
        if number >= len(script.funcs) or script.funcs[number] is not func:
            self._pass.diverge()
            return func(*args, **kwargs)
        if not self._pass.storages.reads(tensors_in((args, kwargs)), number):
            self._pass.diverge()
            return func(*args, **kwargs)
        if number in script.begins:
            self._pass.begin(script.begins[number])
        found = self._pass.take(number, func, args, kwargs)
        if not self._pass.storages.made(tensors_in(found), number):
            self._pass.diverge()
        return found
