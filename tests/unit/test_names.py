"""Names that were replaced stay replaced: an engineer of the field greps for the field's words."""

import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Old name: the one that stands for it now. A new row whenever a name is replaced.
REPLACED = {
    "Bell": "StepWatchdog",
    "bell": "watchdog",
    "RollCall": "LivenessProbe",
    "roll": "liveness",
    "Notes": "ControlChannel",
    "Vote": "AsyncMaxReduce",
    "TwoPhase": "ReduceScatterAllGather",
    "Adder": "WeightedMean",
    "Outbox": "SendBuffer",
    "Buffers": "BufferPool",
    "Carried": "NestedWork",
    "Patience": "RunningClock",
    "Arrival": "PeerRendezvous",
    "OnDevice": "DeviceContext",
    "LevelledMean": "MultiLevelMean",
    "turns_of": "peer_order",
    "adder_of": "make_weighted_mean",
    "sums_stay": "reduces_on_device",
    "raise_where_lost": "raise_if_lost",
    "heeds": "relevant_ranks",
    "Closer": "CloseCallbacks",
    "go_alone": "are_separate",
    "stay_behind": "are_held_back",
    "hurried": "poll_eagerly",
    "Stopwatch": "StepTimer",
    "NodeGroup": "NodeTransport",
    "Letter": "Message",
    "Mailbox": "SendQueue",
    "mailbox": "queue",
    "crossing_of": "shard_transport",
    "Place": "RankInfo",
    "agree": "raise_on_all_ranks",
    "Synchronizer": "GradientStep and DeltaExchange",
    "Exchanges": "DeltaExchange",
    "piled_up": "has_unreduced_grads",
    "session_class": "make_session",
    "agree_options": "check_same_options",
    "agree_layout": "check_same_layout",
    "Meeting": "Coordinator",
    "Links": "Channels",
    "GradientRows": "FlatGradients",
    "GradientBuckets": "GradientReducer",
    "Carrier": "BackgroundReducer",
    "HostSums": "HostReducer",
    "Abreast": "ConcurrentReductions",
    "LayerSteps": "LayerwiseStep",
    "ParameterRow": "DeltaBuffer",
    "rehearse": "warm_up",
    "InPlace": "HostShard",
    "Act": "Action",
    "Seen": "Measurements",
    "Counts": "Metrics",
    "ChunkSearch": "BucketSizeSearch",
    "LayerClient": "ServerHooks",
    "Serving": "ServerThread",
    "RowServer": "ParameterShard",
    "Shares": "Partition",
    "Wired": "PushCompressor",
    "EagerServer": "ParameterServer",
    "Departures": "PushScheduler",
    "tell_frameworks": "set_torchrun_environment",
    "foretell": "simulate_plan",
    "foretold": "predicted",
    "fate": "decision",
    "Tail": "RecomputeSegment",
    "Script": "ActivationTrace",
    "Held": "SavedTensor",
    "stray": "diverge",
    "Beside": "FlowReplicas",
    "Moves": "ParameterDeltas",
    "Did": "TaskRecord",
    "pooch": "search",
    "carrier": "background",
    "stall_seconds": "timeout_seconds",
    "damped": "scale_by_staleness",
    "NODES": "WAIT_INTER_NODE",
}
FILES = sorted(
    path
    for folder in ("daso", "scripts", "slurm", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if path != Path(__file__)
)


def names(path):
    with tokenize.open(path) as file:
        text = file.read()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {(one.string, one.start[0]) for one in tokens if one.type == tokenize.NAME}


@pytest.mark.parametrize("folder", ["daso", "scripts", "slurm", "tests"])
def test_no_name_is_one_that_was_replaced(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}, now {REPLACED[name]}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] == folder
        for name, line in sorted(names(path), key=lambda one: one[1])
        if name in REPLACED
    ]
    assert found == []


def test_a_replaced_name_is_found(tmp_path):
    path = tmp_path / "old.py"
    path.write_text("class Bell:\n    '''A Bell.'''\n")
    assert [name for name, _ in names(path) if name in REPLACED] == ["Bell"]
