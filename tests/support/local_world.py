"""A world of threads: several ranks in one interpreter, over an MPI that lives in memory.

It finds what real MPI lets pass or turns into a hang: ranks in different collectives, buffers that
change while a message is under way, messages that nobody received. Real transports, engines that
poll, windows of other nodes and ranks that die are tests/ranks' business.

One rank's thread runs at a time and gives its turn away where it waits, so that seeds and patches
hold as in a process of its own; engines' threads run beside it, as they do on a cluster.
"""

import itertools
import os
import pickle
import sys
import threading
import time
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

__all__ = ["LIMIT_SECONDS", "MPI", "RankFailedError", "calls_of", "open_handles", "run_ranks"]

LIMIT_SECONDS = 60.0  # of a world
EAGER_BYTES = 1 << 16  # a longer message is under way until its receiver takes it
ANY = -1
NAP_SECONDS = 5e-5


class RankFailedError(Exception):
    """Another rank failed: what this one waits for will not come."""


# --- whose turn it is -----------------------------------------------------------------------------

_here = threading.local()
_turn = threading.Lock()
_real_sleep, _real_yield = time.sleep, os.sched_yield
_real_condition = threading.Condition.wait
_real_wait, _real_join = threading.Event.wait, threading.Thread.join


@contextmanager
def _away() -> Iterator[None]:
    """Give the turn away meanwhile, where this thread has it."""
    if not getattr(_here, "has_turn", False):
        yield
        return
    _here.has_turn = False
    _turn.release()
    try:
        yield
    finally:
        _turn.acquire()
        _here.has_turn = True
        world = _here.world
        if world.failed and not _here.over:
            raise RankFailedError("another rank failed")
        if time.monotonic() > world.ends and not _here.over:
            raise TimeoutError(f"a world of threads must end within {LIMIT_SECONDS:g} s")


def _wait(event: threading.Event, timeout: float | None = None) -> bool:
    """Wait in short pieces, for a rank that failed must be noticed."""
    if not getattr(_here, "has_turn", False):
        return _real_wait(event, timeout)
    ends = time.monotonic() + (LIMIT_SECONDS if timeout is None else timeout)
    while not event.is_set():
        if (left := ends - time.monotonic()) <= 0:
            return False
        with _away():
            _real_wait(event, min(left, 0.05))
    return True


def _wait_for_notice(condition: threading.Condition, timeout: float | None = None) -> bool:
    with _away():
        return _real_condition(condition, LIMIT_SECONDS if timeout is None else timeout)


def _sleep(seconds: float) -> None:
    with _away():
        _real_sleep(seconds)


def _yield() -> None:
    with _away():
        _real_sleep(NAP_SECONDS if getattr(_here, "world", None) else 0)


def _join(thread: threading.Thread, timeout: float | None = None) -> None:
    with _away():
        _real_join(thread, timeout)


def _until(happened: Callable[[], bool]) -> None:
    while not happened():
        _yield()


# --- communicators --------------------------------------------------------------------------------


class Exception_(Exception):  # noqa: N801, N818 - MPI.Exception
    """What MPI raises."""

    def Get_error_class(self) -> int:  # noqa: N802
        return MPI.ERR_OTHER


class _Message:
    def __init__(self, source: int, tag: int, memory: np.ndarray) -> None:
        self.source, self.tag, self.memory = source, tag, memory
        self.copy, self.taken = memory.copy(), memory.nbytes <= EAGER_BYTES

    def fits(self, source: int, tag: int) -> bool:
        return source in (ANY, self.source) and tag in (ANY, self.tag)

    def take(self, into: np.ndarray) -> None:
        assert self.taken or np.array_equal(self.copy, self.memory), (
            f"a message of rank {self.source}, tag {self.tag}, changed while it was under way"
        )
        assert into.nbytes >= self.copy.nbytes, f"a message of tag {self.tag} was cut off"
        into[: self.copy.nbytes] = self.copy
        self.taken = True


