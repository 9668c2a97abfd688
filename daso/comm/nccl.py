"""NCCL as cupy brings it: what there is, and how a node's communicator starts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["describe", "library", "start"]


def describe() -> dict[str, Any]:
    """Return whether NCCL can be loaded, and its version."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        return {"available": False, "why": str(error)}
    if not nccl.available:
        return {"available": False, "why": "cupy was built without NCCL or finds no libnccl"}
    return {"available": True, "version": nccl.get_version()}


def library() -> Any:
    """Return cupy's NCCL. Raises ImportError where `describe` says there is none."""
    from cupy.cuda import nccl

    return nccl


def start(node: "MPI.Comm", nccl: Any) -> Any:
    """Return a communicator over the ranks of a node; needs neither address nor port.

    Args:
        node: Those ranks.
        nccl: From `library`.

    Raises:
        NcclError: It does not start.

    Collective over the node; blocking.
    """
    name, error = None, None
    if node.Get_rank() == 0:
        try:
            name = nccl.get_unique_id()
        except Exception as caught:  # the others wait for a word
            error = RuntimeError(str(caught))
    name, error = node.bcast((name, error))
    if error is not None:
        raise error
    return nccl.NcclCommunicator(node.Get_size(), name, node.Get_rank())
