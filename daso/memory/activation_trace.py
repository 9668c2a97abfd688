"""From what one iteration did: units, what can be recomputed from what, and what that takes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from daso.memory.observe import ObservedStorage, Observer, Op
from daso.memory.planner import Group, Unit

__all__ = [
    "ActivationTrace",
    "Closure",
    "Iteration",
    "Pack",
    "is_heavy",
    "keeps_statistics",
    "name_of",
    "write_script",
]

HEAVY = (  # parts of names: that cost much to compute, for what they make
    "conv",
    "addmm",
    "mm",
    "bmm",
    "baddbmm",
    "addbmm",
    "mv",
    "einsum",
    "_scaled_dot_product",
    "attention",
    "embedding",
    "rnn",
    "lstm",
    "gru",
    "linear",
    "linalg",
    "fft",
    "svd",
    "sort",
    "topk",
)
SHAPES_ALONE = ("empty_like", "new_empty", "new_empty_strided", "empty", "empty_strided")
MOST = 64  # operations of which one tensor is recomputed


def name_of(func: Any) -> str:
    """Return what an operation is called in torch."""
    name: str = func._schema.name
    return name.removeprefix("aten::")


def is_heavy(func: Any) -> bool:
    """Return whether an operation costs much to compute, or nothing is known of it."""
    if func.namespace != "aten":
        return True
    name = name_of(func)
    return any(
        name == part or name.strip("_").startswith(part) or (len(part) > 4 and part in name)
        for part in HEAVY
    )


def keeps_statistics(func: Any) -> bool:
    """Return whether an operation changes running statistics among its arguments."""
    return "batch_norm" in func._schema.name and "backward" not in func._schema.name


class Pack(NamedTuple):
    """A tensor that autograd saved.

    Args:
        storage: Number of its storage.
        op: Operation whose backward reads it.
        result: Whether that operation made it, or changed it.
    """

    storage: int
    op: int
    result: bool = False


@dataclass
class Iteration:
    """What was seen of one iteration.

    Args:
        observer: Its operations and storages.
        packs: What autograd saved in forward, in that order.
        forward: Operations of the model's forward: those below this number.
        loss: Operations below it are forward or of the loss; the rest is backward.
        moments: Operation with which the backward of each unit begins that was come to.
        bounds: First operations of units; 0 is the first.
        whole: Whether units are recomputed as wholes, not from their first operation's result.
        grads: Storages of gradients, which stay.
    """

    observer: Observer
    packs: list[Pack]
    forward: int
    loss: int
    moments: dict[int, int]
    bounds: list[int]
    whole: bool
    grads: set[int]

    @property
    def ops(self) -> Sequence[Op]:
        """All operations."""
        return self.observer.ops

    @property
    def seen(self) -> Sequence[ObservedStorage]:
        """All storages."""
        return self.observer.memory.seen

    @cached_property
    def unit_of(self) -> Sequence[int]:
        """Unit of each operation of forward, and of the loss, which is the last one's."""
        starts = set(self.bounds[1:])
        return list(accumulate(int(number in starts) for number in range(max(self.loss, 1))))

    def unit(self, op: int) -> int:
        """Return the unit of an operation of forward; of a later one, the last."""
        return self.unit_of[min(op, len(self.unit_of) - 1)]


