"""`daso predict` as its user types it."""

import json
import math

import pytest
from jobs import started, typed

from daso.cli.predict import count
from daso.errors import ConfigError
from daso.predict.jobs import read_run


def predict(*words):
    return typed("predict", *words)


CHOSEN = "skip, wait, wire, exchange"
GIVEN = ("--parameters=25.6e6", "--step-ms=100", "--steps=400")


def test_a_table_for_every_link_and_what_stands_behind_it(tmp_path):
    path, plot = tmp_path / "found.json", tmp_path / "found.png"
    pytest.importorskip("matplotlib")
    words = ["--nodes=2,16", "--link=1gbit,25gbit", f"--json={path}", f"--plot={plot}"]
    done = predict(*GIVEN, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("25.6 M parameters, 100.0 ms of computing a step") == 2
    assert "on 16 nodes: Auto (within 1 %" in done.stdout
    assert "Predicted, not measured." in done.stdout
    columns = [line for line in done.stdout.splitlines() if "MB/step" in line]
    assert [line.split() for line in columns] == [
        [*["nodes", "ms/step", "efficiency", "wait", "ms", "MB/step"], *CHOSEN.split()]
    ] * 2
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 2 * 2 * 3
    by = {(row["link"], row["nodes"], row["policy"]): row for row in found["rows"]}
    assert {row["nodes"]: row["plan"] for row in found["rows"]} == {2: "swap", 16: "direct"}
    slow = by["1gbit", 16, "synchronous, as DDP"]
    assert slow["efficiency"] < 0.1
    assert by["1gbit", 16, "Auto"]["efficiency"] > 0.95
    assert by["25gbit", 16, "synchronous, as DDP"]["efficiency"] > 0.7
    assert plot.stat().st_size > 10_000
    assert f"{plot}: a picture of the efficiency\n" in done.stdout
    assert found["assumptions"]


def test_faster_compute_makes_the_link_count_more():
    words = [*GIVEN, "--nodes=8", "--link=10gbit", "--policy=synchronous"]
    now, soon = predict(*words), predict(*words, "--faster-compute=3")
    parts = [float(done.stdout.split("%")[1].split()[-1]) for done in (now, soon)]
    assert parts[0] > parts[1]


def test_adam_and_its_kin_are_predicted_as_they_train():
    words = [*GIVEN[:2], "--nodes=2,64", "--link=10gbit,100mbit", "--policy=auto"]
    done = predict(*words, "--optimizer=adamw")
    assert done.returncode == 0, done.stderr
    fast, slow = done.stdout.split("link 100mbit")
    assert fast.count("1, 0, gradients in int8") == 1  # in 4 bits on 64 nodes
    assert fast.count("1, 0, gradients in int4") == 1
    assert "gradients in" not in slow.split("Predicted")[0]
    assert "normalizes gradients, as Adam does" in done.stdout
    assert "small tensors" not in done.stdout
    assert "of 2000 steps the first quarter" in done.stdout
    assert "--optimizer=adamw" in predict(*words).stdout
    short = predict(*words, "--optimizer=adamw", "--steps=999")
    assert "--steps must be at least 1600, not 999" in short.stderr


def log_of(folder, events):
    folder.mkdir(exist_ok=True)
    lines = [{"event": "start", "parameters": 1000, "nodes": 2}, *events]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def exchange(step, taken, drift, sent=0):
    seen = {"step_seconds": step, "exchange_seconds": taken, "drift": drift, "lr": 0.1}
    return {"event": "exchange", "sent": sent, "seconds": 9.0, **seen}


def test_a_run_tells_what_its_steps_and_exchanges_took(tmp_path):
    first = [exchange(9.0, 9.0, 9.0)] * 3
    rest = [
        exchange(0.1, 0.02, 1e-5, sent=10),
        exchange(0.11, 0.03, 2e-5, sent=20),
        exchange(0.12, 0.04, 3e-5, sent=30),
    ]
    folder = log_of(tmp_path / "run", first + rest)
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"event": "exch')  # the run goes on
    job = read_run(folder)[0]
    assert (job.parameters, job.step_seconds, job.lr) == (1000, 0.11, 0.1)
    assert job.host_seconds == pytest.approx(0.03 / 1000)
    assert job.drift == pytest.approx(2 * 2e-5)  # two nodes are half as far from their mean
    spread = 1.4826 * math.log(0.12 / 0.11)
    assert job.jitter == pytest.approx(spread * math.sqrt(20 / math.pi), rel=0.1)


def test_an_exchange_of_a_fragment_is_of_a_part_of_the_parameters(tmp_path):
    some = [exchange(0.1, 0.02, 1e-5, sent=10 * n) | {"fragment": n % 4} for n in range(12)]
    job = read_run(log_of(tmp_path / "run", some))[0]
    assert job.host_seconds == pytest.approx(0.02 / (1000 / 4))


def test_a_run_tells_whether_small_tensors_went_alone_and_what_that_took(tmp_path):
    """Where none went between two exchanges, nothing was measured."""
    told = [exchange(0.1, 0.02, 1e-5, sent=at) for at in range(0, 80, 10)]
    job = read_run(log_of(tmp_path / "without", told))[0]
    assert (job.small_parameters, job.small_seconds) == (0, 0)
    taken = [{**one, "small_seconds": at * 1e-3} for at, one in enumerate(told)]
    taken[5]["small_seconds"] = 0.0
    job = read_run(log_of(tmp_path / "with", taken))[0]
    assert (job.small_parameters, job.small_seconds) == (1000 / 16, 6e-3)  # 4, 6 and 7 ms


def test_a_run_tells_whether_its_steps_were_restored(tmp_path):
    told = [exchange(0.1, 0.02, 1e-5, sent=at) for at in range(0, 80, 10)]
    assert not read_run(log_of(tmp_path / "sgd", told))[0].normalizes
    told = [{**one, "required_gain": 1.3} for one in told]
    assert read_run(log_of(tmp_path / "adamw", told))[0].normalizes


def test_a_run_whose_nodes_averaged_gradients_tells_what_its_steps_took(tmp_path):
    seconds = [9.0, 9.0, 0.11, 0.111, 0.112]
    told = [
        {"event": "measured", "batch": batch, "step_seconds": one, "exposed_seconds": 0, "lr": 1e-3}
        for batch, one in zip((2, 5, 50, 100, 150), seconds, strict=True)
    ]
    folder = log_of(tmp_path / "run", [*told, exchange(0.1, 0.02, 1e-5)])
    job = read_run(folder)[0]
    assert (job.step_seconds, job.lr, job.normalizes, job.host_seconds) == (0.111, 1e-3, True, 0)
    spread = 1.4826 * math.log(0.112 / 0.111)
    assert job.jitter == pytest.approx(spread * math.sqrt(2 * 50 / math.pi), rel=0.1)
    done = predict(f"--from={folder}", "--nodes=2", "--policy=auto")
    assert done.returncode == 0, done.stderr
    assert "1, 0, gradients in int8" in done.stdout
    assert "it has no data on exchanges" in done.stdout
    with pytest.raises(ConfigError, match="at least 4 exchanges"):
        read_run(log_of(tmp_path / "short", told[:3]))


def test_a_run_that_went_on_elsewhere_tells_of_its_last_nodes(tmp_path):
    events = [
        *[exchange(5.0, 5.0, 1e-3)] * 40,
        {"event": "resume", "parameters": 1000, "nodes": 8},
        *(exchange(0.1, 0.02, 7e-5, sent=at) for at in range(0, 80, 10)),
    ]
    job = read_run(log_of(tmp_path / "run", events))[0]
    assert (job.step_seconds, job.jitter) == (0.1, 0.0)
    assert job.drift == pytest.approx(8e-5)


@pytest.mark.later("starts ranks")
def test_a_run_of_this_machine_is_predicted_on_others(tmp_path):
    words = ["-n", "2", "--ranks-per-node=1", "--data.name=synthetic", "--epochs=1"]
    done = started("daso", "train", *words, f"--runs={tmp_path}", "--name=x")
    assert done.returncode == 0, done.stderr
    done = predict(f"--from={tmp_path / 'x'}", "--nodes=2,64", "--link=1gbit", "--steps=400")
    assert done.returncode == 0, done.stderr
    assert "medians of the last" in done.stdout
    assert str(tmp_path / "x") in done.stdout


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "--from=RUN, or --parameters and --step-ms"),
        ([*GIVEN, "--nodes=0"], "--nodes must be whole numbers"),
        ([*GIVEN, "--link=fast"], "rate of a link"),
        ([*GIVEN, "--link=2000gbit"], "to 1600gbit"),
        ([*GIVEN, "--policy=fixed:4"], "fixed:SKIP:WAIT"),
        ([*GIVEN, "--policy=fixed:1:4"], "must not exceed skip"),
        ([*GIVEN, "--latency-us=-1"], "--latency-us"),
        ([*GIVEN, "--faster-compute=0"], "--faster-compute"),
        ([*GIVEN, "--jitter=2"], "jitter must be a part"),
        ([*GIVEN, "--steps=100"], "--steps must be at least 400"),
        ([*GIVEN, "--steps=" + "9" * 30], "--steps times --nodes must be at most 100000000"),
        ([*GIVEN, "--parameters=xM"], "must be a number such as 25.6M or 25.6e6, not 'xM'"),
        ([*GIVEN, "--json=/nowhere/x.json"], "existing folder"),
        ([*GIVEN, "--plot=x.foo"], "--plot must end in .png, .pdf, .svg"),
        (["--parameters=0", "--step-ms=1"], "parameters must be a positive number"),
        (["--from=/nowhere"], "--from needs the folder of a run"),
    ],
)
def test_what_cannot_be_predicted_is_told_in_one_line(words, match):
    done = predict(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("daso: ")
    assert done.stderr.count("\n") == 1
    assert match in done.stderr


@pytest.mark.parametrize(
    "events", [[], [exchange(0.1, 0.1, 1e-5)] * 3, [exchange(0.0, 0.1, 1e-5)] * 9]
)
def test_a_run_without_exchanges_tells_nothing(tmp_path, events):
    with pytest.raises(ConfigError, match="at least 4 exchanges"):
        read_run(log_of(tmp_path / "run", events))


@pytest.mark.parametrize(
    ("word", "number"), [("25.6M", 25.6e6), ("7B", 7e9), ("350k", 350e3), ("25.6e6", 25.6e6)]
)
def test_parameters_are_given_as_people_write_them(word, number):
    assert count(word) == pytest.approx(number)
