"""Launcher and user settings from environment variables, all of which are read here."""

import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from daso.errors import ConfigError

# Launchers' variables of the rank within its host.
LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
# Variables of restart counts, and of the job ids that the same launcher uses.
RESTARTS = {
    "SLURM_RESTART_COUNT": "SLURM_JOB_ID",
    "DASO_RESTARTS": "DASO_JOB",
    "TORCHELASTIC_RESTART_COUNT": "TORCHELASTIC_RUN_ID",
}
KERNELS = ("torch", "native", "triton")
TORCHRUN = "torchrun"  # or a framework that starts ranks alike
# launcher: (world size, world rank). Only variables set for each rank count: a batch script also
# has SLURM_NTASKS. Ranks of an MPI launcher may set torchrun's variables, so these come last.
LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "MPICH": ("PMI_SIZE", "PMI_RANK"),
    "SLURM": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    TORCHRUN: ("WORLD_SIZE", "RANK"),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """The launcher's world and the user's cut into nodes."""

    launcher: str | None  # None: started without one
    size: int  # world size, as announced
    rank: int  # world rank, as announced
    ranks_per_node: tuple[int, ...] | None  # pretend nodes
    spares: int = 0  # the last ranks, which wait until others are lost


@dataclass(frozen=True, slots=True)
class TorchrunAgents:
    """Connection data that torchrun's agents give to their ranks."""

    rank: int
    size: int
    host: str  # of their shared store, and of rank 0
    port: int  # of that store
    start: str  # identifies this group of ranks


def read_torchrun_agents(env: Mapping[str, str] | None = None) -> TorchrunAgents | None:
    """Return torchrun's data for this rank; None if it did not start it, or has no shared store.

    If srun started torchrun, a rank inherits the variables of MPI's launcher, but not its
    connection.
    """
    env = os.environ if env is None else env
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    numbers = [int(env[name]) for name in names if env.get(name, "").isdecimal()]
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or len(numbers) < len(names):
        return None
    if "OMPI_COMM_WORLD_SIZE" in env or "PMI_PORT" in env or _is_socket(env.get("PMI_FD", "")):
        return None
    if env.get("DASO_PMI_PID", str(os.getpid())) != str(os.getpid()):  # a process of a rank
        return None
    rank, size, port = numbers
    start = env.get("TORCHELASTIC_RUN_ID", "")
    return TorchrunAgents(rank, size, env.get("MASTER_ADDR", ""), port, start) if size > 1 else None


def _is_socket(number: str) -> bool:
    """Return whether this process has an open socket with that descriptor number."""
    if not number.isdecimal():
        return False
    try:
        return stat.S_ISSOCK(os.fstat(int(number)).st_mode)
    except OSError:
        return False


def set_pmi_environment(rank: int, size: int, connection: int) -> None:
    """Set the variables of MPICH's launcher for this rank, before MPI starts.

    Args:
        rank: World rank of this process.
        size: World size.
        connection: Descriptor of the PMI connection.
    """
    for name in [name for name in os.environ if name.startswith(("PMI_", "PMIX_"))]:
        del os.environ[name]
    variables = {
        "PMI_FD": connection,
        "PMI_RANK": rank,
        "PMI_SIZE": size,
        "DASO_PMI_PID": os.getpid(),
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if ranks.isdecimal() and int(ranks) > len(os.sched_getaffinity(0)):
        # A waiting rank yields its core, as under `daso run`.
        os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")


def unset_pmi_connection() -> None:
    """Hide the PMI connection from programs that this rank starts, once MPI runs."""
    os.environ.pop("PMI_FD", None)


def read_launch(env: Mapping[str, str] | None = None) -> Launch:
    """Return how this process was started."""
    env = os.environ if env is None else env
    pretend = parse_ranks_per_node(env.get("DASO_RANKS_PER_NODE", ""))
    spares = _parse_spares(env.get("DASO_SPARES", ""))
    agents = read_torchrun_agents(env)
    launches = (
        promises(env) if agents is None else [Launch(TORCHRUN, agents.size, agents.rank, None)]
    )
    # One task of a SLURM step may have started torchrun: the launcher of several ranks counts.
    several = [launch for launch in launches if launch.size > 1]
    launch = next(iter(several + launches), Launch(None, 1, 0, None))
    return replace(launch, ranks_per_node=pretend, spares=spares)


def promises(env: Mapping[str, str] | None = None) -> list[Launch]:
    """Return the world announced by each launcher; an outer launcher's variables may remain."""
    env = os.environ if env is None else env
    return [
        Launch(launcher, int(env[size]), int(env[rank]), None)
        for launcher, (size, rank) in LAUNCHERS.items()
        if env.get(size, "").isdecimal() and env.get(rank, "").isdecimal()
    ]


def parse_ranks_per_node(text: str) -> tuple[int, ...] | None:
    """Parse ``"2"`` or ``"3,1"``."""
    if not text.strip():
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(
            f"ranks per node must be a positive number or a list such as 3,1, not {text!r}",
            code="ranks-per-node-invalid",
        )
    return tuple(int(word) for word in words)


def _parse_spares(text: str) -> int:
    if text.strip() and not text.strip().isdecimal():
        raise ConfigError(
            f"DASO_SPARES must be a number of ranks, 0 or more, not {text!r}; mend it or unset it",
            code="spares-not-a-number",
        )
    return int(text) if text.strip() else 0


def note_process(rank: int, env: Mapping[str, str] | None = None) -> None:
    """Record this rank's process id for `daso run`, so that it can name a killed rank."""
    folder = (os.environ if env is None else env).get("DASO_PROCESSES")
    if folder and Path(folder).is_dir():
        with suppress(OSError):  # for example a full disk: the rank stays unnamed
            (Path(folder) / str(rank)).write_text(str(os.getpid()))


def survives_lost_ranks(env: Mapping[str, str] | None = None) -> bool:
    """Return whether Open MPI continues without a killed rank: ``mpirun --with-ft ulfm``."""
    return (os.environ if env is None else env).get("OMPI_MCA_mpi_ft_enable") == "1"


def end_without_others() -> None:
    """Make MPI_Finalize not wait for lost ranks; call it before MPI starts."""
    os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")


def may_share_a_gpu(env: Mapping[str, str] | None = None) -> bool:
    """Return whether NCCL's setting allows ranks to share a GPU; supported from 2.30 on."""
    return (os.environ if env is None else env).get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def set_torchrun_environment(
    rank: int, size: int, local_rank: int, local_size: int, first_host: str
) -> None:
    """Set torchrun's variables, for frameworks that read only these."""
    variables = {
        "MASTER_ADDR": first_host,
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})


