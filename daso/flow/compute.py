"""Nodes of a flow that compute: layers, functions, losses, with a small autograd graph each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from daso.errors import FlowError
from daso.flow.model.base import Base, Emit, Key, Pass, Payload, leaf, settled
from daso.flow.model.graph import Node
from daso.flow.model.signatures import draws
from daso.flow.model.weights import Weights

__all__ = ["Compute", "Loss", "gradients", "gradients_of_linear", "is_linear"]

MATRIX = 2  # dimensions


class _Batch:
    """Messages that a layer computed together, until all their gradients are there.

    Args:
        keys: Theirs.
        rows: How many rows each has.
        inputs: Put together.
        outputs: Likewise.
        weights: Tensors that forward computed with.
        version: Theirs.
    """

    __slots__ = ("grads", "inputs", "keys", "outputs", "rows", "version", "weights")

    def __init__(
        self,
        keys: Sequence[Key],
        rows: Sequence[int],
        inputs: Payload,
        outputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        version: int,
    ) -> None:
        self.keys, self.rows, self.inputs, self.outputs = keys, rows, inputs, outputs
        self.weights, self.version = weights, version
        self.grads: dict[Key, Payload] = {}

    def together(self) -> Payload:
        """Return the gradients of the outputs; 0 where a message brought none."""
        if len(self.keys) == 1:
            return self.grads[self.keys[0]]
        found: list[torch.Tensor | None] = []
        for place, output in enumerate(self.outputs):
            parts = [self.grads[key][place] for key in self.keys]
            if all(part is None for part in parts):
                found.append(None)
                continue
            whole = [
                output.new_zeros((rows, *output.shape[1:])) if part is None else part
                for part, rows in zip(parts, self.rows, strict=True)
            ]
            found.append(torch.cat(whole))
        return tuple(found)


class Compute(Base):
    """A layer or a function.

    Args:
        node: Which.
        all_: What is the same for all.
        weights: Of the layer; None: none are trained here.
    """

    def __init__(self, node: Node, all_: Pass, weights: Weights | None) -> None:
        super().__init__(node, all_)
        self.weights = weights
        self._one_by_one = node.kind == "function" or node.more == 1
        self._linear = weights is not None and is_linear(node.call)
        self._draws = node.kind == "layer" and draws(node.call)
        self.at: Key | None = None  # what the user's function is called for, if that is one message

    def forward(self, keys: Sequence[Key], payloads: Sequence[Payload]) -> Sequence[Emit]:
        """Compute for one message, or for several together; return the messages that leave."""
        if self._one_by_one:
            return [
                emit
                for key, payload in zip(keys, payloads, strict=True)
                for emit in self._forward([key], [payload])
            ]
        return self._forward(keys, payloads)

    def _forward(self, keys: Sequence[Key], payloads: Sequence[Payload]) -> Sequence[Emit]:
        self.at = keys[0] if len(keys) == 1 else None
        rows = [self._rows(payload) for payload in payloads] if len(keys) > 1 else []
        inputs = _joined(payloads) if rows else payloads[0]
        like = self._without_autograd(inputs)
        with torch.set_grad_enabled(self.all.trains and like is None):
            outputs = self._call(keys[0], inputs)
        if self.all.trains:
            weights = self.weights
            live, version = ((), 0) if weights is None else (weights.live, weights.version)
            batch = _Batch(keys, rows, inputs, outputs, live, version)
            for key in keys:
                self.keep(key, batch)
        if not rows:
            return [(False, 0, keys[0], tuple(leaf(one, like) for one in outputs))]
        self._check_rows(outputs, sum(rows))
        parts = zip(*(output.split(rows) for output in outputs), strict=True)
        return [
            (False, 0, key, tuple(leaf(one, like) for one in part))
            for key, part in zip(keys, parts, strict=True)
        ]

    def _without_autograd(self, inputs: Payload) -> torch.Tensor | None:
        """Return the weight of a layer whose gradients are two products; None: autograd's way."""
        (first, *_) = inputs
        if not self._linear or not self.all.trains or first is None or first.dim() != MATRIX:
            return None
        assert self.weights is not None
        autocasts = torch.is_autocast_enabled(first.device.type)
        return None if autocasts else self.weights.live[0]

    def _call(self, key: Key, inputs: Payload) -> tuple[torch.Tensor, ...]:
        call = self.node.call
        if self.node.kind == "function":
            outputs = call(self.item(key, inputs), *inputs)
        elif self._draws and self.all.trains:
            seed = hash((self.all.seed, self.node.index, *key)) & 0x7FFFFFFF
            with _drawing(seed, inputs):
                outputs = call(*inputs)
        else:
            outputs = call(*inputs)
        found = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = self.node.outputs[0]
        if len(found) != wanted or not all(isinstance(one, torch.Tensor) for one in found):
            raise FlowError(
                f"{self.node.kind} {self.node.name!r} must return as many tensors as its outputs "
                f"say, {wanted}, but it returned {', '.join(type(one).__name__ for one in found)}"
            )
        return found

    def _rows(self, payload: Payload) -> int:
        found = {one.shape[0] for one in payload if one is not None}
        if len(found) != 1:
            raise FlowError(
                f"messages that are computed together must have as many rows in each tensor, but "
                f"those of one for layer {self.node.name!r} are {sorted(found)}; give it batch=1"
            )
        return found.pop()

    def _check_rows(self, outputs: Sequence[torch.Tensor], rows: int) -> None:
        for output in outputs:
            if output.dim() == 0 or output.shape[0] != rows:
                raise FlowError(
                    f"a layer that computes messages together must return a row for each that it "
                    f"is given, but {self.node.name!r} made a tensor of shape "
                    f"{tuple(output.shape)} of {rows} rows; give it batch=1"
                )

    def backward(self, keys: Sequence[Key], payloads: Sequence[Payload]) -> Sequence[Emit]:
        """Compute gradients once those of all messages of a batch are there.

        The weights' are kept, those of what came in go back.
        """
        self.at = None
        if not self.all.trains:
            return [(True, 0, key, ()) for key in keys]
        if self.weights is not None:
            # One after the other: what is still in the cache keeps its weights.
            return [
                emit
                for key, payload in zip(keys, payloads, strict=True)
                for batch in self._gathered(key, payload)
                for emit in self._back_through(batch, self.weights)
            ]
        whole = [
            batch
            for key, payload in zip(keys, payloads, strict=True)
            for batch in self._gathered(key, payload)
        ]
        parts = [(batch.inputs, batch.outputs, batch.together()) for batch in whole]
        return [
            emit
            for batch, found in zip(whole, gradients_apart(parts), strict=True)
            for emit in _dealt(batch, found)
        ]

    def _gathered(self, key: Key, payload: Payload) -> Sequence[_Batch]:
        """Return the batch of which this was the last gradient; nothing if it was not."""
        batch = self.cache.pop(key)
        batch.grads[key] = payload
        return [batch] if len(batch.grads) == len(batch.keys) else []

    def _back_through(self, batch: _Batch, weights: Weights) -> Sequence[Emit]:
        self.at = batch.keys[0] if len(batch.keys) == 1 else None
        part = batch.inputs, batch.outputs, batch.together()
        uses_autograd = batch.outputs[0].requires_grad or not self._linear
        find = gradients if uses_autograd else gradients_of_linear
        found, of_weights = find(*part, batch.weights)
        weights.add(of_weights, batch.version, [key[0] for key in batch.keys])
        self._publish()
        return _dealt(batch, found)

    def finish(self, instance: int) -> None:
        """All that belongs to an instance is over, everywhere."""
        if self.weights is not None:
            self.weights.finish(instance)
            self._publish()

    def settle(self) -> None:
        """Take in what is left, between epochs."""
        if self.weights is not None:
            self.weights.step()
            self._publish()

    def take_up(self) -> None:
        """Compute from now on with what others made of the weights."""
        if self.weights is not None:
            self.weights.publish(in_use=bool(self.cache), changed=True)

    def _publish(self) -> None:
        assert self.weights is not None
        self.weights.publish(in_use=bool(self.cache))


