"""Decision core of exchanges: the wire, the merge, and what nodes learn from each exchange.

Pure. The trainer, the simulated nodes and the predictor make the same calls, with seconds that are
measured, given or simulated. So equal measurements give equal skip, wait and wire in all three.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from daso.plan.header import Tally
from daso.plan.merge import Merge, keeps_local, merge_rule
from daso.plan.options import BITS, NARROW, NARROWEST, Settings
from daso.plan.schedule import Measurements
from daso.plan.step_restoration import required_gain

__all__ = ["ExchangeRules", "ExchangeState", "Sent", "next_wire"]

BATCHES = 0.95  # that an exchange on int4 may take: with the margin of `Auto`, a wait of 1
RETURN = 0.8  # of these, below which int2 goes back to int4
MIN_NUMEL = 1 << 16  # numbers; below, latency decides how long an exchange takes, not its bytes


@dataclass(frozen=True, slots=True)
class ExchangeState:
    """Knowledge that nodes keep from one exchange to the next; the same on every rank."""

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
        since = min(state.sent_at[one] for one in self._fragments(fragment))
        keeps = wait > 0 and self.keeps(state, wait=wait)
        return Sent(batch, batch - since, fragment, keeps, state.wire)

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
            agreed: Numbers that rode with it: its seconds are those of the exchange before.
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
            sent.batch if one in fragments else at for one, at in enumerate(state.sent_at)
        )
        numel = sum(self.numels[one] for one in fragments)
        learned = ExchangeState(
            *(sent_at, wire, sent.batches, agreed.drift, agreed.step_seconds, sent.wire, numel)
        )
        return learned, measurements

    def drop(self, state: ExchangeState) -> ExchangeState:
        """Return the state after an exchange that was dropped: its seconds say nothing."""
        return replace(state, timed_wire="")

    def _fragments(self, fragment: int | None) -> Sequence[int]:
        return range(len(self.numels)) if fragment is None else [fragment]

    def _model_over_timed(self, state: ExchangeState) -> float:
        """Return the model's size over that of the last exchange; 0 where that says nothing.

        Small fragments take their time for other reasons, and all together take longer than any.
        """
        numel, largest = state.timed_numel, max(self.numels)
        return sum(self.numels) / numel if 0 < largest / 2 <= numel <= largest else 0.0

    def _gradient_seconds(self, exchange_seconds: float, wire: str) -> float:
        """Return the estimated seconds of averaging gradients between nodes; 0: unknown."""
        if not wire or not self.settings.may_hide:
            return 0.0
        return exchange_seconds * BITS[self.settings.gradient_wire(hidden=True)] / BITS[wire]


def next_wire(
    now: str, measurements: Measurements, *, timed: str, choices: Sequence[str], numel: int
) -> str:
    """Return the wire of the next exchange.

    With an optimizer that normalizes, each batch by which a mean is late costs accuracy, and the
    bits of a delta cost next to none: what is rounded away stays in the node's own parameters. So
    int2 takes the place of int4 where int4 takes more than a batch.

    Args:
        now: Wire of the last exchange.
        measurements: Agreed on by all ranks.
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
