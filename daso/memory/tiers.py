"""Second memories: where storages go between forward and backward."""

import ctypes
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from daso.comm.device.cuda import CudaCopies
from daso.comm.device.staging import DeviceStaging
from daso.comm.shared_memory import SharedWindow
from daso.comm.topology import default
from daso.errors import ConfigError
from daso.memory.sizes import parse_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Copying",
    "FileTier",
    "HostTier",
    "NeighbourTier",
    "Second",
    "Tier",
    "measure",
    "open_tier",
]

SECONDS_BETWEEN_LOOKS = 5e-5


class Copying:
    """A copy that goes on.

    Args:
        wait: Blocks until it has ended.
        cell: The row, until it begins.
    """

    def __init__(self, wait: Callable[[], object], cell: list[torch.Tensor]) -> None:
        self._wait, self._cell = wait, cell

    def wait(self) -> None:
        """Block until it has ended; then it holds its row no more."""
        self._wait()

    def drop(self) -> None:
        """Do not copy, if it has not begun. Does not block."""
        self._cell.clear()


class Tier(Protocol):
    """A second memory. Copies to and from it do not block; they end in the order they began."""

    def lease(self, nbytes: int) -> int:
        """Take some of it; return where it begins."""
        ...

    def release(self, at: int, nbytes: int) -> None:
        """Give what was taken back."""
        ...

    def out(self, source: torch.Tensor, at: int) -> Copying:
        """Begin to copy a row of bytes there; return the copy."""
        ...

    def back(self, target: torch.Tensor, at: int) -> Copying:
        """Begin to copy from there into a row of bytes; return the copy."""
        ...

    def close(self) -> None:
        """End all copies and give the memory back; idempotent."""
        ...


