"""Flows on several nodes, one on each, whose parameters an optimizer exchanges."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from daso.comm.control import gather
from daso.comm.topology import Topology
from daso.errors import ConfigError
from daso.flow.model.layers import Layers

# Wraps an optimizer for the ranks of a topology; returns a `daso.DASO`, or an object with its step,
# synchronize, end_epoch, close, state_dict and load_state_dict.
MakeBetween = Callable[[torch.optim.Optimizer, Topology], Any]


def flow_topology(topology: Topology, timeout_seconds: float, *, is_alone: bool) -> Topology:
    """Return the topology of a flow: the world, or this rank's node if each has its own flow.

    Collective over the world; blocking.
    """
    if not topology.equal_on_all_ranks(is_alone, timeout_seconds):
        raise ConfigError(
            "between_nodes must be given to all ranks or to none, not to some",
            code="between-nodes-on-some",
        )
    if is_alone:
        return topology
    sizes = topology.node_sizes
    problem = None
    if len(set(sizes)) > 1:
        problem = ConfigError(
            f"flows on several nodes need the same number of ranks on every node, but the "
            f"nodes have {list(sizes)}; start the same number on each",
            code="unequal-flow-nodes",
        )
    topology.raise_on_all_ranks(problem)
    node = topology.world_comm.Split(topology.node, topology.local_rank)
    node_world = Topology(node, ranks_per_node=topology.local_size)
    node.Free()
    return node_world


class ParameterDeltas(torch.optim.Optimizer):
    """An optimizer whose steps replay the changes that layers made to the parameters.

    A step's gradients are the changes since the last step, negated. A wrapper such as `daso.DASO`
    may average them as gradients, or average parameters instead, on any schedule. If it changes
    neither, the step restores the parameters bit for bit.

    Args:
        params: Parameters that share memory with those that the layers' optimizers update.
    """

    is_linear = True  # steps are linear in their gradients: daso need not probe

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1.0})
        self._params = list(params)
        self._before = [p.detach().clone() for p in self._params]
        self._now: list[torch.Tensor] = []
        self._moved: list[torch.Tensor] = []

    @torch.no_grad()
    def gather(self) -> None:
        """Write the changes since the last step into ``.grad``, and undo them."""
        self._now = [p.detach().clone() for p in self._params]
        self._moved = [before - now for before, now in zip(self._before, self._now, strict=True)]
        for p, before, moved in zip(self._params, self._before, self._moved, strict=True):
            p.grad = moved.clone()
            p.copy_(before)

    @property
    def has_moved(self) -> bool:
        """True if parameters changed since the last step."""
        pairs = zip(self._params, self._before, strict=True)
        return not all(torch.equal(p, before) for p, before in pairs)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the changes, or their mean over nodes."""
        assert closure is None
        # All or none: nodes that averaged their changes must end with the same bits.
        keeps_own = not self.has_moved and all(
            p.grad is None or torch.equal(p.grad, moved)
            for p, moved in zip(self._params, self._moved, strict=True)
        )
        for p, now in zip(self._params, self._now, strict=True):
            if keeps_own or p.grad is None:
                p.copy_(now)
            else:
                p.sub_(p.grad)

    @torch.no_grad()
    def settle(self) -> None:
        """Take the current parameters as the start of the next changes."""
        for p, before in zip(self._params, self._before, strict=True):
            before.copy_(p)
            p.grad = None


class FlowReplicas:
    """Keeps one rank's layers in step with the same layers in the flows of other nodes.

    Args:
        make: Wraps an optimizer for the ranks of a topology.
        layers: This rank's layers; ranks with the same local rank on other nodes have the same.
        topology: The topology of all ranks.
        instances_per_batch: Number of finished instances of a flow between two steps.

    Collective over the world; blocking.
    """

    def __init__(
        self, make: MakeBetween, layers: Layers, topology: Topology, instances_per_batch: int
    ) -> None:
        rank_info = topology.rank_info
        across = topology.world_comm.Split(rank_info.local_rank, rank_info.node)
        self._topology = Topology(across, ranks_per_node=1)
        across.Free()
        self._layers, self._each, self._finished = layers, instances_per_batch, 0
        twins = layers.twins()
        self._moves: ParameterDeltas | None = None
        self._between: Any = None
        if twins:  # on this local rank of all nodes, or of none
            self._moves = ParameterDeltas([nn.Parameter(p.detach()) for p in twins])
            self._between = make(self._moves, self._topology)
            self._moves.settle()  # wrapping may have changed them

    def is_due(self) -> bool:
        """Count a finished instance; return whether a batch is full."""
        self._finished += 1
        return self._finished % self._each == 0

    def step(self) -> None:
        """Exchange, if the schedule requires it; then collective across nodes. Blocking."""
        if self._moves is not None and self._between is not None:
            self._moves.param_groups[0]["lr"] = self._layers.learning_rate()
            self._moves.gather()
            self._between.step()
            self._moves.settle()

    def end_epoch(self, loss: float) -> None:
        """Take a last step if any node changed since. Collective across nodes; blocking."""
        self._finished = 0
        if self._moves is not None and self._between is not None:
            if any(gather(self._topology, self._moves.has_moved, self._layers.timeout_seconds)):
                self.step()
            self._between.end_epoch(loss)
            self._moves.settle()

    def synchronize(self) -> None:
        """Average parameters and buffers over nodes. Collective across nodes; blocking."""
        if self._moves is not None and self._between is not None:
            self._between.synchronize()
            self._moves.settle()
        self._layers.average_buffers(self._topology)

    def settle(self) -> None:
        """Take the current parameters, equal on all nodes, as the start of the next changes."""
        if self._moves is not None:
            self._moves.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, including exchanges in flight."""
        return {} if self._between is None else {"between": self._between.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self._moves is not None and self._between is not None:
            self._between.load_state_dict(state["between"])
            self._moves.settle()

    def close(self) -> None:
        """Close the exchange. Collective over the world; blocking; idempotent."""
        if self._between is not None:
            self._between.close()
            self._between = None
        self._topology.free()
