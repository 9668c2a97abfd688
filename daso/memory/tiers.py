"""Second memories, to which storages are swapped between forward and backward."""

import ctypes
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from daso.comm.device.cuda import CudaCopies
from daso.comm.device.staging import DeviceStaging
from daso.comm.node.shm import SharedWindow
from daso.comm.topology import default
from daso.errors import ConfigError
from daso.memory.sizes import parse_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

POLL_SECONDS = 5e-5


class PendingCopy:
    """A copy in flight.

    Args:
        wait: Blocks until the copy has ended.
        cell: Holds the row until the copy begins.
    """

    def __init__(self, wait: Callable[[], object], cell: list[torch.Tensor]) -> None:
        self._wait, self._cell = wait, cell

    def wait(self) -> None:
        """Block until the copy has ended; it releases its row then."""
        self._wait()

    def drop(self) -> bool:
        """Cancel the copy unless it has begun; return whether it was cancelled. Does not block."""
        try:
            self._cell.pop()
        except IndexError:
            return False
        return True


class Tier(Protocol):
    """A second memory. Copies do not block; they end in the order in which they began."""

    def lease(self, nbytes: int) -> int:
        """Reserve some bytes; return their offset."""
        ...

    def release(self, at: int, nbytes: int) -> None:
        """Release reserved bytes."""
        ...

    def out(self, source: torch.Tensor, at: int) -> PendingCopy:
        """Start to copy a row of bytes to an offset; return the copy."""
        ...

    def back(self, target: torch.Tensor, at: int) -> PendingCopy:
        """Start to copy from an offset into a row of bytes; return the copy."""
        ...

    def close(self) -> None:
        """Finish all copies and free the memory; idempotent."""
        ...


class _Leases:
    """Offsets of reserved bytes in memory that grows.

    Released bytes are reused for requests of the same size, as successive training steps make.
    """

    def __init__(self) -> None:
        self.size = 0
        self._free: dict[int, list[int]] = {}

    def lease(self, nbytes: int) -> int:
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        self.size += nbytes
        return self.size - nbytes

    def release(self, at: int, nbytes: int) -> None:
        self._free.setdefault(nbytes, []).append(at)


class FileTier:
    """An unnamed file: it disappears with the process.

    Args:
        folder: Folder of the file; should be on a fast local disk.
    """

    def __init__(self, folder: Path) -> None:
        try:
            handle, path = tempfile.mkstemp(prefix="daso-swap-", dir=folder)
        except OSError as error:
            raise ConfigError(
                f"the second memory must be a writable folder, but {folder} is not: "
                f"{error.strerror}; name another with second='file:FOLDER'",
                code="second-memory-not-writable",
            ) from error
        os.unlink(path)  # noqa: PTH108 -- removes only the name
        self._file, self._folder = handle, folder
        self._leases, self._worker = _Leases(), ThreadPoolExecutor(1, "daso-swap")

    def lease(self, nbytes: int) -> int:
        """Reserve some bytes; return their offset. Blocks until the disk has allocated them."""
        size = self._leases.size
        at = self._leases.lease(nbytes)
        if self._leases.size > size:
            try:
                os.posix_fallocate(self._file, size, self._leases.size - size)
            except OSError as error:
                raise ConfigError(
                    f"the second memory needs {nbytes:,} more bytes in {self._folder}, which "
                    f"has too few: {error.strerror}; name another folder with second='file:FOLDER'",
                    code="second-memory-is-full",
                ) from error
        return at

    def release(self, at: int, nbytes: int) -> None:
        """Release reserved bytes."""
        self._leases.release(at, nbytes)

    def out(self, source: torch.Tensor, at: int) -> PendingCopy:
        """Start to copy a row of bytes to an offset."""
        return _begin(self._worker, lambda row: self._write(row, at), source)

    def back(self, target: torch.Tensor, at: int) -> PendingCopy:
        """Start to copy from an offset into a row of bytes."""
        return _begin(self._worker, lambda row: self._read(row, at), target)

    def _write(self, source: torch.Tensor, at: int) -> None:
        row = memoryview(_memory(source.cpu())).cast("B")
        done = 0
        while done < len(row):
            done += os.pwrite(self._file, row[done:], at + done)

    def _read(self, target: torch.Tensor, at: int) -> None:
        host = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
        row = memoryview(_memory(host)).cast("B")
        done = 0
        while done < len(row):
            got = os.preadv(self._file, [row[done:]], at + done)
            if not got:
                raise OSError(f"the second memory in {self._folder} ended early")
            done += got
        if host is not target:
            target.copy_(host)

    def close(self) -> None:
        """Finish all copies and close the file."""
        self._worker.shutdown()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class HostTier:
    """Host memory, pinned if the model is on a GPU.

    Args:
        copies: Copies between a GPU and its host; None: a thread copies within host memory.
    """

    def __init__(self, copies: DeviceStaging | None) -> None:
        self._copies, self._leases = copies, _Leases()
        self._worker = None if copies is not None else ThreadPoolExecutor(1, "daso-swap")
        self._slabs: dict[int, torch.Tensor] = {}  # by offset

    def lease(self, nbytes: int) -> int:
        """Reserve some bytes; return their offset."""
        at = self._leases.lease(nbytes)
        if at not in self._slabs:
            self._slabs[at] = (
                torch.frombuffer(mmap(-1, nbytes), dtype=torch.uint8)  # outside torch's allocator
                if self._copies is None
                else self._copies.host_memory(nbytes)
            )
        return at

    def release(self, at: int, nbytes: int) -> None:
        """Release reserved bytes."""
        self._leases.release(at, nbytes)

    def out(self, source: torch.Tensor, at: int) -> PendingCopy:
        """Start to copy a row of bytes to an offset."""
        slot = self.row(at, source.numel())
        if self._copies is None:
            return self.begin(slot.copy_, source)
        return _arrives(self._copies.to_host(source, slot))

    def back(self, target: torch.Tensor, at: int) -> PendingCopy:
        """Start to copy from an offset into a row of bytes."""
        slot = self.row(at, target.numel())
        if self._copies is None:
            return self.begin(lambda row: row.copy_(slot), target)
        return _arrives(self._copies.to_device(slot, target, in_order=True))

    def begin(self, copy: Callable[[torch.Tensor], object], row: torch.Tensor) -> PendingCopy:
        """Start a copy in the thread, after earlier ones."""
        assert self._worker is not None
        return _begin(self._worker, copy, row)

    def row(self, at: int, nbytes: int) -> torch.Tensor:
        """Return the bytes (nbytes, uint8) at an offset."""
        return self._slabs[at][:nbytes]

    def close(self) -> None:
        """Finish all copies and free the memory."""
        if self._worker is not None:
            self._worker.shutdown()
        self._slabs.clear()


