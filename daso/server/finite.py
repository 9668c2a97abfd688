"""Whether gradients are finite: told at once on the host, by and by on a device."""

import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from daso.comm.device.staging import Arrived, DeviceStaging
from daso.errors import NonFiniteError

__all__ = ["FiniteChecks"]

logger = logging.getLogger("daso")
DROPS_IN_A_ROW = 3  # steps with a gradient that is not finite, at which a rank raises


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What was found of a step's layers."""

    step: int
    found: torch.Tensor  # (layers,) bool, where gradients are
    here: torch.Tensor  # on the host, once it came
    came: Arrived


class FiniteChecks:
    """One rank's: of the gradients of each layer, and of steps.

    Args:
        names: Of layers.
        rank: Whose.
        at_once: Raise for the first step, not for three in a row.
        copies: How what a device finds comes to the host; None: gradients are looked at as they
            come, and who looks waits for a device.
    """

    def __init__(
        self, names: Sequence[str], rank: int, *, at_once: bool, copies: DeviceStaging | None
    ) -> None:
        self._names, self._rank = names, rank
        self._most = 1 if at_once else DROPS_IN_A_ROW
        self._copies = copies
        self.dropped = 0  # steps with a gradient that was not finite
        self._in_a_row = 0
        self._found: dict[int, torch.Tensor] = {}  # of layers of this step: () bool
        self._pending: deque[_Verdict] = deque()  # steps of which the device has not told

    def look(self, layer: int, grads: Iterable[torch.Tensor | None]) -> None:
        """Look at the gradients of a layer. Does not block where there are `copies`."""
        there = [grad.detach() for grad in grads if grad is not None and grad.numel()]
        if not there:
            return
        if self._copies is None:
            self._found[layer] = torch.tensor(_are_finite(there), device="cpu")
        else:
            # Whose largest is finite; the sum of finite ones may not be.
            most = [torch.linalg.vector_norm(grad, ord=math.inf).isfinite() for grad in there]
            self._found[layer] = torch.stack(most).all()

    def of(self, layers: Iterable[int], device: torch.device) -> torch.Tensor:
        """Return of layers of this step whether they are finite (layers,), where gradients are."""
        nothing = torch.ones((), dtype=torch.bool, device=device)
        return torch.stack([self._found.get(layer, nothing) for layer in layers])

    def end(self, step: int, device: torch.device) -> None:
        """End a step; count those of which is known how they were.

        Raises:
            NonFiniteError: Too many in a row were not finite.
        """
        found = self.of(range(len(self._names)), device)
        self._found.clear()
        if self._copies is None:
            self._pending.append(_Verdict(step, found, found, lambda: True))
        else:
            here = self._copies.memory(found.numel()).view(torch.bool)
            self._pending.append(_Verdict(step, found, here, self._copies.out(found, here)))
        while self._pending and self._pending[0].came():
            one = self._pending.popleft()
            self._count(one.step, one.here.tolist())

    def settle(self) -> None:
        """Count all steps. Blocks until the device has come to the end of the last."""
        while self._pending:
            one = self._pending.popleft()
            self._count(one.step, one.found.tolist())

    def _count(self, step: int, finite: Sequence[bool]) -> None:
        if all(finite):
            self._in_a_row = 0
            return
        self.dropped += 1
        self._in_a_row += 1
        name = self._names[[*finite].index(False)]
        what = f"gradients of layer {name!r} are not finite in step {step}"
        if self._in_a_row >= self._most:
            raise NonFiniteError(
                f"gradients must be finite, but {what} on rank {self._rank} (in "
                f"{self._in_a_row} steps in a row); lower the learning rate, or look at that "
                f"rank's data"
            )
        logger.warning("%s on rank %d; they were left out", what, self._rank)


def _are_finite(grads: Sequence[torch.Tensor]) -> bool:
    """Return whether gradients are, in one pass if their sum is."""
    if bool(torch.stack([grad.sum().float() for grad in grads]).isfinite().all()):
        return True
    return all(bool(grad.isfinite().all()) for grad in grads)  # large ones may overflow
