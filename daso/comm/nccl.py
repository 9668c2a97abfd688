"""What cupy knows of NCCL on this machine."""

from typing import Any

__all__ = ["describe"]


def describe() -> dict[str, Any]:
    """Return whether NCCL can be loaded, and its version."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        return {"available": False, "why": str(error)}
    if not nccl.available:
        return {"available": False, "why": "cupy was built without NCCL or finds no libnccl"}
    return {"available": True, "version": nccl.get_version()}
