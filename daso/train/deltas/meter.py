"""Measurements of one rank that travel with exchanges: times and CPU contention.

A core that looks free for exchanges may not be: a second job, the quota of a container or the other
hyperthread may use it. The kernel counts how long a thread was ready to run without a core
(`/proc/thread-self/schedstat`, Documentation/scheduler/sched-stats.rst).
"""

import copy
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from daso.plan.exchange import Sent, Tally
from daso.plan.header import Header, slow_rank
from daso.plan.routes import has_changed
from daso.plan.schedule import Measurements
from daso.train.coordinator import Coordinator
from daso.train.model.changes import GradientScaleMeter

SCHEDSTAT = Path("/proc/thread-self/schedstat")
READ_BYTES = 64  # three numbers
SHARE = 0.25  # of the newest exchange in the mean
REMEMBERED = 20  # exchanges of one kind that decide whether a link changed
LEAST_SECONDS = 0.02  # between two exchanges, to measure the contention of others


def ready_seconds() -> float:
    """Return the seconds in which this thread was ready without a core; 0 if not counted."""
    try:
        with SCHEDSTAT.open("rb", buffering=0) as file:  # half the time of `read_text`
            return int(file.read(READ_BYTES).split()[1]) / 1e9
    except (OSError, LookupError, ValueError):
        return 0.0


class CpuContention:
    """Seconds that the training thread loses to exchanges in the background.

    Args:
        cores: ``"shared"``: exchanges and training share cores; ``"spare"``: exchanges have a core,
            and their cost is measured; ``"other"``: they cost nothing, since training runs on a
            GPU.
    """

    def __init__(self, cores: Literal["shared", "spare", "other"]) -> None:
        self._cores = cores
        self._begun: tuple[float, float] | None = None  # when; ready until then
        self._ended: tuple[float, float] | None = None
        self._others = 0.0  # share of time that a thread is ready without a core, without exchanges
        self._loss: float | None = None  # seconds an exchange, smoothed
        self._part = 1.0  # of its thread's processor time
        # At the last call of `of_steps`: time, ready seconds, the engine's processor time.
        self._stepped: tuple[float, float, float] | None = None

    def begin(self, *, during_training: bool) -> None:
        """Note that an exchange begins, during training or a wait. For the training thread."""
        self._begun = None
        if self._cores == "spare" and during_training:
            self._begun = self._learn_of_others()

    def _learn_of_others(self) -> tuple[float, float]:
        """Learn the contention between exchanges; return the time and the ready seconds so far."""
        now, ready = time.perf_counter(), ready_seconds()
        if self._ended is not None and now - self._ended[0] > LEAST_SECONDS:
            share = (ready - self._ended[1]) / (now - self._ended[0])
            # Another thread may train now, and the kernel counts each from its start.
            self._others += SHARE * (min(1.0, max(0.0, share)) - self._others)
        self._ended = None
        return now, ready

    def pause(self) -> None:
        """Note that other background work begins. For the training thread."""
        if self._cores == "spare":
            self._learn_of_others()

    def resume(self) -> None:
        """Note that this work is over. For the training thread."""
        if self._cores == "spare":
            self._ended = time.perf_counter(), ready_seconds()

    def end(self, busy_seconds: float) -> float:
        """Note that an exchange is over; return the seconds that one takes from training.

        Args:
            busy_seconds: Processor time of its thread: an upper limit.

        For the training thread.
        """
        if self._cores != "spare":
            return busy_seconds if self._cores == "shared" else 0.0
        self._ended = None
        if self._begun is not None:
            now, ready = time.perf_counter(), ready_seconds()
            # Negative if contention decreased: clamping here would add up noise.
            lost = min(busy_seconds, ready - self._begun[1] - self._others * (now - self._begun[0]))
            before = lost if self._loss is None else self._loss
            self._loss = before + SHARE * (lost - before)
            self._begun, self._ended = None, (now, ready)
        loss = max(0.0, self._loss or 0.0)
        self._part = min(1.0, loss / busy_seconds) if busy_seconds > 0 else self._part
        return loss

    def of(self, busy_seconds: float) -> float:
        """Return the seconds that an exchange with this processor time takes from training."""
        parts = {"shared": 1.0, "spare": self._part, "other": 0.0}
        return parts[self._cores] * busy_seconds

    def of_steps(self, busy_seconds: float) -> float:
        """Return the seconds that gradient averaging took from steps since the last call.

        Args:
            busy_seconds: Processor time of its thread so far.

        For the training thread.
        """
        if self._cores == "other":
            return 0.0
        ready = ready_seconds() if self._cores == "spare" else 0.0
        now = time.perf_counter(), ready, busy_seconds
        before, self._stepped = self._stepped or now, now
        passed, waited, busy = (new - old for new, old in zip(now, before, strict=True))
        if self._cores == "shared":
            return busy
        return min(busy, max(0.0, waited - self._others * passed))

    def drop(self) -> None:
        """Discard the measurement of a dropped exchange. For the training thread."""
        self._begun = self._ended = None

    def state(self) -> dict[str, float | None]:
        """Return the measurements as plain values."""
        return {"loss": self._loss, "others": self._others, "part": self._part}

    def load(self, state: Mapping[str, float | None]) -> None:
        """Load what `state` returned, and forget the exchange under way."""
        self._loss, self._others = state["loss"], state["others"] or 0.0
        self._part = 1.0 if (part := state.get("part")) is None else part
        self.drop()


