"""A CUDA device that this machine does not have: torch's dispatcher believes in it.

`device.cpp` says what it does and checks; `install` puts it under torch and gives `torch.cuda` the
functions that a build without CUDA lacks. As a pytest plugin (``-p pretended_cuda``) it runs tests
that need a device where there is none, and fails those that leave violations behind. cupy's NCCL
is `nccl`, over MPI, in the books of the same device.

The machine has as many devices as ``DASO_PRETENDED_GPUS`` says, one unless it is set.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

__all__ = ["DEVICES", "install", "pageable", "set_link", "taken_by_mpi", "violations", "waits"]

SOURCE = Path(__file__).parent / "device.cpp"
# Arguments of its function that tells who uses which memory.
USE = ("int64", "int", "uint64", "uint64", "int", "char_p")
CYCLES_PER_SECOND = 1e9
DEVICES = int(os.environ.get("DASO_PRETENDED_GPUS", "1"))


def build():
    """Compile the device, unless it was; return where it lies."""
    root = Path(find_spec("torch").origin).parent
    told = SOURCE.read_bytes() + (root / "version.py").read_bytes() + str(root).encode()
    name = f"daso-pretended-cuda-{os.getuid()}-{hashlib.sha256(told).hexdigest()[:16]}.so"
    built = Path(tempfile.gettempdir()) / name
    if not built.exists() or built.stat().st_uid != os.getuid():
        compiler = os.environ.get("CXX") or shutil.which("g++")
        assert compiler, "the pretended device needs a C++ compiler (g++, or CXX)"
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            made = Path(folder) / "made.so"
            include, lib = root / "include", root / "lib"
            subprocess.run(
                [
                    *(compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w"),
                    *(str(SOURCE), "-o", made),
                    *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"),
                    *(f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"),
                ],
                check=True,
            )
            made.rename(built)
    return built


def _load():
    """Load the device into this process."""
    # Only once does torch look for what is behind CUDA, and that when it is imported.
    assert "torch" not in sys.modules, "the pretended device must be imported before torch"
    lib = ctypes.CDLL(str(build()))
    lib.pretended_held.restype = ctypes.c_uint64
    lib.pretended_pageable.restype = ctypes.c_int64
    lib.pretended_hooked.restype = ctypes.c_bool
    lib.pretended_elapsed.restype = ctypes.c_double
    for name, kinds in {
        "launch": [ctypes.c_int64, ctypes.c_int],
        "elapsed": [ctypes.c_uint64, ctypes.c_uint64],
        "sleep": [ctypes.c_int64, ctypes.c_int, ctypes.c_double],
        "use": [getattr(ctypes, f"c_{kind}") for kind in USE],
        "touch": [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p],
        "pin": [ctypes.c_uint64, ctypes.c_uint64],
        "unpin": [ctypes.c_uint64],
        "resize": [ctypes.c_uint64, ctypes.c_uint64],
        "link": [ctypes.c_double, ctypes.c_double],
    }.items():
        getattr(lib, f"pretended_{name}").argtypes = kinds
    return lib


LIBRARY = _load()
import torch  # noqa: E402 - see there


def _lines(name):
    room = ctypes.create_string_buffer(1 << 20)
    getattr(LIBRARY, f"pretended_{name}")(room, len(room))
    return room.value.decode().splitlines()


def violations():
    """Return what was done out of order since the last call, a line each."""
    return _lines("violations")


def waits():
    """Return how often the host waited for the device since the last call, by what it called."""
    return {by: int(count) for by, count in (line.rsplit(": ", 1) for line in _lines("waits"))}


def pageable():
    """Return how many copies were to go on by themselves, and could not: memory not pinned."""
    return LIBRARY.pretended_pageable()


def set_link(bytes_per_second, latency_seconds=0.0):
    """Let copies between host and devices take time from now on; 0: they take none."""
    LIBRARY.pretended_link(bytes_per_second, latency_seconds)


def taken_by_mpi(tensor):
    """Note that somebody who knows of no streams takes a tensor's memory now, in this thread."""
    assert _index() == tensor.device.index, "the thread that calls MPI is not the device's"
    LIBRARY.pretended_touch(tensor.data_ptr(), tensor.nbytes, b"MPI")


def _index(device=None):
    if device is None:
        return LIBRARY.pretended_current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return LIBRARY.pretended_current_device() if index is None else index


class Stream(torch.Stream):
    """As `torch.cuda.Stream`."""

    def __new__(cls, device=None, priority=0, **ids):
        if not ids:
            made = torch.Stream(device=torch.device("cuda", _index(device)))
            ids = {"stream_id": made.stream_id, "device_index": made.device_index}
        return super().__new__(cls, **{"device_type": 1, **ids})

    @property
    def cuda_stream(self):
        return self.stream_id


