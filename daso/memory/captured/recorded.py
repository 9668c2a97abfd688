"""A step's graph, run once to learn which memory its operations need, and for how long."""

import operator
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from daso.memory.captured.planner import Block
from daso.memory.captured.writes import EMPTY, Make, allocating, direct, flat, in_place, same

__all__ = ["Output", "Recording", "Step", "TensorView", "UnfitError", "filled", "record"]

aten = torch.ops.aten


class UnfitError(Exception):
    """A step cannot be run from a recording; why."""


class TensorView(NamedTuple):
    """Where a tensor lies."""

    home: int  # block; or, of what lies outside the arena, -1 - the value that it is part of
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements
    dtype: torch.dtype


class Step(NamedTuple):
    """An operation that is run."""

    node: Node
    way: str  # "out", "in place" or "allocates"
    make: Make
    outs: tuple[TensorView | None, ...]  # of what it returns and is to be kept


class Output(NamedTuple):
    """Something that a step returns."""

    node: Node
    step: int  # operations that run before it is there
    alone: bool  # its memory may become that of ``.grad``: laid out so, and nobody else's


@dataclass(slots=True)
class Recording:
    """A step's operations, and where their tensors lie.

    Args:
        graph: The operations, in their order.
        roots: Values that lie outside the arena: what is given, then what the graph itself has.
        own: The latter.
        steps: Operations that are run.
        outside: Views of what lies outside; of an operation in place, the node that it is.
        places: Of each node; a list of an operation with several results.
        blocks: Storages that operations made, and when they are needed.
        loose: Those of them that an operation allocates itself.
        outputs: Loss and gradients; None where a parameter gets none.
    """

    graph: Graph
    roots: list[Node] = field(default_factory=list)
    own: list[torch.Tensor] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    outside: list[tuple[Node, Node | None]] = field(default_factory=list)
    places: dict[Node, Any] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    loose: set[int] = field(default_factory=set)
    outputs: list[Output | None] = field(default_factory=list)

    def counted(self, way: str) -> dict[str, int]:
        """Count the operations that are run in some way, by name."""
        names = Counter(str(step.node.target) for step in self.steps if step.way == way)
        return dict(sorted(names.items()))


def record(graph: GraphModule, values: Sequence[torch.Tensor], fixed: range) -> Recording:
    """Run a graph once, and return where its tensors may lie."""
    recorder = _Recorder(graph, values, fixed)
    last = {used: node for node in graph.graph.nodes for used in node.all_input_nodes}
    for node in graph.graph.nodes:
        if node.op != "output":
            recorder.add(node)
        recorder.forget(used for used in node.all_input_nodes if last[used] is node)
    return recorder.finish()


class _Ran(NamedTuple):
    """An operation as it was run."""

    node: Node
    op: OpOverload
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[Any]  # tensors or None


