"""Nodes of a flow that compute: layers, functions, losses, with a small autograd graph each."""

from collections.abc import Sequence

import torch

from daso.errors import FlowError
from daso.flow.base import Base, Emit, Key, Pass, Payload, leaf, settled
from daso.flow.graph import Node
from daso.flow.signatures import draws
from daso.flow.weights import Weights

__all__ = ["Compute", "Loss"]


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
        self._draws = node.kind == "layer" and draws(node.call)

    def forward(self, keys: Sequence[Key], payloads: Sequence[Payload]) -> Sequence[Emit]:
        """Compute for one message, or for several together; return the messages that leave."""
        rows = [self._rows(payload) for payload in payloads] if len(keys) > 1 else []
        inputs = _joined(payloads) if rows else payloads[0]
        with torch.set_grad_enabled(self.all.trains):
            outputs = self._call(keys[0], inputs)
        if self.all.trains:
            weights = self.weights
            live, version = ((), 0) if weights is None else (weights.live, weights.version)
            batch = _Batch(keys, rows, inputs, outputs, live, version)
            for key in keys:
                self.keep(key, batch)
        if not rows:
            return [(False, 0, keys[0], tuple(map(leaf, outputs)))]
        self._check_rows(outputs, sum(rows))
        parts = zip(*(output.split(rows) for output in outputs), strict=True)
        return [
            (False, 0, key, tuple(map(leaf, part))) for key, part in zip(keys, parts, strict=True)
        ]

    def _call(self, key: Key, inputs: Payload) -> tuple[torch.Tensor, ...]:
        call = self.node.call
        if self.node.kind == "function":
            outputs = call(self.item(key, inputs), *inputs)
        elif self._draws and self.all.trains:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(hash((self.all.seed, self.node.index, *key)) & 0x7FFFFFFF)
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
        found = {len(one) for one in payload if one is not None}
        if len(found) != 1:
            raise FlowError(
                f"messages that are computed together must have as many rows in each tensor, but "
                f"those of one for layer {self.node.name!r} are {sorted(found)}; give it batch=1"
            )
        return found.pop()

    def _check_rows(self, outputs: Sequence[torch.Tensor], rows: int) -> None:
        for output in outputs:
            if output.dim() == 0 or len(output) != rows:
                raise FlowError(
                    f"a layer that computes messages together must return a row for each that it "
                    f"is given, but {self.node.name!r} made a tensor of shape "
                    f"{tuple(output.shape)} of {rows} rows; give it batch=1"
                )

    def backward(self, key: Key, payload: Payload) -> Sequence[Emit]:
        """Compute gradients once those of all messages of a batch are there.

        The weights' are kept, those of what came in go back.
        """
        if not self.all.trains:
            return [(True, 0, key, ())]
        batch = self.cache.pop(key)
        batch.grads[key] = payload
        if len(batch.grads) < len(batch.keys):
            return []
        found, of_weights = gradients(batch.inputs, batch.outputs, batch.together(), batch.weights)
        if self.weights is not None:
            instances = [key[0] for key in batch.keys]
            self.weights.add(of_weights, batch.version, instances)
            self._publish()
        if not batch.rows:
            return [(True, 0, key, found)]
        parts = [
            [None] * len(batch.keys)
            if grad is None
            else [settled(one) for one in grad.split(batch.rows)]
            for grad in found
        ]
        return [
            (True, 0, one, tuple(part[place] for part in parts))
            for place, one in enumerate(batch.keys)
        ]

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

    def _publish(self) -> None:
        assert self.weights is not None
        self.weights.publish(in_use=bool(self.cache))


class Loss(Compute):
    """Where gradients begin."""

    def forward(self, keys: Sequence[Key], payloads: Sequence[Payload]) -> Sequence[Emit]:
        """Compute the loss and the gradients of what came."""
        (key,), (payload,) = keys, payloads
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
        if not self.all.trains:
            return [(True, 0, key, ())]
        return [(True, 0, key, gradients(payload, (loss,), (torch.ones_like(loss),), ())[0])]


def gradients(
    inputs: Payload,
    outputs: Sequence[torch.Tensor],
    grads: Payload,
    weights: Sequence[torch.Tensor],
) -> tuple[Payload, Payload]:
    """Return the gradients of inputs and weights; None where there is none.

    Args:
        inputs: What was computed with.
        outputs: What came out.
        grads: Of the outputs.
        weights: What was computed with besides.
    """
    roots = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if grad is not None and output.requires_grad
    ]
    wanted = [one for one in inputs if one is not None and one.requires_grad]
    if not roots or not (wanted or weights):
        return (None,) * len(inputs), (None,) * len(weights)
    ends, starts = zip(*roots, strict=True)
    found = iter(torch.autograd.grad(ends, [*wanted, *weights], starts, allow_unused=True))
    of_inputs = tuple(
        _settled(next(found)) if one is not None and one.requires_grad else None for one in inputs
    )
    return of_inputs, tuple(found)


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
