"""`scripts/bench time-to-accuracy`: what of two courses is compared, and a short one here."""

import json
import math

import pytest
from benchmarks import learning_curves
from benchmarks.plots import draw_courses
from benchmarks.time_to_accuracy import warmed_cosine
from jobs import benchmark

from daso.cli.bench.names import DDP, OURS


def course(*accuracy, seconds_per_step=2.0):
    steps = [10 * (at + 1) for at in range(len(accuracy))]
    seconds = [step * seconds_per_step for step in steps]
    return {"seed": 0, "steps": steps, "seconds": seconds, "accuracy": list(accuracy)}


def found(ddp, ours, *, level=90, data="fashion"):
    """What a link yields where DDP's trainings and ours went so; a step of DDP takes 8 s there."""
    plan = {"data": data, "seeds": len(ddp), "epochs": 1, "peak": 0.1, "every": 10, "level": level}
    same = {"parameters": 5, "batch": 64, "nodes": [1, 1], "versions": {}}
    times = {
        "plan": {"link": "1gbit", "rounds": 7},
        "rows": [{"name": DDP, "step_ms": 8000}, {"name": OURS, "step_ms": 2000}],
    }
    rival, own = (
        {"plan": {"name": name, "link": "any", **plan}, "courses": trained, **same}
        for name, trained in ((DDP, ddp), (OURS, ours))
    )
    return learning_curves.on_link([rival], times, [own])


@pytest.mark.parametrize(
    ("accuracy", "at"), [([80, 89.99, 90, 91], 2), ([91, 80], 0), ([80, 89.99], None), ([], None)]
)
def test_a_level_is_reached_by_the_first_test_that_has_it(accuracy, at):
    assert learning_curves.reached(course(*accuracy), 90) == at


def test_copies_are_tested_densely_until_the_level_and_the_last_one_always():
    assert all(learning_curves.is_tested(index, 11, had_level=False) for index in range(11))
    after = [index for index in range(11) if learning_curves.is_tested(index, 11, had_level=True)]
    assert after == [0, 4, 8, 10]


def test_seconds_of_ddp_are_its_steps_on_this_link_and_ours_are_our_own():
    run = found([course(80, 91, 92)], [course(80, 90, 93)])
    ddp, ours = run["rows"]
    assert (ddp["steps_to"], ddp["seconds_to"]) == (20, 160)
    assert (ours["steps_to"], ours["seconds_to"]) == (20, 40)
    assert ours["over_ddp"] == 0.25
    figure = learning_curves.figures(run)["time_to_accuracy_ratio_1gbit"]
    assert figure["value"] == 0.25
    assert "90 %" in figure["unit"]


def test_the_gap_is_between_means_over_seeds_of_what_was_reached_last():
    run = found([course(91, 92.0), course(91, 92.4)], [course(93, 91.9), course(95, 92.1)])
    assert learning_curves.figures(run)["accuracy_gap_1gbit"]["value"] == pytest.approx(0.2)
    assert run["rows"][1]["spread"] == pytest.approx(0.2 / math.sqrt(2))
    assert "mean of 2 seeds" in learning_curves.table(run)


@pytest.mark.parametrize("late", ["ddp", "ours"])
def test_a_level_that_a_seed_never_reached_has_no_figure(late):
    trained = {"ddp": [course(91), course(92)], "ours": [course(91), course(92)]}
    trained[late][1] = course(89)
    run = found(**trained)
    assert learning_curves.figures(run).keys() == {"accuracy_gap_1gbit"}
    assert learning_curves.table(run).count(" - ") > 0


def test_only_the_real_data_set_has_the_figures_names():
    run = found([course(91)], [course(91)], data="digits")
    assert all(name.endswith("_1gbit_digits") for name in learning_curves.figures(run))


def test_the_learning_rate_warms_up_and_ends_at_zero():
    rates = [warmed_cosine(step / 1000) for step in range(1001)]
    assert rates[0] == pytest.approx(0.05)
    assert max(rates) == pytest.approx(1, abs=0.01)
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0)


def bench(*words):
    return benchmark("time-to-accuracy", *words, seconds=250)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Five epochs of eleven steps, on two pretend nodes of this machine."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("to-accuracy")
    words = ["--link=here", "--data=digits", "--quick", "--epochs=5", "--every=5", "--rounds=1"]
    short = ["--seconds=0.2", "--settle=0.2", "--lr=0.05", "--level=75"]
    done = bench(*words, *short, f"--json={folder / 'run.json'}")
    assert done.returncode == 0, done.stderr
    return done, json.loads((folder / "run.json").read_text())


@pytest.mark.later("runs a bench")
def test_both_train_to_the_end_and_reach_the_level(here):
    done, saved = here
    (run,) = saved["runs"]
    assert [row["name"] for row in run["rows"]] == [DDP, OURS]
    for row in run["rows"]:
        (one,) = row["courses"]
        assert one["steps"][0] == 5
        assert one["steps"][-1] == 55
        assert one["seconds"] == sorted(one["seconds"])
        assert 0 < row["seconds_to"] <= one["seconds"][-1]
        assert row["final"] == one["accuracy"][-1] > 80
    assert run["rows"][1]["courses"][0]["report"]["exchanges"] > 0
    assert done.stdout == learning_curves.table(run) + "\n\n"
    assert "DDP, gloo trains on link here" in done.stderr


@pytest.mark.later("runs a bench")
def test_figures_say_what_was_measured_and_a_picture_shows_it(here):
    _, saved = here
    names = {"time_to_accuracy_ratio_here_digits", "accuracy_gap_here_digits"}
    assert saved["figures"].keys() == names
    for figure in saved["figures"].values():
        assert "its steps times its step time" in figure["conditions"]
    pytest.importorskip("matplotlib")
    (axes,) = draw_courses(saved["runs"]).axes
    level, *lines = axes.get_lines()[::-1]
    assert set(level.get_ydata()) == {75}
    drawn = [list(line.get_ydata()) for line in lines[::-1]]
    assert drawn == [row["courses"][0]["accuracy"] for row in saved["runs"][0]["rows"]]