class NeighbourTier(HostTier):
    """Shared memory of the node's next rank.

    Args:
        node: Communicator of the node.
        nbytes: Size of each rank's part.
        copies: As for `HostTier`.

    Collective over the node, as is `close`; blocking.
    """

    def __init__(self, node: "MPI.Comm", nbytes: int, copies: DeviceStaging | None) -> None:
        super().__init__(copies)
        self._nbytes, self._window = nbytes, SharedWindow(node, nbytes)
        self._memory = self._window.segments[(node.Get_rank() + 1) % node.Get_size()]

    def lease(self, nbytes: int) -> int:
        """Reserve some bytes; return their offset."""
        at = self._leases.lease(nbytes)
        if self._leases.size > self._nbytes:
            raise ConfigError(
                f"the second memory must hold {self._leases.size:,} bytes, but the neighbour's has "
                f"{self._nbytes:,}; increase it with second='neighbour:SIZE'",
                code="neighbour-memory-too-small",
            )
        return at

    def row(self, at: int, nbytes: int) -> torch.Tensor:
        """Return the bytes (nbytes, uint8) at an offset."""
        return self._memory[at : at + nbytes]

    def close(self) -> None:
        """Finish all copies and free the memory."""
        super().close()
        self._window.free()


def _memory(row: torch.Tensor) -> "ctypes.Array[ctypes.c_char]":
    """Return a row's bytes as a buffer, which does not keep the row alive."""
    buffer: ctypes.Array[ctypes.c_char] = (ctypes.c_char * row.numel()).from_address(row.data_ptr())
    return buffer


def _begin(
    worker: Executor, copy: Callable[[torch.Tensor], object], row: torch.Tensor
) -> PendingCopy:
    """Start a copy of a row in a worker thread; the copy releases the row when it ends."""
    cell = [row]

    def job() -> None:
        try:
            rows = [cell.pop()]
        except IndexError:  # dropped
            return
        copy(rows.pop())  # released here when it has ended

    return PendingCopy(worker.submit(job).result, cell)


def _arrives(arrived: Callable[[], bool]) -> PendingCopy:
    def wait() -> None:
        while not arrived():
            time.sleep(POLL_SECONDS)

    return PendingCopy(wait, [])


Second = str | Callable[[torch.device], Tier]


def open_tier(second: Second, device: torch.device) -> Tier:
    """Open a second memory for a device."""
    if not isinstance(second, str):
        return second(device)
    kind, _, folder = second.partition(":")
    if kind == "file" and folder:
        return FileTier(Path(folder))
    copies = CudaCopies(device) if device.type == "cuda" else None
    if second == "host":
        return HostTier(copies)
    if kind == "neighbour" and folder:
        return NeighbourTier(default().node_comm, parse_bytes("second", folder), copies)
    raise ConfigError(
        f"second must be 'host', 'file:FOLDER' or 'neighbour:SIZE', not {second!r}",
        code="unknown-second-memory",
    )


def measure(tier: Tier, device: torch.device, nbytes: int = 1 << 24) -> tuple[float, float]:
    """Measure the bytes per second of a large copy, and the seconds of a small one. Blocks."""
    seconds = []
    for size in (nbytes, 1024):
        row, at = torch.zeros(size, dtype=torch.uint8, device=device), tier.lease(size)
        tried = []
        for _ in range(3):
            start = time.perf_counter()
            tier.out(row, at).wait()
            tier.back(row, at).wait()
            tried.append((time.perf_counter() - start) / 2)
        seconds.append(sorted(tried)[1])
        tier.release(at, size)
    return nbytes / max(seconds[0] - seconds[1], 1e-9), seconds[1]
