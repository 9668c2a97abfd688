"""Partition of a model's rows among ranks, and their layout in messages."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from daso.plan.layout import Span, aligned
from daso.server.plan import owners_of, rows_of
from daso.torch_private import own_parameters
from daso.train.model.params import Named

NO_ROWS = Span(0, 0)
HOST = torch.device("cpu")


def layers_of(module: torch.nn.Module) -> tuple[list[str], Named, tuple[tuple[int, ...], ...]]:
    """Return the layers of a model: the modules that directly own trained parameters."""
    names: list[str] = []
    named: list[tuple[str, torch.Tensor]] = []
    layers: list[tuple[int, ...]] = []
    known_ids: set[int] = set()
    for prefix, submodule in module.named_modules():
        params = []
        for name, param in own_parameters(submodule).items():
            if param is not None and param.requires_grad and id(param) not in known_ids:
                known_ids.add(id(param))
                params.append(len(named))
                named.append((f"{prefix}.{name}".lstrip("."), param))
        if params:
            names.append(prefix)
            layers.append(tuple(params))
    return names, named, tuple(layers)


class Partition:
    """Divides the rows of every parameter among the ranks that update them."""

    # layers: for each layer, the indices of its parameters in `named`.
    def __init__(self, named: Named, layers: Sequence[Sequence[int]], ranks: int) -> None:
        self.named, self.layers, self.ranks = named, layers, ranks
        self.owners = owners_of(
            [sum(named[index][1].nbytes for index in params) for params in layers],
            [max(_rows(named[index][1]) for index in params) for params in layers],
            ranks,
        )
        owners = {
            index: ranks_of_layer
            for ranks_of_layer, params in zip(self.owners, layers, strict=True)
            for index in params
        }
        self._spans = [rows_of(_rows(p), owners[index]) for index, (_, p) in enumerate(named)]

    def _share_nbytes(self, index: int, rank: int) -> int:
        tensor, span = self.named[index][1], self._span(index, rank)
        return tensor.nbytes // _rows(tensor) * span.numel if span.numel else 0

    def _span(self, index: int, rank: int) -> Span:
        return self._spans[index].get(rank, NO_ROWS)

    def owned(self, rank: int) -> list[int]:
        """Return the layers with rows that a rank updates."""
        return [layer for layer, owners in enumerate(self.owners) if rank in owners]

    def of(self, rank: int, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a rank's rows of a tensor shaped like a parameter (rows, ...), as a view."""
        return _in_rows(tensor)[slice(*self._span(index, rank))]

    def params(self, layers: Iterable[int]) -> list[int]:
        """Return the parameters of layers, in order."""
        return [index for layer in layers for index in self.layers[layer]]

    def nbytes(self, rank: int, layers: Iterable[int]) -> int:
        """Return the bytes of a rank's rows of layers."""
        return sum(self._share_nbytes(index, rank) for index in self.params(layers))

    def packed_nbytes(self, rank: int, layers: Iterable[int]) -> int:
        """Return the bytes of `pack` for a rank's rows of layers."""
        spans = self._places(rank, self.params(layers))
        return spans[-1].stop if spans else 0

    def pack(
        self,
        rank: int,
        layers: Sequence[int],
        tensors: Sequence[torch.Tensor | None],
        device: torch.device = HOST,
    ) -> torch.Tensor:
        """Copy a rank's rows into a row of bytes on a device."""
        params = self.params(layers)
        spans = self._places(rank, params)
        row = torch.empty(spans[-1].stop if spans else 0, dtype=torch.uint8, device=device)
        with torch.no_grad():
            for index, span, tensor in zip(params, spans, tensors, strict=True):
                room = self._read(row, index, rank, span)
                if tensor is None:
                    room.zero_()
                elif room.numel():
                    whole = _rows(tensor) == _rows(self.named[index][1])
                    room.copy_(self.of(rank, index, tensor) if whole else _in_rows(tensor))
        return row

    def unpack(
        self, rank: int, layers: Sequence[int], row: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each parameter of layers, and a rank's rows of it as views of a message."""
        params = self.params(layers)
        spans = self._places(rank, params)
        for index, span in zip(params, spans, strict=True):
            yield index, self._read(row, index, rank, span)

    def _places(self, rank: int, params: Sequence[int]) -> tuple[Span, ...]:
        """Return the positions of a rank's rows of parameters in a message."""
        return aligned([self._share_nbytes(index, rank) for index in params])

    def _read(self, row: torch.Tensor, index: int, rank: int, span: Span) -> torch.Tensor:
        tensor = self.named[index][1]
        shape = (self._span(index, rank).numel, *_in_rows(tensor).shape[1:])
        return row[slice(*span)].view(tensor.dtype).view(shape)

    def stand_ins(self, rank: int) -> list[torch.nn.Parameter]:
        """Return new host parameters with the values of a rank's rows."""
        return [
            torch.nn.Parameter(self.of(rank, index, tensor.detach()).cpu().clone())
            for index, (_, tensor) in enumerate(self.named)
        ]


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a first axis, which scalars lack."""
    return tensor if tensor.ndim else tensor.unsqueeze(0)


def _rows(tensor: torch.Tensor) -> int:
    return int(_in_rows(tensor).shape[0])
