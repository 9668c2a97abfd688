"""Tests that need hosts, links and SLURM: `scripts/minicluster` brings them up, once.

The fixture `cluster` is a `Cluster` of four hosts with a state folder of its own. Tests here are
skipped, with the reason, only where there is no root, no right to make namespaces, or a package is
missing; the last lines of pytest's output say how many ran.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from jobs import HANG_SECONDS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "minicluster"
HOSTS = 4
LAUNCHERS = ("PMI", "PMIX", "OMPI_", "PRTE_", "HYD", "SLURM_", "DASO_")
NOT_HERE = ("must be installed", "must run as root", "must get namespaces")

ran = set[str]()


class Cluster:
    """A running cluster, for tests.

    Attributes:
        hosts: Names of the hosts: mini0, mini1, ...
        work: A folder that the hosts see, for scripts and output. (tmp_path lies in /tmp, of which
            every host has its own.)
        env: The environment in which sbatch, srun, squeue and scontrol talk to this cluster.
        python: This Python; the hosts see it, its virtual environment and this checkout.
    """

    def __init__(self, folder: Path, hosts: int) -> None:
        self.folder = folder / "state"
        self.work = folder / "work"
        self.work.mkdir()
        self.hosts = tuple(f"mini{host}" for host in range(hosts))
        outside = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
        self.env = {
            **outside,
            "DASO_MINICLUSTER": str(self.folder),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }
        self.python = sys.executable

    def run(
        self, argv: Sequence[object], *, seconds: float = 60, check: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command outside the hosts, in the folder `work`.

        Args:
            argv: The command: ``["srun", "-N2", "hostname"]``.
            seconds: When to give up.
            check: Whether an exit code other than 0 fails the test.
            env: More environment variables.
        """
        done = subprocess.run(
            [str(word) for word in argv],
            env={**self.env, **env},
            cwd=self.work,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done

    def batch(self, *words: object, seconds: float = HANG_SECONDS, **env: str) -> None:
        """Run a batch job to its end; ``sbatch --wait`` sees that half a minute later."""
        job = self.run(["sbatch", "--parsable", *words], **env).stdout.strip()
        ended = re.compile(" JobState=(COMPLETED|FAILED|TIMEOUT|CANCELLED|NODE_FAIL) ")
        show = ["scontrol", "show", "job", "-o", job]
        self.until(lambda: bool(ended.search(self.run(show).stdout)), seconds=seconds)

    def minicluster(self, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `scripts/minicluster` on this cluster."""
        return self.run([SCRIPT, *words], check=check)

    def on(self, host: str, *words: object, check: bool = True) -> str:
        """Run a command on a host, past SLURM, and return what it prints."""
        return self.minicluster("exec", host, "--", *words, check=check).stdout

    def rate(self, rate: str) -> None:
        """Change the rate of every link, as in ``100mbit`` or ``none``."""
        self.minicluster("rate", rate)

    def cut(self, host: str) -> None:
        """Pull a host's cable."""
        self.minicluster("cut", host)

    def mend(self, host: str) -> None:
        """Put a host's cable back."""
        self.minicluster("mend", host)

    def patience(self, seconds: float) -> float:
        """Let SLURM wait so long for a silent host until it is down; return how long it did."""
        settings = Path(self.env["SLURM_CONF"])
        text = settings.read_text()
        (usual,) = re.findall(r"^SlurmdTimeout=(\d+)$", text, re.MULTILINE)
        line = f"SlurmdTimeout={round(seconds)}"
        settings.write_text(text.replace(f"SlurmdTimeout={usual}", line))
        self.run(["scontrol", "reconfigure"])
        return float(usual)

    def states(self) -> dict[str, str]:
        """Return what SLURM says of every host: idle, mixed, down*, ..."""
        lines = self.run(["sinfo", "-hNo", "%n %T"]).stdout.splitlines()
        return dict(line.split() for line in lines)

    def until(self, happened: Callable[[], bool], *, seconds: float = 60) -> None:
        """Wait until something has happened; fail the test when it does not."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, f"not within {seconds} s; hosts: {self.states()}"
            time.sleep(0.2)

    def reset(self) -> None:
        """End all jobs, take the rate off and mend every host."""
        self.run(["scancel", "--user=root"])
        self.rate("none")
        for host in self.hosts:
            self.mend(host)
        self.until(lambda: set(self.states().values()) == {"idle"})


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    # Not tmp_path: the hosts would not see it.
    folder = Path(tempfile.mkdtemp(prefix="daso-cluster-", dir="/var/tmp"))
    found = Cluster(folder, HOSTS)
    # A test that is late ends this process at once: then the pipe closes, and the cluster goes too.
    guard = subprocess.Popen(
        ["sh", "-c", 'read -r end; "$0" down && rm -r "$1"', SCRIPT, folder],
        env=found.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    seen = [word for one in (ROOT, sys.prefix) for word in ("--share", one)]
    try:
        up = found.minicluster("up", HOSTS, *seen, check=False)
        if up.returncode != 0 and any(reason in up.stderr for reason in NOT_HERE):
            pytest.skip(up.stderr.strip())
        assert up.returncode == 0, up.stderr
        yield found
    finally:
        guard.communicate(timeout=HANG_SECONDS)
        assert guard.returncode == 0


@pytest.fixture(autouse=True)
def as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give the next test the cluster as this one got it."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").reset()


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.is_relative_to(Path(__file__).parent):
        item.add_marker("cluster")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and "cluster" in report.keywords and not report.skipped:
        ran.add(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"cluster: {len(ran)} tests ran on a cluster of {HOSTS} hosts")
