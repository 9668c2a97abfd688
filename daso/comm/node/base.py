"""What a transport inside a node must do.

`NodeBucket` takes the mean of gradients, `NodeShare` shows one rank's part to the whole node. Both
work in steps that do not block, so that backward goes on between them.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from daso import trace
from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.health.patience import Patience
from daso.comm.health.step_watchdog import LATE_SECONDS
from daso.errors import StallError

__all__ = ["NodeBucket", "NodeRow", "NodeShare", "NodeTransport", "wait_until"]

Span = tuple[int, int]

YIELDS = 200  # polls that only give the core away before the first sleep
SLEEP_SECONDS = 5e-5


class NodeBucket(Protocol):
    """A flat row of gradients that the node averages in place."""

    flat: torch.Tensor  # this rank's row (numel)
    left: Arrived | None  # of a sum that was left on the device: tells when it is made

    def start(self, parts: Sequence[Span], *, onward: bool = False, stay: bool = False) -> None:
        """Say that this rank's row is filled; local rank i will add part i. Does not block."""
        ...

    def wait_filled(self) -> None:
        """Block until every rank of the node has started. Collective over the node."""
        ...

    def add(self) -> torch.Tensor | None:
        """Add this rank's part in rank order once all rows are filled. Does not block."""
        ...

    def deliver(self, divisor: int) -> None:
        """Divide the part from `add` and give it to the whole node. Does not block.

        All ranks of a node start buckets in one order, and deliver them in one.
        """
        ...

    def filled(self) -> bool:
        """Return whether every rank of the node has started. Does not block."""
        ...

    def delivered(self) -> bool:
        """Return whether all parts of ``flat`` are there. Does not block."""
        ...

    def missing(self) -> str:
        """Say which ranks of the node have not started; empty where all have."""
        ...

    def wait(self) -> None:
        """Block until all parts of ``flat`` are there. Collective over the node."""
        ...


class NodeRow(Protocol):
    """Memory for gradients, of which buckets are parts."""

    flat: torch.Tensor  # this rank's row (numel)

    def cut(self, spans: Sequence[Span]) -> Sequence[NodeBucket]:
        """Return one bucket for each span of the row; earlier ones must not be used any more.

        Does not communicate, but all ranks of the node must cut alike, between two rounds.
        """
        ...


class NodeShare(Protocol):
    """A flat row of which each of the first ranks of a node owns one part and all read all."""

    mine: torch.Tensor  # this rank's part, empty where it has none
    parts: list[torch.Tensor]  # every part in order; valid from `wait` to `release`

    def publish(self) -> None:
        """Say that ``mine`` is written. Does not block."""
        ...

    def wait(self) -> None:
        """Block until every part is published. Collective over the node."""
        ...

    def release(self) -> None:
        """Say that this rank has read all parts. Does not block."""
        ...

    def wait_released(self) -> None:
        """Block until all ranks have read, so that ``mine`` may be written again."""
        ...


class NodeTransport(Protocol):
    """The ranks of one node and the memory in which they meet."""

    name: str  # for reports
    sums_stay: bool  # gradients are added on the device, and may be left there to go onward

    @property
    def copies(self) -> DeviceStaging | None:
        """How what crosses between nodes comes to the host and back; None: it lies there."""
        ...

    def row(self, numel: int, dtype: torch.dtype, most: int) -> NodeRow:
        """Make a row for up to ``most`` buckets. Collective over the node; blocking."""
        ...

    def share(self, spans: Sequence[Span], dtype: torch.dtype) -> NodeShare:
        """Make a shared row cut into ``spans``. Collective over the node; blocking."""
        ...

    @property
    def waited_seconds(self) -> float:
        """Seconds the training thread waited for copies, and for others of the node."""
        ...

    @property
    def idle_seconds(self) -> float:
        """Seconds of these in which this rank's device, or CPU, computed nothing."""
        ...

    def free(self) -> None:
        """Give the memory back. Collective over the node; blocking; idempotent."""
        ...

    def abandon(self) -> None:
        """Let nothing of this rank wait for others that may be gone; for the end of the process."""
        ...


def wait_until(
    arrived: Callable[[], bool],
    missing: Callable[[], str],
    timeout_seconds: float,
    late: Callable[[], None],
    kind: int | None = None,
    what: str = "take part in a step",
) -> float:
    """Block until ``arrived()``, giving the core away in between."""
    if arrived():
        return 0.0
    start, patience = time.perf_counter(), Patience()
    polls = 0
    while not arrived():
        polls += 1
        if polls < YIELDS:
            os.sched_yield()
            continue
        time.sleep(SLEEP_SECONDS)
        waited = patience.seconds()
        if waited > LATE_SECONDS:
            late()
        if waited > timeout_seconds:
            raise StallError(
                f"all ranks must {what} within {timeout_seconds:g} s: {missing()}; look there, or "
                f"raise Exchange.timeout_seconds"
            )
    if kind is not None:
        trace.record(kind, start)
    return time.perf_counter() - start