class _Recorder:
    """Runs a graph's nodes one by one, and keeps what is known of each."""

    def __init__(self, graph: GraphModule, values: Sequence[torch.Tensor], fixed: range) -> None:
        self.made = Recording(graph.graph)
        self._graph = graph
        self._values = values
        self._fixed = fixed
        self._env: dict[Node, Any] = {}
        self._results = flat(graph.graph.output_node().args[0])
        self._moments: dict[Node, int] = {}  # of results: how many operations ran before

    def add(self, node: Node) -> None:
        if node.op == "placeholder":
            self._root(node, self._values[len(self.made.roots)])
        elif node.op == "get_attr":
            self._constant(node)
        elif node.target is operator.getitem:
            self._item(node)
        else:
            self._operation(node)
        if node in self._results:
            self._moments[node] = len(self.made.steps)

    def forget(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            del self._env[node]

    def finish(self) -> Recording:
        homes = [self.made.places[node].home for node in self._results if node is not None]
        self.made.outputs = [
            None if node is None else self._output(index, node, homes)
            for index, node in enumerate(self._results)
        ]
        return self.made

    def _output(self, index: int, node: Node, homes: Sequence[int]) -> Output:
        place, step = self.made.places[node], self._moments[node]
        if place.home < 0:
            return Output(node, step, alone=False)
        block = self.made.blocks[place.home]
        self.made.blocks[place.home] = block._replace(end=max(block.end, step))
        others = block.end > step or homes.count(place.home) > 1
        alone = index > 0 and not others and _is_gradient(place, block, self._values[index - 1])
        return Output(node, step, alone=alone)

    def _root(self, node: Node, value: torch.Tensor) -> None:
        _check(value, self._values[0].device)
        self.made.places[node] = _view_of(value, -1 - len(self.made.roots))
        self.made.roots.append(node)
        self._env[node] = value

    def _constant(self, node: Node) -> None:
        own = getattr(self._graph, str(node.target))
        if not isinstance(own, torch.Tensor) or own.requires_grad:
            raise UnfitError("it uses tensors that need a gradient and are none of its parameters")
        self.made.own.append(own)
        self._root(node, own)

    def _item(self, node: Node) -> None:
        source, index = node.args
        self._env[node] = self._env[source][index]  # type: ignore[index]
        place = self.made.places[node] = self.made.places[source][index]  # type: ignore[index]
        if place is not None and place.home < 0:
            self.made.outside.append((node, None))

    def _operation(self, node: Node) -> None:
        ran = self._run(node)
        homes = {
            _storage(self._env[one]): self.made.places[one].home for one in node.all_input_nodes
        }
        fresh = [one is not None and _storage(one) not in homes for one in ran.results]
        way, make = _how(ran, fresh)
        for one in _wanted(ran, way):
            if _storage(one) not in homes:
                homes[_storage(one)] = self._block(one, way)
        places = [_located(one, homes) for one in ran.results]
        several = isinstance(self._env[node], (tuple, list))
        self.made.places[node] = places if several else places[0]
        self._note_outside(ran, places, way)
        if way not in {"view", "empty"}:
            outs = [place if new else None for place, new in zip(places, fresh, strict=True)]
            for used in node.all_input_nodes:
                self._use(used)
            self.made.steps.append(Step(node, way, make, tuple(outs)))

    def _run(self, node: Node) -> _Ran:
        op = node.target
        if not isinstance(op, OpOverload):
            raise UnfitError(f"it runs {op}, which is none of torch's own operations")
        args = filled(node.args, self._env)
        kwargs = {name: filled(one, self._env) for name, one in node.kwargs.items()}
        if _sized_by_values(op, args):
            raise UnfitError(f"how much {op} returns depends on values")
        self._check_writes(node, op)
        found = self._env[node] = op(*args, **kwargs)
        results = flat(found)
        for one in results:
            _check(one, self._values[0].device)
        return _Ran(node, op, args, kwargs, results)

    def _check_writes(self, node: Node, op: OpOverload) -> None:
        for index, argument in enumerate(op._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            by_name = node.kwargs.get(argument.name)
            for one in flat(node.args[index] if index < len(node.args) else by_name):
                value = -1 - self.made.places[one].home if isinstance(one, Node) else -1
                if value in self._fixed or value >= len(self._values):
                    raise UnfitError(f"it changes, by {op}, what it is given or keeps")

    def _block(self, one: torch.Tensor, way: str) -> int:
        if any(not step and size > 1 for size, step in zip(one.shape, one.stride(), strict=True)):
            raise UnfitError("an operation returned a tensor whose elements share memory")
        now = len(self.made.steps)
        home = len(self.made.blocks)
        self.made.blocks.append(Block(one.untyped_storage().nbytes(), now, now + 1))
        if way == "allocates":
            self.made.loose.add(home)
        return home

    def _use(self, node: Node) -> None:
        home = self.made.places[node].home
        if home >= 0:
            blocks = self.made.blocks
            blocks[home] = blocks[home]._replace(end=len(self.made.steps) + 1)

    def _note_outside(self, ran: _Ran, places: Sequence[TensorView | None], way: str) -> None:
        if all(place is None or place.home >= 0 for place in places):
            return
        if way == "view":
            self.made.outside.append((ran.node, None))
            return
        given = [one for one in ran.node.all_input_nodes if self._env[one] is self._env[ran.node]]
        if given:
            self.made.outside.append((ran.node, given[0]))
        elif ran.node.users:
            raise UnfitError(f"what {ran.op} returns is part of what it changes")


def _how(ran: _Ran, fresh: Sequence[bool]) -> tuple[str, Make]:
    """Return how an operation is run again."""
    if ran.op in EMPTY:
        return "empty", partial(in_place, ran.op)
    mutable = ran.op._schema.is_mutable
    if not any(fresh):
        is_view = not mutable and any(one is not None for one in ran.results)
        return "view" if is_view else "in place", partial(in_place, ran.op)
    if all(fresh) and not mutable:
        for make in direct(ran.op):
            if _writes(make, ran):
                return "out", make
    return "allocates", partial(allocating, ran.op)


def _writes(make: Make, ran: _Ran) -> bool:
    """Whether an operation can write to given memory what it returned, to the bit."""
    outs = [
        torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
        for one in ran.results
    ]
    before = [*map(_shape, outs)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a resize
            make(outs, ran.args, ran.kwargs)()
    except Exception:  # whatever it is: the operation is then run as it is
        return False
    draws = torch.Tag.nondeterministic_seeded in ran.op.tags
    return before == [*map(_shape, outs)] and (draws or all(map(same, outs, ran.results)))


def _shape(out: torch.Tensor) -> tuple[Any, ...]:
    return out.shape, out.stride(), out.data_ptr(), out.untyped_storage().nbytes()


def _wanted(ran: _Ran, way: str) -> list[torch.Tensor]:
    """Return the results that get a place: of several that are allocated, those in use."""
    results = dict(enumerate(ran.results))
    if way == "allocates" and len(results) > 1:
        used = {user.args[1] for user in ran.node.users if user.users}
        results = {index: one for index, one in results.items() if index in used}
    return [one for one in results.values() if one is not None]


def _sized_by_values(op: OpOverload, args: Sequence[Any]) -> bool:
    if op is aten.index.Tensor:
        masks = {torch.bool, torch.uint8}
        return any(one is not None and one.dtype in masks for one in args[1])
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return not tags.isdisjoint(op.tags)


def _check(one: Any, device: torch.device) -> None:
    if one is None:
        return
    if not isinstance(one, torch.Tensor) or one.layout != torch.strided:
        raise UnfitError("it uses something else than dense tensors")
    if one.device != device:
        raise UnfitError(f"it uses tensors on {one.device} besides {device}")


def _storage(one: torch.Tensor) -> int:
    return int(one.untyped_storage()._cdata)


def _located(one: torch.Tensor | None, homes: Mapping[int, int]) -> TensorView | None:
    home = None if one is None else homes.get(_storage(one))
    return None if one is None or home is None else _view_of(one, home)


def _view_of(one: torch.Tensor, home: int) -> TensorView:
    return TensorView(home, one.size(), one.stride(), int(one.storage_offset()), one.dtype)


def _is_gradient(place: TensorView, block: Block, param: torch.Tensor) -> bool:
    """Return whether a tensor fills its block, and is laid out as its parameter."""
    like = torch.empty_like(param, device="meta")
    sound = block.nbytes == param.numel() * param.dtype.itemsize and place.offset == 0
    return sound and (place.size, place.stride, place.dtype) == (
        like.size(),
        like.stride(),
        like.dtype,
    )


def filled(what: Any, env: Mapping[Node, Any]) -> Any:
    """Return arguments with values in place of the nodes that stand for them."""
    if isinstance(what, Node):
        return env[what]
    if isinstance(what, (tuple, list)):
        return [filled(one, env) for one in what]
    return what
