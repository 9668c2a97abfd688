"""`daso train` as a SLURM job: time limits, requeues, a host that is cut off, a rank that dies."""

import json
import re
import time
from pathlib import Path

import pytest
from cluster.test_submit import Submitter
from jobs import HANG_SECONDS, slowness

# Long enough that the limit comes in between, whatever the machine does.
COMMON = ["--data.name=digits", "--schedule.policy=fixed", "--schedule.skip=4", "--schedule.wait=1"]


@pytest.fixture
def daso(cluster):
    return Submitter(cluster)


def summary_of(daso, name):
    return json.loads((daso.cluster.work / "runs" / name / "summary.json").read_text())


def events(daso, name):
    path = daso.cluster.work / "runs" / name / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def until_it_trains(daso, name, job):
    """Wait until the first epoch is over."""
    daso.cluster.until(
        lambda: any(event["event"] == "epoch" for event in events(daso, name)), seconds=HANG_SECONDS
    )
    assert daso.status(job)[0] == "RUNNING"


@pytest.mark.slow("two jobs train, and one of them twice")
def test_a_job_goes_on_after_its_time_limit_to_the_same_bits(daso):
    """SLURM sends this signal before the limit, see test_ranks_are_told_before_time_runs_out."""
    words = ["-m", "daso", "train", *COMMON, "--epochs=60"]
    job = daso.submit("--nodes=2", *words, "--name=limited")
    until_it_trains(daso, "limited", job)
    daso.cluster.run(["scancel", "--signal=USR1", job])
    log = daso.daso("logs", "--follow", job, seconds=300).stdout
    restarts = int(daso.status(job)[1])
    assert daso.status(job)[0] == "COMPLETED", log[-3000:]
    assert restarts == 1
    stopped = [event for event in events(daso, "limited") if event["event"] == "stopped"]
    resumed = [event for event in events(daso, "limited") if event["event"] == "resume"]
    assert [event["signal"] for event in stopped] == ["SIGUSR1"] * restarts
    assert [event["step"] for event in resumed] == [event["step"] for event in stopped]
    assert [event["restarts"] for event in resumed] == list(range(1, restarts + 1))
    for restart in range(1, restarts + 1):
        assert f"SLURM restarted job {job}: restart {restart}" in log
    whole = daso.submit("--nodes=2", *words, "--name=uninterrupted")
    log = daso.daso("logs", "--follow", whole, seconds=300).stdout
    assert daso.status(whole) == ("COMPLETED", "0"), log[-3000:]
    assert summary_of(daso, "uninterrupted")["resumed_at"] is None
    for key in ("model", "steps", "test_accuracy", "identical", "exchanges"):
        assert summary_of(daso, "limited")[key] == summary_of(daso, "uninterrupted")[key], key


@pytest.mark.slow("SLURM takes half a minute to find a host down")
def test_a_host_that_is_cut_off_ends_the_job_and_is_named(daso):
    words = ["-m", "daso", "train", *COMMON, "--epochs=100000", "--exchange.timeout_seconds=5"]
    job = daso.submit("--nodes=3", *words, "--name=cut")
    until_it_trains(daso, "cut", job)
    # SLURM starts the job anew if it takes the host for down before the ranks do.
    usual = daso.cluster.patience(HANG_SECONDS)
    try:
        daso.cluster.cut("mini2")
        # The script is over then; SLURM waits for the host until it takes it for down.
        ended = f"job {job} ended with exit code"
        daso.cluster.until(
            lambda: ended in daso.daso("logs", job).stdout, seconds=(5 + 3 + 12) * slowness()
        )
    finally:
        daso.cluster.patience(usual)
    log = daso.daso("logs", "--follow", job, seconds=HANG_SECONDS).stdout
    assert re.search(r"no answer from world rank 2 on host mini2", log), log[-3000:]
    assert "exited without reporting" not in log, "who says why it ends is not taken for killed"
    assert daso.status(job)[0] in ("FAILED", "NODE_FAIL", "COMPLETING")


