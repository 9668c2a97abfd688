"""Checks that gradients are finite: at once on the host, later on a device."""

import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from daso.comm.device.staging import Arrived, DeviceStaging
from daso.errors import NonFiniteError

logger = logging.getLogger("daso")
DROPS_IN_A_ROW = 3  # consecutive steps with non-finite gradients at which a rank raises


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Result of the check of one step, by layer."""

    step: int
    finite: torch.Tensor  # (layers,) bool, on the gradients' device
    host_copy: torch.Tensor  # its copy on the host, valid once arrived
    has_arrived: Arrived


class FiniteChecks:
    """Checks one rank's gradients by layer, and raises after steps that are not finite."""

    def __init__(
        self,
        names: Sequence[str],  # of layers
        rank: int,
        *,
        at_once: bool,  # raise at the first step, not at the third in a row
        copies: DeviceStaging | None,  # None: checks block on the device
    ) -> None:
        self._names, self._rank = names, rank
        self._most = 1 if at_once else DROPS_IN_A_ROW
        self._copies = copies
        self.dropped = 0  # steps with a non-finite gradient
        self._in_a_row = 0
        self._finite: dict[int, torch.Tensor] = {}  # by layer of this step: () bool
        self._pending: deque[_Verdict] = deque()  # steps whose check has not arrived

    def check(self, layer: int, grads: Iterable[torch.Tensor | None]) -> None:
        """Check the gradients of a layer. Does not block if `copies` is set."""
        present = [grad.detach() for grad in grads if grad is not None and grad.numel()]
        if not present:
            return
        if self._copies is None:
            self._finite[layer] = torch.tensor(_are_finite(present), device="cpu")
        else:
            # By the largest element; the sum of finite ones may overflow.
            are_finite = [
                torch.linalg.vector_norm(grad, ord=math.inf).isfinite() for grad in present
            ]
            self._finite[layer] = torch.stack(are_finite).all()

    def of(self, layers: Iterable[int], device: torch.device) -> torch.Tensor:
        """Return a flag per given layer of this step (layers,), on the gradients' device."""
        nothing = torch.ones((), dtype=torch.bool, device=device)
        return torch.stack([self._finite.get(layer, nothing) for layer in layers])

    def end(self, step: int, device: torch.device) -> None:
        """End a step; count the steps whose check has arrived, and raise after too many."""
        finite = self.of(range(len(self._names)), device)
        self._finite.clear()
        if self._copies is None:
            self._pending.append(_Verdict(step, finite, finite, lambda: True))
        else:
            host_copy = self._copies.host_memory(finite.numel()).view(torch.bool)
            self._pending.append(
                _Verdict(step, finite, host_copy, self._copies.to_host(finite, host_copy))
            )
        while self._pending and self._pending[0].has_arrived():
            verdict = self._pending.popleft()
            self._count(verdict.step, verdict.host_copy.tolist())

    def settle(self) -> None:
        """Count all steps. Blocks until the device has finished the last one."""
        while self._pending:
            verdict = self._pending.popleft()
            self._count(verdict.step, verdict.finite.tolist())

    def _count(self, step: int, finite: Sequence[bool]) -> None:
        if all(finite):
            self._in_a_row = 0
            return
        self.dropped += 1
        self._in_a_row += 1
        name = self._names[[*finite].index(False)]
        problem = f"gradients of layer {name!r} are not finite in step {step}"
        if self._in_a_row >= self._most:
            raise NonFiniteError(
                f"gradients must be finite, but {problem} on rank {self._rank} (in "
                f"{self._in_a_row} steps in a row); lower the learning rate, or look at that "
                f"rank's data",
                code="gradients-not-finite",
            )
        logger.warning("%s on rank %d; they were left out", problem, self._rank)


def _are_finite(grads: Sequence[torch.Tensor]) -> bool:
    """Return whether gradients are finite, in one pass if their sum is."""
    if bool(torch.stack([grad.sum().float() for grad in grads]).isfinite().all()):
        return True
    return all(bool(grad.isfinite().all()) for grad in grads)  # large ones may overflow
