"""Forms the communicators of a world: all ranks, this rank's node, and the lanes across nodes.

MPI's own blocking calls are used here: a limit needs the communicators that are made here. All
ranks have begun before, which has a limit of its own.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from daso.checks import NONE, Rule, check, either
from daso.comm import control
from daso.comm.health.liveness import LivenessProbe
from daso.comm.health.spares import Reserve, dismiss_at_exit, set_aside
from daso.comm.mpi import abort_on_error, check_launch, check_wheels, load, wheels
from daso.comm.rank_info import RankInfo
from daso.comm.reduction import sum_buffer
from daso.environment import TORCHRUN, note_process, read_launch
from daso.errors import TopologyError
from daso.processes import end_with_starter
from daso.workers import is_worker

if TYPE_CHECKING:
    from mpi4py import MPI

Sizes = int | Sequence[int] | None

GRACE_SECONDS = 5.0  # for rank 0, which can say who is missing
POLL_SECONDS = 1e-3
SIGN = 31_337  # tag; the world may be used by others

_unfinished: list[object] = []  # after a stall: MPI may still write to what a request was given


@dataclass(frozen=True, slots=True)
class WorldCommunicators:
    """The communicators of one rank, and its numbers in them."""

    rank_info: RankInfo
    host_rank: int  # rank inside the host; pretend nodes of a host do not change it
    world: "MPI.Comm"
    node: "MPI.Comm"
    lane: "MPI.Comm"  # COMM_NULL for a rank without a lane
    liveness: LivenessProbe
    reserve: Reserve | None = None  # spare ranks, where there are any
    is_borrowed: bool = False  # another topology frees them


def form_communicators(
    world: "MPI.Comm | None", ranks_per_node: Sizes, *, is_first: bool
) -> WorldCommunicators:
    """Return the communicators of a world; starts MPI where needed.

    Args:
        world: As for `daso.Topology`.
        ranks_per_node: As for `daso.Topology`.
        is_first: No other topology is open in this process.

    Collective over the world; blocking.
    """
    check("ranks_per_node", ranks_per_node, SIZES)
    check_wheels(wheels())
    _refuse_workers()
    mpi = load()
    check("world", world, either(Rule("an MPI.Comm", partial(_is, mpi.Comm)), NONE))
    launch = read_launch()
    check_launch(mpi.COMM_WORLD, launch)
    sizes = launch.ranks_per_node if ranks_per_node is None else ranks_per_node
    abort_on_error()
    note_process(mpi.COMM_WORLD.Get_rank())
    end_with_starter()
    everybody = mpi.COMM_WORLD if world is None else world
    _wait_for_all(everybody)
    if world is None and launch.spares:
        return _form_with_spares(everybody, sizes, launch.spares, is_first=is_first)
    return _complete(_cut(everybody.Dup(), sizes))


class _Cut(NamedTuple):
    """A world that is cut into nodes."""

    world: "MPI.Comm"
    node: "MPI.Comm"
    host_rank: int
    rank_info: RankInfo


def _cut(world: "MPI.Comm", sizes: Sizes) -> _Cut:
    """Cut a world into its hosts, or into pretend nodes. Collective over the world; blocking."""
    host = world.Split_type(load().COMM_TYPE_SHARED)
    host_rank = host.Get_rank()
    group, problem = _pretend_group(host_rank, host.Get_size(), sizes)
    control.raise_first(world.allgather(problem))
    node = host.Split(group, host_rank)
    host.Free()
    return _Cut(world, node, host_rank, _find_rank_info(world, node))


def _find_rank_info(world: "MPI.Comm", node: "MPI.Comm") -> RankInfo:
    first = node.bcast(world.Get_rank())
    firsts = world.allgather(first)
    heads = sorted(set(firsts))
    return RankInfo(
        rank=world.Get_rank(),
        world_size=world.Get_size(),
        local_rank=node.Get_rank(),
        node=heads.index(first),
        node_of=tuple(heads.index(head) for head in firsts),
    )


def _complete(cut: _Cut, reserve: Reserve | None = None) -> WorldCommunicators:
    """Add the lane and the liveness probe. Collective over the world; blocking."""
    mpi, rank_info = load(), cut.rank_info
    lane = None if reserve is not None and reserve.is_spare else rank_info.lane
    color = mpi.UNDEFINED if lane is None else lane
    lane_comm = cut.world.Split(color, rank_info.node)
    hosts = cut.world.allgather(mpi.Get_processor_name())
    liveness = LivenessProbe(cut.world.Dup, hosts)
    return WorldCommunicators(
        rank_info, cut.host_rank, cut.world, cut.node, lane_comm, liveness, reserve
    )


def _form_with_spares(
    everybody: "MPI.Comm", sizes: Sizes, spares: int, *, is_first: bool
) -> WorldCommunicators:
    """Return the communicators of a world with spares; each spare node is alone until needed.

    Collective over the world and its spares; blocking.
    """
    if not is_first:
        raise TopologyError(
            "a job with spare ranks has one topology, but there is one already; pass it on "
            "(topology=), or call daso.init(), which returns it",
            code="second-topology-with-spares",
        )
    is_spare = everybody.Get_rank() >= everybody.Get_size() - spares
    world = set_aside(everybody, spares)
    cut = _cut(world, sizes[-1] if is_spare and isinstance(sizes, Sequence) else sizes)
    reserve, node_of = _meet_spares(everybody.Dup(), spares, cut.rank_info, is_spare=is_spare)
    if not is_spare:
        dismiss_at_exit(reserve)
        return _complete(cut, reserve)
    world.Free()
    local_rank = cut.node.Get_rank()
    rank = max(0, len(node_of) - cut.node.Get_size()) + local_rank
    rank_info = RankInfo(rank, len(node_of), local_rank, node_of[-1], node_of)
    return _complete(_Cut(cut.node.Dup(), cut.node, cut.host_rank, rank_info), reserve)


def _meet_spares(
    comm: "MPI.Comm", spares: int, rank_info: RankInfo, *, is_spare: bool
) -> tuple[Reserve, tuple[int, ...]]:
    """Return the spares of a world, and the node of each of its ranks.

    Collective over the world and its spares; blocking.
    """
    node_of, all_ranks = comm.bcast(rank_info.node_of), comm.Get_size()
    waiting = tuple(range(all_ranks - spares, all_ranks))
    sizes = comm.allgather(rank_info.local_size)
    if max(node_of) == 0 or max(sizes[-spares:]) > max(sizes[:-spares]):
        raise TopologyError(
            f"spare nodes take the place of lost ones where another node is left, so there "
            f"must be two nodes, and no spare one may be larger, but {len(node_of)} ranks are "
            f"on {1 + max(node_of)} nodes, and {spares} are spare; say --ranks-per-node, or "
            f"leave spares out",
            code="spares-need-other-nodes",
        )
    place = rank_info.node if is_spare else None
    return Reserve(comm, 1 + max(node_of), waiting, place), node_of


def _refuse_workers() -> None:
    """Refuse MPI in a worker process of a rank, which has no place in the world."""
    if is_worker() and read_launch().launcher not in (None, TORCHRUN):
        raise TopologyError(
            "MPI must be started by ranks alone, but this is a worker process of one (of a "
            "DataLoader?), which runs the program again; put what trains behind "
            "`if __name__ == '__main__':`",
            code="mpi-in-worker-process",
        )


def _wait_for_all(world: "MPI.Comm") -> None:
    """Wait until every rank has begun; before that no rank can name a missing one.

    Collective over the world; blocking.
    """
    if world.Get_size() == 1:
        return
    rank, token = world.Get_rank(), torch.zeros(1, dtype=torch.int64, device="cpu")
    others = range(1, world.Get_size()) if rank == 0 else ()
    tokens = torch.zeros(world.Get_size(), 1, dtype=torch.int64, device="cpu")
    signs = {other: world.Irecv(sum_buffer(tokens[other]), other, SIGN) for other in others}
    sent = None if rank == 0 else world.Isend(sum_buffer(token), 0, SIGN)
    everybody, start = world.Ibarrier(), time.monotonic()
    late_seconds = control.STALL_SECONDS + (0 if rank == 0 else GRACE_SECONDS)  # rank 0 knows more
    while not everybody.Test():
        time.sleep(POLL_SECONDS)
        if time.monotonic() - start > late_seconds:
            _unfinished.append((everybody, sent, signs, token, tokens))
            missing = [str(other) for other, sign in signs.items() if not sign.Test()]
            who = f"world rank {', '.join(missing)}" if missing else "some rank"
            raise TopologyError(
                f"every rank must call daso.init(), or make what needs it, within "
                f"{control.STALL_SECONDS:g} s, but {who} did not; look there",
                code="ranks-missing-at-init",
            )
    requests = [*signs.values(), *([] if sent is None else [sent])]
    while not all(request.Test() for request in requests):
        time.sleep(POLL_SECONDS)


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind)


def _are_counts(value: object) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(type(count) is int for count in value)


SIZES = Rule(
    "a number of ranks, or the sizes of a host's nodes such as (3, 1), or None",
    lambda value: value is None or type(value) is int or _are_counts(value),
)


def _pretend_group(rank: int, size: int, sizes: Sizes) -> tuple[int, TopologyError | None]:
    """Return this host rank's pretend node, and the problem with the sizes."""
    if sizes is None:
        return 0, None
    if isinstance(sizes, Sequence) and len(sizes) == 1:
        sizes = sizes[0]
    if isinstance(sizes, int):
        if sizes < 1:
            return 0, TopologyError(
                f"ranks_per_node must be at least 1, not {sizes}", code="node-without-ranks"
            )
        if size % sizes:
            whole, rest = divmod(size, sizes)
            uneven = (*([sizes] * whole), rest)
            return 0, TopologyError(
                f"ranks_per_node must divide the ranks of the host ({size}), not {sizes}; change "
                f"it or DASO_RANKS_PER_NODE, or name the sizes: {uneven}",
                code="ranks-not-divisible",
            )
        return rank // sizes, None
    if min(sizes) < 1 or sum(sizes) != size:
        return 0, TopologyError(
            f"ranks_per_node must be positive and add up to the ranks of the host ({size}), not "
            f"{tuple(sizes)}; change it or DASO_RANKS_PER_NODE",
            code="node-sizes-wrong-sum",
        )
    return next(group for group, stop in enumerate(accumulate(sizes)) if rank < stop), None
