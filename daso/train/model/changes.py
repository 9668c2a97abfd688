"""Notices that parameters are not those any more that were laid out for exchange."""

import torch

from daso.train.model.params import Trained, layout_of

__all__ = ["ParameterChanges"]


class ParameterChanges:
    """What became of parameters since this was made.

    Args:
        trained: The optimizer and what it trains.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._trainable = _trainable(trained.inner)
        self._digest = layout_of(trained.named).digest
        self._tensors = [tensor for _, tensor in trained.local]
        self._addresses = self._where()

    def trainable_changed(self) -> bool:
        """Return whether parameters or groups were added, parameters frozen or unfrozen."""
        return self._trainable != _trainable(self._trained.inner)

    def layout_changed(self) -> bool:
        """Return whether parameters got another shape, type or order in memory."""
        addresses = self._where()  # asked at every step: cheaper than layouts
        if addresses == self._addresses:
            return False
        if layout_of(self._trained.named).digest != self._digest:
            return True
        self._addresses = addresses
        return False

    def _where(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]


def _trainable(inner: torch.optim.Optimizer) -> list[list[int]]:
    """Return which parameters an optimizer trains, by groups."""
    return [
        [id(param) for param in group["params"] if param.requires_grad]
        for group in inner.param_groups
    ]
