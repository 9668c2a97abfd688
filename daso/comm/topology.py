"""Who is where: the world, this rank's node, and the lanes that run across nodes.

A *node* is a host, found by MPI, or a pretend node for trying things on one machine. *Lane* l is
local rank l of every node; there are as many lanes as the smallest node has ranks, so that every
lane reaches every node. Ranks beyond that have no lane.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from daso.checks import NONE, Rule, check, either, validate_call
from daso.comm.dtypes import sum_buffer
from daso.comm.health.liveness import LivenessProbe
from daso.comm.health.spares import Reserve, dismiss_at_exit, set_aside
from daso.comm.mpi import abort_on_error, check_launch, check_wheels, load, wheels
from daso.comm.node.base import wait_until
from daso.environment import TORCHRUN, note_process, read_launch
from daso.errors import ConfigError, DasoError, ExchangeError, StallError, TopologyError
from daso.processes import end_with_starter
from daso.workers import is_worker

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "RENDEZVOUS",
    "RankInfo",
    "Regrouped",
    "Topology",
    "default",
    "errors_on_all_ranks",
    "make_default",
    "rank_now",
]

# What ranks do together outside of steps.
RENDEZVOUS = (
    "wrap an optimizer",
    "close an optimizer",
    "make a daso.ParameterServer",
    "close a daso.ParameterServer",
    "make a flow's Runtime",
    "begin an epoch of a flow",
    "close a flow's Runtime",
    "save a checkpoint",
    "load a checkpoint",
    "free a daso.Topology",
    "join torch.distributed",
    "measure the machine",
)
STALL_SECONDS = 300.0  # where nobody says another: that of Exchange
GRACE_SECONDS = 5.0  # for rank 0, which can say who is missing
POLL_SECONDS = 1e-3
SIGN = 31_337  # tag; the world may be used by others

MANY = 10  # open topologies of which something is said

logger = logging.getLogger("daso")
_unfinished: list[object] = []  # after a stall: MPI may still write to what a request was given


@dataclass(frozen=True)
class RankInfo:
    """Ranks and nodes as this rank sees them, in numbers; what takes a count is counted once."""

    rank: int  # world rank
    world_size: int  # ranks of the world
    local_rank: int  # rank inside the node
    node: int  # index of this rank's node
    node_of: tuple[int, ...]  # node of each world rank

    @cached_property
    def node_sizes(self) -> tuple[int, ...]:
        """Ranks of each node."""
        counts = Counter(self.node_of)
        return tuple(counts[node] for node in range(len(counts)))

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.node_sizes)

    @property
    def local_size(self) -> int:
        """Ranks of this rank's node."""
        return self.node_sizes[self.node]

    @cached_property
    def lanes(self) -> int:
        """Number of lanes: the ranks of the smallest node."""
        return min(self.node_sizes)

    @cached_property
    def largest_node(self) -> int:
        """Ranks of the largest node."""
        return max(self.node_sizes)

    @cached_property
    def ranks_of_node(self) -> frozenset[int]:
        """World ranks of this rank's node."""
        return frozenset(rank for rank, node in enumerate(self.node_of) if node == self.node)

    @property
    def lane(self) -> int | None:
        """This rank's lane, or None where the smallest node has no such local rank."""
        return self.local_rank if self.local_rank < self.lanes else None


