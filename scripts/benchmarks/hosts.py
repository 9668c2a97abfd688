"""Hosts of a cluster made for a benchmark: their links have a rate that can be changed."""

import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minicluster.start import interruptible, set_rate, take_down, up
from minicluster.text import Minicluster

import daso
from daso.cli.bench.places import program, read_result
from daso.environment import find_mpirun
from daso.errors import ExchangeError
from daso.slurm.job import Job, render
from daso.slurm.launcher import choose
from daso.slurm.sites import read_template
from daso.slurm.slurm_commands import ask, library_of, offered
from daso.slurm.status import read_jobs

__all__ = ["Hosts", "hosts"]

LOOK_SECONDS = 0.1  # between two looks for what the ranks found
ASK_SECONDS = 3.0  # between two questions to SLURM, meanwhile


class Hosts:
    """Hosts whose links have a rate that can be changed.

    Args:
        state: The cluster's state folder.
        work: A folder that all hosts see.
        count: How many there are.
        slow_link: Rate of the link of the second.
    """

    fastest = "none"

    def __init__(self, state: Path, work: Path, count: int, slow_link: str = "none") -> None:
        self._state, self.work, self._count, self._slow_link = state, work, count, slow_link
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
        self._set_rates(link)
        out, log = self.work / "found.json", self.work / "log"
        job = Job(
            program=program(kind, plan, out),
            launcher=self._launcher,
            chdir=self.work,
            root=True,
            mpirun=str(find_mpirun() or "mpirun"),
            python=sys.executable,
            nodes=nodes,
            tasks_per_node=ranks,
            logs=".",
            extra=(f"--output={log}",),
        )
        template, name = read_template(None)
        script = self.work / "script"
        script.write_text(render(job, template, name=name), encoding="utf-8")
        code = self._wait_for(script, out)
        if code != 0 and log.exists():
            print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
        return read_result(out, code)

    def run_script(self, text: str, *, link: str) -> str:
        """Run a batch script on all hosts, and return what it printed; blocking.

        Args:
            text: Of the script, without SLURM's options.
            link: The rate of every link.
        """
        self._set_rates(link)
        script, log = self.work / "script", self.work / "log"
        options = f"#SBATCH --nodes={self._count} --ntasks-per-node=1 --output={log}"
        script.write_text(f"#!/bin/bash\n{options}\n{text}", encoding="utf-8")
        code = self._wait_for(script, self.work / "never")
        said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if code != 0:
            raise ExchangeError(f"a bench's script must end with exit code 0, not {code}:\n{said}")
        return said

    def _set_rates(self, link: str) -> None:
        set_rate(self._state, link)
        if self._slow_link != "none":
            set_rate(self._state, self._slow_link, ["mini1"])

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


def _code_of(reason: str) -> int:
    number = re.search(r"exit code (\d+)", reason)
    return int(number[1]) if number else 1


@contextmanager
def hosts(
    count: int,
    racks: int = 1,
    uplink: str = "none",
    slow_link: str = "none",
    share: Sequence[str] = (),
) -> Iterator[Hosts]:
    """Start so many hosts, and leave nothing of them, also when this program is ended (SIGTERM).

    Args:
        count: How many.
        racks: Groups of them with a bridge of their own.
        uplink: Rate of each rack's link to the others.
        slow_link: Rate of the link of the second.
        share: Folders in /tmp that they shall see.

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
        racks=racks,
        uplink=uplink,
        share=tuple(sorted(seen | set(share))),
    )
    with interruptible():
        up(cluster)
        work = Path(tempfile.mkdtemp(prefix="daso-bench-", dir="/var/tmp"))
        try:
            yield Hosts(state, work, count, slow_link)
        finally:
            take_down(cluster)
            shutil.rmtree(work, ignore_errors=True)
