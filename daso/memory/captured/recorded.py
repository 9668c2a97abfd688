"""Recording of a step's graph: the memory that its operations need, and for how long."""

import operator
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from daso.memory.captured.planner import Block
from daso.memory.captured.writes import (
    EMPTY,
    Make,
    allocating,
    as_list,
    candidates,
    equal_values,
    in_place,
)
from daso.torch_private import OpOverload, schema_of, storage_key

aten = torch.ops.aten


class UnfitError(Exception):
    """Raised with the reason why a step cannot run from a recording."""


class TensorView(NamedTuple):
    """Block and layout of a tensor."""

    home: int  # its block; outside the arena, -1 - index of the value whose memory it uses
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements
    dtype: torch.dtype


class Step(NamedTuple):
    """An operation of a recording."""

    node: Node
    way: str  # "out", "in place" or "allocates"
    make: Make
    outs: tuple[TensorView | None, ...]  # of its new results; None for the others


class Output(NamedTuple):
    """A result of a step: the loss or a gradient."""

    node: Node
    step: int  # number of operations that run before it is complete
    alone: bool  # its memory may become ``.grad``: laid out like it, and used by nothing else


@dataclass(slots=True)
class Recording:
    """A step's operations, and the places of their tensors.

    Args:
        graph: The operations, in order.
        roots: Nodes of values outside the arena: inputs, then constants of the graph.
        own: The constants.
        steps: Operations to run.
        outside: Views of values outside; for an operation in place, with the node that it returns.
        places: Place of each node; a list for an operation with several results.
        blocks: Storages that operations made, with their lifetimes.
        loose: Blocks that an operation allocates itself.
        outputs: Loss and gradients; None for a parameter without one.
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
        """Count the operations that run in a way, by name."""
        names = Counter(str(step.node.target) for step in self.steps if step.way == way)
        return dict(sorted(names.items()))


def record(graph: GraphModule, values: Sequence[torch.Tensor], fixed: range) -> Recording:
    """Run a graph once, and record its operations and their memory."""
    recorder = _Recorder(graph, values, fixed)
    last = {used: node for node in graph.graph.nodes for used in node.all_input_nodes}
    for node in graph.graph.nodes:
        if node.op != "output":
            recorder.add(node)
        recorder.forget(used for used in node.all_input_nodes if last[used] is node)
    return recorder.finish()


class _Execution(NamedTuple):
    """Execution of an operation, with arguments and results."""

    node: Node
    op: OpOverload
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[Any]  # tensors or None


class _Recorder:
    """Runs a graph's nodes one by one, and records each."""

    def __init__(self, graph: GraphModule, values: Sequence[torch.Tensor], fixed: range) -> None:
        self.recording = Recording(graph.graph)
        self._graph = graph
        self._values = values
        self._fixed = fixed
        self._env: dict[Node, Any] = {}
        self._results = as_list(graph.graph.output_node().args[0])
        self._moments: dict[Node, int] = {}  # by result: number of operations before it

    def add(self, node: Node) -> None:
        if node.op == "placeholder":
            self._root(node, self._values[len(self.recording.roots)])
        elif node.op == "get_attr":
            self._constant(node)
        elif node.target is operator.getitem:
            self._item(node)
        else:
            self._operation(node)
        if node in self._results:
            self._moments[node] = len(self.recording.steps)

    def forget(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            del self._env[node]

    def finish(self) -> Recording:
        homes = [self.recording.places[node].home for node in self._results if node is not None]
        self.recording.outputs = [
            None if node is None else self._output(index, node, homes)
            for index, node in enumerate(self._results)
        ]
        return self.recording

    def _output(self, index: int, node: Node, homes: Sequence[int]) -> Output:
        place, step = self.recording.places[node], self._moments[node]
        if place.home < 0:
            return Output(node, step, alone=False)
        block = self.recording.blocks[place.home]
        self.recording.blocks[place.home] = block._replace(end=max(block.end, step))
        others = block.end > step or homes.count(place.home) > 1
        alone = index > 0 and not others and _is_gradient(place, block, self._values[index - 1])
        return Output(node, step, alone=alone)

    def _root(self, node: Node, value: torch.Tensor) -> None:
        _check(value, self._values[0].device)
        self.recording.places[node] = _view_of(value, -1 - len(self.recording.roots))
        self.recording.roots.append(node)
        self._env[node] = value

    def _constant(self, node: Node) -> None:
        own = getattr(self._graph, str(node.target))
        if not isinstance(own, torch.Tensor) or own.requires_grad:
            raise UnfitError("it uses a tensor that requires a gradient but is not a parameter")
        self.recording.own.append(own)
        self._root(node, own)

    def _item(self, node: Node) -> None:
        source, index = node.args
        self._env[node] = self._env[source][index]  # type: ignore[index]
        place = self.recording.places[node] = self.recording.places[source][index]  # type: ignore[index]
        if place is not None and place.home < 0:
            self.recording.outside.append((node, None))

    def _operation(self, node: Node) -> None:
        ran = self._run(node)
        homes = {
            _storage(self._env[tensor]): self.recording.places[tensor].home
            for tensor in node.all_input_nodes
        }
        fresh = [tensor is not None and _storage(tensor) not in homes for tensor in ran.results]
        way, make = _how(ran, fresh)
        for tensor in _stored_results(ran, way):
            if _storage(tensor) not in homes:
                homes[_storage(tensor)] = self._block(tensor, way)
        places = [_located(tensor, homes) for tensor in ran.results]
        several = isinstance(self._env[node], (tuple, list))
        self.recording.places[node] = places if several else places[0]
        self._note_outside(ran, places, way)
        if way not in {"view", "empty"}:
            outs = [place if new else None for place, new in zip(places, fresh, strict=True)]
            for used in node.all_input_nodes:
                self._use(used)
            self.recording.steps.append(Step(node, way, make, tuple(outs)))

    def _run(self, node: Node) -> _Execution:
        op = node.target
        if not isinstance(op, OpOverload):
            raise UnfitError(f"it runs {op}, which is not one of torch's operations")
        args = filled(node.args, self._env)
        kwargs = {name: filled(argument, self._env) for name, argument in node.kwargs.items()}
        if _sized_by_values(op, args):
            raise UnfitError(f"the result size of {op} depends on values")
        self._check_writes(node, op)
        outcome = self._env[node] = op(*args, **kwargs)
        results = as_list(outcome)
        for result in results:
            _check(result, self._values[0].device)
        return _Execution(node, op, args, kwargs, results)

    def _check_writes(self, node: Node, op: OpOverload) -> None:
        for index, argument in enumerate(schema_of(op).arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            by_name = node.kwargs.get(argument.name)
            for written in as_list(node.args[index] if index < len(node.args) else by_name):
                value = (
                    -1 - self.recording.places[written].home if isinstance(written, Node) else -1
                )
                if value in self._fixed or value >= len(self._values):
                    raise UnfitError(f"{op} changes an input or a constant")

    def _block(self, tensor: torch.Tensor, way: str) -> int:
        if any(
            not step and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise UnfitError("an operation returned a tensor whose elements share memory")
        now = len(self.recording.steps)
        home = len(self.recording.blocks)
        self.recording.blocks.append(Block(tensor.untyped_storage().nbytes(), now, now + 1))
        if way == "allocates":
            self.recording.loose.add(home)
        return home

    def _use(self, node: Node) -> None:
        home = self.recording.places[node].home
        if home >= 0:
            blocks = self.recording.blocks
            blocks[home] = blocks[home]._replace(end=len(self.recording.steps) + 1)

    def _note_outside(self, ran: _Execution, places: Sequence[TensorView | None], way: str) -> None:
        if all(place is None or place.home >= 0 for place in places):
            return
        if way == "view":
            self.recording.outside.append((ran.node, None))
            return
        sources = [
            source
            for source in ran.node.all_input_nodes
            if self._env[source] is self._env[ran.node]
        ]
        if sources:
            self.recording.outside.append((ran.node, sources[0]))
        elif ran.node.users:
            raise UnfitError(f"{ran.op} returns a part of a tensor that it changes")


def _how(ran: _Execution, fresh: Sequence[bool]) -> tuple[str, Make]:
    """Return the way in which an operation runs from the recording, and its maker of calls."""
    if ran.op in EMPTY:
        return "empty", partial(in_place, ran.op)
    mutable = schema_of(ran.op).is_mutable
    if not any(fresh):
        is_view = not mutable and any(result is not None for result in ran.results)
        return "view" if is_view else "in place", partial(in_place, ran.op)
    if all(fresh) and not mutable:
        for make in candidates(ran.op):
            if _writes(make, ran):
                return "out", make
    return "allocates", partial(allocating, ran.op)


def _writes(make: Make, ran: _Execution) -> bool:
    """Return whether a call can write an operation's results, bit for bit, to given memory."""
    outs = [
        torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
        for result in ran.results
    ]
    before = [*map(_shape, outs)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # resizing an output warns
            make(outs, ran.args, ran.kwargs)()
    except Exception:  # any: the operation then allocates its results
        return False
    draws = torch.Tag.nondeterministic_seeded in ran.op.tags
    return before == [*map(_shape, outs)] and (draws or all(map(equal_values, outs, ran.results)))


def _shape(out: torch.Tensor) -> tuple[Any, ...]:
    return out.shape, out.stride(), out.data_ptr(), out.untyped_storage().nbytes()


def _stored_results(ran: _Execution, way: str) -> list[torch.Tensor]:
    """Return the results that get a block; of several allocated ones only those in use."""
    results = dict(enumerate(ran.results))
    if way == "allocates" and len(results) > 1:
        used = {user.args[1] for user in ran.node.users if user.users}
        results = {index: result for index, result in results.items() if index in used}
    return [result for result in results.values() if result is not None]


def _sized_by_values(op: OpOverload, args: Sequence[Any]) -> bool:
    if op is aten.index.Tensor:
        masks = {torch.bool, torch.uint8}
        return any(argument is not None and argument.dtype in masks for argument in args[1])
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return not tags.isdisjoint(op.tags)


def _check(value: Any, device: torch.device) -> None:
    if value is None:
        return
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise UnfitError("it uses values other than dense tensors")
    if value.device != device:
        raise UnfitError(f"it uses tensors on {value.device} besides {device}")


def _storage(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _located(tensor: torch.Tensor | None, homes: Mapping[int, int]) -> TensorView | None:
    home = None if tensor is None else homes.get(_storage(tensor))
    return None if tensor is None or home is None else _view_of(tensor, home)


def _view_of(tensor: torch.Tensor, home: int) -> TensorView:
    return TensorView(
        home, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype
    )


def _is_gradient(place: TensorView, block: Block, param: torch.Tensor) -> bool:
    """Return whether a tensor fills its block and is laid out as its parameter."""
    like = torch.empty_like(param, device="meta")
    sound = block.nbytes == param.numel() * param.dtype.itemsize and place.offset == 0
    return sound and (place.size, place.stride, place.dtype) == (
        like.size(),
        like.stride(),
        like.dtype,
    )


def filled(argument: Any, env: Mapping[Node, Any]) -> Any:
    """Return arguments with nodes replaced by their values."""
    if isinstance(argument, Node):
        return env[argument]
    if isinstance(argument, (tuple, list)):
        return [filled(item, env) for item in argument]
    return argument
