"""Measures the factor by which a program scales gradients between backward and step.

An optimizer that is linear in its gradients (SGD) needs no gain, unless gradients are clipped on
each node: then every node's step has the same length whatever its noise, and their mean is short,
as with optimizers that normalize. It is short by the clipping at most.
"""

import torch

from daso.train.model.params import Named, writes_of

__all__ = ["GradientScaleMeter"]

LEAST_NUMEL = 64  # of the gradient that is looked at
SAME = 1e-4  # relative; a factor that stays is a unit (accumulation, a scaler), not clipping


class GradientScaleMeter:
    """Compares one small gradient before and after the program had it.

    Args:
        named: Names and parameters.
    """

    def __init__(self, named: Named) -> None:
        numels = {index: tensor.numel() for index, (_, tensor) in enumerate(named)}
        large = [index for index, numel in numels.items() if numel >= LEAST_NUMEL]
        self.index = (
            min(large, key=numels.__getitem__) if large else max(numels, key=numels.__getitem__)
        )
        self._tensor = named[self.index][1]
        self._before: tuple[torch.Tensor, tuple[int, int]] | None = None
        # On the device of the gradient: steps, the sum of their factors, the last factor.
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._tensor.device)
        self.seen = False  # gradients were changed at any time

    def note(self) -> None:
        """Keep the gradient as it is when a backward has made it. Does not block."""
        grad = self._tensor.grad
        self._before = None if grad is None else (grad.detach().clone(), writes_of(grad))

    def measure(self) -> None:
        """Compare the gradient that is there when a step begins. Does not block."""
        before, self._before = self._before, None
        grad = self._tensor.grad
        if before is None or grad is None or writes_of(grad) == before[1]:
            return
        self.seen = True
        was = before[0].flatten().double()
        factor = grad.detach().flatten().double() @ was / (was @ was)
        _, _, last = self._sums.unbind()
        linear = ((factor - last).abs() <= SAME * last.abs()) | ~factor.isfinite()
        clipped = torch.where(linear, torch.ones_like(factor), factor.clamp(1e-6, 1.0))
        self._sums[0] += 1
        self._sums[1] += clipped
        self._sums[2] = torch.where(factor.isfinite(), factor, last)

    def forget(self) -> None:
        """Drop the gradient that was kept: its step is over."""
        self._before = None

    def take(self) -> float:
        """Return the factor by which clipping shortened steps since the last call; 0: never seen.

        Blocks for a device.
        """
        if not self.seen:
            return 0.0
        steps, total, _ = self._sums.tolist()
        self._sums[:2] = 0
        return steps / total if total > 0 else 1.0

    def state(self) -> list[float]:
        """Return what this rank needs to go on to the same bits."""
        return [float(self.seen), *self._sums.tolist()]

    def load(self, state: list[float]) -> None:
        """Take over what `state` returned."""
        self.seen = bool(state[0])
        self._sums.copy_(torch.tensor(state[1:], dtype=torch.float64, device="cpu"))