class Request:
    """Of a message or a collective; what it does when it is over, it does once."""

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over, self._done = over, False

    def Test(self) -> bool:  # noqa: N802 - as mpi4py has it, here and below
        if not self._done and self._over():
            self._done = True
        return self._done

    def Wait(self) -> None:  # noqa: N802
        _until(self.Test)

    wait, test = Wait, Test

    @staticmethod
    def Testall(requests: Sequence["Request"]) -> bool:  # noqa: N802
        return all([one.Test() for one in requests])

    @staticmethod
    def Waitall(requests: Sequence["Request"]) -> None:  # noqa: N802
        for one in requests:
            one.Wait()


class Status:
    source, tag, nbytes = ANY, ANY, 0

    def Get_source(self) -> int:  # noqa: N802
        return self.source

    def Get_tag(self) -> int:  # noqa: N802
        return self.tag

    def Get_count(self, _: Any) -> int:  # noqa: N802
        return self.nbytes


class _Group:
    """What the ranks of a communicator share."""

    def __init__(self, world: "_World", members: Sequence[int]) -> None:
        self.world, self.members = world, members  # world ranks
        self.lock = threading.RLock()
        self.boxes: list[deque[_Message]] = [deque() for _ in members]
        self.posted: list[list[tuple[int, int, np.ndarray, list[bool]]]] = [[] for _ in members]
        self.rounds: dict[int, dict[int, tuple[str, Any]]] = defaultdict(dict)
        self.left: dict[int, int] = defaultdict(int)

    def count(self, rank: int, what: str, change: int = 1) -> None:
        """Count what a rank of this communicator did, or holds."""
        self.world.counts[self.members[rank]][what] += change


def _bytes(buffer: Any) -> np.ndarray:
    memory = buffer[0] if isinstance(buffer, tuple | list) else buffer
    return np.asarray(memory).reshape(-1).view(np.uint8)


