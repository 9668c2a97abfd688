"""Small blocking collectives: their values, their limits, and that no other module issues any."""

import ast
import inspect
import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from local_world import run_ranks
from torch import nn

import daso
from daso.checkpoint.state import Checkpoints
from daso.cli.bench import rounds
from daso.comm import control
from daso.comm.control import STALL_SECONDS
from daso.comm.device import cuda_aware, nccl_library
from daso.comm.health import liveness
from daso.comm.node import select
from daso.comm.topology import Topology
from daso.errors import ConfigError, ExchangeError, StallError
from daso.flow.model.checks import Wiring
from daso.flow.model.layers import Layers
from daso.flow.model.node import Node
from daso.train.model.params import broadcast_tensors
from daso.train.model.state_sync import average_tensors

ROOT = Path(daso.__file__).parent

# --- who issues them ------------------------------------------------------------------------------

COLLECTIVES = {
    *("bcast", "allgather", "allreduce", "alltoall"),
    *("Barrier", "Bcast", "Allreduce", "Reduce", "Alltoall", "Alltoallv", "Alltoallw"),
    *("Allgather", "Allgatherv", "Gather", "Gatherv", "Scatter", "Scatterv", "Scan", "Exscan"),
    *("Reduce_scatter", "Reduce_scatter_block"),
}
# Methods of other objects too: collectives where the object is named as a communicator.
SHARED_NAMES = {"barrier", "gather", "reduce", "scatter", "scan", "exscan"}
COMMUNICATOR = re.compile(r"(comm|world|node|lane|across|everybody|survivors|COMM_WORLD)$")

FORMING = "the communicators that a limit needs are made here, after all ranks have started"
LOSS = "a communicator after a loss, which has no liveness yet; another loss ends the wait"
WINDOW = "MPI makes a window in the same place, and has no call for that with a limit"
RIVAL = "a rival in a benchmark: MPI's own call is what is timed"
EXCEPTED = {
    "comm/communicators.py: _cut": FORMING,
    "comm/communicators.py: _find_rank_info": FORMING,
    "comm/communicators.py: _complete": FORMING,
    "comm/communicators.py: _meet_spares": FORMING,
    "comm/health/survivors.py: _next_world": LOSS,
    "comm/health/step_watchdog.py: ControlChannel.free": "liveness itself ends here",
    "comm/node/shm.py: SharedWindow._map": WINDOW,
    "comm/node/shm.py: SharedWindow._check_room": WINDOW,
    "cli/bench/exchange.py: measure": RIVAL,
    "cli/bench/node.py: measure": RIVAL,
}


def is_collective(node):
    """Return whether an attribute is a communicator's blocking collective, called or passed on."""
    if not isinstance(node, ast.Attribute):
        return False
    owner = ast.unparse(node.value).rpartition(".")[2]
    return node.attr in COLLECTIVES or (
        node.attr in SHARED_NAMES and COMMUNICATOR.search(owner) is not None
    )


def places(node, name=""):
    """List the functions that use blocking collectives."""
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}".lstrip(".")
        if is_collective(child):
            yield name
        yield from places(child, inner)


def test_no_other_module_issues_a_blocking_collective():
    found = set()
    for path in ROOT.rglob("*.py"):
        names = places(ast.parse(path.read_text(encoding="utf-8")))
        found |= {f"{path.relative_to(ROOT)}: {name}" for name in names}
    assert found == set(EXCEPTED)


@pytest.mark.parametrize(
    "line",
    [
        "topology.world_comm.bcast(value)",
        "topology.lane_comm.allgather(value)",
        "world.Barrier()",
        "self._topology.world_comm.gather(value)",
        "comm.reduce(value)",
        "call(first=self.world_comm.bcast)",
        "rows = max(MPI.COMM_WORLD.scatter(rows))",
        "comm.Bcast(row, 0)",
    ],
)
def test_a_planted_collective_is_found(line):
    assert list(places(ast.parse(f"def f():\n    {line}"))) == ["f"]


