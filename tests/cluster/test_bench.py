"""`scripts/bench` on hosts of its own."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import HANG_SECONDS

ROOT = Path(__file__).parents[2]
BENCHMARKS = f"{ROOT / 'scripts'}:{ROOT / 'slurm'}"


def left():
    """Return the state folders of benches; `down` removes one last of all."""
    return sorted(Path("/run").glob("daso-bench-*"))


@pytest.fixture
def bench(cluster, tmp_path):
    """A function that runs a bench and returns its runs."""

    def run(*words, seconds=250):
        path = tmp_path / "bench.json"
        command = [sys.executable, "-m", "benchmarks", *words, f"--json={path}"]
        done = subprocess.run(
            command,
            env={**cluster.env, "PYTHONPATH": BENCHMARKS},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(path.read_text())

    before = left()
    yield run
    assert left() == before


@pytest.mark.slow("a cluster comes up for the bench")
def test_an_exchange_is_held_against_its_link(bench):
    found = bench("exchange", "--nodes=2", "--link=200mbit", "--rounds=2", "--quick")
    (run,) = found["runs"]
    rows = {row["name"]: row for row in run["rows"]}
    assert rows["fp32"]["limit_ms"] == pytest.approx(732)
    assert 0.98 < rows["fp32"]["over_limit"] < 1.3  # no faster than the link
    # Both hosts send each half of the buffer twice, and little more.
    assert 36.6 < rows["fp32"]["mbytes"] < 40
    assert 18.3 < rows["bf16"]["mbytes"] < 20
    assert found["figures"]["exchange_fp32_over_limit_2"]["value"] == rows["fp32"]["over_limit"]


@pytest.mark.slow("a cluster comes up for the bench")
def test_a_bench_that_is_ended_leaves_nothing(cluster):
    before, work = left(), sorted(Path("/var/tmp").glob("daso-bench-*"))
    words = ["exchange", "--nodes=2", "--link=200mbit", "--rounds=50"]
    env = {**cluster.env, "PYTHONPATH": BENCHMARKS}
    command = [sys.executable, "-m", "benchmarks", *words]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as bench:
        folder = Path("/run") / f"daso-bench-{bench.pid}"
        try:
            while not set(Path("/var/tmp").glob("daso-bench-*")) - set(work):  # all hosts are there
                assert bench.poll() is None
                time.sleep(0.1)
            assert folder.exists()
        finally:
            bench.terminate()
        said = bench.communicate(timeout=HANG_SECONDS)[1]
    assert (bench.returncode, said) == (130, "daso: interrupted\n")
    assert (left(), sorted(Path("/var/tmp").glob("daso-bench-*"))) == (before, work)


@pytest.mark.slow("a cluster comes up for each link")
def test_step_times_are_taken_on_every_link_that_is_named(bench):
    words = ["--only=DASO Fixed(4, 1), bf16", "--only=DDP, gloo", "--rounds=1"]
    found = bench("train", *words, "--link=none,1gbit", "--seconds=0.5", "--settle=0.5")
    free, slow = found["runs"]
    assert [free["plan"]["link"], slow["plan"]["link"]] == ["none", "1gbit"]
    ddp = {row["name"]: row for row in slow["rows"]}["DDP, gloo"]
    assert ddp["step_ms"] > 146  # 18.3 MB at every step
    for run in (free, slow):  # whatever the link, the same leaves a host
        (mbytes,) = (row["mbytes"] for row in run["rows"] if row["name"] == "DDP, gloo")
        assert 36.6 < mbytes < 40


@pytest.mark.slow("two contenders are trained to the end")
def test_time_to_accuracy_is_that_of_the_link(bench):
    words = ["--data=digits", "--quick", "--rounds=1", "--seconds=0.1", "--settle=0.1"]
    found = bench("time-to-accuracy", *words, "--link=1gbit", "--level=20", seconds=250)
    ddp, ours = found["runs"][0]["rows"]
    assert ddp["step_ms"] > 146  # 18.3 MB at every step
    (course,) = ddp["courses"]
    assert course["seconds"][-1] == pytest.approx(course["steps"][-1] * ddp["step_ms"] / 1e3)
    (course,) = ours["courses"]
    assert course["report"]["exchanges"] > 0
    assert course["report"]["global_bytes_sent"] / course["steps"][-1] < 18.3e6 / 2
