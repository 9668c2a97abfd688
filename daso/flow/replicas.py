"""Whole flows beside each other, one on each node: what keeps their parameters in step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from daso.comm.topology import Topology
from daso.flow.model.layers import Layers

__all__ = ["FlowReplicas", "MakeBetween", "ParameterDeltas"]


class Between(Protocol):
    """What exchanges parameters between nodes at its steps, such as a `daso.DASO`."""

    def step(self) -> Any:
        """Count a batch, and exchange when it is time."""
        ...

    def synchronize(self) -> None:
        """Make parameters the same on all ranks."""
        ...

    def end_epoch(self, loss: float) -> Any:
        """Tell the schedule that an epoch is over."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from it."""
        ...


MakeBetween = Callable[[torch.optim.Optimizer, Topology], Between]


class ParameterDeltas(torch.optim.Optimizer):
    """An optimizer whose steps are what others have done to the parameters since the one before.

    A step's gradients are these movements, negated, so that whoever wraps it may average them as
    it averages gradients, or parameters instead, on any schedule. What nobody changed meanwhile
    becomes what the others made of it, bit for bit.

    Args:
        params: They share memory with those that others move.
    """

    is_linear = True  # a step grows with its gradients: daso need not try

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1.0})
        self._params = list(params)
        self._before = [p.detach().clone() for p in self._params]
        self._now: list[torch.Tensor] = []
        self._moved: list[torch.Tensor] = []

    @torch.no_grad()
    def gather(self) -> None:
        """Take what was done since the last step back, into gradients."""
        self._now = [p.detach().clone() for p in self._params]
        self._moved = [before - now for before, now in zip(self._before, self._now, strict=True)]
        for p, before, moved in zip(self._params, self._before, self._moved, strict=True):
            p.grad = moved.clone()
            p.copy_(before)

    @property
    def has_moved(self) -> bool:
        """Whether anything was done since the last step."""
        pairs = zip(self._params, self._before, strict=True)
        return not all(torch.equal(p, before) for p, before in pairs)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do it, or what it was averaged to."""
        assert closure is None
        # All or none: nodes whose movements were averaged must come to the same bits.
        kept = not self.has_moved and all(
            p.grad is None or torch.equal(p.grad, moved)
            for p, moved in zip(self._params, self._moved, strict=True)
        )
        for p, now in zip(self._params, self._now, strict=True):
            if kept or p.grad is None:
                p.copy_(now)
            else:
                p.sub_(p.grad)

    @torch.no_grad()
    def settle(self) -> None:
        """Count movements from here on."""
        for p, before in zip(self._params, self._before, strict=True):
            before.copy_(p)
            p.grad = None


class FlowReplicas:
    """One rank's layers, and the same layers in the flows of the other nodes.

    Args:
        make: Wraps the optimizer that it is given, for the ranks of the topology that it is given.
        layers: This rank's; those with the same local rank on other nodes have the same.
        topology: Of all ranks.
        instances_per_batch: After how many finished instances of its flow each takes a step.

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
        self._between: Between | None = None
        if twins:  # on all ranks across, or on none
            self._moves = ParameterDeltas([nn.Parameter(p.detach()) for p in twins])
            self._between = make(self._moves, self._topology)
            self._moves.settle()  # wrapping may have changed them

    def is_due(self) -> bool:
        """Count a finished instance; return whether a batch is full."""
        self._finished += 1
        return self._finished % self._each == 0

    def step(self) -> None:
        """Exchange, if it is time. In the sense of the schedule collective across; blocking."""
        if self._moves is not None and self._between is not None:
            self._moves.param_groups[0]["lr"] = self._layers.learning_rate()
            self._moves.gather()
            self._between.step()
            self._moves.settle()

    def end_epoch(self, loss: float) -> None:
        """Take a last step if anything was done since, on any node. Collective across; blocking."""
        self._finished = 0
        if self._moves is not None and self._between is not None:
            if any(self._topology.world_comm.allgather(self._moves.has_moved)):
                self.step()
            self._between.end_epoch(loss)
            self._moves.settle()

    def synchronize(self) -> None:
        """Make parameters, and buffers, the mean of all nodes'. Collective across; blocking."""
        if self._moves is not None and self._between is not None:
            self._between.synchronize()
            self._moves.settle()
        self._layers.average_buffers(self._topology.world_comm)

    def settle(self) -> None:
        """Take parameters as they are: they are the same on all nodes."""
        if self._moves is not None:
            self._moves.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands, and what is not yet merged."""
        return {} if self._between is None else {"between": self._between.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        if self._moves is not None and self._between is not None:
            self._between.load_state_dict(state["between"])
            self._moves.settle()

    def close(self) -> None:
        """Give back what is held. Collective over the world; blocking; idempotent."""
        if self._between is not None:
            self._between.close()
            self._between = None
        self._topology.free()
