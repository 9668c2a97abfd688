"""Topology: the world, this rank's node, and the lanes that run across nodes.

A *node* is a host, found by MPI, or a pretend node for tests on one machine. *Lane* l is
local rank l of every node; there are as many lanes as the smallest node has ranks, so that every
lane reaches every node. Ranks beyond that have no lane.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from daso.checks import check, validate_call
from daso.comm import control, world_values
from daso.comm.communicators import SIZES, WorldCommunicators, form_communicators
from daso.comm.health.spares import Reserve, dismiss_at_exit
from daso.comm.mpi import load
from daso.comm.rank_info import RankInfo
from daso.environment import read_launch
from daso.errors import ConfigError, DasoError

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "RankInfo",
    "Regrouped",
    "Topology",
    "default",
    "errors_on_all_ranks",
    "lane_topology",
    "make_default",
    "rank_now",
]

MANY = 10  # open topologies from one warning to the next

logger = logging.getLogger("daso")


@dataclass(frozen=True, slots=True)
class Regrouped:
    """A rank's numbers in the remaining world; see `Topology.on_regroup`."""

    rank: int  # world rank from now on
    world_size: int  # ranks from now on
    most: Callable[[int], int]  # returns the largest of all ranks' numbers; collective, blocking
    first: Callable[[Any], Any]  # returns what world rank 0 passes; collective, blocking
    is_new: bool  # this rank was a spare until now, and has done no batch
    in_step: bool  # inside a step, which the program has not counted yet


class Topology:
    """The communicators of world, node and lane.

    Args:
        world: Communicator over all ranks that train together; COMM_WORLD if None. It is
            duplicated. Complete `WorldCommunicators` are used as they are.
        ranks_per_node: Cut every host into pretend nodes of this many ranks, or of these sizes
            (``(3, 1)``); None for real nodes, or what DASO_RANKS_PER_NODE says.

    Raises:
        TopologyError: Two MPI wheels are installed, the launcher belongs to another MPI library
            than the one loaded, or the sizes do not fit.

    Collective over the world; blocking.
    """

    _open_now: ClassVar[int] = 0  # topologies of this process that are not freed

    @validate_call
    def __init__(
        self,
        world: "MPI.Comm | WorldCommunicators | None" = None,
        *,
        ranks_per_node: int | Sequence[int] | None = None,
    ) -> None:
        formed = (
            world
            if isinstance(world, WorldCommunicators)
            else form_communicators(world, ranks_per_node, is_first=not Topology._open_now)
        )
        self.is_elastic = False  # training continues without the ranks that are lost
        self.takes_spares = True  # not once all ranks are about to end
        self._followers: dict[int, Callable[[Regrouped], object]] = {}
        self._take(formed)
        if not formed.is_borrowed:
            Topology._open_now += 1
            _warn_of_many(self.rank_info, Topology._open_now)

    def _take(self, formed: WorldCommunicators) -> None:
        """Replace all communicators by new ones, and reset the state that depends on them."""
        self._formed = formed
        self.rank_info, self.host_rank = formed.rank_info, formed.host_rank
        self.world_comm, self.node_comm, self.lane_comm = formed.world, formed.node, formed.lane
        self.liveness, self.reserve = formed.liveness, formed.reserve
        self.others: list[MPI.Comm] = []  # other communicators of these ranks, used outside steps
        self.loss_is_agreed = False  # all remaining ranks know that this world lost a rank
        self._mesh: DeviceMesh | None = None

    @property
    def rank(self) -> int:
        """This rank in the world."""
        return self.rank_info.rank

    @property
    def world_size(self) -> int:
        """Ranks of the world."""
        return self.rank_info.world_size

    @property
    def local_rank(self) -> int:
        """This rank inside its node."""
        return self.rank_info.local_rank

    @property
    def local_size(self) -> int:
        """Ranks of this rank's node."""
        return self.rank_info.local_size

    @property
    def device(self) -> torch.device:
        """Device of this rank: ranks of a host share its visible GPUs round-robin; else the CPU."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return torch.device("cuda", self.host_rank % count) if count else torch.device("cpu")

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return self.rank_info.node

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.rank_info.nodes

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Ranks of each node."""
        return self.rank_info.node_sizes

    @property
    def lanes(self) -> int:
        """Number of lanes: the ranks of the smallest node."""
        return self.rank_info.lanes

    @property
    def communicators(self) -> "list[MPI.Comm]":
        """All communicators on which ranks wait for each other, except those of optimizers."""
        own = [self.world_comm, self.lane_comm, self.node_comm, self.liveness.comm]
        return [*own, *self.others]

    @property
    def has_mesh(self) -> bool:
        """True if `mesh` was created."""
        return self._mesh is not None

    @property
    def mesh(self) -> "DeviceMesh":
        """Torch's mesh ``("node", "local")`` of these ranks, for FSDP2 and tensor parallelism."""
        if self._mesh is None:
            raise ConfigError(
                "a mesh needs torch's process group, but none was requested; call "
                "daso.init(torch_backend='gloo') on CPUs, or 'nccl' on GPUs",
                code="mesh-without-group",
            )
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: "DeviceMesh") -> None:
        self._mesh = mesh

    @mesh.deleter
    def mesh(self) -> None:
        self._mesh = None

    @property
    def is_spare(self) -> bool:
        """True on a spare rank, which waits until it replaces a lost one."""
        return self.reserve is not None and self.reserve.is_spare

    # Methods, each collective over the world and blocking.
    rendezvous = control.rendezvous
    raise_on_all_ranks = control.raise_on_all_ranks
    equal_on_all_ranks = control.all_equal
    all_reduce = world_values.all_reduce
    barrier = world_values.barrier
    print = world_values.print_once  # on rank 0 alone; does not communicate

    def on_regroup(self, call: Callable[[Regrouped], object]) -> Callable[[], None]:
        """Call a function after ranks were lost or joined; return a function that removes it.

        All ranks must add the same functions in the same order, for these may communicate.
        """
        number = 1 + max(self._followers, default=0)
        self._followers[number] = call

        def remove() -> None:
            """Remove the function; idempotent."""
            self._followers.pop(number, None)

        return remove

    def become(self, other: "Topology", reserve: Reserve | None) -> None:
        """Adopt the communicators of a new topology, which must not be used afterwards.

        Args:
            other: The new topology.
            reserve: The remaining spare ranks.
        """
        Topology._open_now -= 1
        if reserve is not None:
            dismiss_at_exit(reserve)
        self._take(replace(other._formed, reserve=reserve))

    def keep_reserve(self, reserve: Reserve | None) -> None:
        """Replace the spare ranks, of which this rank stays one."""
        self._formed, self.reserve = replace(self._formed, reserve=reserve), reserve

    def tell_regrouped(self, *, is_new: bool, in_step: bool) -> None:
        """Call the functions of `on_regroup`. Collective over the world; blocking."""
        numbers = Regrouped(
            rank=self.rank,
            world_size=self.world_size,
            most=lambda number: max(control.gather(self, number)),
            first=partial(control.broadcast, self),
            is_new=is_new,
            in_step=in_step,
        )
        for call in list(self._followers.values()):
            call(numbers)

    def free(self) -> None:
        """Free the communicators. Collective over the world; blocking; idempotent."""
        if self._formed.is_borrowed:
            return
        mpi = load()
        if self.world_comm != mpi.COMM_NULL:
            self.rendezvous("free a daso.Topology", control.STALL_SECONDS)
            Topology._open_now -= 1
        self.liveness.free()
        for comm in (self.lane_comm, self.node_comm, self.world_comm):
            if comm != mpi.COMM_NULL:
                comm.Free()


