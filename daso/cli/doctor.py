"""`daso doctor`: examines the installation, its compatibility, and the defaults it leads to."""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

from daso.cli.launch import Local
from daso.comm.control import gather
from daso.comm.device.cuda_aware import cuda_aware
from daso.comm.device.nccl_library import describe
from daso.comm.mpi import check_wheels, library, load, wheels
from daso.comm.node.select import nccl_problem, wants_nccl
from daso.comm.topology import Topology
from daso.comm.world import init
from daso.environment import find_mpirun, read_launch
from daso.errors import DasoError, summarize
from daso.kernels.build import FOLDER, LOG
from daso.kernels.choice import describe_kernels
from daso.slurm.slurm_commands import is_there

LIMIT_SECONDS = 60.0  # for all ranks to report their findings


def examine() -> dict[str, Any]:
    """Examine this installation, and the world if mpirun started this process.

    Collective over the world; blocking.
    """
    problems: list[str] = []
    mpi = _mpi(problems)
    launcher = _launcher(problems, library=mpi["library"] is not None)
    topology = _join(problems) if mpi["library"] is not None else None
    kernels = _kernels(topology, problems)
    return {
        "mpi": mpi,
        "launcher": launcher,
        "nodes": _nodes(topology, problems) if topology is not None else {},
        "torch": _torch(),
        "kernels": kernels,
        "nccl": _nccl(),
        "chosen": _chosen(),
        "problems": problems,
    }


def _mpi(problems: list[str]) -> dict[str, Any]:
    installed = wheels()
    try:
        check_wheels(installed)
    except DasoError as error:
        problems.append(str(error))
    try:
        mpi = load()
    except DasoError as error:
        problems.append(str(error))
        return {"library": None, "wheels": installed}
    levels = {
        mpi.THREAD_SINGLE: "single",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_MULTIPLE: "multiple",
    }
    return {
        "library": library(),
        "standard": ".".join(map(str, mpi.Get_version())),
        "mpi4py": version("mpi4py"),
        "threads": levels[mpi.Query_thread()],
        "cuda_aware": cuda_aware(),
        "wheels": installed,
    }


def _launcher(problems: list[str], *, library: bool) -> dict[str, Any]:
    mpirun = find_mpirun()
    if mpirun is None:
        if read_launch().launcher is None and not is_there("srun"):
            problems.append("no mpirun: `pip install mpich` brings one, or set DASO_MPIRUN")
        return {"mpirun": None, "started_by": read_launch().launcher}
    if not library or read_launch().launcher is not None:  # inside mpirun, asking would nest jobs
        return {"mpirun": str(mpirun), "started_by": read_launch().launcher}
    answer = _try_two_ranks(mpirun)
    if answer != "they saw 2":
        problems.append(
            f"{mpirun} must start 2 ranks of one world for this Python, but {answer}; set "
            f"DASO_MPIRUN to the mpirun of this MPI library, or MPI4PY_LIBMPI to the libmpi.so of "
            f"that mpirun"
        )
    return {"mpirun": str(mpirun), "pairs_with_library": answer == "they saw 2"}


def _try_two_ranks(mpirun: Path) -> str:
    """Start two ranks and return ``"they saw N"``, or the reason of the failure."""
    ask = (
        "import os; from mpi4py import MPI; "
        "os.write(1, f'size {MPI.COMM_WORLD.Get_size()}\\n'.encode())"
    )
    local = Local(ranks=2, ranks_per_node=None, program=("-c", ask))
    env = local.environment(_outside_mpi(os.environ), root=os.geteuid() == 0, cores=2)
    command = local.command(mpirun)
    try:
        run = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it failed: {error}"
    sizes = [line for line in run.stdout.splitlines() if line.startswith("size ")]
    if sizes:
        return sizes[0].replace("size", "they saw")
    return f"it ended with exit code {run.returncode} and {run.stderr.strip()[-200:]!r}"


