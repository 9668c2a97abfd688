"""`scripts/bench age`: how much of the measured code changed since figures were taken."""

import json
import subprocess
from pathlib import Path

import pytest
from benchmarks.age import ages, commits_of, main
from benchmarks.take import ROOT, Recipe, read_recipes


def test_every_recipe_names_code_that_is_there():
    for name, recipe in read_recipes().items():
        assert recipe.of, name
        assert all((ROOT / path).exists() for path in recipe.of), name


def test_commits_are_found_wherever_figures_name_them():
    found = {
        "versions": {"commit": "abc1234-dirty"},
        "rows": [{"commit": "def5678"}, {"commit": ""}],
    }
    assert commits_of(found) == {"abc1234", "def5678"}


def test_a_row_that_was_repeated_is_of_the_commit_that_ended_the_same():
    repeated = {"commit": "def5678", "repeated": {"commit": "0a1b2c3", "seeds": 1}}
    found = {"versions": {"commit": "abc1234"}, "rows": [repeated]}
    assert commits_of(found) == {"0a1b2c3"}
    assert commits_of({**found, "rows": [repeated, {}]}) == {"abc1234", "0a1b2c3"}


def test_age_counts_changes_of_measured_code(tmp_path):
    first = _commit(tmp_path, "measured", "1\n")
    second = _commit(tmp_path, "measured", "1\n2\n3\n")
    _commit(tmp_path, "other", "1\n")
    _figures(tmp_path, "both", first, second)
    _figures(tmp_path, "new", second)
    _figures(tmp_path, "lost", "0123456789ab")
    recipes = {name: Recipe(of=("measured",)) for name in ("both", "new", "lost")}
    both, new, lost = ages(recipes, tmp_path, tmp_path)
    assert (both.commit, both.commits, both.lines) == (first, 1, 2)
    assert (new.commit, new.commits, new.lines) == (second, 0, 0)
    assert (lost.commit, lost.commits) == ("", None)
    assert str(lost).split() == ["lost", "-", "unknown"]


@pytest.mark.later("asks git for all commits since each figure")
def test_what_changed_most_stands_first(tmp_path, capsys):
    assert main(["--json", str(tmp_path / "ages.json")]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["file", "commit", "lines", "commits", "changed", "since"]
    found = json.loads((tmp_path / "ages.json").read_text())
    assert [line.split()[0] for line in lines] == [one["name"] for one in found]
    known = [one["lines"] for one in found if one["commits"] is not None]
    assert known == sorted(known, reverse=True)


def _figures(folder: Path, name: str, *commits: str) -> None:
    rows = [{"commit": commit} for commit in commits]
    (folder / f"{name}.json").write_text(json.dumps({"rows": rows}))


def _commit(root: Path, name: str, text: str) -> str:
    """Commit a file, and return the commit's name."""
    (root / name).write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (
        ["init", "--quiet"],
        ["add", name],
        [*who, "commit", "--quiet", "--message", name],
    ):
        subprocess.run(["git", *words], cwd=root, check=True)
    told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, check=True)
    return told.stdout.decode().strip()