def slurm_job(env: Mapping[str, str] | None = None) -> str | None:
    """Return the id of the SLURM job that this process belongs to, or None."""
    return (os.environ if env is None else env).get("SLURM_JOB_ID") or None


def restarts(env: Mapping[str, str] | None = None) -> int:
    """Return how often SLURM requeued the job, or its launcher restarted it."""
    env = os.environ if env is None else env
    texts = (env.get(name, "") for name in RESTARTS)
    return sum(int(text) for text in texts if text.isdecimal())


def restarts_left(env: Mapping[str, str] | None = None) -> int:
    """Return how often `daso submit` would still restart the job; 0 in other jobs."""
    limit = (os.environ if env is None else env).get("DASO_MAX_RESTARTS", "")
    return max(0, int(limit) - restarts(env)) if limit.isdecimal() else 0


def job_names(env: Mapping[str, str] | None = None, *, restarted: bool = False) -> set[str]:
    """Return the job's ids, equal across restarts, in launchers (that have restarted it)."""
    env = os.environ if env is None else env
    # torchrun's default id is the same for every job, so its agent's process id is added.
    unnamed = {"TORCHELASTIC_RUN_ID=none": f" on {os.uname().nodename} by {os.getppid()}"}
    names = {
        f"{name}={env[name]}"
        for count, name in RESTARTS.items()
        if env.get(name) and (not restarted or restarts({count: env.get(count, "")}))
    }
    return {name + unnamed.get(name, "") for name in names}


def note_requeue(env: Mapping[str, str] | None = None) -> None:
    """Ask the batch script of `daso submit` to restart the job."""
    path = (os.environ if env is None else env).get("DASO_REQUEUE")
    if path and Path(path).parent.is_dir():
        with suppress(OSError):  # for example a full disk: mpirun still passes on the exit code
            Path(path).touch()


def is_host_leader(env: Mapping[str, str] | None = None) -> bool:
    """Return whether this is the first rank of its host, by its launcher's count."""
    env = os.environ if env is None else env
    own = ("LOCAL_RANK",) if read_torchrun_agents(env) else LOCAL_RANKS
    return [env[name] for name in own if name in env][:1] == ["0"]


def read_cpu_mask(env: Mapping[str, str] | None = None) -> set[int] | None:
    """Return the cores that this rank should run on; None without a setting."""
    variables = os.environ if env is None else env
    masks, rank = variables.get("DASO_CPU_MASKS"), None
    for name in LOCAL_RANKS:
        rank = variables.get(name) if rank is None else rank
    if not masks or rank is None or not rank.isdigit():
        return None
    words = masks.split(",")
    try:
        mask = int(words[int(rank) % len(words)], 16)
    except ValueError:
        raise ConfigError(
            f"DASO_CPU_MASKS must be numbers in hexadecimal, by commas, not {masks!r}; mend them",
            code="cpu-masks-invalid",
        ) from None
    return {core for core in range(mask.bit_length()) if mask >> core & 1}


def note_ignored_signals(numbers: Iterable[int]) -> None:
    """Pass on to worker processes started from now on which signals they must ignore."""
    words = [str(int(number)) for number in sorted(numbers)]
    os.environ.pop("DASO_WORKERS_IGNORE", None)
    if words:
        os.environ["DASO_WORKERS_IGNORE"] = ",".join([str(os.getpid()), *words])