def _outside_mpi(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that MPI set in this process."""
    return {k: v for k, v in env.items() if not k.startswith(("PMI", "PMIX", "OMPI_", "PRTE_"))}


def _join(problems: list[str]) -> Topology | None:
    """Return the topology of the world, or None. Collective over the world; blocking."""
    try:
        return init()
    except DasoError as error:
        problems += [str(error)] if str(error) not in problems else []
        return None


def _nodes(topology: Topology, problems: list[str]) -> dict[str, Any]:
    """Describe the nodes, and make `problems` the problems of all ranks. Collective; blocking."""
    rank_info, device = topology.rank_info, topology.device
    average = _average(topology, device, problems)
    if average == "NCCL" and (problem := nccl_problem()):
        problems.append(str(problem))
    problems[:] = _gather_problems(topology, problems)
    return {
        "world": rank_info.world_size,
        "nodes": rank_info.nodes,
        "ranks_per_node": list(rank_info.node_sizes),
        "lanes": rank_info.lanes,
        "cores": len(os.sched_getaffinity(0)),
        "device": str(device),
        "node_average": average,
    }


def _gather_problems(topology: Topology, problems: list[str]) -> list[str]:
    """Return the problems of all ranks, the same on each. Collective over the world; blocking."""
    hosts, by_rank = topology.liveness.hosts, gather(topology, problems, LIMIT_SECONDS)
    others = [
        f"rank {rank} on {hosts[rank]}: {problem}"
        for rank, own_problems in enumerate(by_rank)
        for problem in own_problems
        if problem not in by_rank[0]
    ]
    return [*by_rank[0], *others]


def _kernels(topology: Topology | None, problems: list[str]) -> dict[str, str]:
    """Return the kernels of each device that this rank uses, after trying them."""
    kernels = {}
    for device in dict.fromkeys([torch.device("cpu"), _device(topology)]):
        try:
            torch.zeros(1, device=device)
        except Exception as error:  # a device in exclusive use by other processes, or full
            problems.append(
                f"{device} must be free to compute on, but {summarize(error)}; see nvidia-smi"
            )
            continue
        try:
            kernels[str(device)] = describe_kernels(device)
        except DasoError as error:
            problems += [str(error)] if str(error) not in problems else []
    if compiler := _compiler_error():
        kernels["compiler"] = compiler
    return kernels


def _device(topology: Topology | None) -> torch.device:
    """Return this rank's device; without MPI, the device that a single rank would use."""
    if topology is not None:
        return topology.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _compiler_error() -> str | None:
    """Return the last error of the C compiler, or None."""
    try:
        lines = (FOLDER / LOG).read_text("utf-8").splitlines()
    except OSError:
        return None
    errors = [line for line in lines if "error" in line.lower()]
    return next(reversed(errors or lines), None)


def _average(topology: Topology, device: torch.device, problems: list[str]) -> str:
    """Return the default method to average gradients inside a node. Collective; blocking."""
    kinds = gather(topology, (topology.node, device.type), LIMIT_SECONDS)
    node_kinds = {kind for node, kind in kinds if node == topology.node}
    if len(node_kinds) > 1:
        problems.append(
            f"all ranks of a node must compute on devices of one kind, but those of node "
            f"{topology.node} do on {' and '.join(sorted(node_kinds))}; give each a GPU, or none "
            f"(CUDA_VISIBLE_DEVICES)"
        )
        return "nothing: devices differ"
    if device.type == "cpu":
        return "shared memory"
    return (
        "NCCL" if wants_nccl(topology, device, "bucketed") else f"sums on the host, from {device}"
    )


def _torch() -> dict[str, Any]:
    has_gpu = torch.cuda.is_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "not in this build of torch",
        "triton": _triton() or "not installed",
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if has_gpu
        else [],
    }


def _triton() -> str | None:
    """Return the version of triton, which some builds of torch install under another name."""
    names = packages_distributions().get("triton", [])
    return version(names[0]) if names else None


def _nccl() -> dict[str, Any]:
    """Return cupy's description of NCCL; torch's builds for CPUs do not need it."""
    import torch

    report = describe()
    if torch.version.cuda is not None or torch.version.hip is not None or report["available"]:
        return report
    return {"available": False, "why": "not needed: this torch is built for CPUs"}


def _chosen() -> dict[str, Any]:
    return {
        "inside_node_cpu": "shared memory (MPI window), in place, rank order",
        "between_nodes": "sums in a fixed order: 2 nodes swap, up to 16 add and return, more use "
        "levels (daso doctor --nodes N); MPI's own with Exchange(algorithm='mpi')",
        "accuracy": "SGD as in synchronous training; Adam and similar too if backward hides "
        "gradients in 4 or 8 bits, otherwise lower: docs/accuracy.md",
        "python": sys.executable,
    }


def render(findings: Mapping[str, Any]) -> str:
    """Return the findings as lines for a terminal."""
    lines = []
    for section, values in findings.items():
        if isinstance(values, Mapping):
            lines.append(section)
            lines += [f"  {key:<20} {_show(value)}" for key, value in values.items()]
    problems = findings["problems"]
    lines.append("problems" if problems else "no problems found")
    return "\n".join([*lines, *(f"  - {problem}" for problem in problems)])


def _show(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "unknown"}[value]
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
