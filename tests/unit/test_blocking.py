"""MPI's own collectives wait for ever: each stands behind a meeting that does not."""

import ast
from pathlib import Path

import daso
from daso.comm.topology import RENDEZVOUS

ROOT = Path(daso.__file__).parent
BLOCKING = {
    *("bcast", "allgather", "Barrier", "Bcast", "allreduce", "Allreduce", "Allgather", "Waitall"),
    *("Split", "Split_type", "Allocate", "Allocate_shared"),
}
INIT = "daso.init()"  # which waits for all ranks by itself
STEP = "a step"  # in which all ranks have just waited for each other
LOSS = "a loss"  # which ends on all ranks what they wait for, and so does another one
WRAP, SERVE, FLOW = "wrap an optimizer", "make a daso.ParameterServer", "make a flow's Runtime"
EPOCH, LOAD = "begin an epoch of a flow", "load a checkpoint"
CLOSE = "close an optimizer"
MEASURE = "measure the machine"

# Where a rank may block in MPI, and where all ranks have met right before.
AFTER = {
    "comm/device/cuda_aware.py: library_problem": WRAP,
    "comm/node/select.py: device_problem": WRAP,
    "comm/node/select.py: wants_nccl": WRAP,
    "comm/device/nccl_library.py: start": WRAP,
    "comm/node/nccl.py: NcclNode.__init__": WRAP,
    "comm/node/shm.py: ShmNode.__init__": WRAP,
    "comm/health/control_messages.py: ControlChannel.free": CLOSE,
    "comm/p2p/packets.py: OneSidedMemory.__init__": SERVE,
    "comm/p2p/packets.py: one_sided_seconds": SERVE,
    "comm/process_group.py: _store": "join torch.distributed",
    "comm/process_group.py: ranks_of_group": WRAP,
    "comm/topology.py: Topology.__init__": INIT,
    "comm/topology.py: Topology._part": INIT,
    "comm/topology.py: Topology._know_spares": INIT,
    "comm/health/spares.py: set_aside": INIT,
    "comm/topology.py: Topology._find_rank_info": INIT,
    "comm/topology.py: Topology.tell_regrouped": LOSS,
    "comm/health/survivors.py: _next_world": LOSS,
    "comm/health/survivors.py: _topology_of.part": LOSS,
    "train/recovery/hand_over.py: hand_over": LOSS,
    "comm/topology.py: Topology.raise_on_all_ranks": WRAP,
    "comm/topology.py: Topology.equal_on_all_ranks": WRAP,
    "comm/shared_memory.py: SharedWindow.__init__": STEP,
    "comm/shared_memory.py: SharedWindow._check_room": STEP,
    "flow/replicas.py: FlowReplicas.__init__": FLOW,
    "predict/measure.py: measure_machine": MEASURE,
    "predict/link_trials.py: link_rate": MEASURE,
    "flow/replicas.py: FlowReplicas.end_epoch": EPOCH,
    "flow/model/layers.py: Layers.fetch": FLOW,
    "flow/model/layers.py: _average": EPOCH,
    "flow/runtime.py: Runtime._check_instances": EPOCH,
    "flow/runtime.py: Runtime._check_same": FLOW,
    "flow/runtime.py: Runtime._go_through": EPOCH,
    "flow/runtime.py: Runtime._place": EPOCH,
    "flow/runtime.py: Runtime._settle": EPOCH,
    "flow/runtime.py: _inside": FLOW,
    "cli/train/resume.py: Saver.open": WRAP,
    "checkpoint/state.py: Checkpoints._listed": LOAD,
    "checkpoint/state.py: Checkpoints._let_once_more": "save a checkpoint",
    "checkpoint/state.py: Checkpoints._load": LOAD,
    "server/optimizer.py: ParameterServer._agree": SERVE,
    "train/deltas/exchange.py: Exchanges._drop": STEP,
    "train/coordinator.py: check_same_options": WRAP,
    "train/model/params.py: check_same_layout": WRAP,
    "train/model/shards.py: check_shards": WRAP,
    "train/model/params.py: broadcast": WRAP,
    "train/session.py: Session._start_anew": STEP,
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