class Event(torch.Event):
    """As `torch.cuda.Event`."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def elapsed_time(self, later):  # torch's own takes no subclass
        return LIBRARY.pretended_elapsed(self.event_id, later.event_id)


def current_stream(device=None):
    stream = torch._C._accelerator_getStream(_index(device))
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index)


@contextmanager
def _on_stream(stream):
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    torch._C._accelerator_setStream(stream)
    try:
        yield
    finally:
        torch._C._accelerator_setStream(before)


class Device:
    """As `torch.cuda.device`."""

    def __init__(self, device):
        self._index = _index(device)

    def __enter__(self):
        self._before = _index()
        LIBRARY.pretended_set_device(self._index)

    def __exit__(self, *_):
        LIBRARY.pretended_set_device(self._before)


def _moved(storage, *, device, non_blocking=False):
    """Copy a storage, as deepcopy and pickle do; torch's own makes one for a device it knows."""
    row = torch.empty(0, dtype=torch.uint8, device=storage.device)
    row.set_(storage, 0, (storage.nbytes(),), (1,))
    return row.to(device, copy=True).untyped_storage()


def _resized(on_cpu, storage, nbytes):
    """Resize a storage, of a device or not."""
    if storage.device.type == "cpu":
        return on_cpu(storage, nbytes)
    LIBRARY.pretended_resize(storage._cdata, nbytes)
    return storage


def _registered(address, nbytes, flags):
    assert flags == 0
    return LIBRARY.pretended_pin(address, nbytes)


def _check_error(code):
    if code:
        raise RuntimeError(f"CUDA error {code}")


def _properties(device=None):
    index = _index(device)
    return SimpleNamespace(
        name="pretended", uuid=f"GPU-{index}", total_memory=1 << 34, major=9, minor=0
    )


def _sleep(cycles):
    LIBRARY.pretended_sleep(current_stream().stream_id, _index(), cycles / CYCLES_PER_SECOND)


def _set_sync_debug_mode(mode):
    LIBRARY.pretended_refuse_waits(int(mode in ("error", 2)))


@functools.cache
def install():
    """Put the device under torch, for the rest of this process."""
    lib = LIBRARY
    assert lib.pretended_hooked(), "torch does not know the pretended device"
    lib.pretended_devices(DEVICES)
    registered = SimpleNamespace(
        cudaHostRegister=_registered, cudaHostUnregister=lib.pretended_unpin
    )
    there = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: DEVICES,
        "current_device": _index,
        "set_device": lambda device: lib.pretended_set_device(_index(device)),
        "device": Device,
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "stream": _on_stream,
        "synchronize": lambda device=None: lib.pretended_synchronize(_index(device)),
        "get_device_name": lambda device=None: "pretended",
        "get_device_properties": _properties,
        "get_device_capability": lambda device=None: (9, 0),
        "memory_allocated": lambda device=None: lib.pretended_held(_index(device), 0),
        "max_memory_allocated": lambda device=None: lib.pretended_held(_index(device), 1),
        "reset_peak_memory_stats": lambda device=None: lib.pretended_reset_most(_index(device)),
        "empty_cache": lambda: None,
        "_sleep": _sleep,
        "set_sync_debug_mode": _set_sync_debug_mode,
        "cudart": lambda: registered,
        "check_error": _check_error,
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": lambda seed: None,  # the CPU's numbers are the device's
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    for name, one in there.items():
        setattr(torch.cuda, name, one)
    torch.UntypedStorage.to = _moved
    torch.UntypedStorage.resize_ = functools.partialmethod(
        functools.partial(_resized, torch.UntypedStorage.resize_)
    )
    torch.UntypedStorage.clone = lambda storage: _moved(storage, device=storage.device)
    for name in ("cupy", "cupy.cuda"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
        sys.modules[name].__path__ = []  # a package
        sys.modules[name].__version__ = "pretended"
    sys.meta_path.insert(0, _Nccl())


class _Nccl:
    """Finds the NCCL of these devices where cupy's is looked for; it starts MPI, so not before."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "cupy.cuda.nccl":
            return spec_from_file_location(name, Path(__file__).parent / "nccl.py")
        return None


def pytest_configure():
    install()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item):
    """Fail whoever does something out of order, the teardown of the test before included."""
    before = violations()
    assert not before, "\n".join(["while an earlier test was torn down:", *before[:20]])
    result = yield
    found = violations()
    assert not found, "\n".join(found[:20])
    return result
