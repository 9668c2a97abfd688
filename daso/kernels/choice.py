"""Selects the kernels of a device: C on CPUs, Triton on GPUs, and torch's as the fallback."""

from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch

from daso.environment import kernels_name
from daso.errors import ConfigError, summarize
from daso.kernels import torch_kernels
from daso.kernels.native import KernelError, load_native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daso.kernels.codecs import Codec
    from daso.kernels.rows import EncodeRows, FlatTensors, Mean, ShardRows


class Kernels(Protocol):
    """The functions of `daso.kernels.torch_kernels`, which documents them."""

    NAME: str

    def encode(
        self,
        codec: "Codec",
        values: "FlatTensors",
        spans: "Sequence[tuple[int, int]]",
        payload: torch.Tensor,
        rows: "EncodeRows" = ...,
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
        """Apply a mean to the rows of a shard."""
        ...

    def fingerprint(self, row: torch.Tensor, out: torch.Tensor) -> None:
        """Compute a checksum of the bits of a row, or of a payload."""
        ...

    def mean_rows(
        self,
        rows: "Sequence[torch.Tensor]",
        divisor: int = 1,
        *,
        total: torch.Tensor | None = None,
        to: "Sequence[torch.Tensor]" = (),
    ) -> None:
        """Average rows, added in order."""
        ...

    def gather(self, values: "FlatTensors", start: int, stop: int, row: torch.Tensor) -> None:
        """Copy elements of tensors to a row."""
        ...

    def merge(
        self, values: "FlatTensors", row: torch.Tensor, pull: float, *, add: bool = False
    ) -> None:
        """Merge a row into tensors."""
        ...


class Choice(NamedTuple):
    """Kernels of a type of device.

    Args:
        kernels: The implementation.
        line: Its name, with the reason for a fallback.
        is_fallback: Faster kernels exist for the device, but do not run here.
    """

    kernels: Kernels
    line: str
    is_fallback: bool = False


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels for rows on a device: C or Triton, or those named by DASO_KERNELS.

    Raises:
        ConfigError: The kernels named by DASO_KERNELS do not run here.
    """
    return _choose(device.type).kernels


def describe_kernels(device: torch.device) -> str:
    """Return the name of the kernels of a device, with the reason for a fallback."""
    return _choose(device.type).line


def slow_kernels(device: torch.device) -> str:
    """Return the fallback of the host or of a device, with its reason; empty without one."""
    choices = (_choose(kind) for kind in dict.fromkeys(("cpu", device.type)))
    return next((choice.line for choice in choices if choice.is_fallback), "")


@cache
def _choose(device: str) -> Choice:
    """Return the kernels of a type of device; cached for the process."""
    fallback, name = cast("Kernels", torch_kernels), kernels_name()
    if name == "torch":
        return Choice(fallback, f"{fallback.NAME} (DASO_KERNELS=torch)")
    best = {"cuda": "triton", "cpu": "native"}.get(device)
    if best is None:
        return Choice(fallback, f"{fallback.NAME} (on {device})")
    try:
        if best == "native":
            native = load_native()
            return Choice(native, native.NAME)
        from daso.kernels import triton_kernels

        triton_kernels.check(torch.device(device))
    except Exception as error:  # Triton needs a C compiler, Python's headers, a writable folder
        why = str(error) if isinstance(error, KernelError) else summarize(error)
        if name == best:  # DASO_KERNELS may also name kernels of another device
            raise ConfigError(
                f"DASO_KERNELS must name kernels that run here, but {name!r} does not: {why}; "
                f"unset it or set it to torch",
                code="kernels-do-not-run",
            ) from error
        return Choice(fallback, f"{fallback.NAME} ({why})", is_fallback=True)
    chosen = cast("Kernels", triton_kernels)
    return Choice(chosen, chosen.NAME)
