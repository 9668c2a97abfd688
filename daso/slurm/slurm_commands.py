"""SLURM's commands: runs them, and explains their refusals."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from daso.environment import for_sbatch, merged
from daso.errors import ConfigError, TopologyError
from daso.slurm.job import Job, flag
from daso.slurm.launcher import read_offered

SECONDS = 60  # commands report a stopped controller only after their own time-outs
SUBMIT_SECONDS = 600  # after an interrupted sbatch the job may or may not exist


class NoAnswerError(TopologyError):
    """A command of SLURM did not answer in time; it may do so later."""


def is_there(command: str) -> bool:
    """Return whether a command is on PATH."""
    return shutil.which(command) is not None


def has_settings(client: Mapping[str, str]) -> bool:
    """Return whether the SLURM_CONF of a site exists; a command without it waits a minute."""
    return "SLURM_CONF" not in client or Path(client["SLURM_CONF"]).is_file()


def require(command: str) -> None:
    """Raise if a command is not on PATH."""
    if not is_there(command):
        raise TopologyError(
            f"{command} must be on PATH, but it is not; log in to a node of a SLURM cluster, see "
            f"the script with `daso submit --dry-run`, or use `daso run` on this machine",
            code="no-slurm-commands",
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
            f"the cluster, or choose another --site",
            code="slurm-conf-not-found",
        )
    seconds = SECONDS if text is None else SUBMIT_SECONDS
    stdin = b"" if text is None else text.encode("utf-8", "surrogateescape")
    env = merged(os.environ, client) if text is None else for_sbatch(os.environ, client, options)
    try:
        return subprocess.run(
            words,
            env=env,
            input=stdin,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        hint = "" if text is None else "; `squeue --me` shows whether the job exists"
        raise NoAnswerError(
            f"{words[0]} must answer within {seconds} s, but it does not; see whether the "
            f"cluster's controller is up with `scontrol ping`{hint}",
            code="slurm-does-not-answer",
        ) from error


def library_of(python: str) -> str | None:
    """Return the version text of a Python's MPI library, without starting MPI; None if unknown."""
    words = [python, "-m", "mpi4py", "--mpi-lib-version"]
    try:
        run = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout if run.returncode == 0 else None


def offered(client: Mapping[str, str]) -> tuple[str, ...]:
    """Return the MPI plugins that srun offers; none without srun."""
    if not is_there("srun") or not has_settings(client):
        return ()
    run = ask(["srun", "--mpi=list"], client=client)
    text = (run.stdout + run.stderr).decode("utf-8", "replace")
    return read_offered(text) if run.returncode == 0 else ()


@dataclass(frozen=True, slots=True)
class Row:
    """Nodes of one size in a partition, as sinfo lists them."""

    cpus: int
    count: int
    gpus: int

    def share(self, gpus: int) -> int:
        """Return the CPUs of a node that come with a number of its GPUs."""
        return self.cpus * min(gpus, self.gpus) // self.gpus if gpus and self.gpus else self.cpus


def _rows(job: Job, nodes: str, *, routed: bool = False) -> list[Row]:
    """Return the nodes of a job's partitions; of all partitions if a site may route the job."""
    partitions, rows = job.partition.split(","), list[Row]()
    for line in nodes.splitlines():
        name, cpus, count, gres = (*line.split("|", 3), "", "", "")[:4]
        fits = name.rstrip("*") in partitions if job.partition else routed or name.endswith("*")
        if fits and cpus.isdecimal() and count.isdecimal():  # not 32+, a group of several sizes
            gpus = sum(int(number) for number in re.findall(r"gpu:(?:[^:,(]+:)?(\d+)", gres))
            rows.append(Row(int(cpus), int(count), gpus))
    return rows