def read_ignored_signals(env: Mapping[str, str] | None = None) -> tuple[int, frozenset[int]]:
    """Return the id of the process that called `note_ignored_signals`, and its signals."""
    words = (os.environ if env is None else env).get("DASO_WORKERS_IGNORE", "").split(",")
    if not all(word.isdigit() for word in words):
        return 0, frozenset()
    pid, *numbers = map(int, words)
    return pid, frozenset(numbers)


def has_marks(env: Mapping[str, str] | None = None) -> bool:
    """Return whether a batch script of `daso submit` started this rank and reads its mark files."""
    return bool((os.environ if env is None else env).get("DASO_REQUEUE"))


def is_first_to_end(env: Mapping[str, str] | None = None) -> bool:
    """Return whether this rank is the first of its `daso submit` job to end irregularly."""
    path = (os.environ if env is None else env).get("DASO_REQUEUE")
    if not path:
        return False
    try:
        os.close(os.open(f"{path}-first", os.O_CREAT | os.O_EXCL))
    except OSError:
        return False
    return True


def terminal_columns(env: Mapping[str, str] | None = None) -> int | None:
    """Return the width of the terminal that shows this rank's output; None without a terminal."""
    # mpirun reads a rank's output from a pipe, so `daso run` passes the width in DASO_TERMINAL.
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    columns = (os.environ if env is None else env).get("DASO_TERMINAL", "")
    return int(columns) if columns.isdigit() else None


def mpi_is_chosen(env: Mapping[str, str] | None = None) -> bool:
    """Return whether MPI4PY_LIBMPI names the MPI library to load."""
    return bool((os.environ if env is None else env).get("MPI4PY_LIBMPI"))


def data_folder(env: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder that DASO_DATA names, or None."""
    text = (os.environ if env is None else env).get("DASO_DATA", "")
    return Path(text) if text else None


def site_name(env: Mapping[str, str] | None = None) -> str:
    """Return the site profile that DASO_SITE names, or nothing."""
    return (os.environ if env is None else env).get("DASO_SITE", "")


def shows_all_tracebacks(env: Mapping[str, str] | None = None) -> bool:
    """Return whether DASO_TRACEBACKS requests the traceback of each rank that fails."""
    return (os.environ if env is None else env).get("DASO_TRACEBACKS") == "all"


def kernels_name(env: Mapping[str, str] | None = None) -> str:
    """Return the value of DASO_KERNELS, one of `KERNELS`, or nothing."""
    name = (os.environ if env is None else env).get("DASO_KERNELS", "")
    if name not in ("", *KERNELS):
        raise ConfigError(
            f"DASO_KERNELS must be one of {', '.join(KERNELS)}, not {name!r}; set it to one of "
            f"these or unset it",
            code="unknown-kernels",
        )
    return name


def expand(text: str, env: Mapping[str, str] | None = None) -> str:
    """Replace ``${NAME}`` and ``${NAME:-default}``, as a shell does."""
    env = os.environ if env is None else env
    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", lambda m: env.get(m[1]) or m[2] or "", text)


def merged(env: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with more variables, for a new process."""
    return {**env, **more}


# sbatch's variables whose names differ from those of its options.
SBATCH_NAMES = {
    "array": ("ARRAY_INX",),
    "mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    "requeue": ("NO_REQUEUE",),
    "time": ("TIMELIMIT",),
}
# Location of SLURM; inside a job, all other SLURM_* variables belong to that job.
SLURM_PLACE = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"}


def for_sbatch(
    env: Mapping[str, str], more: Mapping[str, str], options: Iterable[str]
) -> dict[str, str]:
    """Return an environment that does not override the options of the script for sbatch.

    SBATCH_* variables override the script's lines, and a job submitted from inside another job
    would inherit its SLURM_* variables, the number of restarts among them.
    """
    inside = "SLURM_JOB_ID" in env
    overriding = {
        f"SBATCH_{name}"
        for option in options
        for name in (option.upper().replace("-", "_"), *SBATCH_NAMES.get(option, ()))
    }
    remaining = {
        name: value
        for name, value in env.items()
        if name not in overriding
        and not (inside and name.startswith("SLURM_") and name not in SLURM_PLACE)
    }
    return merged(remaining, more)


def is_placed_by_sbatch(*, partition: bool, env: Mapping[str, str] | None = None) -> bool:
    """Return whether sbatch's variables select the cluster or partition of a job."""
    env = os.environ if env is None else env
    return bool(env.get("SBATCH_CLUSTERS") or (not partition and env.get("SBATCH_PARTITION")))


def find_mpirun(env: Mapping[str, str] | None = None) -> Path | None:
    """Return the path of the mpirun that belongs to this Python, or None."""
    env = os.environ if env is None else env
    if env.get("DASO_MPIRUN"):
        return Path(env["DASO_MPIRUN"])
    sibling = Path(sys.executable).parent / "mpirun"
    if sibling.exists():
        return sibling
    path = shutil.which("mpirun", path=env.get("PATH"))
    return Path(path) if path else None