@pytest.mark.parametrize(
    "line",
    [
        "gather(topology, value)",
        "control.barrier(topology)",
        "kernels.gather(values, 0, 1, row)",
        "self._moves.gather()",
        "comm.Ibcast(row)",
        "from daso.comm.allreduce.direct import deterministic_allreduce",
    ],
)
def test_what_is_no_blocking_collective_is_let_through(line):
    assert list(places(ast.parse(f"def f():\n    {line}"))) == []


def test_the_default_limit_is_that_of_exchange():
    assert daso.Exchange().timeout_seconds == STALL_SECONDS
    for name in control.__all__:
        call = getattr(control, name)
        words = inspect.signature(call).parameters if inspect.isfunction(call) else {}
        if "timeout_seconds" in words:
            assert words["timeout_seconds"].default in (STALL_SECONDS, inspect.Parameter.empty)


# --- values ---------------------------------------------------------------------------------------


def on_ranks(nodes, body):
    """Return what a function of a topology returns on each rank of nodes of these sizes."""

    def with_topology(world):
        topology = Topology(world, ranks_per_node=nodes)
        result = body(topology)
        topology.free()
        return result

    return run_ranks(sum(nodes), with_topology)


@pytest.mark.parametrize("length", [0, 1, 1000])
def test_values_of_any_size_are_gathered_in_rank_order(length):
    def body(topology):
        mine = topology.rank, "x" * length * topology.rank
        return [
            [rank for rank, _ in call(topology, mine)]
            for call in (control.gather, control.gather_in_node)
        ]

    world = [0, 1, 2]
    assert on_ranks((2, 1), body) == [[world, [0, 1]], [world, [0, 1]], [world, [2]]]


def test_lanes_gather_over_nodes():
    found = on_ranks((2, 2), lambda topology: control.gather_in_lane(topology, topology.rank))
    assert found == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_numbers_of_a_node_are_gathered():
    def body(topology):
        return control.gather_numbers_in_node(topology, topology.rank, 5.0)

    assert on_ranks((2, 1), body) == [[0.0, 1.0], [0.0, 1.0], [2.0]]


def test_the_first_rank_of_world_or_node_is_heard():
    def body(topology):
        mine = {"rank": topology.rank}
        calls = control.broadcast, control.broadcast_in_node
        return [call(topology, mine)["rank"] for call in calls]

    assert on_ranks((2, 2), body) == [[0, 0], [0, 0], [0, 2], [0, 2]]


def test_a_row_becomes_that_of_any_rank(monkeypatch):
    monkeypatch.setattr(control, "PIECE_BYTES", 16)

    def body(topology):
        row = torch.full((11,), float(topology.rank))
        control.broadcast_row(topology, row, 2, 5.0)
        return row.tolist()

    assert on_ranks((2, 1), body) == [[2.0] * 11] * 3


@pytest.mark.parametrize(
    ("problems", "text"),
    [
        ([None, "no", None], "rank 1: no"),
        ([None, "no", "nor here"], "rank 1: no"),
        (["no", "no", "no"], "no"),
        (["no", "no", None], "rank 0: no"),
    ],
)
def test_a_problem_of_any_rank_is_raised_on_all(problems, text):
    def body(topology):
        problem = problems[topology.rank]
        with pytest.raises(ConfigError) as caught:
            control.raise_on_all_ranks(topology, problem and ConfigError(problem, code="said-no"))
        control.raise_on_all_ranks(topology, None)
        return str(caught.value), caught.value.code

    assert on_ranks((2, 1), body) == [(text, "said-no")] * 3


