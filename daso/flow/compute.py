"""Nodes of a flow that compute: layers, functions, losses, with a small autograd graph each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from daso.errors import FlowError
from daso.flow.model.base import Base, Emit, Key, Pass, Payload, leaf, settled
from daso.flow.model.node import Node
from daso.flow.model.signatures import draws
from daso.flow.model.weights import Weights
from daso.torch_private import gradients_of


class _Batch:
    """Messages that a layer computed together, until all their gradients arrived."""

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

    def output_grads(self) -> Payload:
        """Return the gradients of the outputs; 0 for messages without one."""
        if len(self.keys) == 1:
            return self.grads[self.keys[0]]
        grads: list[torch.Tensor | None] = []
        for place, output in enumerate(self.outputs):
            parts = [self.grads[key][place] for key in self.keys]
            if all(part is None for part in parts):
                grads.append(None)
                continue
            whole = [
                output.new_zeros((rows, *output.shape[1:])) if part is None else part
                for part, rows in zip(parts, self.rows, strict=True)
            ]
            grads.append(torch.cat(whole))
        return tuple(grads)


class Compute(Base):
    """A layer or a function."""

    def __init__(self, node: Node, all_: Pass, weights: Weights | None) -> None:
        super().__init__(node, all_)
        self.weights = weights
        self._one_by_one = node.kind == "function" or node.more == 1
        self._draws = node.kind == "layer" and draws(node.call)
        self.at: Key | None = None  # message that the user's function runs for; None: several

    def forward(self, keys: Sequence[Key], payloads: Sequence[Payload]) -> Sequence[Emit]:
        """Compute one message, or several together; return the resulting messages."""
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
            seed = hash((self.all.seed, self.node.index, *key)) & 0x7FFFFFFF
            with _drawing(seed, inputs):
                outputs = call(*inputs)
        else:
            outputs = call(*inputs)
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        count = self.node.outputs[0]
        if len(tensors) != count or not all(isinstance(x, torch.Tensor) for x in tensors):
            raise FlowError(
                f"{self.node.kind} {self.node.name!r} must return as many tensors as its outputs "
                f"say, {count}, but it returned {', '.join(type(x).__name__ for x in tensors)}; "
                f"change either",
                code="layer-outputs-differ",
            )
        return tensors

    def _rows(self, payload: Payload) -> int:
        row_counts = {tensor.shape[0] for tensor in payload if tensor is not None}
        if len(row_counts) != 1:
            raise FlowError(
                f"messages that are computed together must have the same number of rows in each "
                f"tensor, but one for layer {self.node.name!r} has {sorted(row_counts)}; give it "
                f"batch=1",
                code="messages-of-unequal-rows",
            )
        return row_counts.pop()

    def _check_rows(self, outputs: Sequence[torch.Tensor], rows: int) -> None:
        for output in outputs:
            if output.dim() == 0 or output.shape[0] != rows:
                raise FlowError(
                    f"a layer that computes messages together must return one row per input row, "
                    f"but {self.node.name!r} returned a tensor of shape "
                    f"{tuple(output.shape)} for {rows} rows; give it batch=1",
                    code="rows-not-kept",
                )

    def backward(self, keys: Sequence[Key], payloads: Sequence[Payload]) -> Sequence[Emit]:
        """Return the gradients of inputs, once those of all messages of a batch arrived."""
        self.at = None
        if not self.all.trains:
            return [(True, 0, key, ()) for key in keys]
        if self.weights is not None:
            # One after the other: batches that are still in the cache keep their weights.
            return [
                emit
                for key, payload in zip(keys, payloads, strict=True)
                for batch in self._completed(key, payload)
                for emit in self._run_backward(batch, self.weights)
            ]
        batches = [
            batch
            for key, payload in zip(keys, payloads, strict=True)
            for batch in self._completed(key, payload)
        ]
        parts = [(batch.inputs, batch.outputs, batch.output_grads()) for batch in batches]
        return [
            emit
            for batch, grads in zip(batches, gradients_of_parts(parts), strict=True)
            for emit in _split_grads(batch, grads)
        ]

    def _completed(self, key: Key, payload: Payload) -> Sequence[_Batch]:
        """Return the batch that this gradient completes, if any."""
        batch = self.cache.pop(key)
        batch.grads[key] = payload
        return [batch] if len(batch.grads) == len(batch.keys) else []

    def _run_backward(self, batch: _Batch, weights: Weights) -> Sequence[Emit]:
        self.at = batch.keys[0] if len(batch.keys) == 1 else None
        part = batch.inputs, batch.outputs, batch.output_grads()
        of_inputs, of_weights = gradients(*part, batch.weights)
        weights.add(of_weights, batch.version, [key[0] for key in batch.keys])
        self._publish()
        return _split_grads(batch, of_inputs)

    def finish(self, instance: int) -> None:
        """Count a finished instance."""
        if self.weights is not None:
            self.weights.finish(instance)
            self._publish()

    def settle(self) -> None:
        """Step with the remaining gradients, between epochs."""
        if self.weights is not None:
            self.weights.step()
            self._publish()

    def use_exchanged_weights(self) -> None:
        """Compute with the weights that an exchange with other nodes changed."""
        if self.weights is not None:
            self.weights.publish(in_use=bool(self.cache), changed=True)

    def _publish(self) -> None:
        assert self.weights is not None
        self.weights.publish(in_use=bool(self.cache))


class Loss(Compute):
    """Computes losses, where gradients begin."""

    def forward(self, keys: Sequence[Key], payloads: Sequence[Payload]) -> Sequence[Emit]:
        """Compute losses and the gradients of their inputs."""
        losses = [self._loss_of(key, payload) for key, payload in zip(keys, payloads, strict=True)]
        if not self.all.trains:
            return [(True, 0, key, ()) for key in keys]
        parts = [
            (payload, (loss,), (torch.ones_like(loss),))
            for payload, loss in zip(payloads, losses, strict=True)
        ]
        self.at = None
        grads_of = gradients_of_parts(parts)
        return [(True, 0, key, grads) for key, grads in zip(keys, grads_of, strict=True)]

    def _loss_of(self, key: Key, payload: Payload) -> torch.Tensor:
        self.at = key
        with torch.set_grad_enabled(self.all.trains):
            result = self.node.call(self.item(key, payload), *payload)
        loss, more = result if isinstance(result, tuple) else (result, {})
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise FlowError(
                f"loss {self.node.name!r} must return a tensor of one number, or such a tensor and "
                f"a dict, not {result!r}",
                code="loss-not-a-number",
            )
        reported = {name: float(value) for name, value in more.items()}
        self.all.results.append((key, float(loss), reported))
        return loss


def _split_grads(batch: _Batch, grads: Payload) -> Sequence[Emit]:
    """Return the backward messages of a batch, one for each of its messages."""
    if not batch.rows:
        return [(True, 0, batch.keys[0], grads)]
    parts = [
        [None] * len(batch.keys)
        if grad is None
        else [settled(rows) for rows in grad.split(batch.rows)]
        for grad in grads
    ]
    return [
        (True, 0, key, tuple(part[place] for part in parts)) for place, key in enumerate(batch.keys)
    ]


Part = tuple[Payload, Sequence[torch.Tensor], Payload]  # inputs, outputs, and their gradients


def gradients_of_parts(parts: Sequence[Part]) -> list[Payload]:
    """Return the input gradients of separate parts, in one call of autograd."""
    if len(parts) == 1:
        return [gradients(*parts[0], ())[0]]
    of_parts: list[Payload] = []
    for some in _without_shared(parts):
        inputs = [tensor for part in some for tensor in part[0]]
        outputs = [tensor for part in some for tensor in part[1]]
        grads = [tensor for part in some for tensor in part[2]]
        every = iter(gradients(inputs, outputs, grads, ())[0])
        of_parts += [tuple(next(every) for _ in part[0]) for part in some]
    return of_parts


def _without_shared(parts: Sequence[Part]) -> list[list[Part]]:
    """Split parts into consecutive pieces; no two parts of a piece share an input."""
    pieces: list[list[Part]] = [[]]
    piece_inputs: set[int] = set()
    for part in parts:
        own = {id(tensor) for tensor in part[0]}
        if own & piece_inputs:
            pieces.append([])
            piece_inputs = set()
        pieces[-1].append(part)
        piece_inputs |= own
    return pieces


def gradients(
    inputs: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor],
) -> tuple[Payload, Payload]:
    """Return the gradients of inputs and of weights; None for a tensor without one."""
    roots = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if grad is not None and output.requires_grad
    ]
    differentiable = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    if not roots or not (differentiable or weights):
        return (None,) * len(inputs), (None,) * len(weights)
    ends, starts = zip(*roots, strict=True)
    results = iter(gradients_of(ends, starts, (*differentiable, *weights)))
    of_inputs = tuple(
        _settled(next(results)) if tensor is not None and tensor.requires_grad else None
        for tensor in inputs
    )
    return of_inputs, tuple(results)


def _settled(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else settled(grad)


def _joined(payloads: Sequence[Payload]) -> Payload:
    """Concatenate the rows of several messages."""
    joined = []
    for parts in zip(*payloads, strict=True):
        tensors = [part for part in parts if part is not None]
        wants = any(part.requires_grad for part in tensors)
        joined.append(torch.cat(tensors).requires_grad_(wants))
    return tuple(joined)


@contextmanager
def _drawing(seed: int, inputs: Payload) -> Iterator[None]:
    """Seed the random numbers of a block; `torch.manual_seed` would take 0.25 ms."""
    places = {x.device.index for x in inputs if x is not None and x.is_cuda}
    used = [torch.cuda.default_generators[place] for place in sorted(places)]
    generators = [torch.default_generator, *used]
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
