"""One table of element types, torch to MPI, and zero-copy views that MPI can send."""

from typing import TYPE_CHECKING, Any

import torch

from daso.comm.mpi import load

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["CODES", "DTYPES", "accumulator", "byte_buffer", "device_buffer", "sum_buffer"]

# Types that MPI may add: MPI.SUM on 16-bit data is refused by MPICH and wrong, without an error,
# in Open MPI (4.1 and 5.0 with bfloat16).
MPI_NAMES = {torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int64: "INT64_T"}

# Types by their numbers in messages that tell what is in them.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums and references of ``dtype`` are kept: fp64 or fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_buffer(flat: torch.Tensor) -> "tuple[Any, MPI.Datatype]":
    """Return ``flat`` as MPI takes it for a reduction."""
    return flat.numpy(), getattr(load(), MPI_NAMES[flat.dtype])


def byte_buffer(flat: torch.Tensor) -> Any:
    """Return the memory of a contiguous CPU tensor as bytes, without a copy."""
    return flat.view(torch.uint8).numpy() if flat.numel() else flat.new_empty(0).numpy()


def device_buffer(flat: torch.Tensor) -> Any:
    """Return the memory of a contiguous CUDA tensor, for an MPI that takes such memory."""
    return load().memory.fromaddress(flat.data_ptr(), flat.nbytes)
