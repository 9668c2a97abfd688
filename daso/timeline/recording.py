"""What all ranks did and when, on one clock, in one file."""

import json
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import torch

from daso import trace
from daso.checks import NONE, Rule, check, either, instance_of, positive, validate_call, whole
from daso.comm.collectives import finish, first_value, gather
from daso.comm.dtypes import byte_buffer
from daso.comm.topology import Topology, default
from daso.errors import ConfigError
from daso.timeline.clock_sync import ask_round

__all__ = ["Recording"]

MOST_SPANS = 10**8
FILE = Rule("the path of a file", lambda one: isinstance(one, str | Path) and bool(str(one)))
SPANS = 3  # tag, beside those of `daso.timeline.clock_sync`


class Recording(AbstractContextManager["Recording"]):
    """Records what every rank does while it is entered; world rank 0 writes it to a file.

    ``daso trace FILE`` shows what is in it. Clocks of all ranks are compared when it is entered, at
    every `mark`, and when it is left.

    Args:
        path: The file, of JSON lines; an earlier one is replaced.
        topology: Who is where; found from MPI if None.
        capacity: Spans that each rank keeps from mark to mark; older ones are lost, and counted.
        timeout_seconds: How long to wait for other ranks at most.

    Entering and leaving are collective over the world; blocking. Leaving by an error is not: then
    the file ends with the last mark.
    """

    @validate_call
    def __init__(
        self,
        path: str | Path,
        topology: Topology | None = None,
        *,
        capacity: int = trace.CAPACITY,
        timeout_seconds: float = 300.0,
    ) -> None:
        check("path", path, FILE)
        check("topology", topology, either(instance_of(Topology), NONE))
        check("capacity", capacity, whole(1, MOST_SPANS, " of spans"))
        check("timeout_seconds", timeout_seconds, positive())
        self.path, self._given = Path(path), topology
        self._recorder = trace.Recorder(capacity)
        self._timeout_seconds = timeout_seconds
        self._since = 0.0  # seconds, time.perf_counter: what began before is not of a batch
        self._file: TextIO | None = None
        self._problem: str | None = None  # with the file

    @property
    def _topology(self) -> Topology:
        if self._given is None:
            self._given = default()
        return self._given

    def __enter__(self) -> Self:
        rank_info, hosts = self._topology.rank_info, self._topology.liveness.hosts
        head = {
            "schema": trace.SCHEMA,
            "ranks": [{"node": node, "host": hosts[r]} for r, node in enumerate(rank_info.node_of)],
        }
        self._write(json.dumps(head), opens=True)
        self._compare_clocks()
        self._since = time.perf_counter()
        trace.start(self._recorder)
        return self

    def mark(self) -> None:
        """Compare clocks, and write what was recorded since. Collective over the world; blocking.

        Between epochs, say, where all ranks wait for each other anyway.

        Raises:
            ConfigError: The file cannot be written; on every rank.
            StallError: A rank did not come.
        """
        self._compare_clocks()
        since = self._since
        spans, lost = self._recorder.take()
        mine = {
            "rank": self._topology.rank,
            "since": since,
            "threads": list(self._recorder.threads),
            "lost": lost,
            "spans": spans,
        }
        self._write_everyones(json.dumps(mine))
        self._since = time.perf_counter()  # writing belongs to no step

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        trace.stop()
        try:
            if error is None:
                self.mark()
        finally:
            if self._file is not None:
                with suppress(OSError):  # told when it was written
                    self._file.close()

    def _compare_clocks(self) -> None:
        if self._topology.world_size > 1:
            readings = ask_round(self._topology, self._timeout_seconds)
            self._write(json.dumps({"clocks": readings}))

    def _write(self, line: str, *, opens: bool = False) -> None:
        """Write a line of world rank 0's; raise on every rank where it could not."""
        alone = self._topology.rank == 0
        self._agree(self._put(line, opens=opens) if alone else None)

    def _write_everyones(self, line: str) -> None:
        """Write every rank's line, one after the other; raise on every rank where it could not."""
        rank_info, world = self._topology.rank_info, self._topology.world_comm
        mine, problem = torch.frombuffer(bytearray(line, "utf-8"), dtype=torch.uint8), None
        sizes = gather(self._topology, mine.numel(), self._timeout_seconds)
        if rank_info.rank == 0:
            problem = self._put(line)
            for rank in range(1, rank_info.world_size):
                row = torch.empty(sizes[rank], dtype=torch.uint8, device="cpu")
                request = world.Irecv(byte_buffer(row), rank, SPANS)
                finish(self._topology, request, self._timeout_seconds)
                problem = problem or self._put(row.numpy().tobytes().decode("utf-8"))
        else:
            finish(self._topology, world.Isend(byte_buffer(mine), 0, SPANS), self._timeout_seconds)
        self._agree(problem)

    def _put(self, line: str, *, opens: bool = False) -> str | None:
        """Write a line; return why it, or one before it, could not be, if so."""
        if self._problem is not None:
            return self._problem
        try:
            if opens:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("w", encoding="utf-8")
            assert self._file is not None
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as caught:
            self._problem = (
                f"a recording's file must be writable, but {self.path}: {caught.strerror}; choose "
                f"another, or leave recording out"
            )
        return self._problem

    def _agree(self, problem: str | None) -> None:
        """Raise world rank 0's problem on every rank."""
        problem = first_value(self._topology, problem, self._timeout_seconds)
        if problem is not None:
            raise ConfigError(problem)