class Comm:
    """One rank's end of a communicator."""

    def __init__(self, group: _Group | None, rank: int) -> None:
        self._group, self.rank, self._round = group, rank, 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Comm) or self._group is not other._group:
            return False
        return self._group is None or self.rank == other.rank  # without one: COMM_NULL

    __hash__ = None  # type: ignore[assignment]

    @property
    def _all(self) -> _Group:
        assert self._group is not None, "a communicator was used after it was freed"
        return self._group

    def count(self, what: str, change: int = 1) -> None:
        """Count what this rank holds."""
        self._all.count(self.rank, what, change)

    @property
    def size(self) -> int:
        return len(self._all.members)

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    # --- collectives ------------------------------------------------------------------------------

    def _meet(self, kind: str, value: Any, end: Callable[[list[Any]], None]) -> Request:
        """Bring a value; ``end`` gets everybody's, once all have come."""
        group, number = self._all, self._round
        group.count(self.rank, "calls")
        self._round += 1
        with group.lock:
            came = group.rounds[number]
            came[self.rank] = kind, value
            kinds = {rank: what for rank, (what, _) in came.items()}
        assert len(set(kinds.values())) == 1, f"ranks are in different collectives: {kinds}"

        def over() -> bool:
            if len(came) < len(group.members):
                return False
            end([came[rank][1] for rank in range(len(came))])
            with group.lock:
                group.left[number] += 1
                if group.left[number] == len(group.members):
                    del group.rounds[number], group.left[number]
            return True

        return Request(over)

    def _gather(self, kind: str, value: Any) -> list[Any]:
        found: list[Any] = []
        self._meet(kind, value, found.extend).Wait()
        return found

    def allgather(self, value: Any) -> list[Any]:
        return [pickle.loads(one) for one in self._gather("allgather", pickle.dumps(value))]

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        found = self._gather(f"gather to {root}", pickle.dumps(value))
        return [pickle.loads(one) for one in found] if self.rank == root else None

    def bcast(self, value: Any, root: int = 0) -> Any:
        own = pickle.dumps(value if self.rank == root else None)
        return pickle.loads(self._gather(f"bcast from {root}", own)[root])

    def allreduce(self, value: Any, op: Any = None) -> Any:
        return (op or MPI.SUM)(self.allgather(value))

    def Barrier(self) -> None:  # noqa: N802
        self.Ibarrier().Wait()

    def Ibarrier(self) -> Request:  # noqa: N802
        return self._meet("barrier", None, lambda _: None)

    def Ibcast(self, buffer: Any, root: int = 0) -> Request:  # noqa: N802
        into = _bytes(buffer)

        def end(found: list[np.ndarray]) -> None:
            assert len(found[root]) == len(into), "a broadcast of another length"
            if self.rank != root:
                into[:] = found[root]

        return self._meet(f"Bcast from {root}", into.copy(), end)

    def Bcast(self, buffer: Any, root: int = 0) -> None:  # noqa: N802
        self.Ibcast(buffer, root).Wait()

    def Iallreduce(self, source: Any, target: Any, op: Any = None) -> Request:  # noqa: N802
        into = np.asarray(target[0] if isinstance(target, tuple) else target).reshape(-1)
        own = into if source is MPI.IN_PLACE else np.asarray(source).reshape(-1)

        def end(found: list[np.ndarray]) -> None:
            into[:] = (op or MPI.SUM)(found)

        return self._meet(f"Allreduce of {into.dtype}, {into.size}", own.copy(), end)

    def Allreduce(self, source: Any, target: Any, op: Any = None) -> None:  # noqa: N802
        self.Iallreduce(source, target, op).Wait()

    def Iallgather(self, source: Any, target: Any) -> Request:  # noqa: N802
        into = _bytes(target)
        return self._meet(
            "Allgather",
            _bytes(source).copy(),
            lambda found: into.__setitem__(slice(None), np.concatenate(found)),
        )

    Iallgatherv = Iallgather

    def Alltoall(self, source: Any, target: Any) -> None:  # noqa: N802
        found = self._gather("Alltoall", _bytes(source).copy())
        parts = [np.split(one, self.size)[self.rank] for one in found]
        _bytes(target)[:] = np.concatenate(parts)

    # --- messages ---------------------------------------------------------------------------------

    def Isend(self, buffer: Any, dest: int, tag: int = 0) -> Request:  # noqa: N802
        message = _Message(self.rank, tag, _bytes(buffer))
        group = self._all
        group.count(self.rank, "calls")
        with group.lock:
            for entry in group.posted[dest]:
                source, wanted, into, came = entry
                if message.fits(source, wanted):
                    group.posted[dest].remove(entry)
                    message.take(into)
                    came.append(True)
                    break
            else:
                group.boxes[dest].append(message)
        return Request(lambda: message.taken)

    Issend = Isend

    def Send(self, buffer: Any, dest: int, tag: int = 0) -> None:  # noqa: N802
        self.Isend(buffer, dest, tag).Wait()

    def Irecv(self, buffer: Any, source: int = ANY, tag: int = ANY) -> Request:  # noqa: N802
        into, came, group = _bytes(buffer), list[bool](), self._all
        with group.lock:
            message = self._next(source, tag, remove=True)
            if message is None:
                group.posted[self.rank].append((source, tag, into, came))
            else:
                message.take(into)
                came.append(True)
        return Request(lambda: bool(came))

    def Recv(self, buffer: Any, source: int = ANY, tag: int = ANY) -> None:  # noqa: N802
        self.Irecv(buffer, source, tag).Wait()

    def _next(self, source: int, tag: int, *, remove: bool) -> _Message | None:
        box = self._all.boxes[self.rank]
        with self._all.lock:
            found = next((one for one in box if one.fits(source, tag)), None)
            if found is not None and remove:
                box.remove(found)
        return found

    def Iprobe(self, source: int = ANY, tag: int = ANY, status: Status | None = None) -> bool:  # noqa: N802
        found = self._next(source, tag, remove=False)
        if found is not None and status is not None:
            status.source, status.tag = found.source, found.tag
            status.nbytes = found.memory.nbytes
        return found is not None

    iprobe = Iprobe

    def Improbe(self, source: int, tag: int, status: Status) -> "_Matched | None":  # noqa: N802
        found = self._next(source, tag, remove=True)
        if found is None:
            return None
        status.source, status.tag, status.nbytes = found.source, found.tag, found.memory.nbytes
        return _Matched(found)

    def send(self, value: Any, dest: int, tag: int = 0) -> None:
        self.Isend(np.frombuffer(pickle.dumps(value), np.uint8), dest, tag).Wait()

    def recv(self, source: int = ANY, tag: int = ANY) -> Any:
        status = Status()
        _until(lambda: self.Iprobe(source, tag, status))
        row = np.empty(status.nbytes, np.uint8)
        self.Recv(row, status.source, status.tag)
        return pickle.loads(row.tobytes())

    # --- others of its kind -----------------------------------------------------------------------

    def Split(self, color: int | None = 0, key: int = 0) -> "Comm":  # noqa: N802
        asked = self._gather("Split", (color, key))
        chosen = [rank for rank, one in enumerate(asked) if one[0] == color]
        chosen.sort(key=lambda rank: (asked[rank][1], rank))
        members = [self._all.members[rank] for rank in chosen]
        group = _Group(self._all.world, members) if self.rank == chosen[0] else None
        group = self._gather("Split, its ranks", group)[chosen[0]]
        if color is None:
            return MPI.COMM_NULL
        self._all.count(self.rank, "communicators")
        return Comm(group, chosen.index(self.rank))

    def Split_type(self, _: Any) -> "Comm":  # noqa: N802
        return self.Split(0, self.rank)

    def Dup(self) -> "Comm":  # noqa: N802
        return self.Split(0, self.rank)

    def Free(self) -> None:  # noqa: N802
        self.Barrier()
        unread = [(one.source, one.tag) for one in self._all.boxes[self.rank]]
        self._all.count(self.rank, "communicators", -1)
        self._group = None
        assert not unread, f"messages that nobody received, (source, tag): {unread}"

    def Abort(self, code: int = 1) -> None:  # noqa: N802
        self._all.world.failed = True
        raise RankFailedError(f"rank {self.rank} aborted with {code}")


