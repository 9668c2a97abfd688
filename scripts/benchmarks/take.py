"""Takes files of scripts/figures anew, each by the commands that it was taken with before.

`scripts/figures/recipes.toml` holds these. They run in a clone of the last commit, so that figures
name what they are of, and files may be edited meanwhile.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.overview import FIGURES
from daso.strict import json_by_rows

__all__ = ["Recipe", "main", "merged", "read_recipes"]

ROOT = FIGURES.parents[1]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a file of figures is taken.

    Args:
        commands: Of ``scripts/bench``, one after the other.
        minutes: That they take, about; 0: nobody counted.
        by_hand: What to do instead, where commands are not enough.
        picture: The last command draws one, too.
        of: Folders and files of the code that it measures.
    """

    commands: tuple[str, ...] = ()
    minutes: float = 0.0
    by_hand: str = ""
    picture: bool = False
    of: tuple[str, ...] = ()

    @property
    def time(self) -> str:
        """How long it takes, in words, where that is known."""
        return f", about {self.minutes:g} min" if self.minutes else ""


def read_recipes(path: Path = FIGURES / "recipes.toml") -> dict[str, Recipe]:
    """Return how each file is taken, by its name."""
    return {name: _recipe(**one) for name, one in tomllib.loads(path.read_text("utf-8")).items()}


def _recipe(commands: Sequence[str] = (), of: Sequence[str] = (), **others: Any) -> Recipe:
    """Return what a table of the file says."""
    return Recipe(tuple(commands), of=tuple(of), **others)


def main(words: Sequence[str] | None = None, recipes: Mapping[str, Recipe] | None = None) -> int:
    """Run the commands of some files, and write what they found.

    Args:
        words: Arguments; the process's own if None.
        recipes: By name; those that are kept if None.

    Returns:
        Exit code.
    """
    recipes = recipes or read_recipes()
    parser = argparse.ArgumentParser(prog="scripts/bench take", description=__doc__)
    parser.add_argument("name", nargs="+", help=f"of a file: {', '.join(recipes)}")
    parser.add_argument("--to", type=Path, default=FIGURES, help="folder (scripts/figures)")
    options = parser.parse_args(words)
    for name in options.name:
        if name not in recipes:
            parser.error(f"NAME must be one of {', '.join(recipes)}, not {name!r}")
        if recipes[name].by_hand:
            parser.error(f"{name} is taken by hand: {recipes[name].by_hand}")
    with _last_commit() as clone:
        for name in options.name:
            print(f"{name}{recipes[name].time}", flush=True)
            _take(name, recipes[name], clone, options.to)
    print("now run scripts/bench tables, and read the pages that quote these figures")
    return 0


@contextmanager
def _last_commit() -> Iterator[Path]:
    """Yield a folder with the last commit, where hosts of this machine's cluster see it."""
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"take-{os.getpid()}-", dir=build) as folder:
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), folder], check=True)
        # Without its own libraries the clone would measure torch's operations.
        built = [sys.executable, "-m", "daso.kernels.build"]
        subprocess.run(built, cwd=folder, check=False, stdout=subprocess.DEVNULL)
        yield Path(folder)


def _take(name: str, recipe: Recipe, clone: Path, to: Path) -> None:
    """Run the commands of a file, and write it, and its picture, when all of them are over."""
    places = os.pathsep.join(str(clone / part) for part in ("", "scripts", "slurm"))
    environment = {**os.environ, "PYTHONPATH": places}
    path, picture = clone / "found.json", clone / "found.png"
    drawn = ["--plot", str(picture)] if recipe.picture else []
    found: dict[str, Any] = {}
    for command in recipe.commands:
        bench = [sys.executable, "-m", "benchmarks", *shlex.split(command), "--json", str(path)]
        # Ranks would read what the shell that started this reads next.
        done = subprocess.run(
            [*bench, *drawn], cwd=clone, env=environment, stdin=subprocess.DEVNULL, check=False
        )
        if done.returncode != 0:  # which said why
            sys.exit(done.returncode)
        found = merged(found, json.loads(path.read_text(encoding="utf-8")))
    (to / f"{name}.json").write_text(json_by_rows(found) + "\n", encoding="utf-8")
    if recipe.picture:
        shutil.copy(picture, to / f"{name}.png")


def merged(found: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Put together what two commands found: lists grow, the last figure of a name counts."""
    both = {**more, **found}
    for name in found.keys() & more.keys():
        if isinstance(found[name], list):
            both[name] = [*found[name], *more[name]]
        elif name == "figures":
            both[name] = {**found[name], **more[name]}
    return both
