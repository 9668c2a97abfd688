"""Weights of one layer, with gathered gradients and the layer's optimizer."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from daso.comm.reduction import byte_buffer
from daso.flow.model.node import MakeOptimizer
from daso.flow.plan import Updates, age_factor
from daso.torch_private import own_parameters


class GatheredGradients:
    """Sums of a layer's gradients until its optimizer steps."""

    def __init__(self, count: int) -> None:
        self._sums: list[torch.Tensor | None] = [None] * count
        self._owned = [False] * count  # whether a sum may be written to
        self.units = 0  # gradients or instances in the sums, see `Updates.unit`
        self.instances: set[int] = set()  # under way, with gradients in the sums

    @property
    def can_step(self) -> bool:
        """True if a gradient and a complete unit were gathered."""
        return self.units > 0 and any(held is not None for held in self._sums)

    def add(self, place: int, grad: torch.Tensor) -> None:
        """Add the gradient of a parameter."""
        held = self._sums[place]
        if held is None:
            self._sums[place] = grad
        elif self._owned[place]:
            held.add_(grad)
        else:  # autograd may have returned the same memory twice
            self._sums[place] = held + grad
            self._owned[place] = True

    def write_grads(self, twins: Sequence[nn.Parameter]) -> None:
        """Write the means into ``.grad``."""
        for twin, held, owned in zip(twins, self._sums, self._owned, strict=True):
            if held is None:
                continue
            # Optimizers may write to gradients; autograd's memory may be shared with others.
            twin.grad = held if owned else held.clone()
            if self.units > 1:
                twin.grad.div_(self.units)

    def clear(self) -> None:
        """Drop the sums, but not the instances under way."""
        self._sums = [None] * len(self._sums)
        self._owned = [False] * len(self._owned)
        self.units = 0


class Weights:
    """Parameters of a layer, and the optimizer that updates their twins."""

    # With current weights a twin shares its parameter's memory, but not the version counter by
    # which torch detects changes since forward: backward may compute with changed weights. With
    # stashed weights the module gets new parameters after an update, while backwards with the old
    # ones are pending.
    def __init__(self, module: nn.Module, make: MakeOptimizer, updates: Updates) -> None:
        self.module, self._updates = module, updates
        self._places = [
            (owner, name, p)
            for owner in module.modules()
            for name, p in own_parameters(owner).items()  # one parameter may have several names
            if p is not None and p.requires_grad
        ]
        self._stashes = updates.weights == "stashed"
        self.own = list(dict.fromkeys(p for _, _, p in self._places))  # the user's parameters
        self.live = list(self.own)  # parameters that forward computes with
        self.twins = [
            nn.Parameter(p.detach().clone() if self._stashes else p.data) for p in self.own
        ]
        self.optimizer = make(self.twins) if self.twins else None
        self.version = 0  # steps taken
        self._published = 0  # version that forward computes with
        self._uses_copies = False  # forward computes with copies of the user's parameters
        self.ages: list[int] = [0, 0, 0]  # gradients, sum of their ages, the highest
        self._gathered = GatheredGradients(len(self.own))

    def add(
        self, grads: Sequence[torch.Tensor | None], version: int, instances: Sequence[int]
    ) -> None:
        """Add a gradient; step if enough were gathered."""
        if all(grad is None for grad in grads):
            return
        age = self.version - version
        self.ages[0] += 1
        self.ages[1] += age
        self.ages[2] = max(self.ages[2], age)
        factor = age_factor(age, scale_by_staleness=self._updates.scale_by_staleness)
        for place, grad in enumerate(grads):
            if grad is not None:
                self._gathered.add(place, grad if factor == 1 else grad * factor)
        if self._updates.unit == "instance":
            self._gathered.instances.update(instances)
        else:
            self._count(len(instances))

    def finish(self, instance: int) -> None:
        """Count an instance whose gradients are complete; step if enough were gathered."""
        if instance in self._gathered.instances:
            self._gathered.instances.discard(instance)
            self._count(1)

    def _count(self, more: int) -> None:
        self._gathered.units += more
        if self._gathered.units >= self._updates.min_update_interval:
            self.step()

    def step(self) -> None:
        """Step with the mean of the gathered gradients, if any."""
        if self.optimizer is not None and self._gathered.can_step:
            self._gathered.write_grads(self.twins)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.version += 1
        self._gathered.clear()

    def begin(self) -> None:
        """Begin an epoch: drop the gradients of a failed one."""
        self._gathered.clear()
        self._gathered.instances.clear()
        self.publish(in_use=False)

    @torch.no_grad()
    def publish(self, *, in_use: bool, changed: bool = False) -> None:
        """Let forward compute with the newest weights, if weights are stashed."""
        is_new = self._published != self.version or changed
        if not self._stashes or not (is_new or (self._uses_copies and not in_use)):
            return
        self._published, self._uses_copies = self.version, in_use
        if in_use:
            new = {
                id(p): nn.Parameter(twin.clone())
                for p, twin in zip(self.own, self.twins, strict=True)
            }
        else:
            new = {id(p): p for p in self.own}
            for p, twin in zip(self.own, self.twins, strict=True):
                p.copy_(twin)
        self.live = [new[id(p)] for p in self.own]
        for owner, name, p in self._places:
            own_parameters(owner)[name] = new[id(p)]

    @torch.no_grad()
    def update_twins(self) -> None:
        """Copy the parameters to the twins, after another writer changed them."""
        for p, twin in zip(self.own, self.twins, strict=True):
            twin.copy_(p)

    def digest(self) -> str:
        """Return a hash of the parameters and buffers, between epochs."""
        digest = hashlib.sha256()
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            digest.update(byte_buffer(tensor.detach().cpu().contiguous().view(-1)))
        return digest.hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and the version, between epochs."""
        state = None if self.optimizer is None else self.optimizer.state_dict()
        return {"optimizer": state, "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.version = state["version"]
        self.update_twins()
