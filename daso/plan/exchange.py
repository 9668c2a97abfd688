"""Decisions about exchanges: the wire, the merge, and the state after each exchange.

Pure functions. The trainer, the simulated nodes and the predictor make the same calls, with
measured, given or simulated seconds. So equal measurements give equal skip, wait and wire in all
three.

A merge is how a node takes in a mean that is some batches old. With x the local parameters now, s
the local parameters when the exchange was sent, g the new reference (the mean over all nodes, or
the result of an outer optimizer), W the batches waited and P the nodes:

- ``daso``: x <- (2 W x + P g) / (2 W + P), worked out as x + (g - x) P / (2 W + P), which leaves x
  alone where it equals g (Coquelin et al. 2022, doi 10.1186/s40537-021-00556-1).
- ``delta``: x <- x + (g - s), so the local work since the send is kept whole; more exactly,
  x <- x + (mean - own) of the payloads, so rounding errors stay in x until they are sent.
- ``eager``: when the exchange is sent, the node goes at once to e, where it would stand if its own
  part of the mean were new and the other nodes' as in the exchange before; when the mean is there,
  x <- x + (g - e). With an outer optimizer, e is one step of it (eager updates, Kale et al. 2025,
  arXiv 2502.12996).
- a number a between 0 and 1: x <- a x + (1 - a) g (the mixing of Streaming DiLoCo, Douillard et al.
  2025, arXiv 2501.18512).
- ``auto``: ``eager`` with an outer optimizer; else, decided when the exchange is sent, ``delta`` as
  long as the drift that nodes make while they wait is small, because it loses no work, and ``daso``
  above, because it pulls nodes together where ``delta`` would diverge.
- After waiting 0 batches x equals s, and every rule is x <- g, taken over bit for bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from daso.plan.options import BITS, NARROW, NARROWEST, Settings
from daso.plan.schedule import Measurements
from daso.plan.step_restoration import required_gain

BATCHES = 0.95  # that an exchange on int4 may take: with the margin of `Auto`, a wait of 1
RETURN = 0.8  # of these, below which int4 replaces int2 again
MIN_NUMEL = 1 << 16  # numbers; below, latency decides how long an exchange takes, not its bytes
DROPS_AT_MOST = 2  # without two good exchanges in a row between them
MOST_DRIFT = 0.1  # relative distance made while waiting, above which auto contracts
# Units of a tally: of sizes of parameters, and of what steps change, a few millionths of these.
SIZES, STEPS = 2.0**30, 2.0**36
CHECKSUMS = 2**32  # of messages; a sum over 2048 ranks is exact, too
MOST_SHARES = 2.0**42  # of one rank: 2048 ranks' sum is exact


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge: x <- x + pull (g - x), or with ``since_send`` x <- x + (g - s)."""

    pull: float
    since_send: bool = False


ADOPT = Merge(pull=1.0)
KEEP = Merge(pull=1.0, since_send=True)
LEAVE = Merge(pull=0.0)


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over all ranks, relative to a size that all ranks know, in whole units.

    Sums of whole numbers are exact, and the same on every rank, whatever order MPI adds in.
    """

    distance: float = 0.0  # squared, of this rank's part from the mean of all nodes; in `STEPS`
    norm: float = 0.0  # squared, of this rank's part of the reference; in `SIZES`
    moved: float = 0.0  # squared length of this rank's part of the mean delta; in `STEPS`
    unmatched: float = 0.0  # checksums of payloads, sent minus received, modulo `CHECKSUMS`

    @classmethod
    def measured(cls, distance: float, norm: float, moved: float, size: float) -> "Tally":
        """Return a rank's share."""
        return cls(
            _share(distance, size, STEPS), _share(norm, size, SIZES), _share(moved, size, STEPS)
        )

    def __add__(self, other: "Tally") -> "Tally":
        """Return the sums over the ranks of both."""
        pairs = zip(self.encode(), other.encode(), strict=True)
        return Tally(*(left + right for left, right in pairs))

    @classmethod
    def width(cls) -> int:
        """Return the number of values of a tally."""
        return len(fields(cls))

    def encode(self) -> list[float]:
        """Return the numbers in a fixed order."""
        return [self.distance, self.norm, self.moved, self.unmatched]

    @property
    def payloads_arrived(self) -> bool:
        """Whether the payloads of all ranks arrived as they were sent; for a sum over all ranks."""
        return self.unmatched % CHECKSUMS == 0

    def drift(self, *, nodes: int, batches: int) -> float:
        """Return the mean square drift of one batch, relative to the reference's norm.

        The distance of a node from the mean of all is what counts (consensus distance): of two
        nodes with the same noise its square is half of that of many nodes.
        """
        if nodes < 2 or batches < 1 or self.norm <= 0:
            return 0.0
        return max(self.distance, 0.5) * (SIZES / STEPS) / batches / self.norm


