"""Triton kernels: interpreted they give the bits of torch's operations, and they compile.

Each in a process of its own: Triton interprets all or nothing, from when it is imported.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HANG_SECONDS


@pytest.mark.later("Triton interprets, or compiles, every kernel in a process of its own")
@pytest.mark.slow("Triton interprets, or compiles, every kernel in a process of its own")
@pytest.mark.parametrize(("tests", "interprets"), [("on_interpreter", "1"), ("on_compiler", "0")])
def test_kernels(tests, interprets, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", interprets)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    path = Path(__file__).parent / f"{tests}.py"
    words = [sys.executable, "-m", "pytest", "-q", "--color=no", str(path)]
    run = subprocess.run(words, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert run.returncode == 0, run.stdout[-6000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
