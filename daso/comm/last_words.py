"""Uncaught errors: world rank 0 prints an error that all ranks raise alike, once."""

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType, TracebackType

from daso.environment import shows_all_tracebacks

TAG = 31_336  # unlikely to be used by a program's own messages over COMM_WORLD
WAIT_SECONDS = 0.5  # how long rank 0 waits for the other ranks to fail
ANSWER_SECONDS = 0.7  # how long they wait for its answer before they print their own error
POLL_SECONDS = 0.002
RUNNERS = ("<frozen runpy>", "/mpi4py/__main__.py", "/mpi4py/run.py")  # file name suffixes
YES, NO = b"\1", b"\0"
_unfinished: list[object] = []


def without_runner(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of the modules that started the program."""
    while trace is not None and trace.tb_next is not None:
        if not trace.tb_frame.f_code.co_filename.endswith(RUNNERS):
            break
        trace = trace.tb_next
    return trace


def place_of(trace: TracebackType | None) -> str:
    """Return the file and line at which an error was raised."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def fail_alike(mpi: ModuleType, text: str, show: Callable[[], object]) -> bool:
    """Return whether all ranks fail with the same text within half a second.

    World rank 0 shows the error before it answers the other ranks, which then exit.

    Returns False if ``DASO_TRACEBACKS=all`` asks for the traceback of each rank. Messages go over
    COMM_WORLD to world rank 0 and back; blocks for at most a second, on ranks above 0 for less.
    """
    if shows_all_tracebacks() or mpi.COMM_WORLD.Get_size() == 1:
        return False
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    with suppress(mpi.Exception):  # for example after the loss of a rank
        return _collect(mpi, digest, show) if mpi.COMM_WORLD.Get_rank() == 0 else _ask(mpi, digest)
    return False


def _collect(mpi: ModuleType, digest: bytes, show: Callable[[], object]) -> bool:
    """Compare all ranks' digests with this one's; answer the ranks that sent one."""
    world, end = mpi.COMM_WORLD, time.monotonic() + WAIT_SECONDS
    digests: dict[int, bytes] = {}
    status = mpi.Status()
    while len(digests) < world.Get_size() - 1 and time.monotonic() < end:
        if world.Iprobe(mpi.ANY_SOURCE, TAG, status):
            row = bytearray(len(digest))
            world.Recv(row, status.Get_source(), TAG)
            digests[status.Get_source()] = bytes(row)
        else:
            time.sleep(POLL_SECONDS)
    alike = len(digests) == world.Get_size() - 1 and set(digests.values()) == {digest}
    if alike:
        show()
    answer, end = bytearray(YES if alike else NO), time.monotonic()
    for request in [world.Isend(answer, rank, TAG) for rank in digests]:
        while not request.Test() and time.monotonic() < end + WAIT_SECONDS:
            time.sleep(POLL_SECONDS)
    return alike


def _ask(mpi: ModuleType, digest: bytes) -> bool:
    """Send this rank's digest to world rank 0; return its answer, or False if none arrives."""
    world, end = mpi.COMM_WORLD, time.monotonic() + ANSWER_SECONDS
    answer = bytearray(NO)
    sent, received = world.Isend(bytearray(digest), 0, TAG), world.Irecv(answer, 0, TAG)
    _unfinished.append((sent, received, answer))  # MPI may write to it until the process ends
    while not (sent.Test() and received.Test()) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return bytes(answer) == YES