@dataclass(slots=True)
class Closure:
    """What makes one unit's tail again.

    Args:
        ops: Operations, in their order.
        makes: Storages that they make.
        items: Of them, those that were saved.
        anchors: Saved storages of heads from which they are made.
        seconds: That it takes.
        working_bytes: That it needs besides the items, at most.
        ends: After each operation, storages that no later one reads.
    """

    ops: list[int]
    makes: set[int] = field(default_factory=set)
    items: set[int] = field(default_factory=set)
    anchors: set[int] = field(default_factory=set)
    seconds: float = 0.0
    working_bytes: int = 0
    ends: dict[int, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class ActivationTrace:
    """What is known of a model's iteration: whoever carries out a plan follows it.

    Args:
        funcs: What each operation of forward calls.
        reads: Storages that each reads, in the order of its arguments.
        makes: Storages of its results, in their order.
        outside: Storages that were there before.
        begins: Units, by their first operation.
        packs: Storage of each tensor that is saved, in their order; -1 where it stays as it is.
        users: Unit whose backward reads it.
        groups: Unit and name of the group of each storage that goes some way.
        nbytes: Of each such storage.
        closures: What makes the tails of units again, where they have one.
        units: For `daso.memory.planner`.
        names: What each unit begins with, to be read.
    """

    funcs: list[Any]
    reads: list[tuple[int, ...]]
    makes: list[tuple[int, ...]]
    outside: set[int]
    begins: dict[int, int]
    packs: list[int]
    users: list[int]
    groups: dict[int, tuple[int, str]]
    nbytes: dict[int, int]
    closures: dict[int, Closure]
    units: list[Unit]
    names: list[str]


class _Closures:
    """Finds what each saved storage can be recomputed from.

    Args:
        seen: The iteration.
        items: Saved storages that may go, in the order in which they were made.
    """

    def __init__(self, seen: Iteration, items: Sequence[int]) -> None:
        self.seen, self.items = seen, set(items)
        self.writers: dict[int, list[int]] = defaultdict(list)
        for number, op in enumerate(seen.ops[: seen.forward]):
            made = [one for one in op.makes if seen.seen[one].born == number]
            for one in dict.fromkeys((*made, *op.writes)):
                self.writers[one].append(number)
        self.heads: set[int] = set()
        self.tails: dict[int, Closure] = {}
        for item in items:
            found = self._closure(item)
            if found is None:
                self.heads.add(item)
            else:
                self.tails[item] = found

    def _closure(self, item: int) -> Closure | None:
        """Return what makes a storage again; None if that cannot be, or costs too much."""
        ops: set[int] = set()
        anchors: set[int] = set()
        if not self._need(item, self.seen.forward, ops, anchors, item) or len(ops) > MOST:
            return None
        return Closure(sorted(ops), anchors=anchors)

    def _need(self, one: int, before: int, ops: set[int], anchors: set[int], item: int) -> bool:
        """Add what makes a storage as it is before an operation; return whether that can be."""
        last = self.writers[one][-1] if self.writers[one] else -1
        if self.seen.seen[one].born < 0:
            return last < 0  # the next forward would change it before this one's backward
        if one != item and self._is_there(one, item):
            if one in self.items:
                anchors.add(one)
            return last < before
        numbers = [number for number in self.writers[one] if number < before]
        return all(self._run_again(number, one, ops, anchors, item) for number in numbers)

    def _run_again(
        self, number: int, one: int, ops: set[int], anchors: set[int], item: int
    ) -> bool:
        """Add an operation that makes a storage, with all it needs; return whether it may run."""
        if number in ops:
            return True
        op = self.seen.ops[number]
        if not self._may_run_again(op) or len(ops) > MOST:
            return False
        ops.add(number)
        if name_of(op.func) in SHAPES_ALONE:
            return True
        reads = {*op.reads} - {one}
        if keeps_statistics(op.func):
            reads -= {*op.writes}
        return all(self._need(read, number, ops, anchors, item) for read in reads)

    def _is_there(self, one: int, item: int) -> bool:
        """Return whether a storage is there when an item is recomputed."""
        if one in self.heads:
            return True
        if one in self.tails:  # of the same unit: made again with it
            return self._unit(one) != self._unit(item)
        return False

    def _unit(self, one: int) -> int:
        return self.seen.unit(self.seen.seen[one].born)

    def _may_run_again(self, op: Op) -> bool:
        if is_heavy(op.func) and not self.seen.whole:
            return False
        # Statistics of a norm are not changed again: it runs on copies of them.
        made_here = all(self.seen.seen[one].born >= 0 for one in op.writes)
        return op.plain and op.func.namespace == "aten" and (made_here or keeps_statistics(op.func))


def write_script(seen: Iteration, least: int) -> ActivationTrace:
    """Return the script of an iteration."""
    changed = _changed_after_they_were_saved(seen)
    saved = dict.fromkeys(pack.storage for pack in seen.packs if pack.storage >= 0)
    items = [one for one in saved if one not in changed and _may_go(seen, one, least)]
    items.sort(key=lambda one: seen.seen[one].born)
    found = _Closures(seen, items)
    _make_heads_of_what_needs_tails(found, items)
    groups = {
        one: (seen.unit(seen.seen[one].born), "tail" if one in found.tails else "head")
        for one in items
    }
    closures = _by_unit(seen, found.tails, groups)
    ops = seen.ops[: seen.forward]
    return ActivationTrace(
        [op.func for op in ops],
        [op.reads for op in ops],
        [op.makes for op in ops],
        {number for number, storage in enumerate(seen.seen) if storage.born < 0},
        {first: number for number, first in enumerate(seen.bounds)},
        [pack.storage if pack.storage in groups else -1 for pack in seen.packs],
        [seen.unit(pack.op) for pack in seen.packs],
        groups,
        {one: seen.seen[one].nbytes for one in items},
        closures,
        _units(seen, groups, closures),
        [name_of(ops[first].func) if ops else "" for first in seen.bounds],
    )


def _may_go(seen: Iteration, one: int, least: int) -> bool:
    """Return whether nobody but autograd holds a storage between forward and backward."""
    storage = seen.seen[one]
    return storage.born >= 0 and storage.nbytes >= least and storage.died <= seen.loss


def _changed_after_they_were_saved(seen: Iteration) -> set[int]:
    """Return storages of which autograd is to say in backward that they have changed."""
    last: dict[int, int] = {}
    for number, op in enumerate(seen.ops[: seen.forward]):
        last |= dict.fromkeys(op.writes, number)
    return {
        pack.storage
        for pack in seen.packs
        if last.get(pack.storage, -1) > pack.op - (not pack.result)
    }


def _make_heads_of_what_needs_tails(found: _Closures, items: Sequence[int]) -> None:
    """Let nothing be recomputed from what is recomputed with another unit: that would go on."""
    for item in items:
        closure = found.tails.get(item)
        if closure is not None and any(anchor in found.tails for anchor in closure.anchors):
            del found.tails[item]
            found.heads.add(item)


def _by_unit(
    seen: Iteration, tails: Mapping[int, Closure], groups: Mapping[int, tuple[int, str]]
) -> dict[int, Closure]:
    """Return the closures of units: of all items of their tails together."""
    found: dict[int, Closure] = {}
    for item, closure in tails.items():
        unit = found.setdefault(groups[item][0], Closure([]))
        unit.ops = sorted({*unit.ops, *closure.ops})
        unit.items.add(item)
        unit.anchors |= closure.anchors
    for unit in found.values():
        ops = [seen.ops[number] for number in unit.ops]
        unit.anchors -= unit.items
        made = {one for op in ops for one in op.makes} - unit.anchors
        unit.makes = {one for one in made if seen.seen[one].born in unit.ops}
        unit.seconds = sum(op.seconds for op in ops)
        _let_end(seen, unit)
    return found


def _let_end(seen: Iteration, unit: Closure) -> None:
    """Find when what is made on the way is not needed any more, and how much there is of it."""
    last: dict[int, int] = {}
    for number in unit.ops:
        for one in (*seen.ops[number].reads, *seen.ops[number].makes):
            if one in unit.makes and one not in unit.items:
                last[one] = number
    for one, number in last.items():
        unit.ends.setdefault(number, []).append(one)
    there = 0
    for number in unit.ops:
        new = {one for one in seen.ops[number].makes if seen.seen[one].born == number}
        there += sum(seen.seen[one].nbytes for one in new & set(last))
        unit.working_bytes = max(unit.working_bytes, there)
        there -= sum(seen.seen[one].nbytes for one in unit.ends.get(number, ()))


def _units(
    seen: Iteration, groups: Mapping[int, tuple[int, str]], closures: Mapping[int, Closure]
) -> list[Unit]:
    """Return what is to be known of units to plan."""
    users: dict[int, list[int]] = defaultdict(list)
    for pack in seen.packs:
        users[pack.storage].append(seen.unit(pack.op))
    returns = {one: max(users[one], default=0) for one in groups}
    for number, closure in closures.items():
        first = max(returns[one] for one in closure.items)
        for one in closure.anchors:
            returns[one] = max(returns[one], first, number)
    times, working = _work(seen, set(groups))
    units = []
    for number in range(len(seen.bounds)):
        closure = closures.get(number, Closure([]))
        units.append(
            Unit(
                _group(seen, number, _of(groups, number, "head"), returns),
                _group(seen, number, _of(groups, number, "tail"), returns),
                times[0][number],
                times[1][number],
                closure.seconds,
                working[0][number],
                working[1][number],
                closure.working_bytes,
            )
        )
    return units


def _of(groups: Mapping[int, tuple[int, str]], number: int, name: str) -> list[int]:
    return [one for one, group in groups.items() if group == (number, name)]


def _group(seen: Iteration, number: int, items: Iterable[int], returns: Mapping[int, int]) -> Group:
    items = list(items)
    leaves = max((seen.unit(seen.seen[one].died - 1) for one in items), default=number)
    back = max((returns[one] for one in items), default=number)
    nbytes = sum(seen.seen[one].nbytes for one in items)
    return Group(nbytes, max(leaves, number), max(back, number))


def _work(seen: Iteration, items: set[int]) -> tuple[list[list[float]], list[list[int]]]:
    """Return seconds, and bytes besides items and gradients, of units' forward and backward."""
    count = len(seen.bounds)
    seconds = [[0.0] * count, [0.0] * count]
    nbytes = [[0] * count, [0] * count]
    live = seen.observer.live(items | seen.grads)
    starts = {op: unit for unit, op in seen.moments.items()}
    backward = count - 1
    for number, op in enumerate(seen.ops):
        if number < seen.loss:
            way, unit = 0, seen.unit(number)
        else:
            backward = min(backward, starts.get(number, backward))
            way, unit = 1, backward
        seconds[way][unit] += op.seconds
        nbytes[way][unit] = max(nbytes[way][unit], live[number])
    for unit in range(count):  # a unit that nothing was seen of has what is there around it
        nbytes[1][unit] = nbytes[1][unit] or max(nbytes[1], default=0)
    return seconds, nbytes
