"""A CUDA without a device: streams that know which launches of which streams come before theirs."""

import threading
from contextlib import contextmanager, nullcontext

import torch

from daso.comm.device.cuda import CudaCopies


class Stream:
    """What was launched on it, and what that comes after: launches of each stream by name."""

    def __init__(self, name):
        self.name, self.cuda_stream = name, id(self)
        self.after = {name: 0}

    def launch(self):
        self.after[self.name] += 1

    def wait_stream(self, other):
        self._follow(other.after)

    def wait_event(self, event):
        self._follow(event.after)

    def _follow(self, after):
        for name, count in after.items():
            self.after[name] = max(count, self.after.get(name, 0))

    def knows(self, other):
        """Return whether what is launched here now comes after all that was launched there."""
        return self.after.get(other.name, 0) == other.after[other.name]

    def query(self):
        return True


class Event:
    def __init__(self, *, enable_timing=False):
        self.after, self.stream = {}, None

    def record(self, stream):
        self.after, self.stream = dict(stream.after), stream

    def query(self):
        return True

    def elapsed_time(self, later):
        return 0.0  # of copies that are made at once


class Cuda:
    """As much of `torch.cuda` as daso uses; tensors are on the CPU and copies are made at once."""

    Event = Event

    def __init__(self):
        self.compute = Stream("compute")
        self._current, self._count = threading.local(), 0
        self.registered = {}  # address: bytes

    def Stream(self, device, priority=0):  # noqa: N802 - torch's name
        assert device is not None
        self._count += 1
        return Stream(f"side {self._count}")

    def current_stream(self, device=None):
        assert device is not None, "of a device, whichever the thread has"
        return self._streams()[-1]

    def _streams(self):
        """Return what this thread launches on, the innermost last; threads begin on the same."""
        if not hasattr(self._current, "streams"):
            self._current.streams = [self.compute]
        return self._current.streams

    @contextmanager
    def stream(self, stream):
        self._streams().append(stream)
        try:
            yield
        finally:
            self._streams().pop()

    def device(self, device):
        assert device is not None
        return nullcontext()

    def set_device(self, device):
        assert device is not None

    def cudart(self):
        return self

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802 - CUDA's name
        assert flags == 0
        known = self.registered.items()
        if any(at < address + nbytes and address < at + size for at, size in known):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802 - CUDA's name
        return 0 if self.registered.pop(address, None) else 713

    def check_error(self, code):
        if code:
            raise RuntimeError(f"CUDA error {code}")


class Copies(CudaCopies):
    """Copies whose memory on the host is not pinned, for want of a driver."""

    def host_memory(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)