@dataclass(frozen=True, slots=True)
class Regrouped:
    """Tells a rank its place in the world that is left; see `Topology.on_regroup`."""

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
            duplicated.
        ranks_per_node: Cut every host into pretend nodes of this many ranks, or of these sizes
            (``(3, 1)``); None for real nodes, or what DASO_RANKS_PER_NODE says.

    Raises:
        TopologyError: Two MPI wheels are installed, the launcher belongs to another MPI library
            than the one loaded, or the sizes do not fit.

    Collective over the world; blocking.
    """

    _open_now: ClassVar[int] = 0  # made in this process and not freed

    @validate_call
    def __init__(
        self,
        world: "MPI.Comm | None" = None,
        *,
        ranks_per_node: int | Sequence[int] | None = None,
    ) -> None:
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
        self._part(everybody, sizes, spares=launch.spares if world is None else 0)
        hosts = self.world_comm.allgather(mpi.Get_processor_name())
        self._begin(LivenessProbe(self.world_comm.Dup, hosts))
        _tell_of_many(self.rank_info, Topology._open_now)

    def _begin(self, liveness: LivenessProbe) -> None:
        """Set what is not yet known of these ranks."""
        self.liveness = liveness
        self.others: list[MPI.Comm] = []  # of these ranks, on which they wait outside of steps
        self._mesh: DeviceMesh | None = None
        self.is_elastic = False  # goes on without ranks that are lost
        self.takes_spares = True  # not once all are about to end
        self.loss_is_agreed = False  # all ranks that are left know that this world lost one
        self._followers: dict[int, Callable[[Regrouped], object]] = {}
        Topology._open_now += 1

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
        """Where this rank computes: the ranks of a host take the GPUs that they see in turn."""
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
        """All on which ranks wait for each other, but those of optimizers."""
        own = [self.world_comm, self.lane_comm, self.node_comm, self.liveness.comm]
        return [*own, *self.others]

    @property
    def has_mesh(self) -> bool:
        """Whether `mesh` was made."""
        return self._mesh is not None

    @property
    def mesh(self) -> "DeviceMesh":
        """Torch's mesh ``("node", "local")`` of these ranks, for FSDP2 and tensor parallelism."""
        if self._mesh is None:
            raise ConfigError(
                "a mesh needs torch's process group, but none was asked for; call "
                "daso.init(torch_backend='gloo') on CPUs, or 'nccl' on GPUs"
            )
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: "DeviceMesh") -> None:
        self._mesh = mesh

    @mesh.deleter
    def mesh(self) -> None:
        self._mesh = None

    def _find_rank_info(self) -> RankInfo:
        first = self.node_comm.bcast(self.world_comm.Get_rank())
        firsts = self.world_comm.allgather(first)
        heads = sorted(set(firsts))
        return RankInfo(
            rank=self.world_comm.Get_rank(),
            world_size=self.world_comm.Get_size(),
            local_rank=self.node_comm.Get_rank(),
            node=heads.index(first),
            node_of=tuple(heads.index(head) for head in firsts),
        )

    def _part(
        self, everybody: "MPI.Comm", sizes: int | Sequence[int] | None, *, spares: int
    ) -> None:
        """Make the communicators. Collective over everybody; blocking."""
        mpi = load()
        if spares and Topology._open_now:
            raise TopologyError(
                "a job with spare ranks has one topology, but there is one already; pass it on "
                "(topology=), or call daso.init(), which returns it"
            )
        is_spare = spares > 0 and everybody.Get_rank() >= everybody.Get_size() - spares
        self.world_comm: MPI.Comm = set_aside(everybody, spares) if spares else everybody.Dup()
        host = self.world_comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.host_rank: int = host.Get_rank()  # pretend nodes of a host do not change it
        sizes = sizes[-1] if is_spare and isinstance(sizes, Sequence) else sizes
        group, problem = _pretend_group(self.host_rank, host.Get_size(), sizes)
        self.raise_on_all_ranks(problem, TopologyError)
        self.node_comm: MPI.Comm = host.Split(group, self.host_rank)
        host.Free()
        self.rank_info = self._find_rank_info()
        self.reserve: Reserve | None = None  # spare ranks, where there are any
        if spares:
            self._know_spares(everybody.Dup(), spares, is_spare)
        lane = None if is_spare else self.rank_info.lane
        color = mpi.UNDEFINED if lane is None else lane
        self.lane_comm: MPI.Comm = self.world_comm.Split(color, self.rank_info.node)

    def _know_spares(self, comm: "MPI.Comm", spares: int, is_spare: bool) -> None:
        """Let a world and its spares know each other; until it is needed, each spare node is alone.

        Collective over both; blocking.
        """
        node_of, all_ranks = comm.bcast(self.rank_info.node_of), comm.Get_size()
        waiting = tuple(range(all_ranks - spares, all_ranks))
        sizes = comm.allgather(self.rank_info.local_size)
        if max(node_of) == 0 or max(sizes[-spares:]) > max(sizes[:-spares]):
            raise TopologyError(
                f"spare nodes take the place of lost ones where another node is left, so there "
                f"must be two nodes, and no spare one may be larger, but {len(node_of)} ranks are "
                f"on {1 + max(node_of)} nodes, and {spares} are spare; say --ranks-per-node, or "
                f"leave spares out"
            )
        place = self.rank_info.node if is_spare else None
        self.reserve = Reserve(comm, 1 + max(node_of), waiting, place)
        if not is_spare:
            dismiss_at_exit(self.reserve)
            return
        self.world_comm.Free()
        self.world_comm, local_rank = self.node_comm.Dup(), self.node_comm.Get_rank()
        rank = max(0, len(node_of) - self.node_comm.Get_size()) + local_rank
        self.rank_info = RankInfo(rank, len(node_of), local_rank, node_of[-1], node_of)

    @property
    def is_spare(self) -> bool:
        """Whether this rank waits until others are lost; until then it goes by the last ones."""
        return self.reserve is not None and self.reserve.is_spare

    def rendezvous(self, what: str, timeout_seconds: float) -> None:
        """Wait until every rank has come to the same place of the program.

        MPI's own collectives wait for ever for a rank that never comes: whatever ranks do together
        outside of steps begins here.

        Args:
            what: What all do there together: one of `RENDEZVOUS`.
            timeout_seconds: How long to wait at most.

        Raises:
            StallError: They did not all come; names who is missing.
            ExchangeError: Others came to another place; names it.

        Collective over the world; blocking.
        """
        ranks = self.world_comm.Get_size()
        if ranks == 1:
            return
        mine = torch.tensor([RENDEZVOUS.index(what)], device="cpu")
        places = torch.empty(ranks, dtype=torch.int64, device="cpu")
        request = self.world_comm.Iallgather(sum_buffer(mine), sum_buffer(places))
        try:
            wait_until(
                request.Test,
                self.liveness.missing,
                timeout_seconds,
                self.liveness.answer,
                what=what,
            )
        except StallError:
            _unfinished.append((request, mine, places))  # MPI may still write to them
            raise
        for rank, place in enumerate(places.tolist()):
            if place != int(mine):
                raise ExchangeError(
                    f"all ranks must come to the same place of the program, but this rank is about "
                    f"to {what}, and rank {rank} to {RENDEZVOUS[place]}; let all ranks do the same"
                )

    def raise_on_all_ranks(self, problem: str | None, kind: type[Exception]) -> None:
        """Raise the same error on every rank when any rank has a problem.

        Args:
            problem: What is wrong here: rule, value, remedy; None if nothing is.
            kind: The error to raise.

        Collective over the world; blocking.
        """
        problems = self.world_comm.allgather(problem)
        found = [(rank, text) for rank, text in enumerate(problems) if text is not None]
        if not found:
            return
        rank, text = found[0]
        everywhere = len(found) == len(problems) and len({text for _, text in found}) == 1
        raise kind(text if everywhere else f"rank {rank}: {text}")

    def equal_on_all_ranks(self, value: object) -> bool:
        """Return whether every rank passed an equal value. Collective over the world; blocking."""
        return all(other == value for other in self.world_comm.allgather(value))

    def on_regroup(self, call: Callable[[Regrouped], object]) -> Callable[[], None]:
        """Call a function where ranks were lost or joined; return what takes it off.

        All ranks must add the same functions in the same order, for these may communicate.
        """
        number = 1 + max(self._followers, default=0)
        self._followers[number] = call

        def remove() -> None:
            """Take it off; idempotent."""
            self._followers.pop(number, None)

        return remove

    def become(self, other: "Topology", reserve: Reserve | None) -> None:
        """Take the place of another topology, which must not be used any more.

        Args:
            other: That one.
            reserve: The spare ranks that are left.
        """
        Topology._open_now -= 1
        if reserve is not None:
            dismiss_at_exit(reserve)
        lasting = {
            "is_elastic": self.is_elastic,
            "takes_spares": self.takes_spares,
            "_followers": self._followers,
            "reserve": reserve,
        }
        self.__dict__.clear()
        self.__dict__.update(other.__dict__ | lasting)

    def tell_regrouped(self, *, is_new: bool, in_step: bool) -> None:
        """Call the functions that `on_regroup` was given. Collective over the world; blocking."""
        told = Regrouped(
            rank=self.rank,
            world_size=self.world_size,
            most=lambda number: max(self.world_comm.allgather(number)),
            first=self.world_comm.bcast,
            is_new=is_new,
            in_step=in_step,
        )
        for call in list(self._followers.values()):
            call(told)

    def free(self) -> None:
        """Give the communicators back. Collective over the world; blocking; idempotent."""
        mpi = load()
        if self.world_comm != mpi.COMM_NULL:
            self.rendezvous("free a daso.Topology", STALL_SECONDS)
            Topology._open_now -= 1
        self.liveness.free()
        for comm in (self.lane_comm, self.node_comm, self.world_comm):
            if comm != mpi.COMM_NULL:
                comm.Free()


