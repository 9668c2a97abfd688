"""Tells how much of the code that each file of figures measures has changed since it was taken.

`of` in `scripts/figures/recipes.toml` names that code; git knows what became of it. A file whose
code changed a lot is to be taken anew before it is quoted.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.overview import FIGURES
from benchmarks.take import ROOT, Recipe, read_recipes

__all__ = ["Age", "ages", "commits_of", "main"]


@dataclass(frozen=True, slots=True)
class Age:
    """What happened to the code that a file of figures measures.

    Args:
        name: Of the file.
        commit: That its figures name, the one since which most changed; empty if git lacks any.
        commits: Later ones that changed that code; None if it is not known.
        lines: That they added and deleted, together.
    """

    name: str
    commit: str = ""
    commits: int | None = None
    lines: int = 0

    def __str__(self) -> str:
        """Return a line of a table."""
        changed = f"{self.lines:>6}  {self.commits:>7}" if self.commits is not None else "unknown"
        return f"{self.name:<20}  {self.commit[:7] or '-':<7}  {changed}"


def main(words: Sequence[str] | None = None) -> int:
    """Print a line for every file, those whose code changed most first.

    Args:
        words: Arguments; the process's own if None.

    Returns:
        Exit code.
    """
    parser = argparse.ArgumentParser(prog="scripts/bench age", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the lines to this file, too")
    options = parser.parse_args(words)
    found = sorted(ages(read_recipes()), key=lambda age: (age.commits is not None, -age.lines))
    print(f"{'file':<20}  {'commit':<7}  {'lines':>6}  {'commits':>7}  changed since")
    print("\n".join(map(str, found)))
    if options.json:
        options.json.write_text(json.dumps([asdict(age) for age in found], indent=1) + "\n")
    return 0


def ages(
    recipes: Mapping[str, Recipe], figures: Path = FIGURES, root: Path = ROOT
) -> Iterator[Age]:
    """Yield what became of the code of each file.

    Args:
        recipes: By name of a file.
        figures: Folder of these files.
        root: Of the repository.
    """
    for name, recipe in recipes.items():
        text = (figures / f"{name}.json").read_text(encoding="utf-8")
        since = [_since(name, one, recipe.of, root) for one in sorted(commits_of(json.loads(text)))]
        unknown = [age for age in since if age.commits is None]
        yield max(since, key=lambda age: age.lines) if since and not unknown else Age(name)


def commits_of(found: Any) -> set[str]:
    """Return the commits that figures name, wherever they do; of a repeated row, the later one."""
    if isinstance(found, list):
        return set().union(*map(commits_of, found))
    if not isinstance(found, dict):
        return set()
    if "repeated" in found:
        return commits_of(found["repeated"])
    rows = found.get("rows", [])
    if rows and all(map(commits_of, rows)):  # each names its own: the file's says nothing more
        return commits_of(rows)
    own = re.match("[0-9a-f]{7,}", str(found.get("commit", "")))
    return set().union({own[0]} if own else set(), *map(commits_of, found.values()))


def _since(name: str, commit: str, paths: Sequence[str], root: Path) -> Age:
    """Return what changed at these paths after a commit, that git may not have."""
    log = ["git", "log", "--format=format:commit", "--numstat", f"{commit}..HEAD", "--", *paths]
    done = subprocess.run(log, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return Age(name, commit)
    words = [line.split("\t") for line in done.stdout.splitlines() if line]
    lines = sum(int(count) for counts in words for count in counts[:2] if count.isdecimal())
    return Age(name, commit, sum(one == ["commit"] for one in words), lines)


if __name__ == "__main__":
    sys.exit(main())
