"""C kernels read and write within their operands, and rely on nothing that C leaves undefined."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from daso.kernels import build as build_module
from daso.kernels.build import LOG, VARIANTS, build
from daso.kernels.native import supported_variants

ROOT = Path(__file__).parents[3]
PROPERTIES = "tests/unit/kernels/test_same_bits.py"
# What every processor runs, and the code that needs newer instructions.
CHECKED = sorted({VARIANTS[-1], supported_variants()[0]})
FLAGS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SECONDS = 600


def find_sanitizer():
    """The library that a process must load first; a compiler without it skips the test."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    words = [*compiler, "-print-file-name=libasan.so"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no C compiler: {error}")
    path = Path(done.stdout.strip())
    if not path.is_absolute():
        pytest.skip(f"{compiler[0]} has no AddressSanitizer")
    return path


@pytest.mark.later("compiles with sanitizers, and runs another file")
@pytest.mark.slow("compiles with sanitizers, and runs another file")
@pytest.mark.parametrize("variant", CHECKED)
def test_sanitizers_find_nothing(tmp_path, monkeypatch, variant):
    sanitizer = find_sanitizer()
    monkeypatch.setattr(build_module, "VARIANTS", (variant,))
    assert build(to=tmp_path, extra=FLAGS) == [variant], (tmp_path / LOG).read_text()
    variables = {
        "LD_PRELOAD": str(sanitizer),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "DASO_TEST_LIBRARIES": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", PROPERTIES],
        env=os.environ | variables,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert f"[{variant}" in done.stdout, "no test ran with the library"
