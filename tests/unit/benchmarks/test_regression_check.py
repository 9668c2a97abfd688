"""`scripts/bench guard`: what it says of ratios, and a short run on a machine without hosts."""

import copy
import json
from pathlib import Path

import pytest
from benchmarks import regression_check
from minicluster import start

from daso.cli.bench.names import OURS
from daso.errors import ExchangeError

RECORDED = Path(__file__).parents[3] / "scripts" / "figures"


@pytest.mark.parametrize(
    ("recorded", "now", "word"),
    [
        ([1.0, 1.1, 1.2], [1.0, 1.1, 1.2], "as recorded"),
        ([1.0, 1.1, 1.2], [1.3, 1.3, 1.4], "slower"),
        ([1.0, 1.1, 1.2], [1.2, 1.3, 1.4], "as recorded"),  # the ranges meet
        ([1.00, 1.01, 1.02], [1.03, 1.1, 1.2], "as recorded"),  # less than 15 % apart
        ([1.00, 1.01, 1.02], [1.03, 1.17, 1.2], "slower"),
        ([1.0, 1.1, 5.0], [4.0, 4.0, 4.0], "as recorded"),  # a noisy round was recorded
        ([1.3, 1.3, 1.4], [1.0, 1.1, 1.2], "faster"),
        ([1.15, 1.15], [1.05, 1.05], "as recorded"),
        ([], [9.0], "not recorded"),
    ],
)
def test_a_ratio_is_another_one_beyond_both_spreads_and_a_margin(recorded, now, word):
    assert regression_check.judge("any", recorded, now).word == word


@pytest.mark.parametrize("figure", regression_check.GUARDED)
@pytest.mark.parametrize(
    ("recorded", "now", "slowdown", "refused"),
    [
        ([], [1.5, 0.9, 0.9], 1.0, False),
        ([], [1.5, 0.9, 1.1], 1.0, True),
        ([0.3, 0.4, 0.5], [0.6, 0.7, 0.75], 1.0, False),  # slower, but not by as much
        ([0.3, 0.4, 0.5], [0.6, 0.9, 0.95], 1.0, True),
        ([0.3, 0.4, 0.5], [0.6, 0.9, 0.95], 0.5, True),  # a faster machine excuses nothing
        ([0.3, 0.4, 0.5], [0.6, 0.9, 0.95], 1.2, False),
        ([0.3, 0.4, 0.5], [0.6, 1.1, 1.2], 9.0, True),
        ([0.3, 0.4, 0.5], [0.45, 0.9, 0.95], 1.0, False),  # a round was as ever
        ([0.8], [0.99, 0.99], 1.0, False),
    ],
)
def test_a_rival_that_wins_or_a_lead_that_is_halved_is_refused(
    figure, recorded, now, slowdown, refused
):
    others = regression_check.judge("any", [0.1], [2.0])
    found = regression_check.judge(figure, recorded, now)
    assert regression_check.broken([others, found], slowdown) == [found] * refused
    if refused:
        with pytest.raises(ExchangeError, match=f"but {figure} was {min(now):.3f}, "):
            regression_check.refuse([others, found], slowdown)
    else:
        regression_check.refuse([others, found], slowdown)


@pytest.fixture
def taken():
    """Runs of every kind: the recorded ones, on the guard's link."""
    found = {
        kind: json.loads((RECORDED / f"{kind}.json").read_text())
        for kind in regression_check.BENCHES
    }
    return {
        kind: next(run for run in one["runs"] if run["plan"].get("link", "1gbit") == "1gbit")
        for kind, one in found.items()
    }


def words(folder, taken):
    return {one.figure: one.word for one in regression_check.verdicts(folder, taken)}


def test_recorded_runs_are_as_recorded(taken):
    found = words(RECORDED, taken)
    assert set(regression_check.GUARDED) < found.keys()
    assert {"step_ratio_1gbit", "exchange_fp32_over_limit_2"} < found.keys()
    assert set(found.values()) == {"as recorded"}


def test_a_slow_contender_is_told(taken):
    now = copy.deepcopy(taken)
    for row in now["train"]["rows"]:
        if row["name"] == OURS:
            for one in row["rounds"]:
                one["seconds"] *= 2
    found = words(RECORDED, now)
    slower = {"step_ratio_1gbit", "step_ratio_over_ddp_1gbit"}
    assert {name for name, word in found.items() if word == "slower"} == slower
    assert {name for name, word in found.items() if word != "as recorded"} == slower


def test_what_was_recorded_elsewhere_or_never_is_no_measure(taken, tmp_path):
    assert set(words(tmp_path, taken).values()) == {"not recorded"}
    now = copy.deepcopy(taken)
    now["train"]["nodes"], now["exchange"]["plan"]["link"] = [2, 2], "2gbit"
    found = words(RECORDED, now)
    assert {name for name, word in found.items() if word == "as recorded"} == {
        "node_average_8mib_over_mpi"
    }


def test_how_fast_the_machine_computes_is_told(taken, tmp_path):
    now = taken["train"]
    step = f"{now['rows'][0]['step_ms']:.1f} ms"
    line, slowdown = regression_check.pace(RECORDED, now)
    assert line.endswith(f"recorded {step}, now {step}") and slowdown == 1
    line, slowdown = regression_check.pace(tmp_path, now)
    assert line.endswith(f"recorded -, now {step}") and slowdown == 1
    now = copy.deepcopy(now)
    now["rows"][0]["step_ms"] *= 3
    assert regression_check.pace(RECORDED, now)[1] == pytest.approx(3)


def test_figures_of_a_run_are_the_medians_of_its_ratios(taken):
    train = regression_check.train
    shown = {name: one["value"] for name, one in train.figures(taken["train"]).items()}
    verdicts = [
        regression_check.judge(name, [], now) for name, now in train.ratios(taken["train"]).items()
    ]
    lines = regression_check.table(verdicts).splitlines()[1:]
    for name, value in shown.items():
        (line,) = (line for line in lines if line.split()[0] == name)
        assert f"{value:.3f}" in line


@pytest.mark.later("runs benches")
def test_without_hosts_this_machine_is_measured_and_said_to_be(monkeypatch, capsys):
    monkeypatch.setitem(start.PACKAGES, "no-such-package", ("no-such-program",))
    found = dict(regression_check.measure(1, seconds=0.2, settle=0.2))
    assert capsys.readouterr().out.startswith("no hosts, so no link and no exchange")
    assert found.keys() == {"train", "node"}
    verdicts = regression_check.verdicts(RECORDED, found)
    assert {one.figure for one in verdicts} == {
        "step_ratio_here",
        "step_ratio_ddp_here",
        "step_ratio_over_ddp_here",
        "node_average_8mib_over_mpi",
    }
    assert all(min(one.now) > 0 for one in verdicts)
