"""`scripts/bench predict`: what a run calibrates, and predictions held against measurements."""

import pytest
from benchmarks import prediction_error

from daso.cli.bench import train
from daso.cli.bench.names import COMPUTE, OURS
from daso.predict.links import HEADERS

EXACT = pytest.approx
PLAN = train.Plan("cnn", (), 3, 1.0, 1.0, "")


def row(name, step_ms, over):
    seen = {"lr": 0.1, "drift": 4e-5}
    report = {"measurements": seen, "own_seconds": 0.008} if over > 0 else {}
    rounds = [{"base_seconds": step_ms / over / 1e3}] * 3
    found = {"name": name, "step_ms": step_ms, "over_compute": over, "report": report}
    return found | {"rounds": rounds}


class Machine:
    """Takes what one of two cores would by the model, and a tenth more after it has calibrated.

    Links themselves take nothing here: what is predicted for them is too much.
    """

    def __init__(self):
        self.asked = []

    def run(self, kind, plan, *, link, nodes, ranks):
        assert (kind, ranks, plan["link"]) == (train.__name__, 1, link)
        assert plan["names"] == tuple(prediction_error.WAYS)
        self.asked.append((link, nodes))
        more = (1.1 if len(self.asked) > 1 else 1.0) * nodes / 2
        steps = {
            COMPUTE: 50.0,
            prediction_error.SYNCHRONOUS: 62.5,
            prediction_error.OFTEN: 55.0,
            OURS: 50.0,
        }
        rows = [row(name, more * ms, ms / 50) for name, ms in steps.items()]
        found = {"plan": plan, "parameters": 10**6, "nodes": [1] * nodes, "rows": rows}
        return found | {"versions": {}}


def test_the_first_run_calibrates_and_nothing_else_does():
    machine = Machine()
    found = list(prediction_error.compare(machine, PLAN, [("1gbit", 2), ("none", 4)], cores=2))
    assert machine.asked == [("none", 2), ("1gbit", 2), ("none", 4)]
    assert [one["calibrates"] for one in found] == [True, False, False]
    job = found[0]["job"]
    assert job["step_seconds"] == EXACT(0.05)
    assert job["gradient_seconds"] == EXACT(9.3e-9)  # of 12.5 ms a step 3.2 are votes
    assert job["own_seconds"] == EXACT(8e-9)
    assert job["host_seconds"] == EXACT(12e-9)  # of 5 ms a step, every fourth: 20
    assert job["drift"] == EXACT(8e-5)
    assert all(one["job"] == job for one in found)


def test_what_calibrates_is_predicted_as_it_was():
    first, *_ = prediction_error.compare(Machine(), PLAN, [], cores=2)
    rows = {row["name"]: row for row in first["rows"]}
    assert rows[prediction_error.OFTEN]["predicted_ms"] == EXACT(55.0, rel=1e-3)
    assert rows[prediction_error.SYNCHRONOUS]["predicted_ms"] == EXACT(62.5, rel=1e-3)
    assert rows[prediction_error.OFTEN]["unchanged_ms"] == 55.0


def test_hosts_sharing_cores_are_predicted_from_their_compute():
    *_, four = prediction_error.compare(Machine(), PLAN, [("none", 4)], cores=2)
    rows = {row["name"]: row for row in four["rows"]}
    assert rows[prediction_error.OFTEN]["predicted_ms"] == EXACT(121.0, rel=1e-3)
    assert rows[prediction_error.OFTEN]["compute_ms"] == EXACT(110.0)


def test_temporary_slowness_does_not_spoil_predictions():
    """On a link that takes nothing, and 10 % slower at everything than when it was calibrated."""
    *_, found = prediction_error.compare(Machine(), PLAN, [("none", 2)], cores=2)
    for one in found["rows"]:
        if one["name"] != OURS:  # which takes nothing for exchanges here
            assert one["predicted_ms"] == EXACT(one["measured_ms"], rel=0.01)
        assert one["unchanged_ms"] == EXACT(one["measured_ms"])


def test_a_rate_in_bits_is_an_eighth_of_it_in_bytes():
    *_, found = prediction_error.compare(Machine(), PLAN, [("100mbit", 2)], cores=2)
    rows = {row["name"]: row for row in found["rows"]}
    often = rows[prediction_error.OFTEN]
    crossing = 2e6 * HEADERS * 8 / 1e8  # a million numbers of 2 bytes, every fourth step
    assert often["added_ms"] - often["compute_ms"] == EXACT(1e3 * crossing / 4)


def test_errors_are_of_all_settings_but_the_calibrating_one():
    settings = [("1gbit", 2), ("none", 3), ("none", 4)]
    found = list(prediction_error.compare(Machine(), PLAN, settings, cores=2))
    figures = prediction_error.figures(found)
    assert figures.keys() == {
        f"{rule}_error_{kind}"
        for rule in ("prediction", "unchanged", "added")
        for kind in ("median", "worst")
    }
    errors = [
        abs(row["predicted_ms"] / row["measured_ms"] - 1)
        for one in found[1:]
        for row in one["rows"]
    ]
    assert figures["prediction_error_worst"]["value"] == EXACT(max(errors))
    assert (
        "9 settings: 1gbit on 2 hosts, none on 3 hosts"
        in (figures["prediction_error_median"]["conditions"])
    )
    assert prediction_error.figures(found[:3]) == {}  # too few to say


def test_a_table_has_predictions_beside_both_rules():
    first, second = prediction_error.compare(Machine(), PLAN, [("1gbit", 2)], cores=2)
    assert "which calibrates: 50.0 ms of computing" in prediction_error.table(first)
    lines = prediction_error.table(second).splitlines()
    assert lines[0] == "link 1gbit, 2 hosts"
    assert [line.split("  ")[0] for line in lines[2:]] == list(prediction_error.WAYS)
    assert lines[1].split() == ["compute", "measured", "predicted", "error", "unchanged", "added"]
    assert lines[2].split()[-6:-4] == ["55.0", "68.8"]
    assert lines[2].split()[-2] == "0%"  # unchanged, but for the speed of the machine


def test_the_pace_of_the_simulator_is_a_figure_of_its_own():
    found, text, figures = prediction_error.pace(nodes=100, steps=400)
    assert figures["simulate_100_nodes_seconds"]["value"] == found["seconds"] > 0
    assert text.startswith("100 nodes, 400 steps of DASO Auto on virtual time: ")
    assert found["outcome"]["exchanges"] > 0
