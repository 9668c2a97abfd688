"""Where am I: what launcher and user said through the environment, read here alone."""

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

__all__ = [
    "TORCHRUN",
    "Launch",
    "TorchrunAgents",
    "data_folder",
    "end_without_others",
    "expand",
    "expand_home",
    "find_mpirun",
    "for_sbatch",
    "has_marks",
    "is_file",
    "is_first_to_end",
    "is_placed_by_sbatch",
    "kernels_name",
    "may_share_a_gpu",
    "merged",
    "mpi_is_chosen",
    "note_ignored_signals",
    "note_process",
    "note_requeue",
    "path_of",
    "promises",
    "read_cpu_mask",
    "read_ignored_signals",
    "read_launch",
    "read_torchrun_agents",
    "restarts",
    "set_pmi_environment",
    "site_name",
    "slurm_job",
    "survives_lost_ranks",
    "tell_frameworks",
    "terminal_columns",
    "unset_pmi_connection",
]

# Rank within its host, as launchers say it.
LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
# How often who started this job started it again, and by what name he knows it.
RESTARTS = {
    "SLURM_RESTART_COUNT": "SLURM_JOB_ID",
    "DASO_RESTARTS": "DASO_JOB",
    "TORCHELASTIC_RESTART_COUNT": "TORCHELASTIC_RUN_ID",
}
KERNELS = ("torch", "native", "triton")
TORCHRUN = "torchrun"  # or a framework that starts ranks as it does
# launcher: (world size, world rank). Only variables that a launcher sets for each rank count:
# a batch script also sees SLURM_NTASKS, while it is one process. Ranks of an MPI launcher may set
# torchrun's for themselves: those come last.
LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "MPICH": ("PMI_SIZE", "PMI_RANK"),
    "SLURM": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    TORCHRUN: ("WORLD_SIZE", "RANK"),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher promised and what the user asked for."""

    launcher: str | None  # None: started alone
    size: int  # ranks promised
    rank: int  # world rank promised
    ranks_per_node: tuple[int, ...] | None  # pretend nodes
    spares: int = 0  # of the ranks, the last ones: they wait until others are lost


@dataclass(frozen=True, slots=True)
class TorchrunAgents:
    """What torchrun's agents tell a rank that they started."""

    rank: int
    size: int
    host: str  # of the store that they share, and of rank 0
    port: int  # of that store
    start: str  # names these ranks among others