@pytest.mark.slow("SLURM takes half a minute to find a host down")
def test_job_of_a_lost_host_resumes_on_another(daso):
    words = ["-m", "daso", "train", *COMMON, "--epochs=100000", "--checkpoint.every=50"]
    limit, name = "--exchange.timeout_seconds=5", "elsewhere"
    job = daso.submit("--nodes=2", "--restart-on-failure=1", *words, limit, f"--name={name}")
    until_it_trains(daso, name, job)
    hosts = daso.cluster.run(["scontrol", "show", "hostnames", nodes_of(daso, job)]).stdout.split()
    daso.cluster.cut(hosts[1])

    def since_resumed():
        kinds = [event["event"] for event in events(daso, name)]
        return kinds[kinds.index("resume") :] if "resume" in kinds else []

    daso.cluster.until(lambda: "epoch" in since_resumed(), seconds=HANG_SECONDS)
    assert hosts[1] not in nodes_of(daso, job)
    (resumed,) = [one for one in events(daso, name) if one["event"] == "resume"]
    assert (resumed["step"] > 0, resumed["restarts"]) == (True, 1)
    assert daso.status(job) == ("RUNNING", "1")


def nodes_of(daso, job):
    return daso.cluster.run(["squeue", "-h", "-j", job, "-o", "%N"]).stdout.strip()


@pytest.mark.slow("a job trains for a while")
def test_a_rank_that_is_killed_in_training_ends_the_job(daso):
    words = ["-m", "daso", "train", *COMMON, "--epochs=100000"]
    job = daso.submit("--nodes=2", *words, "--name=victim")
    until_it_trains(daso, "victim", job)
    start = time.monotonic()
    # The oldest: beside each rank another process of that name watches it.
    daso.cluster.on("mini1", "pkill", "-9", "-o", "-f", "daso.slurm.rank_entry.*name=victim")
    log = daso.follow(job)
    seconds = time.monotonic() - start
    assert seconds < 15 * slowness(), f"gone after {seconds:.1f} s"
    assert re.search(r"ended with exit code [1-9]", log), log[-2000:]
    said = re.findall(r"daso: rank \d of 2 on mini\d exited without reporting: it was killed", log)
    assert len(said) == 1, log[-2000:]
    assert daso.status(job)[0] == "FAILED"


@pytest.mark.slow("a job trains for a while")
def test_a_link_that_changes_in_mid_run_is_measured_within_five_exchanges(daso):
    """By all ranks after the same exchange, and they stay the same bits."""
    cluster = daso.cluster
    cluster.rate("1gbit")
    changed, out = cluster.work / "changed", cluster.work / "links.json"
    program = Path(__file__).with_name("on_links.py")
    job = daso.submit("--nodes=4", str(program), str(changed), str(out))
    cluster.until((cluster.work / "training").exists, seconds=HANG_SECONDS)
    time.sleep(3)  # some twenty exchanges
    cluster.minicluster("rate", "mini3", "100mbit")
    changed.touch()
    log = daso.daso("logs", "--follow", job, seconds=200).stdout
    assert out.exists(), log[-3000:]
    found = json.loads(out.read_text())
    assert found["same"]
    kinds = found["kinds"]
    at = kinds.index("links", found["noticed"])
    assert kinds[:at].count("exchange") - found["noticed"] <= 5, kinds


ON_TORCHRUN = """
import os, torch, daso

world = daso.init()
torch.manual_seed(world.rank)
model = torch.nn.Linear(8, 3)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
with daso.DASO(inner, module=model, policy=daso.Fixed(4, 1)) as optimizer:
    for step in range(12):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    optimizer.synchronize()
found = (world.rank, world.world_size, world.nodes, model.weight.double().sum().item().hex())
os.write(1, f"is {' '.join(map(str, found))}\\n".encode())
"""


@pytest.mark.slow("torchrun starts ranks on two hosts")
def test_torchrun_starts_ranks_on_hosts(cluster):
    """Their agents meet by c10d; srun starts these, and says to them what is not for the ranks."""
    program, script = cluster.work / "on_torchrun.py", cluster.work / "torchrun.sh"
    program.write_text(ON_TORCHRUN)
    words = "--nnodes=2 --nproc-per-node=2 --rdzv-id=7 --rdzv-backend=c10d"
    script.write_text(
        "#!/bin/bash\n"
        f"srun --mpi=pmi2 {cluster.python} -m torch.distributed.run {words} "
        f"--rdzv-endpoint=mini0:29511 {program}\n"
    )
    cluster.batch("--nodes=2", "--ntasks-per-node=1", "--output=torchrun.out", script)
    said = (cluster.work / "torchrun.out").read_text()
    found = sorted(re.findall(r"^is (\d) (\d) (\d) (\S+)$", said, re.MULTILINE))
    assert [one[:3] for one in found] == [(str(rank), "4", "2") for rank in range(4)], said[-3000:]
    assert len({one[3] for one in found}) == 1