def test_equal_values_are_told_from_others():
    def body(topology):
        return control.all_equal(topology, "a"), control.all_equal(topology, topology.rank // 2)

    assert on_ranks((2, 1), body) == [(True, False)] * 3


def test_a_rank_at_another_place_is_named():
    def body(topology):
        what = ("load a checkpoint", "save a checkpoint")[topology.rank]
        with pytest.raises(ExchangeError, match=f"is about to {what}, and rank . to "):
            control.rendezvous(topology, what, 5.0)

    on_ranks((1, 1), body)


# --- a rank that never comes ----------------------------------------------------------------------

LIMIT = 0.3


def layers_of(topology):
    wiring = Wiring((Node(0, "a", "layer", 1, (1,), nn.Linear(2, 2)),), ())
    return Layers(wiring, None, None, topology, LIMIT)


def launch_nccl(topology):
    nccl = SimpleNamespace(get_unique_id=lambda: b"name", NcclCommunicator=lambda *_: None)
    return nccl_library.start(topology, nccl, None, LIMIT)


row = partial(torch.zeros, 3)
WORLD = {
    "gather": lambda top: control.gather(top, 1, LIMIT),
    "gather unlike": lambda top: control.gather_unlike(top, 1, LIMIT),
    "broadcast": lambda top: control.broadcast(top, 1, LIMIT),
    "broadcast a row": lambda top: control.broadcast_row(top, row(), 0, LIMIT),
    "barrier": lambda top: control.barrier(top, LIMIT),
    "problems": lambda top: top.raise_on_all_ranks(None, LIMIT),
    "equal": lambda top: top.equal_on_all_ranks(1, LIMIT),
    "devices": lambda top: select.device_problem(top, torch.device("cpu"), LIMIT),
    "CUDA in MPI": lambda top: cuda_aware.library_problem(top, torch.device("cuda"), LIMIT),
    "parameters": lambda top: broadcast_tensors([row()], top, LIMIT),
    "state": lambda top: average_tensors([row().long()], top, None, 1, timeout_seconds=LIMIT),
    "layers of a flow": lambda top: layers_of(top).fetch(lambda _: 0),
    "bytes of hosts": rounds.sent_bytes,
}
NODE = {
    "gather": lambda top: control.gather_in_node(top, 1, LIMIT),
    "numbers": lambda top: control.gather_numbers_in_node(top, 1, LIMIT),
    "broadcast": lambda top: control.broadcast_in_node(top, 1, LIMIT),
    "NCCL": launch_nccl,
}
LANE = {"gather": lambda top: control.gather_in_lane(top, 1, LIMIT)}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Let sites that have no configured limit, and the search for the missing rank, end soon."""
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(cuda_aware, "cuda_aware", lambda: True)
    monkeypatch.setattr(rounds, "gather", partial(control.gather, timeout_seconds=LIMIT))


def is_named(missing, nodes, call):
    """Check that the other of two ranks names the one that never comes."""

    def body(world):
        topology = Topology(world, ranks_per_node=nodes)
        if world.rank == missing:
            return
        start = time.monotonic()
        text = rf"within {LIMIT:g} s: no answer from world rank {missing} on host threads"
        with pytest.raises(StallError, match=text):
            call(topology)
        assert time.monotonic() - start < 10 * LIMIT

    run_ranks(2, body)


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("what", WORLD)
def test_a_rank_of_the_world_that_never_comes_is_named(what, missing):
    is_named(missing, (1, 1), WORLD[what])


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("what", NODE)
def test_a_rank_of_the_node_that_never_comes_is_named(what, missing):
    is_named(missing, (2,), NODE[what])


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("what", LANE)
def test_a_rank_of_the_lane_that_never_comes_is_named(what, missing):
    is_named(missing, (1, 1), LANE[what])


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_lists_no_checkpoints_is_named(missing, tmp_path):
    is_named(missing, (1, 1), lambda top: Checkpoints(tmp_path, top, timeout_seconds=LIMIT).steps())


def test_what_mpi_may_still_write_to_is_kept_after_a_stall():
    before = len(control._unfinished)
    is_named(1, (1, 1), WORLD["broadcast a row"])
    assert len(control._unfinished) > before