@contextmanager
def errors_on_all_ranks(topology: object, what: str, timeout_seconds: float) -> Iterator[None]:
    """Raise an error of daso's that some rank meets inside on all ranks.

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
    text = None if problem is None else str(problem)
    where.raise_on_all_ranks(text, ConfigError if problem is None else type(problem))


def _refuse_workers() -> None:
    """Refuse MPI in a worker process of a rank, which has no place in the world."""
    if is_worker() and read_launch().launcher not in (None, TORCHRUN):
        raise TopologyError(
            "MPI must be started by ranks alone, but this is a worker process of one (of a "
            "DataLoader?), which runs the program again; put what trains behind "
            "`if __name__ == '__main__':`"
        )


def _tell_of_many(rank_info: RankInfo, number: int) -> None:
    """Say it where many topologies are open: MPI has some 2,000 communicators in all."""
    if number % MANY == 0 and rank_info.rank == 0:
        logger.warning(
            "%d topologies are open, and each holds communicators, of which MPI has few: make one "
            "and pass it on (topology=), or free() those that are not used",
            number,
        )


def _wait_for_all(world: "MPI.Comm") -> None:
    """Wait until every rank has begun: nobody answers who is missing before all have.

    Collective over the world; blocking.
    """
    if world.Get_size() == 1:
        return
    rank, token = world.Get_rank(), torch.zeros(1, dtype=torch.int64, device="cpu")
    others = range(1, world.Get_size()) if rank == 0 else ()
    tokens = torch.zeros(world.Get_size(), 1, dtype=torch.int64, device="cpu")
    signs = {one: world.Irecv(sum_buffer(tokens[one]), one, SIGN) for one in others}
    sent = None if rank == 0 else world.Isend(sum_buffer(token), 0, SIGN)
    everybody, start = world.Ibarrier(), time.monotonic()
    late_seconds = STALL_SECONDS + (0 if rank == 0 else GRACE_SECONDS)  # rank 0 knows more
    while not everybody.Test():
        time.sleep(POLL_SECONDS)
        if time.monotonic() - start > late_seconds:
            _unfinished.append((everybody, sent, signs, token, tokens))
            missing = [str(one) for one, sign in signs.items() if not sign.Test()]
            who = f"world rank {', '.join(missing)}" if missing else "some rank"
            raise TopologyError(
                f"every rank must call daso.init(), or make what needs it, within "
                f"{STALL_SECONDS:g} s, but {who} did not; look there"
            )
    while not all(one.Test() for one in (*signs.values(), *([] if sent is None else [sent]))):
        time.sleep(POLL_SECONDS)


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind)


def _are_counts(value: object) -> bool:
    return (
        isinstance(value, list | tuple) and bool(value) and all(type(one) is int for one in value)
    )


SIZES = Rule(
    "a number of ranks, or the sizes of a host's nodes such as (3, 1), or None",
    lambda value: value is None or type(value) is int or _are_counts(value),
)


def _pretend_group(
    rank: int, size: int, sizes: int | Sequence[int] | None
) -> tuple[int, str | None]:
    """Return this host rank's pretend node, and what is wrong with the sizes."""
    if sizes is None:
        return 0, None
    if isinstance(sizes, Sequence) and len(sizes) == 1:
        sizes = sizes[0]
    if isinstance(sizes, int):
        if sizes < 1:
            return 0, f"ranks_per_node must be at least 1, not {sizes}"
        if size % sizes:
            whole, rest = divmod(size, sizes)
            uneven = (*([sizes] * whole), rest)
            return 0, (
                f"ranks_per_node must divide the ranks of the host ({size}), not {sizes}; change "
                f"it or DASO_RANKS_PER_NODE, or name the sizes: {uneven}"
            )
        return rank // sizes, None
    if min(sizes) < 1 or sum(sizes) != size:
        return 0, (
            f"ranks_per_node must be positive and add up to the ranks of the host ({size}), not "
            f"{tuple(sizes)}; change it or DASO_RANKS_PER_NODE"
        )
    return next(group for group, stop in enumerate(accumulate(sizes)) if rank < stop), None


