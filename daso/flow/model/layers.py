"""All layers of a flow on one rank: their parameters between ranks, and in checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from daso.comm.collectives import byte_pieces
from daso.comm.dtypes import accumulator, byte_buffer
from daso.flow.model.checks import Wiring
from daso.flow.model.graph import MakeOptimizer, Node
from daso.flow.model.weights import Weights
from daso.flow.plan import Updates
from daso.plan.step_restoration import rate_of

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Layers", "mean_of", "tensors_of"]

Ranks = tuple[tuple[int, ...], ...]


class Layers:
    """The layers of a flow, and this rank's weights of those that it computes.

    Args:
        wiring: The flow.
        make: Makes the optimizer of one.
        updates: When these take steps.
        world: Communicator over all ranks.
    """

    def __init__(
        self, wiring: Wiring, make: MakeOptimizer, updates: Updates, world: "MPI.Comm"
    ) -> None:
        self._count = len(wiring.nodes)
        self.nodes = [node for node in wiring.nodes if node.kind == "layer"]
        self.updates, self._make, self._world = updates, make, world
        self.ranks_of: Ranks = ()  # of every node of the flow, once they are settled
        self._trained = self._flags()
        self.weights: dict[int, Weights] = {}

    def _flags(self) -> dict[tuple[str, str], bool]:
        return {
            (node.name, name): param.requires_grad
            for node in self.nodes
            for name, param in node.call.named_parameters()
        }

    def changed(self) -> str | None:
        """Return why layers cannot be trained on that were frozen or unfrozen; None if none was."""
        for (layer, name), trains in self._flags().items():
            if trains != self._trained.get((layer, name), trains):
                return (
                    f"parameters must stay trained or frozen while a flow.Runtime is open, but "
                    f"{name} of layer {layer!r} was {'unfrozen' if trains else 'frozen'}; close "
                    f"it, and make another one"
                )
        return None

    def settle(self, ranks_of: Ranks) -> None:
        """Take on this rank's layers; none while nobody knows whose they are."""
        if self.weights and ranks_of == self.ranks_of:  # schedulers go on with these optimizers
            for one in self.weights.values():
                one.begin()
            return
        self.ranks_of = ranks_of
        self.weights = {
            node.index: Weights(node.call, node.optimizer or self._make, self.updates)
            for node in self.nodes
            if ranks_of and self._world.Get_rank() in ranks_of[node.index]
        }

    def twins(self) -> list[nn.Parameter]:
        """Return what this rank's optimizers update, node by node."""
        return [twin for _, one in sorted(self.weights.items()) for twin in one.twins]

    def publish(self) -> None:
        """Compute, between epochs, with what others made of the twins."""
        for one in self.weights.values():
            one.publish(in_use=False, changed=True)

    @torch.no_grad()
    def fetch(self, root: Callable[[int], int], comm: "MPI.Comm | None" = None) -> None:
        """Give every rank all parameters and buffers. Collective over a communicator; blocking."""
        for node in self.nodes:
            for tensor in tensors_of(node.call):
                row = tensor.detach().cpu().contiguous().clone()
                for piece in byte_pieces(row.view(-1)):
                    (comm or self._world).Bcast(byte_buffer(piece), root(node.index))
                tensor.copy_(row)
        for one in self.weights.values():
            one.take_up()

    @torch.no_grad()
    def average(self) -> None:
        """Set replicas to their mean, added in rank order. Collective over the world; blocking."""
        for node in self.nodes:
            homes = self.ranks_of[node.index]
            if len(homes) > 1:
                for tensor in tensors_of(node.call):
                    _average(tensor, self._world, homes)
                if node.index in self.weights:
                    self.weights[node.index].take_up()

    @torch.no_grad()
    def average_buffers(self, across: "MPI.Comm") -> None:
        """Set buffers of this rank's layers to their mean over ranks that have the same layers.

        Collective over the communicator; blocking.
        """
        for node in self._own():
            for buffer in node.call.buffers():
                _average(buffer, across, range(across.Get_size()))

    def learning_rate(self) -> float:
        """Return the highest of this rank's optimizers."""
        groups = (
            group
            for one in self.weights.values()
            if one.optimizer is not None
            for group in one.optimizer.param_groups
        )
        return max((rate_of(group, 1.0) for group in groups), default=1.0)

    # --- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's layers and their optimizers, between epochs; at first all layers."""
        if not self.ranks_of:  # and no optimizers
            modules = {node.name: {"module": node.call.state_dict()} for node in self.nodes}
            return {"ranks_of": [], "layers": modules}
        states = {
            node.name: {"module": node.call.state_dict(), **self.weights[node.index].state_dict()}
            for node in self._own()
        }
        return {"ranks_of": [list(ranks) for ranks in self.ranks_of], "layers": states}

    def unfit(self, state: Mapping[str, Any]) -> str | None:
        """Return why a state cannot be gone on from; None if it can."""
        homes, size = state["ranks_of"], self._world.Get_size()
        if homes and (len(homes) != self._count or max(map(max, homes)) >= size):
            return (
                f"state must be that of the same flow, of {self._count} nodes on no more ranks "
                f"than these, {size}, but it is of {len(homes)} nodes on "
                f"{max(map(max, homes)) + 1} ranks"
            )
        names = {node.name for node in self.nodes}
        if not set(state["layers"]) <= names:
            return (
                f"state must be that of the same flow, but it has layers "
                f"{sorted(set(state['layers']) - names)}, which are not in this one"
            )
        rank = self._world.Get_rank()
        mine = {node.name for node in self.nodes if homes and rank in homes[node.index]}
        if homes and mine != set(state["layers"]):
            return (
                f"state must be that of rank {rank}, with layers {sorted(mine)}, but it has "
                f"{sorted(state['layers'])}; save and load one on every rank"
            )
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank, of layers settled likewise."""
        if not self.ranks_of:
            for node in self.nodes:
                if node.name in state["layers"]:
                    node.call.load_state_dict(state["layers"][node.name]["module"])
            return
        for node in self._own():
            saved = state["layers"][node.name]
            node.call.load_state_dict(saved["module"])
            self.weights[node.index].load_state_dict(saved)

    def _own(self) -> Iterator[Node]:
        return (node for node in self.nodes if node.index in self.weights)


def _average(tensor: torch.Tensor, comm: "MPI.Comm", homes: Sequence[int]) -> None:
    rows = []
    for rank in homes:
        row = tensor.detach().cpu().contiguous().clone()
        for piece in byte_pieces(row.view(-1)):
            comm.Bcast(byte_buffer(piece), rank)
        rows.append(row)
    tensor.copy_(mean_of(rows))


def mean_of(replicas: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of a tensor's replicas, added in their order; of whole numbers, the first's.

    Added and returned in fp32 or fp64.
    """
    first, *others = replicas
    if not first.is_floating_point():
        return first
    total = first.to(accumulator(first.dtype))
    for one in others:
        total = total + one
    return total / len(replicas)


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module that are not empty."""
    found = [*module.parameters(), *module.buffers()]
    return [tensor for tensor in found if tensor.numel()]
