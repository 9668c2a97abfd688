"""NCCL through cupy: its availability, and the start of a node's communicator."""

import functools
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from daso.comm.control import broadcast_in_node
from daso.errors import summarize

if TYPE_CHECKING:
    from daso.comm.topology import Topology

NOT_FOUND = "cupy finds no libnccl.so.2"
# By the CUDA version of torch.
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
    """Return whether NCCL can be loaded, with its version or with the reason and the remedy."""
    with_cupy, with_nccl = REMEDIES.get((torch.version.cuda or "").partition(".")[0], OTHERWISE)
    try:
        import cupy
    except Exception as error:  # also if a library that it needs does not load
        remedy = f"install cupy for torch's CUDA: {with_cupy}"
        return {"available": False, "why": summarize(error), "remedy": remedy}
    report: dict[str, Any] = {"available": False, "cupy": cupy.__version__}
    try:
        with warnings.catch_warnings(record=True) as loading:  # of what does not load
            warnings.simplefilter("always")
            from cupy.cuda import nccl
        if nccl.available:
            return {**report, "available": True, "version": nccl.get_version()}
        report["why"] = " ".join(str(loading[-1].message).split()) if loading else NOT_FOUND
    except Exception as error:
        report["why"] = summarize(error)
    return {**report, "remedy": f"install NCCL for torch's CUDA: {with_nccl}"}


def library() -> Any:
    """Return cupy's NCCL module; raises ImportError where `describe` reports it unavailable."""
    from cupy.cuda import nccl

    return nccl


def start(
    topology: "Topology",
    nccl: Any,
    within: Callable[[], AbstractContextManager[Any]],
    seconds: float,
) -> Any:
    """Return an NCCL communicator over the ranks of a node; needs neither address nor port.

    Collective over the node; blocking.
    """
    name, problem = None, None
    if topology.local_rank == 0:
        try:
            name = nccl.get_unique_id()
        except Exception as error:  # the other ranks wait for the broadcast
            problem = summarize(error)
    name, problem = broadcast_in_node(topology, (name, problem), seconds)
    if problem is not None:
        raise RuntimeError(problem)
    return _call_with_limit(
        lambda: nccl.NcclCommunicator(topology.local_size, name, topology.local_rank),
        within,
        seconds,
    )


def _call_with_limit(
    make: Callable[[], Any], within: Callable[[], AbstractContextManager[Any]], seconds: float
) -> Any:
    """Return the result of a call that waits for other ranks; raise if it exceeds the limit."""
    results: list[Any] = []
    problems: list[str] = []

    def run() -> None:
        try:
            with within():
                results.append(make())
        except Exception as error:
            problems.append(summarize(error))

    thread = threading.Thread(target=run, name="daso-nccl", daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    raise RuntimeError(
        problems[0] if problems else f"not all ranks of the node started it within {seconds:g} s"
    )