def cpus_of_a_rank(job: Job, nodes: str, *, routed: bool) -> tuple[int, str] | None:
    """Return a rank's share of the smallest node's CPUs, and the reason; None if unknown.

    A job that takes some of a node's GPUs gets the same part of its CPUs.
    """
    rows = _rows(job, nodes, routed=routed)
    gpus = job.gpus_per_node
    rows = [row for row in rows if gpus and row.gpus >= gpus] or rows
    if not rows:
        return None
    shares = {row: row.share(gpus) for row in rows}
    row = min(rows, key=lambda row: (shares[row], row.cpus))
    kind = "the smallest node" if len(set(shares.values())) > 1 else "a node"
    part = f", and the job takes {gpus} of its {row.gpus} GPUs" if shares[row] < row.cpus else ""
    return max(1, shares[row] // job.tasks_per_node), f"{kind} has {row.cpus}{part}"


def too_big(job: Job, nodes: str) -> ConfigError | None:
    """Return the error of a job that cannot fit into its partition, or None if it can."""
    sizes_here = [(row.cpus, row.count) for row in _rows(job, nodes)]
    need = job.tasks_per_node * job.cpus_per_task
    fit = sum(count for cpus, count in sizes_here if cpus >= need)
    if not sizes_here or fit >= job.nodes or "--overcommit" in " ".join(job.extra):
        return None
    sizes = ", ".join(f"{count} of {cpus} CPUs" for cpus, count in sorted(sizes_here))
    return ConfigError(
        f"ranks must fit into the slots of the partition, which has nodes: {sizes}; not {job.size} "
        f"with {need} CPUs on each; take fewer --nodes, --tasks-per-node or --cpus-per-task, or "
        f"another --partition",
        code="job-exceeds-partition",
    )


# Patterns of sbatch's errors (SLURM 22.05): the rule, the options with the value, the remedy.
REFUSALS = {
    r"node configuration is not available|CPU count per node|Node count specification|"
    r"More processors requested|Task count specification": (
        "the cluster must be able to hold the job",
        ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "mem"),
        "ask for less; `sinfo -o '%P %D %c %m %G'` shows nodes, CPUs, memory and GPUs",
    ),
    r"[Mm]emory specification": (
        "a node must have the memory",
        ("mem",),
        "ask for less; `sinfo -o '%P %m'` shows what there is",
    ),
    r"account/partition combination": (
        "the account must be yours, and may use the partition",
        ("account", "partition"),
        "`sacctmgr show assoc user=$USER format=account,partition` lists yours",
    ),
    r"accounting/QOS policy|QOS\w*Limit|Assoc\w*Limit": (
        "a job must be within the limits of its account and quality of service",
        ("nodes", "time", "account", "qos"),
        "ask for less, or wait for your other jobs; `sacctmgr show qos` lists limits",
    ),
    r"partition": ("the partition must be there", ("partition",), "`sinfo -s` lists them"),
    r"account": ("the account must be yours", ("account",), "`sacctmgr show user $USER` has it"),
    r"qos|QOS": ("the quality of service must be there", ("qos",), "`sacctmgr show qos` has it"),
    r"feature": ("nodes must have the features", ("constraint",), "`sinfo -o '%P %f'` lists them"),
    r"generic resource|gres|GRES": (
        "nodes must have the GPUs",
        ("gpus_per_node", "gpu_request"),
        "`sinfo -o '%P %G'` lists them; some sites want --gpu-request=gres",
    ),
    r"time limit|time specification": (
        "the time limit must be one that the partition allows",
        ("time", "partition"),
        "`sinfo -o '%P %l'` lists them",
    ),
    r"dependency": (
        "the jobs to wait for must be there",
        ("dependency",),
        "`squeue --me` lists them",
    ),
    r"contact slurm controller|establish a configuration|Connection refused|fetch config": (
        "the cluster's controller must answer",
        (),
        "see `scontrol ping`; on a test cluster, choose its --site",
    ),
}


def explain(stderr: str, job: Job) -> str:
    """Return sbatch's refusal as one line with rule, value and remedy."""
    words = [re.sub(r"^sbatch: (error|fatal): ", "", line) for line in stderr.splitlines()]
    words = [word for word in words if word and not word.startswith("Try ")]
    reason = words[-1].removeprefix("Batch job submission failed: ") if words else "nothing"
    for sign, (rule, names, remedy) in REFUSALS.items():
        if re.search(sign, " ".join(words)):
            values = [f"{flag(name)}={getattr(job, name)}" for name in names if getattr(job, name)]
            options = f" to {' '.join(values)}" if values else ""
            return f"{rule}, but sbatch said {reason!r}{options}; {remedy}"
    return (
        f"sbatch must take the job, but said {reason!r}; change the option that it names, or see "
        f"the script with --dry-run"
    )
