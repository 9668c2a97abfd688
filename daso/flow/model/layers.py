"""All layers of a flow on one rank: exchange between ranks, and checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from daso.comm.control import broadcast_row
from daso.comm.reduction import accumulator
from daso.comm.topology import Topology
from daso.errors import CheckpointError, ConfigError
from daso.flow.model.checks import Wiring
from daso.flow.model.node import MakeOptimizer, Node
from daso.flow.model.weights import Weights
from daso.flow.plan import Updates
from daso.plan.step_restoration import rate_of

Ranks = tuple[tuple[int, ...], ...]


class Layers:
    """Layers of a flow, with the weights of those that this rank computes."""

    def __init__(
        self,
        wiring: Wiring,
        make: MakeOptimizer,
        updates: Updates,
        topology: Topology,
        timeout_seconds: float,
    ) -> None:
        self.wiring, self.nodes = wiring, wiring.layers
        self.updates, self._make = updates, make
        self._topology, self.timeout_seconds = topology, timeout_seconds
        self.ranks_of: Ranks = ()  # of every node of the flow, after placement
        self._trained = self._flags()
        self.weights: dict[int, Weights] = {}

    def _flags(self) -> dict[tuple[str, str], bool]:
        return {
            (node.name, name): param.requires_grad
            for node in self.nodes
            for name, param in node.call.named_parameters()
        }

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set all modules to evaluation mode; restore their modes at the end."""
        modules = [module for node in self.nodes for module in node.call.modules()]
        trained = [module for module in modules if module.training]
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module in trained:
                module.training = True

    def changed(self) -> ConfigError | None:
        """Return an error if a parameter was frozen or unfrozen; None if none was."""
        for (layer, name), trains in self._flags().items():
            if trains != self._trained.get((layer, name), trains):
                return ConfigError(
                    f"parameters must stay trained or frozen while a flow.Runtime is open, but "
                    f"{name} of layer {layer!r} was {'unfrozen' if trains else 'frozen'}; close "
                    f"it, and make a new one",
                    code="trained-parameters-changed",
                )
        return None

    def settle(self, ranks_of: Ranks) -> None:
        """Make this rank's weights for a placement; none before placement."""
        if self.weights and ranks_of == self.ranks_of:  # schedulers hold these optimizers
            for weights in self.weights.values():
                weights.begin()
            return
        self.ranks_of = ranks_of
        self.weights = {
            node.index: Weights(node.call, node.optimizer or self._make, self.updates)
            for node in self.nodes
            if ranks_of and self._topology.rank in ranks_of[node.index]
        }

    def twins(self) -> list[nn.Parameter]:
        """Return the parameters that this rank's optimizers update, node by node."""
        return [twin for _, weights in sorted(self.weights.items()) for twin in weights.twins]

    def publish(self) -> None:
        """Publish the twins that other nodes changed, between epochs."""
        for weights in self.weights.values():
            weights.publish(in_use=False, changed=True)

    @torch.no_grad()
    def fetch(self, root: Callable[[int], int], among: Topology | None = None) -> None:
        """Broadcast all parameters and buffers. Collective over the topology; blocking."""
        where = among or self._topology
        for node in self.nodes:
            for tensor in tensors_of(node.call):
                row = tensor.detach().cpu().contiguous().clone()
                broadcast_row(where, row.view(-1), root(node.index), self.timeout_seconds)
                tensor.copy_(row)
        for weights in self.weights.values():
            weights.update_twins()

    @torch.no_grad()
    def average(self) -> None:
        """Set replicas to their mean, added in rank order. Collective over the world; blocking."""
        for node in self.nodes:
            homes = self.ranks_of[node.index]
            if len(homes) > 1:
                for tensor in tensors_of(node.call):
                    _average(tensor, self._topology, homes, self.timeout_seconds)
                if node.index in self.weights:
                    self.weights[node.index].update_twins()

    @torch.no_grad()
    def average_buffers(self, across: Topology) -> None:
        """Set buffers of this rank's layers to their mean over ranks that have the same layers.

        Collective over the world of ``across``; blocking.
        """
        for node in self._own():
            for buffer in node.call.buffers():
                _average(buffer, across, range(across.world_size), self.timeout_seconds)

    def learning_rate(self) -> float:
        """Return the highest learning rate of this rank's optimizers."""
        groups = (
            group
            for weights in self.weights.values()
            if weights.optimizer is not None
            for group in weights.optimizer.param_groups
        )
        return max((rate_of(group, 1.0) for group in groups), default=1.0)

    # --- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's layers and optimizers, between epochs; before placement all layers."""
        if not self.ranks_of:  # and no optimizers
            modules = {node.name: {"module": node.call.state_dict()} for node in self.nodes}
            return {"ranks_of": [], "layers": modules}
        states = {
            node.name: {"module": node.call.state_dict(), **self.weights[node.index].state_dict()}
            for node in self._own()
        }
        return {"ranks_of": [list(ranks) for ranks in self.ranks_of], "layers": states}

    def unfit(self, state: Mapping[str, Any]) -> CheckpointError | None:
        """Return why a state cannot be loaded; None if it can."""
        homes, size = state["ranks_of"], self._topology.world_size
        nodes = len(self.wiring.nodes)
        if homes and (len(homes) != nodes or max(map(max, homes)) >= size):
            return CheckpointError(
                f"state must be that of the same flow, of {nodes} nodes on no more ranks "
                f"than these, {size}, but it is of {len(homes)} nodes on "
                f"{max(map(max, homes)) + 1} ranks",
                code="state-of-other-flow",
            )
        names = {node.name for node in self.nodes}
        if not set(state["layers"]) <= names:
            return CheckpointError(
                f"state must be that of the same flow, but it has layers "
                f"{sorted(set(state['layers']) - names)}, which are not in this one",
                code="state-of-other-flow",
            )
        rank = self._topology.rank
        own = {node.name for node in self.nodes if homes and rank in homes[node.index]}
        if homes and own != set(state["layers"]):
            return CheckpointError(
                f"state must be that of rank {rank}, with layers {sorted(own)}, but it has "
                f"{sorted(state['layers'])}; save and load one on every rank",
                code="state-of-other-rank",
            )
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank, after the same placement."""
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


def _average(
    tensor: torch.Tensor, topology: Topology, homes: Sequence[int], timeout_seconds: float
) -> None:
    rows = []
    for rank in homes:
        row = tensor.detach().cpu().contiguous().clone()
        broadcast_row(topology, row.view(-1), rank, timeout_seconds)
        rows.append(row)
    tensor.copy_(mean_of(rows))


def mean_of(replicas: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of replicas, added in order in fp32 or fp64; the first of integers."""
    first, *others = replicas
    if not first.is_floating_point():
        return first
    total = first.to(accumulator(first.dtype))
    for replica in others:
        total = total + replica
    return total / len(replicas)


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the non-empty parameters and buffers of a module."""
    tensors = [*module.parameters(), *module.buffers()]
    return [tensor for tensor in tensors if tensor.numel()]
