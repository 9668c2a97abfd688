"""Copies between a CUDA device and its host: streams, events, pinned memory."""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from daso.comm.device.staging import Arrived

FIRST = -1  # priority of a stream whose kernels run before those of other streams (0)


class CudaStamp:
    """Timestamp of a CUDA stream; see `daso.comm.step_timer.Timestamp`.

    Args:
        event: A recorded event with timing.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def over(self) -> bool:
        """Return whether the device has passed the event."""
        return bool(self._event.query())

    def since(self, earlier: "CudaStamp") -> float:
        """Return the seconds since another timestamp of this device."""
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class CudaCopies:
    """Copies of a CUDA device, on separate streams; see `daso.comm.device.staging.DeviceStaging`.

    Args:
        device: A CUDA device.
        cuda: ``torch.cuda``, or a substitute for tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._out, self._back = (cuda.Stream(device) for _ in range(2))
        # For short kernels that other ranks wait for: they must not queue behind those of training.
        self._side_stream = cuda.Stream(device, priority=FIRST)
        self._pinned: list[int] = []  # addresses

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Arrived:
        """Start a copy to the host, after the kernels that this thread launched so far."""
        return self._copy(self._out, source, target, in_order=True)

    def to_device(
        self, source: torch.Tensor, target: torch.Tensor, *, in_order: bool = False
    ) -> Arrived:
        """Start a copy to the device."""
        return self._copy(self._back, source, target, in_order=in_order)

    def _copy(
        self, stream: Any, source: torch.Tensor, target: torch.Tensor, *, in_order: bool
    ) -> Arrived:
        if in_order:
            stream.wait_stream(self._cuda.current_stream(self._device))
        with self._on(stream):
            target.copy_(source, non_blocking=True)
            on_device = source if source.is_cuda else target
            if on_device.is_cuda:  # its memory is not reused before the copy has finished
                on_device.record_stream(stream)
            return self.completion()

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Launch this thread's kernels on a separate stream while the context is open."""
        with self._on(self._side_stream):
            yield

    def bind_thread(self) -> None:
        """Make the device the current one of the calling thread."""
        self._cuda.set_device(self._device)

    def current_stream(self) -> object:
        """Return the calling thread's stream."""
        return self._cuda.current_stream(self._device)

    def record_stream(self, tensors: Iterable[torch.Tensor], stream: object) -> None:
        """Keep the memory of tensors made in `side_stream` while kernels of a stream use it."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)  # type: ignore[arg-type]  # from `current_stream`

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        # The device too: a new thread would otherwise create a context on the first GPU.
        with self._cuda.device(self._device), self._cuda.stream(stream):
            yield

    def completion(self) -> Arrived:
        """Return a function that tests whether this thread's earlier kernels have finished."""
        arrived: Arrived = self._recorded(enable_timing=False).query
        return arrived

    def timestamp(self) -> CudaStamp:
        """Record a timestamp on this thread's stream."""
        return CudaStamp(self._recorded(enable_timing=True))

    def _recorded(self, *, enable_timing: bool) -> Any:
        """Return an event recorded after the kernels that this thread launched so far."""
        event = self._cuda.Event(enable_timing=enable_timing)
        with self._cuda.device(self._device):
            event.record(self._cuda.current_stream(self._device))
        return event

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return pinned host memory (nbytes, uint8)."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def pin(self, rows: Sequence[torch.Tensor]) -> None:
        """Pin host buffers, so that their copies are as fast as those of `host_memory`."""
        cudart = self._cuda.cudart()
        for start, stop in pages(rows):
            with self._cuda.device(self._device):
                self._cuda.check_error(cudart.cudaHostRegister(start, stop - start, 0))
            self._pinned.append(start)

    def unpin(self) -> None:
        """Unpin all host buffers."""
        cudart = self._cuda.cudart()
        while self._pinned:
            self._cuda.check_error(cudart.cudaHostUnregister(self._pinned.pop()))


def pages(rows: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the page-aligned address ranges of buffers, merged so that they do not overlap."""
    size = mmap.PAGESIZE
    ranges: list[tuple[int, int]] = []
    for row in sorted((row for row in rows if row.numel()), key=torch.Tensor.data_ptr):
        start = row.data_ptr() // size * size
        stop = -(-(row.data_ptr() + row.nbytes) // size) * size
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
        else:
            ranges.append((start, stop))
    return ranges
