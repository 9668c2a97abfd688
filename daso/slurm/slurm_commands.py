"""The door to SLURM's commands."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from daso.environment import for_sbatch, merged
from daso.errors import TopologyError
from daso.slurm.launcher import read_offered

__all__ = ["NoAnswerError", "ask", "has_settings", "is_there", "library_of", "offered", "require"]

SECONDS = 60  # a controller that is down answers after some time-outs of its own
SUBMIT_SECONDS = 600  # who stops sbatch does not know whether the job is there


class NoAnswerError(TopologyError):
    """A command of SLURM did not answer in time; it may do so later."""


def is_there(command: str) -> bool:
    """Return whether a command is on PATH."""
    return shutil.which(command) is not None


def has_settings(client: Mapping[str, str]) -> bool:
    """Return whether SLURM's settings are where a site says; without, a command waits a minute."""
    return "SLURM_CONF" not in client or Path(client["SLURM_CONF"]).is_file()


def require(command: str) -> None:
    """Refuse to go on without a command."""
    if not is_there(command):
        raise TopologyError(
            f"{command} must be on PATH, but it is not; log in to a node of a SLURM cluster, see "
            f"the script with `daso submit --dry-run`, or use `daso run` on this machine"
        )


def ask(
    words: Sequence[str],
    *,
    client: Mapping[str, str],
    text: str | None = None,
    options: Sequence[str] = (),
) -> "subprocess.CompletedProcess[bytes]":
    """Run a command of SLURM and wait for it."""
    require(words[0])
    if not has_settings(client):
        raise TopologyError(
            f"the site's SLURM_CONF must be a file, but there is no {client['SLURM_CONF']}; start "
            f"the cluster, or choose another --site"
        )
    seconds = SECONDS if text is None else SUBMIT_SECONDS
    given = b"" if text is None else text.encode("utf-8", "surrogateescape")
    env = merged(os.environ, client) if text is None else for_sbatch(os.environ, client, options)
    try:
        return subprocess.run(
            words,
            env=env,
            input=given,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        there = "" if text is None else "; `squeue --me` tells whether the job is there"
        raise NoAnswerError(
            f"{words[0]} must answer within {seconds} s, but it does not; see whether the "
            f"cluster's controller is up with `scontrol ping`{there}"
        ) from error


def library_of(python: str) -> str | None:
    """Let a Python tell of its MPI library, which does not start MPI."""
    words = [python, "-m", "mpi4py", "--mpi-lib-version"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout if said.returncode == 0 else None


def offered(client: Mapping[str, str]) -> tuple[str, ...]:
    """Return the MPI plugins that srun offers; none where there is no srun to ask."""
    if not is_there("srun") or not has_settings(client):
        return ()
    said = ask(["srun", "--mpi=list"], client=client)
    text = (said.stdout + said.stderr).decode("utf-8", "replace")
    return read_offered(text) if said.returncode == 0 else ()
