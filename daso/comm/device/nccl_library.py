"""NCCL as cupy brings it: what there is, and how a node's communicator starts."""

import functools
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from daso.errors import told

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["describe", "library", "start"]


NOT_FOUND = "cupy finds no libnccl.so.2"
# By the CUDA that torch was built with, as torch tells it.
REMEDIES = {
    "12": ("pip install cupy-cuda12x", "pip install nvidia-nccl-cu12"),
    "13": ("pip install cupy-cuda13x", "pip install nvidia-nccl-cu13"),
}
OTHERWISE = (
    "pip install cupy-cuda12x or cupy-cuda13x, or cupy built for it",
    "pip install nvidia-nccl-cu12 or nvidia-nccl-cu13, or NCCL built for it",
)


@functools.cache
def describe() -> dict[str, Any]:
    """Return whether NCCL can be loaded, and its version; or why not, and the remedy."""
    with_cupy, with_nccl = REMEDIES.get((torch.version.cuda or "").partition(".")[0], OTHERWISE)
    try:
        import cupy
    except Exception as error:  # also where what it needs does not load
        remedy = f"install cupy for torch's CUDA: {with_cupy}"
        return {"available": False, "why": told(error), "remedy": remedy}
    found: dict[str, Any] = {"available": False, "cupy": cupy.__version__}
    try:
        with warnings.catch_warnings(record=True) as said:  # cupy warns of what does not load
            warnings.simplefilter("always")
            from cupy.cuda import nccl
        if nccl.available:
            return {**found, "available": True, "version": nccl.get_version()}
        found["why"] = " ".join(str(said[-1].message).split()) if said else NOT_FOUND
    except Exception as error:
        found["why"] = told(error)
    return {**found, "remedy": f"install NCCL for torch's CUDA: {with_nccl}"}


def library() -> Any:
    """Return cupy's NCCL. Raises ImportError where `describe` says there is none."""
    from cupy.cuda import nccl

    return nccl


def start(
    node: "MPI.Comm", nccl: Any, within: Callable[[], AbstractContextManager[Any]], seconds: float
) -> Any:
    """Return a communicator over the ranks of a node; needs neither address nor port.

    Collective over the node; blocking.
    """
    name, problem = None, None
    if node.Get_rank() == 0:
        try:
            name = nccl.get_unique_id()
        except Exception as error:  # the others wait for a word
            problem = told(error)
    name, problem = node.bcast((name, problem))
    if problem is not None:
        raise RuntimeError(problem)
    return _in_time(
        lambda: nccl.NcclCommunicator(node.Get_size(), name, node.Get_rank()), within, seconds
    )


def _in_time(
    make: Callable[[], Any], within: Callable[[], AbstractContextManager[Any]], seconds: float
) -> Any:
    """Return what a call makes that waits for other ranks, which may never come."""
    made: list[Any] = []
    problems: list[str] = []

    def run() -> None:
        try:
            with within():
                made.append(make())
        except Exception as error:
            problems.append(told(error))

    thread = threading.Thread(target=run, name="daso-nccl", daemon=True)
    thread.start()
    thread.join(seconds)
    if made:
        return made[0]
    raise RuntimeError(
        problems[0] if problems else f"not all ranks of the node started it within {seconds:g} s"
    )