class _Leases:
    """Parts of something that grows, given out and taken back.

    Parts that were given back go to whoever asks for as many bytes, as one training step after the
    other does.
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
    """A file, which has no name: it is gone with the process.

    Args:
        folder: In which it is made; should lie on a disk that is local and fast.
    """

    def __init__(self, folder: Path) -> None:
        try:
            handle, path = tempfile.mkstemp(prefix="daso-swap-", dir=folder)
        except OSError as error:
            raise ConfigError(
                f"the second memory must be a folder that can be written to, but {folder} is not: "
                f"{error.strerror}; name another with second='file:FOLDER'"
            ) from error
        os.unlink(path)  # noqa: PTH108 -- the name alone goes
        self._file, self._folder = handle, folder
        self._leases, self._worker = _Leases(), ThreadPoolExecutor(1, "daso-swap")

    def lease(self, nbytes: int) -> int:
        """Take some of it; return where it begins. Blocks until the disk has it."""
        size = self._leases.size
        at = self._leases.lease(nbytes)
        if self._leases.size > size:
            try:
                os.posix_fallocate(self._file, size, self._leases.size - size)
            except OSError as error:
                raise ConfigError(
                    f"the second memory needs {nbytes:,} bytes more in {self._folder}, which has "
                    f"not as many: {error.strerror}; name another folder with second='file:FOLDER'"
                ) from error
        return at

    def release(self, at: int, nbytes: int) -> None:
        """Give what was taken back."""
        self._leases.release(at, nbytes)

    def out(self, source: torch.Tensor, at: int) -> Copying:
        """Begin to copy a row of bytes to it."""
        return _begin(self._worker, lambda row: self._write(row, at), source)

    def back(self, target: torch.Tensor, at: int) -> Copying:
        """Begin to copy from it into a row of bytes."""
        return _begin(self._worker, lambda row: self._read(row, at), target)

    def _write(self, source: torch.Tensor, at: int) -> None:
        row = memoryview(_memory(source.cpu())).cast("B")
        done = 0
        while done < len(row):
            done += os.pwrite(self._file, row[done:], at + done)

    def _read(self, target: torch.Tensor, at: int) -> None:
        there = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
        row = memoryview(_memory(there)).cast("B")
        done = 0
        while done < len(row):
            got = os.preadv(self._file, [row[done:]], at + done)
            if not got:
                raise OSError(f"the second memory in {self._folder} ended early")
            done += got
        if there is not target:
            target.copy_(there)

    def close(self) -> None:
        """End all copies and give the file back."""
        self._worker.shutdown()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class HostTier:
    """Memory of the host: pinned where the model is on a GPU.

    Args:
        copies: What copies between a GPU and its host; None: a thread, from host to host.
    """

    def __init__(self, copies: DeviceStaging | None) -> None:
        self._copies, self._leases = copies, _Leases()
        self._worker = None if copies is not None else ThreadPoolExecutor(1, "daso-swap")
        self._slabs: dict[int, torch.Tensor] = {}  # by where they begin

    def lease(self, nbytes: int) -> int:
        """Take some of it; return where it begins."""
        at = self._leases.lease(nbytes)
        if at not in self._slabs:
            self._slabs[at] = (
                torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                if self._copies is None
                else self._copies.memory(nbytes)
            )
        return at

    def release(self, at: int, nbytes: int) -> None:
        """Give what was taken back."""
        self._leases.release(at, nbytes)

    def out(self, source: torch.Tensor, at: int) -> Copying:
        """Begin to copy a row of bytes to it."""
        there = self.row(at, source.numel())
        if self._copies is None:
            return self.begin(there.copy_, source)
        return _arrives(self._copies.out(source, there))

    def back(self, target: torch.Tensor, at: int) -> Copying:
        """Begin to copy from it into a row of bytes."""
        there = self.row(at, target.numel())
        if self._copies is None:
            return self.begin(lambda row: row.copy_(there), target)
        return _arrives(self._copies.back(there, target, in_turn=True))

    def begin(self, copy: Callable[[torch.Tensor], object], row: torch.Tensor) -> Copying:
        """Let the thread copy a row, after those before."""
        assert self._worker is not None
        return _begin(self._worker, copy, row)

    def row(self, at: int, nbytes: int) -> torch.Tensor:
        """Return the bytes (nbytes, uint8) there."""
        start = max(one for one in self._slabs if one <= at)
        return self._slabs[start][at - start : at - start + nbytes]

    def close(self) -> None:
        """End all copies and give the memory back."""
        if self._worker is not None:
            self._worker.shutdown()
        self._slabs.clear()


class NeighbourTier(HostTier):
    """Shared memory of the node's next rank.

    Args:
        node: Communicator of the node.
        nbytes: Of every rank's.
        copies: As for `HostTier`.

    Collective over the node, as is `close`; blocking.
    """

    def __init__(self, node: "MPI.Comm", nbytes: int, copies: DeviceStaging | None) -> None:
        super().__init__(copies)
        self._nbytes, self._window = nbytes, SharedWindow(node, nbytes)
        self._slabs[0] = self._window.segments[(node.Get_rank() + 1) % node.Get_size()]

    def lease(self, nbytes: int) -> int:
        """Take some of it; return where it begins."""
        at = self._leases.lease(nbytes)
        if self._leases.size > self._nbytes:
            raise ConfigError(
                f"the second memory must hold {self._leases.size:,} bytes, but the neighbour's has "
                f"{self._nbytes:,}: ask for more with second='neighbour:SIZE'"
            )
        return at

    def close(self) -> None:
        """End all copies and give the memory back."""
        super().close()
        self._window.free()


def _memory(row: torch.Tensor) -> "ctypes.Array[ctypes.c_char]":
    """Return a row's bytes as a buffer; the row must live as long."""
    found: ctypes.Array[ctypes.c_char] = (ctypes.c_char * row.numel()).from_address(row.data_ptr())
    return found


def _begin(worker: Executor, copy: Callable[[torch.Tensor], object], row: torch.Tensor) -> Copying:
    """Let a thread copy a row; return what blocks until it has, and holds the row no more."""
    cell = [row]

    def job() -> None:
        try:
            mine = [cell.pop()]
        except IndexError:  # dropped
            return
        copy(mine.pop())  # and held by nothing here once it has ended

    return Copying(worker.submit(job).result, cell)


def _arrives(arrived: Callable[[], bool]) -> Copying:
    def wait() -> None:
        while not arrived():
            time.sleep(SECONDS_BETWEEN_LOOKS)

    return Copying(wait, [])


Second = str | Callable[[torch.device], Tier]


def open_tier(second: Second, device: torch.device) -> Tier:
    """Return a second memory."""
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
    raise ConfigError(f"second must be 'host', 'file:FOLDER' or 'neighbour:SIZE', not {second!r}")


def measure(tier: Tier, device: torch.device, nbytes: int = 1 << 24) -> tuple[float, float]:
    """Return bytes per second of a large copy, and seconds of a small one. Blocks."""
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
