"""MPI waits without limit to make communicators and windows: each stands behind a meeting.

Blocking collectives are in `daso.comm.control`; tests/unit/comm/test_control.py holds that.
"""

import ast
from pathlib import Path

import daso
from daso.comm.control import RENDEZVOUS

ROOT = Path(daso.__file__).parent
BLOCKING = {"Split", "Split_type", "Allocate", "Allocate_shared", "Waitall"}
INIT = "daso.init()"  # which waits for all ranks by itself
STEP = "a step"  # in which all ranks have just waited for each other
LOSS = "a loss"  # which ends on all ranks what they wait for, and so does another one
FLOW = "make a flow's Runtime"
CLOSE = "close an optimizer"

# Where a rank may block in MPI, and where all ranks have met right before.
AFTER = {
    "comm/health/step_watchdog.py: ControlChannel.free": CLOSE,
    "comm/communicators.py: _cut": INIT,
    "comm/communicators.py: _complete": INIT,
    "comm/health/spares.py: set_aside": INIT,
    "comm/health/survivors.py: _topology_of.part": LOSS,
    "train/recovery/hand_over.py: hand_over": LOSS,
    "comm/node/shm.py: SharedWindow.__init__": STEP,
    "flow/replicas.py: FlowReplicas.__init__": FLOW,
    "flow/replicas.py: flow_topology": FLOW,
}


def places(node, name=""):
    """Names of the functions with calls that block in MPI."""
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}".lstrip(".")
        called = child.func if isinstance(child, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in BLOCKING:
            yield name
        yield from places(child, inner)


def test_whatever_blocks_in_mpi_stands_behind_a_meeting():
    found = set()
    for path in ROOT.rglob("*.py"):
        file = path.relative_to(ROOT)
        if file.parts[0] != "examples" and file.parts[:2] != ("cli", "bench"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {f"{file}: {name}" for name in places(tree)}
    assert found == set(AFTER)
    assert set(AFTER.values()) - {INIT, STEP, LOSS} <= set(RENDEZVOUS)
