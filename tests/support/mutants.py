"""Plant each fault of tests/mutants.toml in a copy of the project: its test must fail there.

A fault that its test lets pass is named, and the exit code is 1. What each entry says:

    name, file, old, new    what is planted: in that file, ``new`` for ``old``, which is there once
    breaks                  what goes wrong for a user
    test                    the cheapest test that finds it; C libraries are built before it runs
    ranks                   for a test that mpirun starts: on how many
    before                  whether the suite of e96cf42, before it was cut, found it
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from daso.environment import find_mpirun

ROOT = Path(__file__).parents[2]
PARTS = ("daso", "tests", "scripts", "slurm", "notebooks", "pyproject.toml", "setup.cfg")
FILES = ("README.md", "CHANGELOG.md", "constraints.txt")
SECONDS = 240.0  # for a test at most; most end in five
PYTEST = ("-m", "pytest", "-q", "-x", "--color=no", "--timeout=60", "--timeout-method=thread")
BUILD = ("-m", "daso.kernels.build")  # for faults in C
FAILED = 1  # pytest's exit code: a test ran, and failed


@dataclass(frozen=True)
class Mutant:
    """A fault, and the test that must find it."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    test: str
    ranks: int | None = None
    before: str = ""


def read() -> list[Mutant]:
    """Return all that are written down."""
    with (ROOT / "tests" / "mutants.toml").open("rb") as file:
        return [Mutant(**entry) for entry in tomllib.load(file)["mutant"]]


def everyday() -> set[str]:
    """Return the tests of the everyday tier, without their parameters."""
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line.split("[")[0] for line in listed.stdout.splitlines() if "::" in line}


def is_everyday(mutant: Mutant, tests: set[str]) -> bool:
    """Return whether the everyday tier finds it: it runs ranks too, two of them."""
    if mutant.ranks:
        return mutant.ranks == 2 and "test_contract" not in mutant.test
    return mutant.test.split("[")[0] in tests


@contextmanager
def planted(mutant: Mutant) -> Iterator[Path]:
    """Make a copy of the project with the fault in it."""
    with tempfile.TemporaryDirectory(prefix="daso-mutant-") as name:
        folder = Path(name)
        for part in PARTS + FILES:
            source = ROOT / part
            if source.is_dir():
                skip = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, folder / part, symlinks=True, ignore=skip)
            else:
                shutil.copy(source, folder / part)
        path = folder / mutant.file
        text = path.read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.name}: its text must be there once"
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        yield folder


def command(mutant: Mutant) -> list[str]:
    """Return what runs the test."""
    words = [sys.executable, *PYTEST, mutant.test]
    if mutant.ranks is None:
        return words
    return [str(find_mpirun()), "-n", str(mutant.ranks), *words, "--with-mpi"]


def run_in(folder: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with the copy of the project in a folder."""
    variables = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    return subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def verdict(mutant: Mutant) -> str:
    """Return what became of it: killed, or why not."""
    with planted(mutant) as folder:
        if Path(mutant.file).suffix in (".c", ".h"):
            built = run_in(folder, [sys.executable, *BUILD])
            if built.returncode or built.stderr:  # a test would fail for want of a library
                return f"DID NOT RUN: {built.stderr[-300:]}"
        try:
            run = run_in(folder, command(mutant))
        except subprocess.TimeoutExpired:
            return "killed"  # a test that hangs fails the suite, too
    if run.returncode == FAILED:
        return "killed"
    if run.returncode in (signal.SIGSEGV, 128 + signal.SIGSEGV):
        return "killed"  # a crash fails the suite, too
    return "SURVIVED" if run.returncode == 0 else f"DID NOT RUN: {run.stdout[-300:]}"


def main(words: Sequence[str]) -> int:
    """Plant those that are named, or all."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of mutants; none: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at the same time")
    options = parser.parse_args(words)
    mutants = [one for one in read() if not options.names or one.name in options.names]
    unknown = set(options.names) - {one.name for one in mutants}
    if unknown or not mutants:
        parser.error(f"names must be of mutants in tests/mutants.toml, not {sorted(unknown)}")
    tests = everyday()
    alive = found_daily = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, said in zip(mutants, pool.map(verdict, mutants), strict=True):
            daily = is_everyday(mutant, tests)
            found_daily += daily and said == "killed"
            alive += said != "killed"
            tier = "everyday" if daily else "all"
            print(f"{said:9} {tier:9} {mutant.name}: {mutant.test}", flush=True)
    share = found_daily / len(mutants)
    print(
        f"{len(mutants)} mutants: {len(mutants) - alive} killed, {found_daily} of them "
        f"({share:.0%}) by the everyday tier"
    )
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
