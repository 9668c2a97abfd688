"""What all ranks did and when, on one clock, in one file."""

import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import torch

from daso import trace
from daso.comm.clock import ask_round
from daso.comm.dtypes import byte_buffer
from daso.comm.node import wait_until
from daso.comm.topology import Topology, default
from daso.comm.vote import gather
from daso.errors import ConfigError

__all__ = ["SCHEMA", "Recording"]

SCHEMA = 1  # of the file; goes up when a field changes its meaning
SPANS = 3  # tag


class Recording(AbstractContextManager["Recording"]):
    """Records what every rank does while it is entered; world rank 0 writes it to a file.

    ``daso trace FILE`` shows what is in it. Clocks of all ranks are compared when it is entered, at
    every `mark`, and when it is left.

    Args:
        path: The file, of JSON lines; an earlier one is replaced.
        topology: Who is where; found from MPI if None.
        capacity: Spans that each rank keeps from mark to mark; older ones are lost, and counted.
        stall_seconds: How long to wait for other ranks at most.

    Entering and leaving are collective over the world; blocking. Leaving by an error is not: then
    the file ends with the last mark.
    """

    def __init__(
        self,
        path: str | Path,
        topology: Topology | None = None,
        *,
        capacity: int = trace.CAPACITY,
        stall_seconds: float = 300.0,
    ) -> None:
        self.path, self._given = Path(path), topology
        if capacity < 1:
            raise ConfigError(f"capacity must be at least 1 span, not {capacity}")
        self._recorder = trace.Recorder(capacity)
        self._stall_seconds = stall_seconds
        self._since = 0.0  # seconds, time.perf_counter: what began before is not of a batch
        self._file: TextIO | None = None

    @property
    def _topology(self) -> Topology:
        if self._given is None:
            self._given = default()
        return self._given

    def __enter__(self) -> Self:
        place, hosts = self._topology.place, self._topology.roll.hosts
        head = {
            "schema": SCHEMA,
            "kinds": trace.KINDS,
            "ranks": [{"node": node, "host": hosts[r]} for r, node in enumerate(place.node_of)],
        }
        self._write([json.dumps(head)], opens=True)
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
        spans, lost = self._recorder.take()
        mine = {
            "rank": self._topology.place.rank,
            "since": self._since,
            "threads": list(self._recorder.threads),
            "lost": lost,
            "spans": [astuple(span) for span in spans],
        }
        self._compare_clocks()
        self._write(self._collect(json.dumps(mine)))
        self._since = time.perf_counter()

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
                self._file.close()

    def _compare_clocks(self) -> None:
        if self._topology.place.size > 1:
            readings = ask_round(self._topology, self._stall_seconds)
            self._write([json.dumps({"clocks": readings})])

    def _write(self, lines: Sequence[str], *, opens: bool = False) -> None:
        """Write lines on world rank 0; raise on every rank where it could not."""
        problem = None
        if self._topology.place.rank == 0:
            try:
                if opens:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = self.path.open("w", encoding="utf-8")
                assert self._file is not None
                self._file.writelines(line + "\n" for line in lines)
                self._file.flush()
            except OSError as caught:
                problem = (
                    f"a recording's file must be writable, but {self.path}: {caught.strerror}; "
                    f"choose another, or leave recording out"
                )
        problem = gather(self._topology, problem, self._stall_seconds)[0]
        if problem is not None:
            raise ConfigError(problem)

    def _collect(self, text: str) -> list[str]:
        """Return every rank's text on world rank 0, and nothing elsewhere: they may be long."""
        place, world = self._topology.place, self._topology.world
        mine = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)
        sizes = gather(self._topology, mine.numel(), self._stall_seconds)
        if place.rank > 0:
            self._finish(world.Isend(byte_buffer(mine), 0, SPANS))
            return []
        texts = [text]
        for rank in range(1, place.size):
            row = torch.empty(sizes[rank], dtype=torch.uint8)
            self._finish(world.Irecv(byte_buffer(row), rank, SPANS))
            texts.append(row.numpy().tobytes().decode("utf-8"))
        return texts

    def _finish(self, request: Any) -> None:
        roll = self._topology.roll
        wait_until(request.Test, roll.missing, self._stall_seconds, roll.answer)
