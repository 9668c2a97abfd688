"""Notebooks run from top to bottom, are stored without outputs, and define next to nothing."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_LINES = 8  # of a function: what is longer belongs into the package

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[dict]:
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.later("runs a notebook")
@pytest.mark.slow("runs a notebook")
@each
def test_it_runs(path: Path) -> None:
    words = ["--nbmake", "--nbmake-timeout=600", "--timeout=700", "-q", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@each
def test_it_is_stored_without_outputs(path: Path) -> None:
    for cell in code_cells(path):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        assert cell["metadata"] == {}


@each
def test_it_calls_daso_and_defines_next_to_nothing(path: Path) -> None:
    programs = [ast.parse("".join(cell["source"])) for cell in code_cells(path)]
    assert any("daso" in ast.unparse(program) for program in programs)
    made = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in (node for program in programs for node in ast.walk(program)):
        if isinstance(node, made):
            assert node.end_lineno - node.lineno < MOST_LINES, node.name
