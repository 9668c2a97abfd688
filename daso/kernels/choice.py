"""Which kernels compute on a device: C on CPUs, Triton on GPUs, torch where these are not there."""

from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

import torch

from daso.environment import kernels_name
from daso.errors import ConfigError, told
from daso.kernels import torch_kernels
from daso.kernels.native import KernelError, load_native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daso.kernels.codecs import Codec
    from daso.kernels.rows import FlatTensors, Mean, ShardRows

__all__ = ["Kernels", "describe_kernels", "kernels_for", "slow_kernels"]


class Kernels(Protocol):
    """The functions of `daso.kernels.torch_kernels`, which documents them."""

    NAME: str

    def encode(
        self,
        codec: "Codec",
        values: "FlatTensors",
        spans: "Sequence[tuple[int, int]]",
        payload: torch.Tensor,
        *,
        reference: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        rounding: torch.Tensor | None = None,
        gradients: bool = False,
        first: torch.Tensor | None = None,
        distance: torch.Tensor | None = None,
    ) -> None:
        """Encode values - reference + residual."""
        ...

    def reduce(
        self,
        mean: "Mean",
        numel: int,
        *,
        payload: torch.Tensor | None = None,
        row: torch.Tensor | None = None,
        carry: torch.Tensor | None = None,
        gradients: bool = False,
    ) -> None:
        """Compute a mean in rank order."""
        ...

    def accept(
        self,
        mean: "Mean",
        sent: torch.Tensor,
        start: int,
        stop: int,
        rows: "ShardRows",
        sums: torch.Tensor,
    ) -> None:
        """Take in the mean of what nodes sent."""
        ...

    def mean_rows(
        self,
        rows: "Sequence[torch.Tensor]",
        divisor: int = 1,
        *,
        total: torch.Tensor | None = None,
        to: "Sequence[torch.Tensor]" = (),
    ) -> None:
        """Add rows in order, and divide."""
        ...

    def gather(self, values: "FlatTensors", start: int, stop: int, row: torch.Tensor) -> None:
        """Copy elements of tensors to a row."""
        ...

    def merge(
        self, values: "FlatTensors", row: torch.Tensor, pull: float, *, add: bool = False
    ) -> None:
        """Merge a row into tensors."""
        ...


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels for rows on a device: C or Triton, or those that DASO_KERNELS names.

    Raises:
        ConfigError: Those that DASO_KERNELS names do not run here.
    """
    return _choose(device.type)[0]


def describe_kernels(device: torch.device) -> str:
    """Return which kernels compute on a device, and why not better ones."""
    return _choose(device.type)[1]


def slow_kernels(device: torch.device) -> str:
    """Return which kernels compute where better ones should, and why; nothing where these do."""
    line = describe_kernels(device)
    return line if line.startswith(torch_kernels.NAME) and kernels_name() != "torch" else ""


@cache
def _choose(device: str) -> tuple[Kernels, str]:
    """Return kernels, and a line that says which; once a process for each type of device."""
    fallback, name = cast("Kernels", torch_kernels), kernels_name()
    if name == "torch":
        return fallback, f"{fallback.NAME} (DASO_KERNELS=torch)"
    wanted = "triton" if device == "cuda" else "native"
    try:
        if wanted == "native":
            native = load_native()
            return native, native.NAME
        from daso.kernels import triton_kernels

        triton_kernels.check(torch.device(device))
    except Exception as error:  # Triton needs a C compiler, Python's headers, a folder to write to
        why = str(error) if isinstance(error, KernelError) else told(error)
        if name == wanted:  # a name of kernels for other devices says nothing of these
            raise ConfigError(
                f"DASO_KERNELS must name kernels that run here, but {name!r} does not: {why}; "
                f"unset it or set it to torch"
            ) from error
        return fallback, f"{fallback.NAME} ({why})"
    chosen = cast("Kernels", triton_kernels)
    return chosen, chosen.NAME
