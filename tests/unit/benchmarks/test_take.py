"""`scripts/bench take`: files of figures taken anew, each as it was."""

import json
import os
import shlex
from pathlib import Path

import pytest
from benchmarks import accuracy
from benchmarks.command import make_parser
from benchmarks.take import Recipe, main, merged, read_recipes

ROOT = Path(__file__).parents[3]
COMMANDS = [command for recipe in read_recipes().values() for command in recipe.commands]


def test_every_file_of_figures_has_a_recipe_and_names_its_date():
    files = {path.stem: path for path in (ROOT / "scripts" / "figures").glob("*.json")}
    assert files.keys() == read_recipes().keys()
    assert all(json.loads(path.read_text())["date"] for path in files.values())
    for recipe in read_recipes().values():
        assert bool(recipe.commands) != bool(recipe.by_hand)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_recipes_are_ones_that_benchmarks_take(command):
    kind, *words = shlex.split(command)
    if kind == "accuracy":
        trials = [trial for trial, _ in accuracy.trials(quick=False)]
        images = trials[0].data  # digits, where fashion is not installed
        only = accuracy.parsed(words).only.replace("fashion", images)
        assert [str(trial) for trial in trials].count(only) == 1
    else:
        assert make_parser().parse_args([kind, *words]).bench == kind


def test_what_several_commands_found_is_put_together():
    one = {"figures": {"a": 1, "b": 2}, "date": "2026-01-01", "runs": [1]}
    two = {"figures": {"b": 3}, "date": "2026-01-02", "runs": [2], "rows": [4]}
    assert merged({}, one) == one
    assert merged(one, two) == {
        "figures": {"a": 1, "b": 3},
        "date": "2026-01-01",
        "runs": [1, 2],
        "rows": [4],
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [("nodes", "NAME must be one of train, "), ("gpu", "gpu is taken by hand: gpu, on a machine")],
)
def test_what_it_cannot_take_is_refused(name, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def _leaves_no_clone():
    yield
    assert not list((ROOT / "build").glob(f"take-{os.getpid()}-*"))


@pytest.mark.later("builds a clone")
@pytest.mark.slow("starts a program")
@pytest.mark.usefixtures("_leaves_no_clone")
def test_a_command_that_fails_ends_it_and_its_file_stays_away(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        main(["node", f"--to={tmp_path}"], {"node": Recipe(commands=("node --mebibytes few",))})
    assert ended.value.code == 2
    assert capfd.readouterr().err.count("few") == 1, "one line says why"
    assert not list(tmp_path.iterdir())


@pytest.mark.later("starts ranks")
@pytest.mark.slow("starts ranks")
@pytest.mark.usefixtures("_leaves_no_clone")
def test_a_file_is_taken_from_the_last_commit(tmp_path, monkeypatch, capfd):
    node = "node --mebibytes 0.1 --rounds 2"
    recipes = {"node": Recipe(commands=(node, node), minutes=1)}
    assert main(["node", f"--to={tmp_path}"], recipes) == 0
    found = json.loads((tmp_path / "node.json").read_text())
    assert len(found["runs"]) == 2
    assert not found["versions"]["commit"].endswith("-dirty")
    assert "node, about 1 min" in capfd.readouterr().out
