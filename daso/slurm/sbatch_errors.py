"""Why SLURM does not take a job: its words, and what it does not say, as one line of ours."""

import re

from daso.slurm.job import Job, flag

__all__ = ["explain", "too_big"]


def too_big(job: Job, nodes: str) -> str | None:
    """Return what is wrong with a job that its partition cannot hold, or None."""
    rows = [line.split("|") for line in nodes.splitlines() if line.count("|") == 2]
    wanted = job.partition.split(",") if job.partition else [""]
    here = [
        (int(cpus), int(count))
        for name, cpus, count in rows
        if cpus.isdecimal()  # not 32+, of nodes that are lumped together
        and (name.rstrip("*") in wanted if job.partition else name.endswith("*"))
    ]
    need = job.tasks_per_node * job.cpus_per_task
    fit = sum(count for cpus, count in here if cpus >= need)
    if not here or fit >= job.nodes or "--overcommit" in " ".join(job.extra):
        return None
    there = ", ".join(f"{count} of {cpus} CPUs" for cpus, count in sorted(here))
    return (
        f"ranks must fit into the slots of the partition, which has nodes: {there}; not {job.size} "
        f"with {need} CPUs on each; take fewer --nodes, --tasks-per-node or --cpus-per-task, or "
        f"another --partition"
    )


# What sbatch says (SLURM 22.05): the rule behind it, the options that name the value, the remedy.
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


def explain(said: str, job: Job) -> str:
    """Return sbatch's refusal as one line with rule, value and remedy."""
    words = [re.sub(r"^sbatch: (error|fatal): ", "", line) for line in said.splitlines()]
    words = [word for word in words if word and not word.startswith("Try ")]
    reason = words[-1].removeprefix("Batch job submission failed: ") if words else "nothing"
    for sign, (rule, names, remedy) in REFUSALS.items():
        if re.search(sign, " ".join(words)):
            values = [f"{flag(name)}={getattr(job, name)}" for name in names if getattr(job, name)]
            given = f" to {' '.join(values)}" if values else ""
            return f"{rule}, but sbatch said {reason!r}{given}; {remedy}"
    return (
        f"sbatch must take the job, but said {reason!r}; change the option that it names, or see "
        f"the script with --dry-run"
    )
