"""Hierarchical asynchronous data-parallel training for PyTorch over MPI.

Names are imported on first use: ``import daso`` starts neither torch, MPI nor CUDA, so that
commands work on a login node.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from daso.environment import read_ignored_signals
from daso.version import __version__ as __version__

if TYPE_CHECKING:
    from daso import errors, flow, memory, predict
    from daso.comm.recording import Recording
    from daso.comm.topology import Topology, init
    from daso.plan.options import Exchange, Gradients
    from daso.plan.policy import Auto, Fixed, Plateau, Qsr
    from daso.server.optimizer import ParameterServer
    from daso.train.attach import attach
    from daso.train.optimizer import DASO

if read_ignored_signals()[1]:  # perhaps a worker of a rank
    import_module("daso.workers")

__all__ = [
    "DASO",
    "Auto",
    "Exchange",
    "Fixed",
    "Gradients",
    "ParameterServer",
    "Plateau",
    "Qsr",
    "Recording",
    "Topology",
    "attach",
    "errors",
    "flow",
    "init",
    "memory",
    "predict",
]

_HOME = {
    "DASO": "daso.train.optimizer",
    "Auto": "daso.plan.policy",
    "Exchange": "daso.plan.options",
    "Fixed": "daso.plan.policy",
    "Gradients": "daso.plan.options",
    "ParameterServer": "daso.server.optimizer",
    "Plateau": "daso.plan.policy",
    "Qsr": "daso.plan.policy",
    "Recording": "daso.comm.recording",
    "attach": "daso.train.attach",
    "Topology": "daso.comm.topology",
    "init": "daso.comm.topology",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name == "errors":
        return import_module("daso.errors")
    if name == "flow":
        return import_module("daso.flow")
    if name == "memory":
        return import_module("daso.memory")
    if name == "predict":
        return import_module("daso.predict")
    if name not in _HOME:
        raise AttributeError(f"module 'daso' has no attribute {name!r}{_hint(name)}")
    return getattr(import_module(_HOME[name]), name)


def _hint(name: str) -> str:
    """Return which public name was probably meant, as the end of a message."""
    import difflib

    by_small = {public.lower(): public for public in __all__}
    near = difflib.get_close_matches(name.lower(), by_small, 1)
    return f"; did you mean {by_small[near[0]]!r}?" if near else ""


def __dir__() -> list[str]:
    return sorted(__all__)