class _Matched:
    def __init__(self, message: _Message) -> None:
        self._message = message

    def Irecv(self, buffer: Any) -> Request:  # noqa: N802
        self._message.take(_bytes(buffer))
        return Request(lambda: True)


class Window:
    """Memory that all ranks of a node see."""

    def __init__(self, segments: list[np.ndarray], comm: Comm) -> None:
        self._segments, self._comm = segments, comm
        comm.count("windows")

    @staticmethod
    def Allocate_shared(nbytes: int, _: int, comm: Comm) -> "Window":  # noqa: N802
        return Window(comm._gather("Allocate_shared", np.zeros(nbytes, np.uint8)), comm)

    def Shared_query(self, rank: int) -> tuple[np.ndarray, int]:  # noqa: N802
        return self._segments[rank], 1

    def Lock_all(self) -> None:  # noqa: N802
        """Nothing to do: threads see each other's memory."""

    Unlock_all = Sync = Lock_all

    def Free(self) -> None:  # noqa: N802
        """Wait for all ranks of the node, as MPI does."""
        self._comm.Barrier()
        self._comm.count("windows", -1)


class _Datatypes(types.ModuleType):
    """The module `mpi4py.MPI`, as far as daso uses it."""

    @property
    def COMM_WORLD(self) -> Comm:  # noqa: N802
        return getattr(_here, "comm", None) or self.COMM_SELF

    @property
    def COMM_SELF(self) -> Comm:  # noqa: N802
        return Comm(_Group(_World(1), [0]), 0)


def _add(rows: Sequence[Any]) -> Any:
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def _largest(rows: Sequence[Any]) -> Any:
    return np.maximum.reduce(rows) if isinstance(rows[0], np.ndarray) else max(rows)


MPI: Any = _Datatypes("mpi4py.MPI")
MPI.__file__ = __file__
for _name in ("FLOAT", "DOUBLE", "INT64_T", "BYTE", "IN_PLACE", "COMM_TYPE_SHARED"):
    setattr(MPI, _name, _name)
