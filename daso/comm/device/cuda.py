"""A CUDA device beside its host: streams for copies, events that are asked, pinned memory."""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from daso.comm.device.staging import Arrived

__all__ = ["FIRST", "CudaCopies", "CudaStamp", "pages"]


FIRST = -1  # a stream's priority: its launches go before those of others, 0


class CudaStamp:
    """A moment of a stream; see `daso.comm.step_timer.Timestamp`.

    Args:
        event: Recorded there, with its time.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def over(self) -> bool:
        """Return whether the device has come past it."""
        return bool(self._event.query())

    def since(self, earlier: "CudaStamp") -> float:
        """Return the seconds since another one of this device."""
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class CudaCopies:
    """Copies on streams of their own; see `daso.comm.device.staging.DeviceStaging`.

    Args:
        device: A CUDA device.
        cuda: What launches there.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._out, self._back = (cuda.Stream(device) for _ in range(2))
        # Short launches that ranks wait for; behind training's they would wait for each of them.
        self._beside = cuda.Stream(device, priority=FIRST)
        self._pinned: list[int] = []  # addresses

    def out(self, source: torch.Tensor, target: torch.Tensor) -> Arrived:
        """Start a copy to the host, after what this thread launched so far."""
        return self._copy(self._out, source, target, in_turn=True)

    def back(self, source: torch.Tensor, target: torch.Tensor, *, in_turn: bool = False) -> Arrived:
        """Start a copy to the device."""
        return self._copy(self._back, source, target, in_turn=in_turn)

    def _copy(
        self, stream: Any, source: torch.Tensor, target: torch.Tensor, *, in_turn: bool
    ) -> Arrived:
        if in_turn:
            stream.wait_stream(self._cuda.current_stream(self._device))
        with self._on(stream):
            target.copy_(source, non_blocking=True)
            there = source if source.is_cuda else target
            if there.is_cuda:  # its memory is not given to others before the copy is over
                there.record_stream(stream)
            return self.mark()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Let what this thread launches meanwhile run beside what other threads launch."""
        with self._on(self._beside):
            yield

    def attach(self) -> None:
        """Make the device the calling thread's."""
        self._cuda.set_device(self._device)

    def here(self) -> object:
        """Return the calling thread's stream."""
        return self._cuda.current_stream(self._device)

    def lend(self, tensors: Iterable[torch.Tensor], to: object) -> None:
        """Let what is launched on a stream use tensors that were made `beside`."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(to)  # type: ignore[arg-type]  # from `here`

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        # The device too: a thread that has none of its own would else start one on the first GPU.
        with self._cuda.device(self._device), self._cuda.stream(stream):
            yield

    def mark(self) -> Arrived:
        """Return what tells when all that this thread launched so far, there, is over."""
        arrived: Arrived = self._recorded(enable_timing=False).query
        return arrived

    def stamp(self) -> CudaStamp:
        """Launch a stamp of the device's time."""
        return CudaStamp(self._recorded(enable_timing=True))

    def _recorded(self, *, enable_timing: bool) -> Any:
        """Return an event behind all that this thread launched so far."""
        event = self._cuda.Event(enable_timing=enable_timing)
        with self._cuda.device(self._device):
            event.record(self._cuda.current_stream(self._device))
        return event

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return pinned host memory (nbytes, uint8)."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def pin(self, rows: Sequence[torch.Tensor]) -> None:
        """Let copies to and from rows on the host go as fast as from `memory`."""
        cudart = self._cuda.cudart()
        for start, stop in pages(rows):
            with self._cuda.device(self._device):
                self._cuda.check_error(cudart.cudaHostRegister(start, stop - start, 0))
            self._pinned.append(start)

    def unpin(self) -> None:
        """Take back every `pin`."""
        cudart = self._cuda.cudart()
        while self._pinned:
            self._cuda.check_error(cudart.cudaHostUnregister(self._pinned.pop()))


def pages(rows: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the pages of memory, each once, in which rows lie."""
    size = mmap.PAGESIZE
    found: list[tuple[int, int]] = []
    for row in sorted((row for row in rows if row.numel()), key=torch.Tensor.data_ptr):
        start = row.data_ptr() // size * size
        stop = -(-(row.data_ptr() + row.nbytes) // size) * size
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found
