"""Counters of an optimizer's communication, on one rank."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NotRequired, TypedDict

from daso import trace
from daso.comm.step_timer import StepTimer
from daso.plan.exchange import Recent
from daso.plan.schedule import State

# Totals that a checkpoint keeps, and the names that it gives to the facts of `Recent`.
TOTALS = (
    "epoch",
    "exchanges",
    "small_exchanges",
    "dropped",
    "global_bytes_sent",
    "exposed_seconds",
)
RECENT = {
    "drops_lately": "drops",
    "good_in_a_row": "good_in_a_row",
    "exchange_seconds": "exchange_seconds",
    "scales_apart": "scales_apart",
}


class Report(TypedDict):
    """Keys of `optimizer.report()`; see `docs/reference/report.md`."""

    # The world; omitted until it is known.
    mpi: NotRequired[str]
    world: NotRequired[int]
    nodes: NotRequired[int]
    node_sizes: NotRequired[list[int]]
    lanes: NotRequired[int]
    node_transport: NotRequired[str]
    # Choices by the keywords.
    policy: str
    wire: str
    merge: str | float
    outer: bool
    fragments: int
    gpu_direct: bool
    algorithm: str
    gradient_reducer: str
    step: str
    # Choices in training, if anything is exchanged.
    allreduce: NotRequired[str]
    gradient_wire: NotRequired[str]
    step_restoration: NotRequired[str]
    small_tensors: NotRequired[str]
    kernels: NotRequired[str]
    bucket_bytes: NotRequired[int]
    # Progress.
    batches: int
    in_flight: bool
    skip_history: list[tuple[int, int, int]]
    small_history: list[tuple[int, int]]
    wide_history: list[tuple[int, bool]]
    skip_because: str
    gain: float
    measurements: dict[str, Any]
    # Counters and events of this rank.
    exchanges: int
    small_exchanges: int
    dropped: int
    global_bytes_sent: int
    exposed_seconds: float
    slowest: dict[str, Any] | None
    events: list[dict[str, Any]]


@dataclass(slots=True)
class History:
    """Choices of the schedule: the first, and each change with the batch that it followed."""

    skip: list[tuple[int, int, int]]  # batch, skip, wait
    small: list[tuple[int, int]]  # batch, batches from one exchange of small tensors to the next
    wide: list[tuple[int, bool]]  # batch, whether gradients cross in 8 bits

    @classmethod
    def of(cls, state: State) -> "History":
        """Return the history of a run that starts in ``state``."""
        return cls([(0, state.skip, state.wait)], [(0, state.small.period)], [(0, state.sync.wide)])

    def take(self, before: State, now: State) -> None:
        """Add the current choices if they changed."""
        if (now.skip, now.wait) != (before.skip, before.wait):
            self.skip.append((now.batch, now.skip, now.wait))
        if now.small.period != before.small.period:
            self.small.append((now.batch, now.small.period))
        if now.sync.wide != before.sync.wide:
            self.wide.append((now.batch, now.sync.wide))

    def state(self) -> dict[str, list[list[int]]]:
        """Return the history as plain values."""
        return {name: [list(entry) for entry in entries] for name, entries in asdict(self).items()}

    @classmethod
    def load(cls, values: Mapping[str, Sequence[Sequence[int]]]) -> "History":
        """Return the history that `state` returned as these values."""
        entries = ([tuple(entry) for entry in values[choice.name]] for choice in fields(cls))
        return cls(*entries)  # type: ignore[arg-type]  # of as many numbers as `state` had


@dataclass(frozen=True, slots=True)
class Slowest:
    """Rank with the longest steps, excluding waits for other nodes."""

    host: str
    rank: int
    step_seconds: float
    fastest_seconds: float  # of a step of the fastest rank


@dataclass(slots=True)
class Metrics:
    """Counters since the start, on this rank."""

    epoch: int = 0  # epochs finished
    exchanges: int = 0  # merged, and synchronous batches
    small_exchanges: int = 0  # of small tensors alone
    sent: int = 0  # exchanges of parameters, for recordings: the same on every rank
    dropped: int = 0  # exchanges or steps dropped for values that are not finite
    recent: Recent = field(default_factory=Recent)
    global_bytes_sent: int = 0  # to other nodes, by this rank
    # Durations of steps, and waits for other ranks that the node does not count itself.
    watch: StepTimer = field(default_factory=StepTimer)
    exposed_before: float = 0.0  # seconds, in closed nodes and before a resume
    stepped_at: float = field(default_factory=time.perf_counter)  # by the host
    slowest: Slowest | None = None  # at the last meeting of nodes
    # The last exchanges, drops and joins; bounded, so that a long run does not grow.
    events: deque[dict[str, object]] = field(default_factory=lambda: deque(maxlen=10_000))

    def step(self, batch: int) -> None:
        """Count the step of a batch."""
        begun = self.stepped_at
        self.pass_step()
        trace.record(trace.STEP, begun, key=batch)

    def pass_step(self) -> None:
        """Count a step that is not recorded."""
        self.stepped_at = time.perf_counter()
        self.watch.step()

    def begin_epoch(self, epoch: int) -> None:
        """Attribute later events to an epoch."""
        self.epoch = epoch

    def close_node(self, idle_seconds: float) -> None:
        """Add the idle seconds of a node that is closed."""
        self.exposed_before += idle_seconds

    @property
    def exposed_seconds(self) -> float:
        """Seconds that this rank was idle because it waited for other ranks."""
        return self.exposed_before + sum(
            map(self.watch.idle_seconds, (trace.WAIT_INTER_NODE, trace.WAIT_INTRA_NODE))
        )

    @exposed_seconds.setter
    def exposed_seconds(self, seconds: float) -> None:
        self.exposed_before += seconds - self.exposed_seconds

    def send(self) -> int:
        """Count an exchange of parameters; return its number, the same on every rank."""
        self.sent += 1
        return self.sent

    def good(self) -> None:
        """Count an exchange that was merged, or a synchronous step."""
        self.exchanges += 1
        self.recent = self.recent.after_good()

    def drop(self) -> Recent:
        """Count a dropped exchange or step; return the updated `Recent`."""
        self.dropped += 1
        self.recent = self.recent.after_drop()
        return self.recent

    def note(self, **facts: Any) -> None:
        """Replace values of the last exchange or step."""
        self.recent = replace(self.recent, **facts)

    def state(self) -> dict[str, float]:
        """Return the totals, and the recent values that later decisions use."""
        facts = {key: getattr(self.recent, name) for key, name in RECENT.items()}
        return {name: getattr(self, name) for name in TOTALS} | facts

    def load(self, state: Mapping[str, float]) -> None:
        """Load what `state` returned."""
        for name in TOTALS:
            setattr(self, name, state[name])
        self.note(**{name: state[key] for key, name in RECENT.items()})

    def event(self, kind: str, **what: object) -> None:
        """Record an event."""
        self.events.append({"kind": kind, "epoch": self.epoch, **what})
