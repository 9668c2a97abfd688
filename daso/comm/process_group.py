"""Creates torch.distributed's default process group over the ranks of a topology.

For libraries that use torch's own collectives inside a node: FSDP2, tensor parallelism, DDP. The
ranks find each other through MPI: no port or address has to be set. Rank r there is world rank r.
"""

import atexit
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from daso.comm.control import STALL_SECONDS, broadcast, gather_in_node
from daso.comm.topology import Topology
from daso.errors import ConfigError, TopologyError, summarize

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TCPStore = Any  # torch does not export its type

Backend = Literal["gloo", "nccl"]

# A model's mesh holds groups until exit. A thread of gloo that releases the tensors of its last
# collective while the interpreter finalizes would abort the process.
LEAVE_SECONDS = 0.05


def join_process_group(topology: Topology, backend: Backend) -> bool:
    """Create torch.distributed's default group, or check that an existing one has the same ranks.

    Args:
        topology: The ranks.
        backend: Of collectives; with NCCL, each rank takes one of its host's GPUs.

    Returns:
        Whether the group was created by this call.

    Raises:
        ConfigError: A group of other ranks exists.
        TopologyError: Ranks cannot reach world rank 0.

    Collective over the world; blocking.
    """
    topology.rendezvous("join torch.distributed", STALL_SECONDS)
    problem = None
    if not dist.is_available():
        problem = ConfigError(
            "torch must have torch.distributed, but has not", code="no-torch-distributed"
        )
    topology.raise_on_all_ranks(problem)
    if not topology.equal_on_all_ranks(dist.is_initialized()):
        raise ConfigError(
            "torch.distributed must be initialized on every rank or on none, but it is on some; "
            "leave init_process_group() out: daso.init makes the group",
            code="group-on-some-ranks",
        )
    if dist.is_initialized():
        topology.raise_on_all_ranks(_other_ranks(topology))
        return False
    if backend == "nccl" and not torch.cuda.is_available():
        problem = ConfigError(
            "NCCL needs a GPU for each rank, but this one sees none; use torch_backend='gloo'",
            code="nccl-without-gpu",
        )
    topology.raise_on_all_ranks(problem)
    store, device = _store(topology), None
    if backend == "nccl":
        device = topology.device
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=store,
        rank=topology.rank,
        world_size=topology.world_size,
        device_id=device,
    )
    # Its threads must not outlive the interpreter.
    atexit.register(_leave)
    return True


def _leave() -> None:
    """Destroy torch.distributed's groups, and let their threads release Python objects."""
    if dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(LEAVE_SECONDS)  # releases the GIL


def _other_ranks(topology: Topology) -> ConfigError | None:
    """Return how an existing group differs from the world, or None."""
    here, size = dist.get_rank(), dist.get_world_size()
    if (here, size) == (topology.rank, topology.world_size):
        return None
    return ConfigError(
        f"torch.distributed must have the ranks of MPI, rank {topology.rank} of "
        f"{topology.world_size}, but it was initialized as rank {here} of {size}; leave "
        f"init_process_group() out: daso.init makes the group",
        code="process-group-differs",
    )


def _store(topology: Topology) -> TCPStore:
    """Return the TCPStore of all ranks. Collective over the world; blocking."""
    store, problem = None, None
    if topology.rank == 0:
        try:
            store = _server(topology.world_size)
        except (OSError, RuntimeError) as error:
            problem = TopologyError(
                f"a rank must be able to listen on a port of its host: {summarize(error)}",
                code="no-port-to-listen",
            )
    topology.raise_on_all_ranks(problem)
    port = 0 if store is None else store.port
    hosts = topology.liveness.hosts
    names = ["127.0.0.1"] if len(set(hosts)) == 1 else [socket.gethostname(), _address()]
    names, port = broadcast(topology, (names, port))
    if store is None:
        store, problem = _connect(names, port, topology.world_size)
    topology.raise_on_all_ranks(problem)
    assert store is not None, "a rank without a store has raised"
    return store


def _server(ranks: int) -> TCPStore:
    return _tcp_store("0.0.0.0", 0, ranks, is_master=True, wait_for_workers=False)


def _tcp_store(*words: Any, **keywords: Any) -> TCPStore:
    return dist.TCPStore(*words, **keywords)  # type: ignore[attr-defined]  # not exported


def _connect(
    names: Sequence[str], port: int, ranks: int
) -> tuple[TCPStore | None, TopologyError | None]:
    """Return a client of world rank 0's store, by the first reachable name, or the problem."""
    problems = []
    for name in names:
        try:
            with socket.create_connection((name, port), timeout=10.0):
                pass
            return _tcp_store(name, port, ranks, is_master=False), None
        except (OSError, RuntimeError) as error:
            problems.append(f"{name}: {summarize(error)}")
    return None, TopologyError(
        f"ranks must reach world rank 0's host by TCP to meet in torch.distributed, but port "
        f"{port} is not reached ({'; '.join(problems)}); see that hosts resolve each other's names",
        code="rank-0-not-reached",
    )


def _address() -> str:
    """Return the address that this host's name resolves to."""
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def node_mesh(topology: Topology, device_type: str) -> "DeviceMesh":
    """Return torch's mesh ``("node", "local")`` of the world.

    Collective over the world; blocking.
    """
    if len(set(topology.node_sizes)) > 1:
        raise TopologyError(
            f"nodes must have the same number of ranks to be a mesh, not {topology.node_sizes}; "
            f"start as many on each",
            code="mesh-on-unequal-nodes",
        )
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.arange(topology.world_size, device="cpu")
    # The ranks of a node need not be consecutive: launchers may distribute them round-robin.
    order = sorted(ranks.tolist(), key=lambda rank: (topology.rank_info.node_of[rank], rank))
    return DeviceMesh(
        device_type,
        torch.tensor(order, device="cpu").view(topology.nodes, topology.local_size),
        mesh_dim_names=("node", "local"),
    )


def ranks_of_group(topology: Topology) -> list[int]:
    """Return the rank of each rank of this node in torch's default group.

    Collective over the node; blocking.
    """
    ranks: list[int] = gather_in_node(topology, dist.get_rank())
    return ranks