def spare_cores(ranks: int, threads: int) -> bool:
    """Return whether the node has spare cores for exchanges."""
    return len(os.sched_getaffinity(0)) > ranks * threads


@dataclass(slots=True)
class LocalMeasurements:
    """Measurements of this rank that the next header carries, and times of earlier exchanges."""

    size: float = 1.0  # about the squared norm of all parameters; the same on every rank
    measured: Tally = field(default_factory=Tally)  # of the last exchange
    own_seconds: float = 0.0  # of a core that training could use, for the last exchange
    # Of each exchange of small tensors since: seconds that it took from training, and exposed ones.
    small_own_seconds: list[float] = field(default_factory=list)
    small_exposed_seconds: list[float] = field(default_factory=list)
    # Where plans follow links: seconds of the last exchanges by wire and fragment, and the kind of
    # the last one.
    lately: dict[str, list[float]] = field(default_factory=dict)
    kind: str = ""
    written: bool = False  # the program wrote parameters since nodes agreed
    # Batch of the last measurement in this phase, and seconds that steps were exposed until then.
    marked: tuple[int, float] | None = None


class ExchangeMeter:
    """Measurements of one rank, put into the headers of its exchanges.

    Args:
        coordinator: Times of steps, and the inner optimizer.
        clipping: Measures clipping; None: steps are not restored by it.
        digest: Of the layout of all rows.
    """

    def __init__(
        self, coordinator: Coordinator, clipping: GradientScaleMeter | None, digest: int
    ) -> None:
        self._inner, self._metrics = coordinator.trained.inner, coordinator.metrics
        self._rank_info, self.clipping = coordinator.topology.rank_info, clipping
        self._digest, self._message_sums = digest, coordinator.channels.message_sums
        ranks, threads = self._rank_info.local_size, torch.get_num_threads()
        cores: Literal["spare", "shared"] = "spare" if spare_cores(ranks, threads) else "shared"
        on_host = coordinator.trained.device.type == "cpu"
        self.contention = CpuContention(cores if on_host else "other")
        self.local = LocalMeasurements()

    def anchor(self, size: float) -> None:
        """Begin with parameters that are equal everywhere, with a squared norm of ``size``."""
        self.local = LocalMeasurements(size, own_seconds=self.local.own_seconds)

    def header(self, batch: int) -> Header:
        """Return the numbers that ranks check at every exchange."""
        return Header.of(self._digest, batch, self._inner.param_groups)

    def measured_header(self, batch: int) -> Header:
        """Return these numbers with the measurements since the last call."""
        values: dict[str, Any] = self._small_seconds()
        values |= {"own_seconds": self.local.own_seconds, "written": float(self.local.written)}
        if self.clipping is not None:
            values["clipping"] = self.clipping.take()
        if seconds := self._metrics.watch.take_steps():
            median, rank_info = statistics.median(seconds), self._rank_info
            values["minus_step_seconds"] = -median
            values["slowest"] = slow_rank(median, rank_info.rank, rank_info.world_size)
        if self._metrics.recent.exchange_seconds and self._rank_info.lane is not None:
            values["minus_exchange_seconds"] = -self._metrics.recent.exchange_seconds
        header = Header.of(self._digest, batch, self._inner.param_groups)
        return replace(header, **values)

    def tally(self) -> Tally:
        """Return this rank's part of the tally of the last exchange."""
        if self._message_sums is None:
            return self.local.measured
        return replace(self.local.measured, unmatched=float(self._message_sums.balance()))

    def _small_seconds(self) -> dict[str, float]:
        """Return the seconds of exchanges of small tensors since the last header."""
        local = self.local
        own, exposed = local.small_own_seconds, local.small_exposed_seconds
        local.small_own_seconds, local.small_exposed_seconds = [], []
        if not own or self._rank_info.lane is None:
            return {}
        return {
            # One slow moment is not the cost: all ranks go by the rank that loses most.
            "small_own_seconds": statistics.median(own),
            "minus_small_exposed_seconds": -statistics.fmean(exposed),
        }

    def synchronous_header(self, batch: int, busy_seconds: float) -> Header:
        """Return a header with the exposed seconds of synchronous steps since the last call.

        Args:
            batch: Batches done.
            busy_seconds: Processor time of the engine's thread so far.
        """
        exposed, header = self._metrics.watch.step_idle_seconds(), self.measured_header(batch)
        since, before = self.local.marked or (batch, 0.0)
        lost = self.contention.of_steps(busy_seconds)
        # A rank without a lane waits in its node.
        if self._rank_info.lane is not None and since < batch:
            seconds = (exposed - before + lost) / (batch - since)
            header = replace(header, minus_exposed_seconds=-seconds)
        self.local.marked = batch, exposed
        return header

    def started(self, *, during_training: bool, small: bool) -> None:
        """Note that an exchange begins, during training or while training waits."""
        if small:
            self.contention.pause()
        else:
            self.contention.begin(during_training=during_training)

    def link_changed(self, sent: Sent, agreed: Measurements) -> bool:
        """Return whether exchanges of one kind take longer or shorter than they did.

        Args:
            sent: The exchange that was merged last.
            agreed: Measurements of the exchange before it, which all ranks agreed on.
        """
        local = self.local
        kind, local.kind = local.kind, f"{sent.wire} {sent.fragment}"
        if not kind:
            return False
        local.lately[kind] = [*local.lately.get(kind, ()), agreed.exchange_seconds][-REMEMBERED:]
        if not has_changed(local.lately[kind]):
            return False
        local.lately, local.kind = {}, ""
        return True

    def merged(self, own_seconds: float, busy_seconds: float) -> None:
        """Note the cost of an exchange that was merged, in seconds of a core."""
        self.local.own_seconds = own_seconds + self.contention.end(busy_seconds)

    def merged_small(self, own: float, busy_seconds: float, exposed_seconds: float) -> None:
        """Note the cost of an exchange of small tensors that was merged."""
        own += self.contention.of(busy_seconds)
        self.contention.resume()
        self.local.small_own_seconds.append(own)
        self.local.small_exposed_seconds.append(exposed_seconds)

    # --- checkpoint --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the measurements as plain values."""
        return {
            "local": asdict(self.local),
            "core_loss": self.contention.state(),
            "gradient_scale": self.clipping and self.clipping.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        local = copy.deepcopy(state["local"])  # lists are the caller's
        fresh = {"measured": Tally(**local["measured"]), "marked": None}
        self.local = LocalMeasurements(**local | fresh)
        self.contention.load(state.get("core_loss", {"loss": None, "others": 0.0}))
        if self.clipping is not None and state.get("gradient_scale"):
            self.clipping.load(state["gradient_scale"])