def read_torchrun_agents(env: Mapping[str, str] | None = None) -> TorchrunAgents | None:
    """Return what torchrun said to this rank; None where it did not start it, or shares no store.

    Where srun started torchrun, a rank inherits what MPI's launcher said, but not its connection.
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
    """Return whether this process has a connection of that number."""
    if not number.isdecimal():
        return False
    try:
        return stat.S_ISSOCK(os.fstat(int(number)).st_mode)
    except OSError:
        return False


def set_pmi_environment(rank: int, size: int, connection: int) -> None:
    """Say what MPICH's launcher says to its ranks, before MPI starts.

    Args:
        rank: This one.
        size: Ranks.
        connection: Number of the file over which ranks are told of each other.
    """
    for name in [name for name in os.environ if name.startswith(("PMI_", "PMIX_"))]:
        del os.environ[name]
    told = {"PMI_FD": connection, "PMI_RANK": rank, "PMI_SIZE": size, "DASO_PMI_PID": os.getpid()}
    os.environ.update({name: str(value) for name, value in told.items()})
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if ranks.isdecimal() and int(ranks) > len(os.sched_getaffinity(0)):
        # A rank that waits sleeps, and leaves its core to others, as under `daso run`.
        os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")


def unset_pmi_connection() -> None:
    """Keep the connection from programs that this rank starts, once MPI runs."""
    os.environ.pop("PMI_FD", None)


def read_launch(env: Mapping[str, str] | None = None) -> Launch:
    """Read how this process was started."""
    env = os.environ if env is None else env
    pretend = parse_ranks_per_node(env.get("DASO_RANKS_PER_NODE", ""))
    spares = _parse_spares(env.get("DASO_SPARES", ""))
    agents = read_torchrun_agents(env)
    found = promises(env) if agents is None else [Launch(TORCHRUN, agents.size, agents.rank, None)]
    # One task of a SLURM step may have started torchrun: who started several started these.
    several = [launch for launch in found if launch.size > 1]
    launch = next(iter(several + found), Launch(None, 1, 0, None))
    return replace(launch, ranks_per_node=pretend, spares=spares)


def promises(env: Mapping[str, str] | None = None) -> list[Launch]:
    """Return what each launcher said; some may be left over of a launcher further out."""
    env = os.environ if env is None else env
    return [
        Launch(launcher, int(env[size]), int(env[rank]), None)
        for launcher, (size, rank) in LAUNCHERS.items()
        if env.get(size, "").isdecimal() and env.get(rank, "").isdecimal()
    ]


def parse_ranks_per_node(text: str) -> tuple[int, ...] | None:
    """Read ``"2"`` or ``"3,1"``."""
    if not text.strip():
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(
            f"ranks per node must be a positive number or a list such as 3,1, not {text!r}"
        )
    return tuple(int(word) for word in words)


def _parse_spares(text: str) -> int:
    if text.strip() and not text.strip().isdecimal():
        raise ConfigError(
            f"DASO_SPARES must be a number of ranks, 0 or more, not {text!r}; mend it or unset it"
        )
    return int(text) if text.strip() else 0


def note_process(rank: int, env: Mapping[str, str] | None = None) -> None:
    """Tell `daso run` which process this rank is, so that it can name a rank that is killed."""
    folder = (os.environ if env is None else env).get("DASO_PROCESSES")
    if folder and Path(folder).is_dir():
        with suppress(OSError):  # a full disk: the rank has no name then
            (Path(folder) / str(rank)).write_text(str(os.getpid()))


def survives_lost_ranks(env: Mapping[str, str] | None = None) -> bool:
    """Return whether Open MPI goes on without a rank that is killed: ``mpirun --with-ft ulfm``."""
    return (os.environ if env is None else env).get("OMPI_MCA_mpi_ft_enable") == "1"


def end_without_others() -> None:
    """Let MPI_Finalize not wait for ranks that were lost; call it before MPI starts."""
    os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")


def may_share_a_gpu(env: Mapping[str, str] | None = None) -> bool:
    """Return whether NCCL was told that ranks may share a GPU; it can from 2.30 on."""
    return (os.environ if env is None else env).get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def tell_frameworks(
    rank: int, size: int, local_rank: int, local_size: int, first_host: str
) -> None:
    """Say what torchrun says to its ranks, for frameworks that ask nobody else."""
    told = {
        "MASTER_ADDR": first_host,
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
    }
    os.environ.update({name: str(value) for name, value in told.items()})


def slurm_job(env: Mapping[str, str] | None = None) -> str | None:
    """Return the id of the SLURM job that this process belongs to, or None."""
    return (os.environ if env is None else env).get("SLURM_JOB_ID") or None


def restarts(env: Mapping[str, str] | None = None) -> int:
    """Return how often SLURM put the job back into its queue, or who starts ranks did so again."""
    env = os.environ if env is None else env
    texts = (env.get(name, "") for name in RESTARTS)
    return sum(int(text) for text in texts if text.isdecimal())


def job_names(env: Mapping[str, str] | None = None, *, restarted: bool = False) -> set[str]:
    """Return by what names those who started this job know it: the same when they start it again.

    Args:
        env: The process's own if None.
        restarted: Only those who did start it again.
    """
    env = os.environ if env is None else env
    # Unless it is told another, torchrun gives every job this one: its agents know themselves.
    unnamed = {"TORCHELASTIC_RUN_ID=none": f" on {os.uname().nodename} by {os.getppid()}"}
    names = {
        f"{name}={env[name]}"
        for count, name in RESTARTS.items()
        if env.get(name) and (not restarted or restarts({count: env.get(count, "")}))
    }
    return {name + unnamed.get(name, "") for name in names}


def note_requeue(env: Mapping[str, str] | None = None) -> None:
    """Tell the batch script of `daso submit` that this rank wants the job to be started again."""
    path = (os.environ if env is None else env).get("DASO_REQUEUE")
    if path and Path(path).parent.is_dir():
        with suppress(OSError):  # a full disk: mpirun passes the exit code on all the same
            Path(path).touch()


def is_host_leader(env: Mapping[str, str] | None = None) -> bool:
    """Return whether this is the first rank of its host, as its launcher counts."""
    env = os.environ if env is None else env
    own = ("LOCAL_RANK",) if read_torchrun_agents(env) else LOCAL_RANKS
    return [env[name] for name in own if name in env][:1] == ["0"]


def read_cpu_mask(env: Mapping[str, str] | None = None) -> set[int] | None:
    """Return the cores that this rank shall run on; None where nothing is said."""
    found = os.environ if env is None else env
    masks, rank = found.get("DASO_CPU_MASKS"), None
    for name in LOCAL_RANKS:
        rank = found.get(name) if rank is None else rank
    if not masks or rank is None or not rank.isdigit():
        return None
    words = masks.split(",")
    try:
        mask = int(words[int(rank) % len(words)], 16)
    except ValueError:
        raise ConfigError(
            f"DASO_CPU_MASKS must be numbers in hexadecimal, by commas, not {masks!r}; mend them"
        ) from None
    return {core for core in range(mask.bit_length()) if mask >> core & 1}


def note_ignored_signals(numbers: Iterable[int]) -> None:
    """Tell worker processes that this one starts from now on which signals are not for them."""
    words = [str(int(number)) for number in sorted(numbers)]
    os.environ.pop("DASO_WORKERS_IGNORE", None)
    if words:
        os.environ["DASO_WORKERS_IGNORE"] = ",".join([str(os.getpid()), *words])


def read_ignored_signals(env: Mapping[str, str] | None = None) -> tuple[int, frozenset[int]]:
    """Return who started this process, and the signals that `note_ignored_signals` named there."""
    words = (os.environ if env is None else env).get("DASO_WORKERS_IGNORE", "").split(",")
    if not all(word.isdigit() for word in words):
        return 0, frozenset()
    pid, *numbers = map(int, words)
    return pid, frozenset(numbers)


def has_marks(env: Mapping[str, str] | None = None) -> bool:
    """Return whether a batch script of `daso submit` started this rank, and reads its marks."""
    return bool((os.environ if env is None else env).get("DASO_REQUEUE"))


def is_first_to_end(env: Mapping[str, str] | None = None) -> bool:
    """Return whether no rank of this job of `daso submit` exited without reporting before."""
    path = (os.environ if env is None else env).get("DASO_REQUEUE")
    if not path:
        return False
    try:
        os.close(os.open(f"{path}-first", os.O_CREAT | os.O_EXCL))
    except OSError:
        return False
    return True


def terminal_columns(env: Mapping[str, str] | None = None) -> int | None:
    """Return how wide the terminal is that shows this rank's output; None where there is none.

    mpirun reads a rank's output from a pipe, so `daso run` says in DASO_TERMINAL what lies behind.
    """
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    columns = (os.environ if env is None else env).get("DASO_TERMINAL", "")
    return int(columns) if columns.isdigit() else None


def mpi_is_chosen(env: Mapping[str, str] | None = None) -> bool:
    """Return whether MPI4PY_LIBMPI says which MPI library to load."""
    return bool((os.environ if env is None else env).get("MPI4PY_LIBMPI"))


def data_folder(env: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder that DASO_DATA names, or None."""
    text = (os.environ if env is None else env).get("DASO_DATA", "")
    return Path(text) if text else None


