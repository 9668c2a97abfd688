"""What is said of NCCL where it is not there, or does not load; how a start ends in time."""

import sys
import threading
import warnings
from contextlib import nullcontext
from types import ModuleType

import pytest
from mpi4py import MPI

import daso
from daso.comm.device.nccl_library import describe, start


class Cupy(ModuleType):
    """As cupy, whose NCCL is what a call makes when it is imported."""

    __version__ = "14.2.0"
    __path__ = ()

    def __init__(self, make):
        super().__init__("cupy")
        self.cuda = Cuda(make)


class Cuda(ModuleType):
    def __init__(self, make):
        super().__init__("cupy.cuda")
        self.__path__ = ()
        self._make = make

    @property
    def nccl(self):
        return self._make()


@pytest.fixture
def described(monkeypatch):
    def ask(make):
        cupy = Cupy(make)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
        return describe.__wrapped__()

    return ask


class Nccl:
    available = True

    def __init__(self, version=None, available=True):
        self.available, self._version = available, version

    def get_version(self):
        if isinstance(self._version, Exception):
            raise self._version
        return self._version


def raises(error):
    raise error


def warns():
    warnings.warn("nccl could not be loaded.\n  Reason: ImportError (libnccl.so.2)", stacklevel=1)
    return Nccl(available=False)


def test_what_is_there_is_told(described):
    assert described(lambda: Nccl(23203)) == {
        "cupy": "14.2.0",
        "available": True,
        "version": 23203,
    }


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (warns, "nccl could not be loaded. Reason: ImportError (libnccl.so.2)"),
        (lambda: Nccl(available=False), "cupy finds no libnccl.so.2"),
        (lambda: raises(RuntimeError("Failed to dlopen x")), "RuntimeError: Failed to dlopen x"),
        (lambda: Nccl(ValueError(3)), "ValueError: 3"),
    ],
)
def test_a_library_that_does_not_load_is_told_with_the_remedy(described, monkeypatch, make, why):
    """As an answer, whatever cupy raises: on one rank alone an error would stop all others."""
    monkeypatch.setattr("torch.version.cuda", "12.8")
    found = described(make)
    assert (found["available"], found["why"]) == (False, why)
    remedy = found["remedy"]
    assert remedy.startswith("install NCCL for torch's CUDA: pip install nvidia-nccl-cu12")


@pytest.mark.parametrize(
    ("cuda", "ends"),
    [
        ("12.8", "pip install nvidia-nccl-cu12"),
        ("13.0", "pip install nvidia-nccl-cu13"),
        ("11.8", "or NCCL built for it"),
        (None, "or NCCL built for it"),
    ],
)
def test_the_remedy_is_for_the_cuda_that_torch_was_built_with(described, monkeypatch, cuda, ends):
    monkeypatch.setattr("torch.version.cuda", cuda)
    assert described(warns)["remedy"].endswith(ends)


def test_without_cupy_the_remedy_is_cupy(monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setitem(sys.modules, "cupy", None)
    found = describe.__wrapped__()
    assert not found["available"]
    assert "pip install cupy-cuda12x" in found["remedy"]


class Starts:
    """NCCL whose communicator comes when it is let."""

    def __init__(self):
        self.go_on = threading.Event()

    def get_unique_id(self):
        return b"name"

    def NcclCommunicator(self, *told):  # noqa: N802 - cupy's name
        self.go_on.wait(10)
        return told


def test_a_start_that_others_do_not_take_part_in_ends():
    nccl, alone = Starts(), daso.Topology(MPI.COMM_SELF)
    with pytest.raises(RuntimeError, match=r"not all ranks of the node started it within 0.1 s"):
        start(alone, nccl, nullcontext, 0.1)
    nccl.go_on.set()
    assert start(alone, nccl, nullcontext, 5.0) == (1, b"name", 0)
    alone.free()