@contextmanager
def errors_on_all_ranks(topology: object, what: str, timeout_seconds: float) -> Iterator[None]:
    """Raise on all ranks a daso error that any rank raises inside.

    Collective over the world; blocking, at its end.
    """
    problem: DasoError | None = None
    try:
        yield
    except DasoError as error:
        problem = error
    where = topology if isinstance(topology, Topology) else next(iter(_default.values()), None)
    if where is None or not _is_open(where) or where.world_comm.Get_size() == 1:
        if problem is not None:
            raise problem
        return
    where.rendezvous(what, timeout_seconds)
    try:
        where.raise_on_all_ranks(problem, timeout_seconds)
    except DasoError as error:
        # Re-raise this rank's error object: its traceback leads to the program's line.
        raise (problem if problem and str(error) == str(problem) else error) from None


def _warn_of_many(rank_info: RankInfo, number: int) -> None:
    """Warn at each tenth open topology: MPI has some 2,000 communicators in all."""
    if number % MANY == 0 and rank_info.rank == 0:
        logger.warning(
            "%d topologies are open, and each holds communicators, of which MPI has few: make one "
            "and pass it on (topology=), or free() those that are not used",
            number,
        )


def lane_topology(whole: Topology) -> Topology:
    """Return one lane as a separate world: the ranks of equal local rank, a node each.

    It borrows the communicators of the whole, whose nodes have the same number of ranks.
    """
    nodes, node = whole.nodes, whole.node
    return Topology(
        WorldCommunicators(
            RankInfo(node, nodes, 0, node, tuple(range(nodes))),
            whole.host_rank,
            world=whole.lane_comm,
            node=load().COMM_SELF,
            lane=whole.lane_comm,
            liveness=whole.liveness,
            is_borrowed=True,
        )
    )


_default: dict[Any, Topology] = {}  # at most one entry, by the requested sizes


def make_default(ranks_per_node: int | Sequence[int] | None) -> Topology:
    """Return the default topology of `daso.DASO`; create it, or replace one of other sizes.

    Collective over the world; blocking.
    """
    check("ranks_per_node", ranks_per_node, SIZES)
    requested = read_launch().ranks_per_node if ranks_per_node is None else ranks_per_node
    sizes = (requested,) if isinstance(requested, int) else requested and tuple(requested)
    if not _is_open(_default.get(sizes)):
        topology = Topology(ranks_per_node=ranks_per_node)
        _default.clear()
        _default[sizes] = topology
    return default()


def _is_open(topology: Topology | None) -> bool:
    return topology is not None and topology.world_comm != load().COMM_NULL


def rank_now() -> int | None:
    """Return this rank if a loss of ranks may change its number; else None."""
    elastic = (each for each in _default.values() if _is_open(each) and each.is_elastic)
    return next((topology.rank for topology in elastic), None)


def have_met() -> bool:
    """Return whether ranks are connected: from then on errors are raised on all of them."""
    return any(map(_is_open, _default.values()))


def default() -> Topology:
    """Return the topology set by `daso.init`; create it if none is open."""
    return next(filter(_is_open, _default.values()), None) or make_default(None)