def _share(value: float, size: float, units: float) -> float:
    if not (value >= 0 and 0 < size < math.inf):  # NaN too: nothing was measured
        return 0.0
    return float(round(min(value / size * units, MOST_SHARES)))


@dataclass(frozen=True, slots=True)
class Recent:
    """Facts of the last exchanges and steps of one rank; a checkpoint keeps them.

    Args:
        drops: Dropped exchanges and steps without two good ones in a row between them.
        good_in_a_row: Good exchanges and synchronous steps since the last drop.
        exchange_seconds: Seconds of the last exchange, from when its payload was made to its end.
        scales_apart: Nodes stepped with GradScalers whose scales may differ.
    """

    drops: int = 0
    good_in_a_row: int = 0
    exchange_seconds: float = 0.0
    scales_apart: bool = False

    def after_good(self) -> "Recent":
        """Return the facts after an exchange that was merged, or a synchronous step."""
        good = self.good_in_a_row + 1
        # One good exchange may only show that the exchange before it was dropped and mended.
        return replace(self, good_in_a_row=good, drops=self.drops if good == 1 else 0)

    def after_drop(self) -> "Recent":
        """Return the facts after a drop."""
        return replace(self, drops=self.drops + 1, good_in_a_row=0)

    def without_drops(self) -> "Recent":
        """Return the facts without drops, which other ranks may have counted otherwise."""
        return replace(self, drops=0, good_in_a_row=0)

    def too_many_drops(self, *, tolerated: bool) -> bool:
        """Return whether training must end.

        Args:
            tolerated: A single drop is no error.
        """
        return self.drops > (DROPS_AT_MOST if tolerated else 0)


@dataclass(frozen=True, slots=True)
class ExchangeState:
    """State that carries over from one exchange to the next; the same on every rank."""

    sent_at: tuple[int, ...]  # batch of the last send of each fragment
    wire: str  # of the next exchange
    batches: int = 0  # of work in the last exchange
    drift: float = 0.0  # see `daso.plan.schedule.Measurements`
    step_seconds: float = 0.0
    timed_wire: str = ""  # wire of the last exchange; empty: it was dropped, or none was sent
    timed_numel: int = 0  # numbers that it carried


@dataclass(frozen=True, slots=True)
class Sent:
    """Batch, fragment, wire and merge of one exchange in flight."""

    batch: int  # batch after which it was sent
    batches: int  # of work that it carries
    fragment: int | None  # None: all of them
    keeps: bool  # the merge keeps local work
    wire: str


