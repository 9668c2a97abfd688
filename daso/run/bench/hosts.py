"""Where ranks of a bench run: on hosts of a cluster made for it, or all on this machine."""

import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import daso
from daso.environment import find_mpirun
from daso.errors import ExchangeError
from daso.run.client import ask, library_of, offered
from daso.run.launcher import choose
from daso.run.local import Local, launch
from daso.run.minicluster.start import interruptible, set_rate, take_down, up
from daso.run.minicluster.text import Minicluster
from daso.run.script import render
from daso.run.sites import read_template
from daso.run.slurm import Job
from daso.run.states import read_jobs

__all__ = ["HERE", "Here", "Hosts", "Place", "hosts", "run_here"]

HERE = "here"
LOOK_SECONDS = 0.1  # between two looks for what the ranks found
ASK_SECONDS = 3.0  # between two questions to SLURM, meanwhile
RANKS = ("-m", "daso.run.bench.ranks")


class Place(Protocol):
    """Where ranks can be started."""

    fastest: str  # link

    def run(self, kind: str, plan: Mapping[str, Any], *, link: str, nodes: int, ranks: int) -> Any:
        """Measure on ranks of this place, and return what they found; blocking."""
        ...


class Here:
    """This machine, cut into pretend nodes; it has no links."""

    fastest = HERE

    def run(self, kind: str, plan: Mapping[str, Any], *, link: str, nodes: int, ranks: int) -> Any:  # noqa: ARG002 - a place's
        """Measure on ranks of this machine, and return what they found; blocking."""
        return run_here(kind, plan, ranks=nodes * ranks, ranks_per_node=ranks)


class Hosts:
    """Hosts whose links have a rate that can be changed.

    Args:
        state: The cluster's state folder.
        work: A folder that all hosts see.
    """

    fastest = "none"

    def __init__(self, state: Path, work: Path) -> None:
        self._state, self._work = state, work
        self._client = {"SLURM_CONF": str(state / "slurm.conf")}
        self._launcher = choose(library_of(sys.executable), offered(self._client))

    def run(self, kind: str, plan: Mapping[str, Any], *, link: str, nodes: int, ranks: int) -> Any:
        """Measure on ranks of these hosts, and return what they found; blocking.

        Args:
            kind: The bench's module.
            plan: Its plan, for JSON.
            link: The rate of every link.
            nodes: Number of hosts.
            ranks: On each.
        """
        set_rate(self._state, link)
        out, log = self._work / "found.json", self._work / "log"
        job = Job(
            program=_program(kind, plan, out),
            launcher=self._launcher,
            chdir=self._work,
            root=True,
            mpirun=str(find_mpirun() or "mpirun"),
            python=sys.executable,
            nodes=nodes,
            tasks_per_node=ranks,
            logs=".",
            extra=(f"--output={log}",),
        )
        template, name = read_template(None)
        script = self._work / "script"
        script.write_text(render(job, template, name=name), encoding="utf-8")
        code = self._wait_for(script, out)
        if code != 0 and log.exists():
            print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
        return _found(out, code)

    def _wait_for(self, script: Path, out: Path) -> int:
        """Submit a script, and return its exit code once the job has ended.

        ``sbatch --wait`` asks less and less often: it ends up to half a minute later.
        """
        said = ask(["sbatch", "--parsable", str(script)], client=self._client)
        if said.returncode != 0:
            why = said.stderr.decode("utf-8", "replace").strip()
            raise ExchangeError(f"sbatch must take the bench's job, but: {why}")
        job = said.stdout.decode().strip().split(";")[0]
        while True:
            state = read_jobs(
                ask(["scontrol", "show", "job", "-o", job], client=self._client).stdout.decode()
            )[0]
            if state.ended:
                return 0 if state.state == "COMPLETED" else _code_of(state.reason)
            # Asking takes a core for a moment, beside ranks that are measured.
            until = time.monotonic() + ASK_SECONDS
            while not out.exists() and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)
            time.sleep(LOOK_SECONDS)


def _program(kind: str, plan: Mapping[str, Any], out: Path) -> tuple[str, ...]:
    """Return what ranks run; they find the bench's module where this process did."""
    found = find_spec(kind)
    assert found is not None and found.origin is not None, kind
    folder = Path(found.origin).parents[kind.count(".")]
    return (*RANKS, kind, str(folder), json.dumps(plan), str(out))


def _code_of(reason: str) -> int:
    number = re.search(r"exit code (\d+)", reason)
    return int(number[1]) if number else 1


def _found(out: Path, code: int) -> Any:
    if code != 0 or not out.exists():
        raise ExchangeError(f"the ranks must end with exit code 0, not {code}; see what they said")
    found = json.loads(out.read_text(encoding="utf-8"))
    out.unlink()
    return found


def run_here(kind: str, plan: Mapping[str, Any], *, ranks: int, ranks_per_node: int) -> Any:
    """Measure on ranks of this machine, cut into pretend nodes; blocking."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        program = _program(kind, plan, out)
        code = launch(Local(ranks=ranks, ranks_per_node=str(ranks_per_node), program=program))
        return _found(out, code)


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Start so many hosts, and leave nothing of them, also when this program is ended (SIGTERM).

    Args:
        count: How many.

    Raises:
        DasoError: Not root, or a package is missing.
    """
    state = Path("/run") / f"daso-bench-{os.getpid()}"
    seen = {str(Path(daso.__file__).parents[1]), sys.prefix}
    cluster = Minicluster(
        folder=str(state),
        token=secrets.token_hex(8),
        hosts=count,
        cpus=4,
        rate="none",
        share=tuple(sorted(seen)),
    )
    with interruptible():
        up(cluster)
        work = Path(tempfile.mkdtemp(prefix="daso-bench-", dir="/var/tmp"))
        try:
            yield Hosts(state, work)
        finally:
            take_down(cluster)
            shutil.rmtree(work, ignore_errors=True)