def site_name(env: Mapping[str, str] | None = None) -> str:
    """Return the site profile that DASO_SITE names, or nothing."""
    return (os.environ if env is None else env).get("DASO_SITE", "")


def kernels_name(env: Mapping[str, str] | None = None) -> str:
    """Return the value of DASO_KERNELS, or nothing.

    Raises:
        ConfigError: The value is not one of `KERNELS`.
    """
    name = (os.environ if env is None else env).get("DASO_KERNELS", "")
    if name not in ("", *KERNELS):
        raise ConfigError(
            f"DASO_KERNELS must be one of {', '.join(KERNELS)}, not {name!r}; set it to one of "
            f"these or unset it"
        )
    return name


def expand(text: str, env: Mapping[str, str] | None = None) -> str:
    """Replace ``${NAME}`` and ``${NAME:-default}``, as a shell does."""
    env = os.environ if env is None else env
    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", lambda m: env.get(m[1]) or m[2] or "", text)


def expand_home(word: str) -> str:
    """Replace a leading ~ by the user's folder, as no shell does behind a "=" or in a file."""
    return os.path.expanduser(word)  # noqa: PTH111 - a Path would change docker://image


def is_file(path: Path) -> bool:
    """Return whether a file is there, as far as this user may look."""
    try:
        return path.is_file()
    except OSError:
        return False


def path_of(word: str) -> Path:
    """Return the path that somebody typed."""
    return Path(expand_home(word))


def merged(env: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with more in it, for a process that is started."""
    return {**env, **more}


# What sbatch reads under another name than that of its option.
SBATCH_NAMES = {
    "array": ("ARRAY_INX",),
    "mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    "requeue": ("NO_REQUEUE",),
    "time": ("TIMELIMIT",),
}
# Where SLURM is; all other SLURM_* variables inside a job are of that job.
SLURM_PLACE = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"}


def for_sbatch(
    env: Mapping[str, str], more: Mapping[str, str], options: Iterable[str]
) -> dict[str, str]:
    """Return an environment in which sbatch does what its script says.

    SBATCH_* variables count more than the script's lines, and a job that is submitted from inside
    another one would inherit that one's SLURM_* variables, its number of restarts among them.
    """
    inside = "SLURM_JOB_ID" in env
    said = {
        f"SBATCH_{name}"
        for option in options
        for name in (option.upper().replace("-", "_"), *SBATCH_NAMES.get(option, ()))
    }
    kept = {
        name: value
        for name, value in env.items()
        if name not in said
        and not (inside and name.startswith("SLURM_") and name not in SLURM_PLACE)
    }
    return merged(kept, more)


def is_placed_by_sbatch(*, partition: bool, env: Mapping[str, str] | None = None) -> bool:
    """Return whether variables tell sbatch where a job runs, which may name its partition."""
    env = os.environ if env is None else env
    return bool(env.get("SBATCH_CLUSTERS") or (not partition and env.get("SBATCH_PARTITION")))


def find_mpirun(env: Mapping[str, str] | None = None) -> Path | None:
    """Find the mpirun that belongs to this Python."""
    env = os.environ if env is None else env
    if env.get("DASO_MPIRUN"):
        return Path(env["DASO_MPIRUN"])
    beside = Path(sys.executable).parent / "mpirun"
    if beside.exists():
        return beside
    found = shutil.which("mpirun", path=env.get("PATH"))
    return Path(found) if found else None