@dataclass(frozen=True, slots=True)
class ExchangeRules:
    """Decisions about exchanges of one model.

    Args:
        settings: The optimizer's keywords.
        nodes: Number of nodes.
        numels: Numbers of each fragment.
        momentum: Momentum of an inner optimizer whose steps are restored; None: they are not.
        linear_momentum: Momentum of one that is linear in its gradients, whose steps are restored
            where gradients are clipped; None: they are not.
    """

    settings: Settings
    nodes: int
    numels: tuple[int, ...]
    momentum: float | None = None
    linear_momentum: float | None = None

    def start(self, batch: int = 0, before: ExchangeState | None = None) -> ExchangeState:
        """Return the state where all nodes hold the same parameters, and keep the wire."""
        wire = self.settings.wires[0] if before is None else before.wire
        return ExchangeState((batch,) * len(self.numels), wire)

    def send(self, state: ExchangeState, batch: int, fragment: int | None, *, wait: int) -> Sent:
        """Return the exchange that starts after a batch."""
        since = min(state.sent_at[number] for number in self._fragments(fragment))
        keeps = wait > 0 and self.keeps(state, wait=wait)
        return Sent(batch, batch - since, fragment, keeps, state.wire)

    def send_small(self, state: ExchangeState, batch: int, *, wait: int) -> Sent:
        """Return the exchange of small tensors alone that starts after a batch."""
        return Sent(batch, 0, 0, self.keeps(state, wait=wait), self.settings.wires[0])

    def keeps(self, state: ExchangeState, *, wait: int) -> bool:
        """Return whether the merge of an exchange that starts now keeps local work."""
        settings = self.settings
        merge = "delta" if settings.sparse and settings.merge == "auto" else settings.merge
        return keeps_local(merge, wait=wait, drift=state.drift, outer=settings.outer)

    def merge(self, *, waited: int, keeps: bool, settles: bool = False) -> Merge:
        """Return how a mean is merged that is some batches old; see `merge_rule`."""
        merge = self.settings.merge
        return merge_rule(merge, waited=waited, nodes=self.nodes, keeps=keeps, settles=settles)

    def statistics(
        self, state: ExchangeState, tally: Tally, clipping: float = 0.0
    ) -> tuple[float, float, float]:
        """Return drift, required gain and clipped gain of the last exchange; 0: not measured.

        Args:
            state: Before the exchange.
            tally: Sums of the last exchange over all ranks.
            clipping: Factor by which clipping shortened steps; 0: not seen. A linear optimizer
                needs a gain of that at most.
        """
        drift = tally.drift(nodes=self.nodes, batches=state.batches)
        momentum = self.linear_momentum if clipping else self.momentum
        if momentum is None:
            return drift, 0.0, 0.0
        sums = tally.distance, tally.moved
        gain = required_gain(*sums, nodes=self.nodes, batches=state.batches, momentum=momentum)
        return (drift, 0.0, min(gain, clipping)) if clipping else (drift, gain, 0.0)

    def learn(
        self, state: ExchangeState, sent: Sent, agreed: Measurements
    ) -> tuple[ExchangeState, Measurements]:
        """Return the state and the measurements after an exchange.

        Args:
            state: Before it.
            sent: The exchange.
            agreed: Measurements that travelled with it; its seconds are the previous exchange's.
        """
        whole = self._model_over_timed(state)
        seconds = self._gradient_seconds(whole * agreed.exchange_seconds, state.timed_wire)
        measurements = replace(agreed, gradient_seconds=seconds)
        wire = sent.wire
        if state.timed_wire and whole:
            wire = next_wire(
                sent.wire,
                measurements,
                timed=state.timed_wire,
                choices=self.settings.wires,
                numel=state.timed_numel,
            )
        fragments = self._fragments(sent.fragment)
        sent_at = tuple(
            sent.batch if number in fragments else at for number, at in enumerate(state.sent_at)
        )
        numel = sum(self.numels[number] for number in fragments)
        learned = ExchangeState(
            *(sent_at, wire, sent.batches, agreed.drift, agreed.step_seconds, sent.wire, numel)
        )
        return learned, measurements

    def drop(self, state: ExchangeState) -> ExchangeState:
        """Return the state after a dropped exchange, whose seconds are not used."""
        return replace(state, timed_wire="")

    def _fragments(self, fragment: int | None) -> Sequence[int]:
        return range(len(self.numels)) if fragment is None else [fragment]

    def _model_over_timed(self, state: ExchangeState) -> float:
        """Return the model's size over that of the last exchange; 0: not comparable.

        Latency dominates small fragments, and all together take longer than any.
        """
        numel, largest = state.timed_numel, max(self.numels)
        return sum(self.numels) / numel if 0 < largest / 2 <= numel <= largest else 0.0

    def _gradient_seconds(self, exchange_seconds: float, wire: str) -> float:
        """Return the estimated seconds of averaging gradients between nodes; 0: unknown."""
        if not wire or not self.settings.may_hide:
            return 0.0
        return exchange_seconds * BITS[self.settings.hidden_wire] / BITS[wire]


def next_wire(
    now: str, measurements: Measurements, *, timed: str, choices: Sequence[str], numel: int
) -> str:
    """Return the wire of the next exchange.

    With an optimizer that normalizes, each batch of wait costs accuracy, and fewer bits cost almost
    none: the rounding error stays in the node's parameters. So int2 replaces int4 if an exchange
    on int4 takes more than a batch.

    Args:
        now: Wire of the last exchange.
        measurements: Measurements that all ranks agreed on.
        timed: Wire of the exchange that took ``measurements.exchange_seconds``.
        choices: Wires that the settings allow.
        numel: Numbers that the exchange carried.
    """
    step_seconds, seconds = measurements.step_seconds, measurements.exchange_seconds
    measured = step_seconds > 0 and seconds > 0 and numel >= MIN_NUMEL
    if not measured or not {NARROW, NARROWEST} <= set(choices):
        return now
    if not measurements.required_gain:  # not an optimizer that normalizes, or not measured yet
        return now
    batches = seconds / step_seconds * BITS[NARROW] / BITS[timed]
    most = BATCHES if now == NARROW else BATCHES * RETURN
    return NARROWEST if batches > most else NARROW


def keeps_local(merge: str | float, *, wait: int, drift: float = 0.0, outer: bool = False) -> bool:
    """Return whether the merge of an exchange that starts will keep local work whole."""
    if merge == "auto":
        return outer or math.sqrt(drift * wait) <= MOST_DRIFT
    return merge in ("delta", "eager")


def merge_rule(
    merge: str | float, *, waited: int, nodes: int, keeps: bool, settles: bool = False
) -> Merge:
    """Return the merge to carry out.

    Args:
        merge: The keyword.
        waited: Batches since the exchange was sent.
        nodes: Number of nodes.
        keeps: Whether local work since then is kept whole, as `keeps_local` said.
        settles: A blocking exchange follows: a weighted merge would only undo later work.
    """
    if waited == 0:
        return ADOPT
    if keeps:
        return KEEP
    if settles:
        return LEAVE
    if merge in ("auto", "daso"):
        return Merge(pull=nodes / (2 * waited + nodes))
    return Merge(pull=1.0 - float(merge))
