"""Recording of all ranks' spans on one clock, in one file."""

import json
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import torch

from daso import trace
from daso.checks import NONE, Rule, check, either, instance_of, positive, validate_call, whole
from daso.comm.control import broadcast, finish, gather
from daso.comm.reduction import byte_buffer
from daso.comm.topology import Topology, default
from daso.errors import ConfigError
from daso.timeline.clock_sync import ask_round

MOST_SPANS = 10**8
FILE = Rule("the path of a file", lambda path: isinstance(path, str | Path) and bool(str(path)))
SPANS = 3  # tag, in addition to those of `daso.timeline.clock_sync`


class Recording(AbstractContextManager["Recording"]):
    """Records the spans of all ranks while it is entered; world rank 0 writes them to a file.

    ``daso trace FILE`` reports on it. The clocks of all ranks are compared on entry, at every
    `mark`, and on exit.

    Args:
        path: The file, of JSON lines; an existing one is replaced.
        topology: Topology of the ranks; None: MPI's world.
        capacity: Maximum number of spans of each rank between marks; older ones are lost, and
            counted.
        timeout_seconds: Maximum wait for other ranks.

    Entry and exit are collective over the world; blocking. Exit after an exception is not: then
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
        self.path, self._topology_or_none = Path(path), topology
        self._recorder = trace.Recorder(capacity)
        self._timeout_seconds = timeout_seconds
        self._since = 0.0  # seconds, time.perf_counter: earlier spans belong to no batch
        self._file: TextIO | None = None
        self._problem: ConfigError | None = None  # of writing the file

    @property
    def _topology(self) -> Topology:
        if self._topology_or_none is None:
            self._topology_or_none = default()
        return self._topology_or_none

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
        """Compare clocks, and write the spans recorded so far. Collective over the world; blocking.

        A good place is between epochs, where all ranks wait for each other anyway.

        Raises:
            ConfigError: The file cannot be written; on every rank.
            StallError: A rank did not reach the call in time.
        """
        self._compare_clocks()
        since = self._since
        spans, lost = self._recorder.take()
        record = {
            "rank": self._topology.rank,
            "since": since,
            "threads": list(self._recorder.threads),
            "lost": lost,
            "spans": spans,
        }
        self._write_all_ranks(json.dumps(record))
        self._since = time.perf_counter()  # writing is not part of a step

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
                with suppress(OSError):  # reported when it was written
                    self._file.close()

    def _compare_clocks(self) -> None:
        if self._topology.world_size > 1:
            readings = ask_round(self._topology, self._timeout_seconds)
            self._write(json.dumps({"clocks": readings}))

    def _write(self, line: str, *, opens: bool = False) -> None:
        """Write world rank 0's line; raise on every rank if it cannot be written."""
        is_writer = self._topology.rank == 0
        self._agree(self._write_line(line, opens=opens) if is_writer else None)

    def _write_all_ranks(self, line: str) -> None:
        """Write all ranks' lines in order; raise on every rank if one cannot be written."""
        rank_info, world = self._topology.rank_info, self._topology.world_comm
        data, problem = torch.frombuffer(bytearray(line, "utf-8"), dtype=torch.uint8), None
        sizes = gather(self._topology, data.numel(), self._timeout_seconds)
        if rank_info.rank == 0:
            problem = self._write_line(line)
            for rank in range(1, rank_info.world_size):
                row = torch.empty(sizes[rank], dtype=torch.uint8, device="cpu")
                request = world.Irecv(byte_buffer(row), rank, SPANS)
                finish(self._topology, request, self._timeout_seconds)
                problem = problem or self._write_line(row.numpy().tobytes().decode("utf-8"))
        else:
            finish(self._topology, world.Isend(byte_buffer(data), 0, SPANS), self._timeout_seconds)
        self._agree(problem)

    def _write_line(self, line: str, *, opens: bool = False) -> ConfigError | None:
        """Write a line; return the error of this or an earlier line, or None."""
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
            self._problem = ConfigError(
                f"a recording's file must be writable, but {self.path}: {caught.strerror}; choose "
                f"another, or leave recording out",
                code="recording-not-writable",
            )
        return self._problem

    def _agree(self, problem: ConfigError | None) -> None:
        """Raise world rank 0's problem on every rank."""
        problem = broadcast(self._topology, problem, self._timeout_seconds)
        if problem is not None:
            raise problem