class Loss(Compute):
    """Where gradients begin."""

    def forward(self, keys: Sequence[Key], payloads: Sequence[Payload]) -> Sequence[Emit]:
        """Compute losses and the gradients of what came."""
        losses = [self._loss_of(key, payload) for key, payload in zip(keys, payloads, strict=True)]
        if not self.all.trains:
            return [(True, 0, key, ()) for key in keys]
        parts = [
            (payload, (loss,), (torch.ones_like(loss),))
            for payload, loss in zip(payloads, losses, strict=True)
        ]
        self.at = None
        found = gradients_apart(parts)
        return [(True, 0, key, grads) for key, grads in zip(keys, found, strict=True)]

    def _loss_of(self, key: Key, payload: Payload) -> torch.Tensor:
        self.at = key
        with torch.set_grad_enabled(self.all.trains):
            found = self.node.call(self.item(key, payload), *payload)
        loss, more = found if isinstance(found, tuple) else (found, {})
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise FlowError(
                f"loss {self.node.name!r} must return a tensor of one number, or that and a dict, "
                f"not {found!r}"
            )
        reported = {name: float(one) for name, one in more.items()}
        self.all.results.append((key, float(loss), reported))
        return loss


def _dealt(batch: _Batch, found: Payload) -> Sequence[Emit]:
    """Return the messages that go back from a batch."""
    if not batch.rows:
        return [(True, 0, batch.keys[0], found)]
    parts = [
        [None] * len(batch.keys)
        if grad is None
        else [settled(one) for one in grad.split(batch.rows)]
        for grad in found
    ]
    return [
        (True, 0, key, tuple(part[place] for part in parts)) for place, key in enumerate(batch.keys)
    ]


