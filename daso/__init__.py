"""Hierarchical asynchronous data-parallel training for PyTorch over MPI.

Names are imported on first use: ``import daso`` starts neither torch, MPI nor CUDA, so that
commands work on a login node.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from daso.environment import read_ignored_signals
from daso.public_names import on_first_use
from daso.version import __version__ as __version__

if TYPE_CHECKING:
    from daso import errors, flow, integrations, memory, predict
    from daso.checkpoint.preemption import StopRequest
    from daso.comm.topology import Topology
    from daso.comm.world import init
    from daso.integrations.ddp_hook import ddp_hook, ddp_hook_state
    from daso.plan.auto import Auto
    from daso.plan.options import Exchange, Gradients
    from daso.plan.policies import Fixed, Plateau, Qsr
    from daso.server.optimizer import ParameterServer
    from daso.timeline.recording import Recording
    from daso.train.attach import attach
    from daso.train.optimizer import DASO

if read_ignored_signals()[1]:  # this process may be a rank's worker
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
    "StopRequest",
    "Topology",
    "attach",
    "ddp_hook",
    "ddp_hook_state",
    "errors",
    "flow",
    "init",
    "integrations",
    "memory",
    "predict",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "DASO": "daso.train.optimizer",
        "Auto": "daso.plan.auto",
        "Exchange": "daso.plan.options",
        "Fixed": "daso.plan.policies",
        "Gradients": "daso.plan.options",
        "ParameterServer": "daso.server.optimizer",
        "Plateau": "daso.plan.policies",
        "Qsr": "daso.plan.policies",
        "Recording": "daso.timeline.recording",
        "StopRequest": "daso.checkpoint.preemption",
        "Topology": "daso.comm.topology",
        "attach": "daso.train.attach",
        "ddp_hook": "daso.integrations.ddp_hook",
        "ddp_hook_state": "daso.integrations.ddp_hook",
        "errors": "daso.errors",
        "flow": "daso.flow",
        "init": "daso.comm.world",
        "integrations": "daso.integrations",
        "memory": "daso.memory",
        "predict": "daso.predict",
    },
)