_default: dict[Any, Topology] = {}  # at most one, by the sizes that were asked for


def make_default(ranks_per_node: int | Sequence[int] | None) -> Topology:
    """Return the topology that `daso.DASO` uses when none is given; made where it is another.

    Collective over the world; blocking.
    """
    check("ranks_per_node", ranks_per_node, SIZES)
    given = read_launch().ranks_per_node if ranks_per_node is None else ranks_per_node
    sizes = (given,) if isinstance(given, int) else given and tuple(given)
    if not _is_open(_default.get(sizes)):
        topology = Topology(ranks_per_node=ranks_per_node)
        _default.clear()
        _default[sizes] = topology
    return default()


def _is_open(topology: Topology | None) -> bool:
    return topology is not None and topology.world_comm != load().COMM_NULL


def rank_now() -> int | None:
    """Return this rank where numbers may change, as ranks are lost; None where they stay."""
    open_now = (one for one in _default.values() if _is_open(one) and one.is_elastic)
    return next((one.rank for one in open_now), None)


def have_met() -> bool:
    """Return whether ranks know each other: from then on they meet the same errors."""
    return any(_is_open(one) for one in _default.values())


def default() -> Topology:
    """Return the topology set by `daso.init`, made now if there is none yet."""
    return next((one for one in _default.values() if _is_open(one)), None) or make_default(None)