Part = tuple[Payload, Sequence[torch.Tensor], Payload]  # inputs, outputs, and their gradients


def gradients_apart(parts: Sequence[Part]) -> list[Payload]:
    """Return the gradients of the inputs of parts that share nothing, in one call of autograd.

    What is then added is the same as in a call for each.
    """
    if len(parts) == 1:
        return [gradients(*parts[0], ())[0]]
    found: list[Payload] = []
    for some in _without_shared(parts):
        inputs = [one for part in some for one in part[0]]
        outputs = [one for part in some for one in part[1]]
        grads = [one for part in some for one in part[2]]
        every = iter(gradients(inputs, outputs, grads, ())[0])
        found += [tuple(next(every) for _ in part[0]) for part in some]
    return found


def _without_shared(parts: Sequence[Part]) -> list[list[Part]]:
    """Cut parts, in their order, so that none of a piece has an input of another there."""
    pieces: list[list[Part]] = [[]]
    seen: set[int] = set()
    for part in parts:
        own = {id(one) for one in part[0]}
        if own & seen:
            pieces.append([])
            seen = set()
        pieces[-1].append(part)
        seen |= own
    return pieces


def gradients(
    inputs: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor],
) -> tuple[Payload, Payload]:
    """Return the gradients of inputs and weights; None where there is none."""
    roots = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if grad is not None and output.requires_grad
    ]
    wanted = [one for one in inputs if one is not None and one.requires_grad]
    if not roots or not (wanted or weights):
        return (None,) * len(inputs), (None,) * len(weights)
    ends, starts = zip(*roots, strict=True)
    # What `torch.autograd.grad` calls: its checks take as long as backward of a small layer.
    run = torch.autograd.Variable._execution_engine.run_backward
    asked = (*wanted, *weights)
    found = iter(run(ends, starts, False, False, asked, True, accumulate_grad=False))
    of_inputs = tuple(
        _settled(next(found)) if one is not None and one.requires_grad else None for one in inputs
    )
    return of_inputs, tuple(found)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is torch's own linear layer, all of which is trained, and nothing more."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return (
        type(module) is nn.Linear
        and not any((*hooks, module._backward_pre_hooks, "forward" in module.__dict__))
        and all(p.requires_grad and not p._backward_hooks for p in module.parameters())
    )


def gradients_of_linear(
    inputs: Sequence[torch.Tensor | None],
    _outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor],
) -> tuple[Payload, Payload]:
    """Return what `gradients` does, to the same bits, for a linear layer, whose inputs are rows."""
    (rows,), (grad,), (weight, *bias) = inputs, grads, weights
    if grad is None or rows is None:
        return (None,), (None,) * len(weights)
    of_rows = settled(grad.mm(weight)) if rows.requires_grad else None
    return (of_rows,), (grad.t().mm(rows), *(grad.sum(0) for _ in bias))


def _settled(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else settled(grad)


def _joined(payloads: Sequence[Payload]) -> Payload:
    """Put the rows of messages together."""
    found = []
    for parts in zip(*payloads, strict=True):
        there = [part for part in parts if part is not None]
        wants = any(part.requires_grad for part in there)
        found.append(torch.cat(there).requires_grad_(wants))
    return tuple(found)


@contextmanager
def _drawing(seed: int, inputs: Payload) -> Iterator[None]:
    """Draw random numbers from a seed, and leave those of the program alone.

    `torch.manual_seed` would take 0.25 ms without CUDA, and seed every device with it.
    """
    places = {one.device.index for one in inputs if one is not None and one.is_cuda}
    used = [torch.cuda.default_generators[place] for place in sorted(places)]
    generators = [torch.default_generator, *used]
    before = [one.get_state() for one in generators]
    for one in generators:
        one.manual_seed(seed)
    try:
        yield
    finally:
        for one, state in zip(generators, before, strict=True):
            one.set_state(state)
