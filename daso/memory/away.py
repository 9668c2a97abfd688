"""Storage bytes that were copied to the second memory."""

import torch

from daso.memory.storages import has_storage
from daso.memory.tiers import Tier

MIN_BYTES = 4096  # smaller storages are not moved


def is_movable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor is fully described by its storage and layout."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and has_storage(tensor)
        and tensor.device == device
        and not (tensor.is_conj() or tensor.is_neg())
    )


class Away:
    """Bytes of one storage in the second memory."""

    def __init__(self, tier: Tier, row: torch.Tensor) -> None:
        self._tier, self._nbytes, self._device = tier, row.numel(), row.device
        self._at = -1
        self._at = tier.lease(self._nbytes)
        tier.out(row, self._at).wait()

    def content(self) -> torch.Tensor:
        """Copy the bytes back; blocks until they have arrived."""
        row = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        self._tier.back(row, self._at).wait()
        return row

    def __del__(self) -> None:
        if self._at >= 0:
            self._tier.release(self._at, self._nbytes)
