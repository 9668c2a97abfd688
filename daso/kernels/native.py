"""C kernels for CPUs: `native.c`, loaded by ctypes, which releases the GIL during calls.

One library is built for each instruction set (`build`); the best one for this processor is loaded.
A library of other sources, or one that does not load, is not used.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from daso.kernels import torch_kernels
from daso.kernels.build import FOLDER, VARIANTS, digest, library_name
from daso.kernels.codecs import Codec
from daso.kernels.rows import KINDS, NO_ROWS, EncodeRows, FlatTensors, Mean, ShardRows

NAMES = ("fp32", "bf16", "fp16", "int8", "int4", "int2", "topk", "fp64")
WIRES = {name: index for index, name in enumerate(NAMES)}
COPY, ADD, PULL = range(3)
# Flags of /proc/cpuinfo that a variant needs beyond the next one.
FEATURES = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"},
}
CPU = torch.device("cpu")
int32, int64, double = ctypes.c_int32, ctypes.c_int64, ctypes.c_double
pointer = ctypes.c_void_p
ARGUMENTS = {
    "daso_encode": (
        *(int32, int64, pointer, pointer, pointer, pointer, pointer, pointer, pointer),
        *(int32, pointer, pointer, pointer, pointer),
    ),
    "daso_reduce": (
        *(int32, int64, int64, pointer, pointer, double, pointer, int32, pointer, pointer),
    ),
    "daso_accept": (
        *(int32, int64, int64, pointer, pointer, double, pointer, pointer, pointer, pointer),
        *(pointer, pointer, pointer, double, pointer),
    ),
    "daso_mean_rows": (*(int32, int64, int64, pointer, double, pointer, int32, int64, pointer),),
    "daso_gather": (int64, int64, pointer, pointer, pointer, pointer),
    "daso_merge": (int32, double, int64, pointer, pointer, pointer, pointer),
}
Function = Callable[..., None]
TYPES = {torch.float32: "fp32", torch.float64: "fp64"}


class KernelError(Exception):
    """Raised if kernels cannot be used."""


@dataclass(frozen=True, slots=True)
class _Functions:
    """Functions of the library for rows of one type."""

    encode: Function
    reduce: Function
    accept: Function
    mean_rows: Function
    gather: Function
    merge: Function


def supported_variants(cpuinfo: str | None = None) -> list[str]:
    """Return the variants that this processor can run, fastest first."""
    if not FEATURES.keys() & set(VARIANTS):
        return list(VARIANTS)
    text = Path("/proc/cpuinfo").read_text("utf-8") if cpuinfo is None else cpuinfo
    words = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    lacking = [name for name in VARIANTS if not FEATURES.get(name, set()) <= set(words)]
    first = max((VARIANTS.index(name) + 1 for name in lacking), default=0)
    return list(VARIANTS[first:])


@cache
def load_native(variant: str | None = None, folder: Path = FOLDER) -> "NativeKernels":
    """Return the kernels of a variant; None: the best one for this processor.

    Raises:
        KernelError: The library is missing, does not load, or belongs to another version.
    """
    names = supported_variants() if variant is None else [variant]
    reasons = []
    for name in names:
        path = folder / library_name(name)
        if path.exists():
            try:
                return NativeKernels(_open(path), name)
            except KernelError as error:
                reasons.append(str(error))
    if reasons:
        raise KernelError(reasons[0])
    raise KernelError("no library was built; run python -m daso.kernels.build, with a C compiler")


def _open(path: Path) -> ctypes.CDLL:
    """Load a library; raise KernelError if it was built from other sources."""
    try:
        library = ctypes.CDLL(str(path))
        source = library.daso_source
    except (OSError, AttributeError) as error:
        raise KernelError(
            f"{path.name} does not load ({error}); run python -m daso.kernels.build"
        ) from error
    source.restype, source.argtypes = ctypes.c_uint64, ()
    if source() != digest():
        raise KernelError(
            f"{path.name} was built from another native.c; run python -m daso.kernels.build"
        )
    return library


class NativeKernels:
    """The functions of `daso.kernels.torch_kernels`, with the same bits, in C.

    Args:
        library: The library built from `native.c`.
        variant: The instruction set it was compiled for.
    """

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        self.NAME = f"C kernels ({variant})"
        self._fingerprint = library.daso_fingerprint
        self._fingerprint.argtypes, self._fingerprint.restype = (int64, pointer), ctypes.c_uint32
        self._functions = {}
        for dtype, suffix in TYPES.items():
            functions = {}
            for name, arguments in ARGUMENTS.items():
                function = getattr(library, f"{name}_{suffix}")
                function.argtypes, function.restype = arguments, None
                functions[name.removeprefix("daso_")] = function
            self._functions[dtype] = _Functions(**functions)

    def encode(
        self,
        codec: Codec,
        values: FlatTensors,
        spans: Sequence[tuple[int, int]],
        payload: torch.Tensor,
        rows: EncodeRows = NO_ROWS,
    ) -> None:
        """Encode values - reference + residual; see `daso.kernels.torch_kernels.encode`."""
        if not values.on_host:
            torch_kernels.encode(codec, values, spans, payload, rows)
            return
        if rows.gradients or (rows.fingerprint is not None and rows.reference is None):
            rows.check()
        flat = array("q", [at for span in spans for at in span])
        _check_bytes(payload, sum(codec.nbytes(stop - start) for start, stop in spans))
        last = max(flat, default=0)
        _check_end(values, last)
        _check_rows(codec.row, last, rows.reference, rows.residual, rows.rounding)
        self._functions[codec.row].encode(
            WIRES[codec.wire],
            len(spans),
            _address(flat),
            *_tables(values),
            *map(_pointer, (rows.reference, rows.residual, rows.rounding)),
            rows.gradients,
            payload.data_ptr(),
            _pointer(rows.first),
            _pointer(rows.distance),
            _pointer(rows.fingerprint),
        )

    def reduce(
        self,
        mean: Mean,
        numel: int,
        *,
        payload: torch.Tensor | None = None,
        row: torch.Tensor | None = None,
        carry: torch.Tensor | None = None,
        gradients: bool = False,
    ) -> None:
        """Compute a mean in rank order; see `daso.kernels.torch_kernels.reduce`."""
        codec = mean.codec
        if payload is not None:
            _check_bytes(payload, codec.nbytes(numel))
        _check_rows(codec.row, numel, row, carry)
        versions, weights = _versions(mean, numel)
        self._functions[codec.row].reduce(
            WIRES[codec.wire],
            numel,
            len(versions),
            _address(versions),
            _address(weights),
            mean.total,
            _pointer(carry),
            gradients,
            _pointer(payload),
            _pointer(row),
        )

    def accept(
        self,
        mean: Mean,
        sent: torch.Tensor,
        start: int,
        stop: int,
        rows: ShardRows,
        sums: torch.Tensor,
    ) -> None:
        """Apply a mean; see `daso.kernels.torch_kernels.accept`."""
        codec, numel = mean.codec, stop - start
        versions, weights = _versions(mean, numel)
        _check_bytes(sent, codec.offset(numel))
        changed = (rows.reference, rows.negated, rows.shown, rows.residual)
        optional = (rows.rounding, rows.others)
        _check_rows(codec.row, stop, *changed, *optional)
        if rows.rounding is not None and rows.residual is None:
            raise ValueError("rounding errors must have a residual to go to, but it is None")
        at = start * codec.row.itemsize
        self._functions[codec.row].accept(
            WIRES[codec.wire],
            numel,
            len(versions),
            _address(versions),
            _address(weights),
            mean.total,
            sent.data_ptr(),
            *(None if row is None else row.data_ptr() + at for row in (*changed, *optional)),
            rows.share,
            sums.data_ptr(),
        )

    def fingerprint(self, row: torch.Tensor, out: torch.Tensor) -> None:
        """Compute a checksum; see `daso.kernels.torch_kernels.fingerprint`."""
        _check_rows(row.dtype, row.numel(), row)
        out.fill_(self._fingerprint(row.nbytes, row.data_ptr()))

    def mean_rows(
        self,
        rows: Sequence[torch.Tensor],
        divisor: int = 1,
        *,
        total: torch.Tensor | None = None,
        to: Sequence[torch.Tensor] = (),
    ) -> None:
        """Average rows, added in order; see `daso.kernels.torch_kernels.mean_rows`."""
        kind, numel = rows[0].dtype, rows[0].numel()
        wide = torch.float64 if kind == torch.float64 else torch.float32
        written = to[0].dtype if to else kind
        _check_rows(kind, numel, *rows)
        _check_rows(wide, numel, total)
        _check_rows(written, numel, *to)
        read, others = (array("q", [row.data_ptr() for row in group]) for group in (rows, to))
        self._functions[wide].mean_rows(
            KINDS[kind],
            numel,
            len(read),
            _address(read),
            divisor,
            _pointer(total),
            KINDS[written],
            len(others),
            _address(others),
        )

    def gather(self, values: FlatTensors, start: int, stop: int, row: torch.Tensor) -> None:
        """Copy elements of tensors to a row; see `daso.kernels.torch_kernels.gather`."""
        if not values.on_host:
            torch_kernels.gather(values, start, stop, row)
            return
        _check_end(values, stop)
        _check_rows(row.dtype, stop - start, row)
        self._functions[row.dtype].gather(start, stop - start, *_tables(values), row.data_ptr())

    def merge(
        self, values: FlatTensors, row: torch.Tensor, pull: float, *, add: bool = False
    ) -> None:
        """Merge a row into tensors; see `daso.kernels.torch_kernels.merge`."""
        if not values.on_host:
            torch_kernels.merge(values, row, pull, add=add)
            return
        _check_rows(row.dtype, values.numel, row)
        how = ADD if add else COPY if pull == 1 else PULL
        self._functions[row.dtype].merge(
            how, pull, len(values.kinds), *_tables(values), row.data_ptr()
        )
        # So that autograd raises for a backward through the old values, as after torch's
        # operations.
        torch.autograd.graph.increment_version(values.tensors)


def _address(numbers: "array[int] | array[float]") -> int:
    return numbers.buffer_info()[0]


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _tables(values: FlatTensors) -> tuple[int, int, int]:
    return _address(values.addresses), _address(values.kinds), _address(values.ends)


def _versions(mean: Mean, numel: int) -> "tuple[array[int], array[float]]":
    """Return the addresses of payloads, after a check of their lengths, and the weights."""
    if not len(mean.versions) == len(mean.weights) > 0:
        raise ValueError(
            f"a mean must have a weight for each version, not {len(mean.weights)} for "
            f"{len(mean.versions)}"
        )
    for version in mean.versions:
        _check_bytes(version, mean.codec.offset(numel))
    versions = array("q", [version.data_ptr() for version in mean.versions])
    return versions, array("d", mean.weights)


def _check_end(values: FlatTensors, stop: int) -> None:
    """Raise if a span ends after the tensors: C would read past them."""
    if stop > values.numel:
        raise ValueError(f"a span must end within {values.numel} numbers, not at {stop}")


def _check_bytes(payload: torch.Tensor, nbytes: int) -> None:
    """Raise if a payload is shorter than its row: C would read or write past it."""
    bad = payload.numel() < nbytes or payload.dtype != torch.uint8
    if bad or not payload.is_contiguous() or payload.device != CPU:
        raise ValueError(
            f"a payload must be {nbytes} contiguous bytes on the host, not {payload.numel()} "
            f"numbers of {payload.dtype} with strides {payload.stride()} on {payload.device}"
        )


def _check_rows(dtype: torch.dtype, numel: int, *rows: torch.Tensor | None) -> None:
    """Raise for rows that are shorter, of another type or device, or not contiguous."""
    for row in rows:
        if row is None:
            continue
        bad = row.numel() < numel or row.dtype != dtype
        if bad or not row.is_contiguous() or row.device != CPU:
            raise ValueError(
                f"a row must be {numel} contiguous numbers of {dtype} on the host, not "
                f"{row.numel()} of {row.dtype} with strides {row.stride()} on {row.device}"
            )
