"""What an optimizer counts about its communication, on one rank."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NotRequired, TypedDict

from daso import trace
from daso.comm.step_timer import StepTimer
from daso.plan.schedule import State

__all__ = ["History", "Metrics", "Report", "Slowest"]

# What a checkpoint keeps: votes on too many drops, and totals.
KEPT = (
    "epoch",
    "exchanges",
    "small_exchanges",
    "dropped",
    "drops_lately",
    "good_in_a_row",
    "global_bytes_sent",
    "exposed_seconds",
    "exchange_seconds",
    "scales_apart",
)


class Report(TypedDict):
    """What `optimizer.report()` tells; `docs/reference/report.md` says what each key means."""

    # Of the world; left out before it is known.
    mpi: NotRequired[str]
    world: NotRequired[int]
    nodes: NotRequired[int]
    node_sizes: NotRequired[list[int]]
    lanes: NotRequired[int]
    node_transport: NotRequired[str]
    # What was chosen.
    policy: str
    wire: str
    merge: str | float
    outer: bool
    fragments: int
    gpu_direct: bool
    algorithm: str
    gradient_reducer: str
    step: str
    # What was chosen while training, where there is something to exchange.
    allreduce: NotRequired[str]
    gradient_wire: NotRequired[str]
    step_restoration: NotRequired[str]
    small_tensors: NotRequired[str]
    kernels: NotRequired[str]
    bucket_bytes: NotRequired[int]
    # Where training is.
    batches: int
    in_flight: bool
    skip_history: list[tuple[int, int, int]]
    small_history: list[tuple[int, int]]
    wide_history: list[tuple[int, bool]]
    skip_because: str
    gain: float
    measurements: dict[str, Any]
    # What happened, on this rank.
    exchanges: int
    small_exchanges: int
    dropped: int
    global_bytes_sent: int
    exposed_seconds: float
    slowest: dict[str, Any] | None
    events: list[dict[str, Any]]


@dataclass(slots=True)
class History:
    """What the schedule chose: the first choice, and each change with the batch it came after."""

    skip: list[tuple[int, int, int]]  # batch, skip, wait
    small: list[tuple[int, int]]  # batch, batches from one exchange of small tensors to the next
    wide: list[tuple[int, bool]]  # batch, whether gradients cross in 8 bits

    @classmethod
    def of(cls, state: State) -> "History":
        """Return that of a run in which this is chosen."""
        return cls([(0, state.skip, state.wait)], [(0, state.small.period)], [(0, state.sync.wide)])

    def take(self, before: State, now: State) -> None:
        """Add what is chosen now, where that is another."""
        if (now.skip, now.wait) != (before.skip, before.wait):
            self.skip.append((now.batch, now.skip, now.wait))
        if now.small.period != before.small.period:
            self.small.append((now.batch, now.small.period))
        if now.sync.wide != before.sync.wide:
            self.wide.append((now.batch, now.sync.wide))

    def state(self) -> dict[str, list[list[int]]]:
        """Return it as plain values."""
        return {name: [list(entry) for entry in entries] for name, entries in asdict(self).items()}

    @classmethod
    def load(cls, values: Mapping[str, Sequence[Sequence[int]]]) -> "History":
        """Return that whose `state` these are."""
        entries = ([tuple(entry) for entry in values[one.name]] for one in fields(cls))
        return cls(*entries)  # type: ignore[arg-type]  # of as many numbers as `state` had


@dataclass(frozen=True, slots=True)
class Slowest:
    """The rank with the longest steps, without waits for other nodes."""

    host: str
    rank: int
    step_seconds: float
    fastest_seconds: float  # of a step of the fastest rank


@dataclass(slots=True)
class Metrics:
    """What happened since the start, on this rank."""

    epoch: int = 0  # epochs finished
    exchanges: int = 0  # merged, and synchronous batches
    small_exchanges: int = 0  # of small tensors alone
    sent: int = 0  # exchanges of parameters, for recordings: the same on every rank
    dropped: int = 0  # exchanges or steps dropped for values that are not finite
    drops_lately: int = 0  # without two good exchanges in a row between them
    good_in_a_row: int = 0
    global_bytes_sent: int = 0  # to other nodes, by this rank
    # Steps, and standing still for others, but for what the node itself counts.
    watch: StepTimer = field(default_factory=StepTimer)
    exposed_before: float = 0.0  # seconds, in nodes that were closed and runs that were resumed
    exchange_seconds: float = 0.0  # the last exchange, from when what crosses was there to its end
    stepped_at: float = field(default_factory=time.perf_counter)  # by the host
    scales_apart: bool = False  # nodes stepped with GradScalers of their own
    slowest: Slowest | None = None  # when nodes met last
    # The last exchanges, drops and joins; bounded, so that a long run does not grow.
    events: deque[dict[str, object]] = field(default_factory=lambda: deque(maxlen=10_000))

    def step(self) -> None:
        """A step was taken."""
        self.stepped_at = time.perf_counter()
        self.watch.step()

    @property
    def exposed_seconds(self) -> float:
        """Seconds this rank computed nothing since it waited for others."""
        return self.exposed_before + sum(
            map(self.watch.idle_seconds, (trace.WAIT_INTER_NODE, trace.WAIT_INTRA_NODE))
        )

    @exposed_seconds.setter
    def exposed_seconds(self, seconds: float) -> None:
        self.exposed_before += seconds - self.exposed_seconds

    def send(self) -> int:
        """An exchange of parameters is sent; return its number, the same on every rank."""
        self.sent += 1
        return self.sent

    def good(self) -> None:
        """An exchange was merged, or a synchronous step taken."""
        self.exchanges += 1
        self.good_in_a_row += 1
        # One good exchange may only show that the one before it was dropped and mended.
        if self.good_in_a_row > 1:
            self.drops_lately = 0

    def drop(self) -> int:
        """An exchange or a step was dropped; return how many were lately."""
        self.dropped += 1
        self.drops_lately += 1
        self.good_in_a_row = 0
        return self.drops_lately

    def state(self) -> dict[str, float]:
        """Return what decides what happens next, and the totals."""
        return {name: getattr(self, name) for name in KEPT}

    def load(self, state: Mapping[str, float]) -> None:
        """Take over what `state` returned."""
        for name in KEPT:
            setattr(self, name, state[name])

    def event(self, kind: str, **what: object) -> None:
        """Remember an event."""
        self.events.append({"kind": kind, "epoch": self.epoch, **what})