MPI.SUM, MPI.MAX, MPI.UNDEFINED, MPI.ANY_SOURCE, MPI.ANY_TAG = _add, _largest, None, ANY, ANY
MPI.COMM_NULL, MPI.WIN_NULL, MPI.Exception, MPI.ERR_OTHER = Comm(None, 0), None, Exception_, 15
MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED = 75, 76, 77
MPI.ERR_IN_STATUS = 18
MPI.Comm, MPI.Request, MPI.Status, MPI.Win = Comm, Request, Status, Window
MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE = range(4)
MPI.Is_initialized = MPI.Is_finalized = lambda: True
MPI.Is_finalized = lambda: False
MPI.Query_thread, MPI.Get_version = lambda: MPI.THREAD_MULTIPLE, lambda: (4, 1)
MPI.Get_processor_name, MPI.Get_library_version = lambda: "threads", lambda: "threads 1.0"


# --- a world --------------------------------------------------------------------------------------


class _World:
    def __init__(self, size: int) -> None:
        self.size, self.failed, self.ends = size, False, time.monotonic() + LIMIT_SECONDS
        self.errors: dict[int, BaseException] = {}
        self.group = _Group(self, range(size))
        self.counts: list[Counter[str]] = [Counter() for _ in range(size)]  # of each rank

    def rank(self, rank: int, body: Callable[[Comm], Any], results: list[Any]) -> None:
        """Be one rank: a thread's body."""
        _turn.acquire()
        _here.has_turn, _here.world, _here.over = True, self, False
        _here.comm = Comm(self.group, rank)
        try:
            results[rank] = body(_here.comm)
        except BaseException as error:
            self.errors[rank] = error
            self.failed = True
        finally:
            _here.over = True
            if getattr(_here, "has_turn", False):
                _here.has_turn = False
                _turn.release()


@contextmanager
def _in_memory() -> Iterator[None]:
    """Let daso find this MPI, and let whoever waits give the turn away."""
    import mpi4py
    import torch._dynamo  # noqa: F401 - optimizers import it, and it must not be by a rank's thread

    from daso.comm import topology

    with ExitStack() as stack:
        for target, name, value in [
            (mpi4py, "MPI", MPI),
            (time, "sleep", _sleep),
            (os, "sched_yield", _yield),
            (threading.Event, "wait", _wait),
            (threading.Condition, "wait", _wait_for_notice),
            (threading.Thread, "join", _join),
            (sys, "excepthook", sys.excepthook),
            (topology, "_default", {}),
            (topology.Topology, "_open_now", 0),  # ranks that never come leave theirs open
        ]:
            stack.enter_context(mock.patch.object(target, name, value, create=name == "MPI"))
        before = sys.modules.get("mpi4py.MPI")  # not patch.dict: it would forget what is imported
        sys.modules["mpi4py.MPI"] = MPI
        try:
            yield
        finally:
            if before is None:
                del sys.modules["mpi4py.MPI"]
            else:
                sys.modules["mpi4py.MPI"] = before


def open_handles() -> dict[str, int]:
    """Return how many communicators and windows the calling rank has made and not freed."""
    counts = _here.world.counts[_here.comm.rank]
    return {what: counts[what] for what in ("communicators", "windows")}


def calls_of(rank: int) -> int:
    """Return how many collectives and sends a rank has begun, in all of its threads."""
    return int(_here.world.counts[rank]["calls"])


def run_ranks(ranks: int, body: Callable[[Comm], Any]) -> list[Any]:
    """Run a function once for each rank, in threads, and return what each returned.

    Args:
        ranks: How many.
        body: Gets its rank's communicator of the world.

    Raises:
        BaseException: What the first rank that failed raised; others are ended.
    """
    world, results = _World(ranks), [None] * ranks
    sys.setswitchinterval(1e-4)
    with _in_memory():
        threads = [
            threading.Thread(
                target=world.rank, args=(rank, body, results), name=f"rank {rank}", daemon=True
            )
            for rank in range(ranks)
        ]
        for one in threads:
            one.start()
        for one in threads:
            _real_join(one, LIMIT_SECONDS + 5)
        late = [one.name for one in threads if one.is_alive()]
    assert not late, f"did not end: {late}"
    failed = {r: e for r, e in world.errors.items() if not isinstance(e, RankFailedError)}
    for rank in itertools.chain(failed, world.errors):
        error = world.errors[rank]
        error.add_note(f"on rank {rank} of {ranks}; others: {world.errors}")
        raise error
    return results
