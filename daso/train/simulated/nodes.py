"""Simulation of many nodes of one rank each in one process, with the code of a real run.

Schedule, shards, codecs and merges are the real ones, so a laptop shows the accuracy that a
schedule, a wire or a merge costs on 16 nodes. Nothing is sent; the caller sets all times. The bits
are those of a real run with one rank per node and the same `daso.Exchange`, for every wire, unless
the all-reduce plan follows measured links: with ``algorithm="planned"``, and with ``"auto"`` from
17 nodes on, which is planned here for typical costs. Values are not checked for NaN or infinity.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from daso.comm.reduction import accumulator
from daso.kernels.codecs import codec_named
from daso.plan.exchange import ExchangeRules, Sent, Tally
from daso.plan.header import largest_rate
from daso.plan.layout import fragments
from daso.plan.options import Settings
from daso.plan.schedule import (
    Action,
    Measurements,
    Policy,
    State,
    after_batch,
    after_epoch,
    after_exchange,
    begin,
    drain,
)
from daso.plan.small_tensors import SMALL_WAIT
from daso.train.deltas.outer import MakeOuter
from daso.train.deltas.shard import MergeOptions
from daso.train.inner.step_restoration import make_restorations
from daso.train.model.params import Trained
from daso.train.simulated.gradients import SimulatedGradients
from daso.train.simulated.rows import Row

MANY = 1 << 20  # numbers
Loss = Callable[[torch.nn.Module], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Times:
    """Times of the simulated machine, or of the run that is replayed."""

    step_seconds: float = 1.0
    # Of an exchange on the first wire that the settings allow; with fragments, of one fragment.
    exchange_seconds: float = 1.0
    own_seconds: float = 0.0  # of a core that training could use, for such an exchange
    on_devices: bool = False  # rows are cut as on devices, which changes blocks of int8 and int4
    exposed_seconds: float = 0.0  # of a synchronous step, in which a node waits
    small_seconds: float = 0.0  # that an exchange of small tensors takes from training


@dataclass(frozen=True, slots=True)
class InFlight:
    """An exchange in flight; its result is computed already, and held until it is due."""

    sent: Sent
    agreed: Measurements
    small: bool = False  # it carries small tensors alone


@dataclass(frozen=True, slots=True)
class LastExchange:
    """Measurements of the last exchange, which travel with the next one."""

    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    own_seconds: float = 0.0
    small_sent: bool = False  # small tensors alone, since everything was


class SimulatedNodes:
    """Trains one replica of a model for each node, in turn, and exchanges between them.

    Args:
        build: Makes the model, the same in every call.
        make_inner: Makes the inner optimizer of a model.
        nodes: Number of nodes.
        policy: Chooses skip and wait.
        settings: Settings of exchanges.
        outer: Makes an optimizer for the reference.
        times: Times of the machine, which the policy measures.
        wires: Wire of each exchange by the batch after which it was sent, as in the ``events`` of a
            run that is replayed; None: chosen by ``times`` where the settings leave it open.
    """

    def __init__(
        self,
        build: Callable[[], torch.nn.Module],
        make_inner: Callable[[torch.nn.Module], torch.optim.Optimizer],
        nodes: int,
        *,
        policy: Policy,
        settings: Settings,
        outer: MakeOuter | None = None,
        times: Times | None = None,
        wires: Mapping[int, str] | None = None,
    ) -> None:
        self.models = [build() for _ in range(nodes)]
        self.inners = [make_inner(model) for model in self.models]
        self.policy, self.settings, self.times = policy, settings, times or Times()
        self._wires = wires or {}
        options = MergeOptions(settings.eager, 1 / nodes, outer)
        pairs = zip(self.inners, self.models, strict=True)
        self.named = [Trained.by(inner, model).named for inner, model in pairs]
        self.step_restorations = [
            make_restorations(inner, settings, warns=False).always for inner in self.inners
        ]
        restoration = self.step_restorations[0]
        self.rows = [
            self._rows(cut, options, may_select=restoration is None) for cut in self._cuts()
        ]
        self.state = begin(
            policy,
            replace(policy.start(), fragments=len(self.rows), sparse=settings.sparse),
            nodes=nodes,
            memory=0.0 if restoration is None else restoration.memory,
            may_hide=restoration is not None and settings.may_hide,
            small_share=self._small_share(),
            numel=sum(tensor.numel() for _, tensor in self.named[0]),
        )
        self.global_bytes_sent = 0  # by all nodes
        self.events: list[dict[str, Any]] = []
        self._flight: InFlight | None = None
        momentum = None if restoration is None else restoration.momentum
        self.rules = ExchangeRules(settings, nodes, tuple(self._numels), momentum)
        self._exchanged, self._last, self._size = self.rules.start(), LastExchange(), 1.0
        wire = settings.hidden_wire
        self._compressed = SimulatedGradients(self.named, wire, settings)
        if not self.state.synchronous:
            self._anchor(0)

    def _cuts(self) -> Sequence[Sequence[int]]:
        return fragments([p.numel() for _, p in self.named[0]], self.settings.exchange.fragments)

    @property
    def _small_rows(self) -> list[Row]:
        return [row for rows in self.rows for row in rows if row.is_small]

    @property
    def _numels(self) -> list[int]:
        """Numbers of each fragment."""
        return [sum(row.parts[0].published.numel() for row in rows) for rows in self.rows]

    def _small_share(self) -> float:
        numels = {small: 0 for small in (False, True)}
        for row in (row for rows in self.rows for row in rows):
            numels[row.is_small] += row.parts[0].published.numel()
        return self.settings.small_share(numels[True], sum(numels.values()))

    def _rows(self, cut: Sequence[int], options: MergeOptions, *, may_select: bool) -> list[Row]:
        tensors = [tensor for _, tensor in self.named[0]]
        numels = [tensor.numel() for tensor in tensors]
        small = set(self.settings.small_tensors(numels)) if may_select else set()
        kinds = {at: (at in small, accumulator(tensors[at].dtype)) for at in cut}
        return [
            Row(
                [[named[at] for at in cut if kinds[at] == kind] for named in self.named],
                kind[1],
                options,
                self.settings,
                on_devices=self.times.on_devices,
                is_small=kind[0],
            )
            for kind in sorted(set(kinds.values()), key=lambda kind: (kind[0], kind[1].itemsize))
        ]

    # --- training ----------------------------------------------------------------------------

    def step(self, losses: Sequence[Loss]) -> float:
        """Take one step on every node."""
        total = 0.0
        for model, inner, loss_of in zip(self.models, self.inners, losses, strict=True):
            inner.zero_grad()
            loss = loss_of(model)
            loss.backward()
            total += float(loss.detach())
        if self.state.synchronous:
            self._average_gradients()
        else:
            self._compressed.forget()
        for inner, restoration in zip(self.inners, self.step_restorations, strict=True):
            with restoration.scaled(self.state.step_gain) if restoration else nullcontext():
                inner.step()
        self._act(*after_batch(self.policy, self.state))
        return total / len(self.models)

    def end_epoch(self, loss: float) -> None:
        """End an epoch of the schedule; all nodes agree afterwards."""
        self._act(*after_epoch(self.policy, self.state, loss))

    def synchronize(self) -> None:
        """Finish the exchange in flight; make parameters and floating buffers equal."""
        self._act(*drain(self.state))
        _average([list(model.buffers()) for model in self.models])

    def _average_gradients(self) -> None:
        """Replace gradients by their mean over nodes, added in node order."""
        state = self.state
        wire = self.settings.gradient_wire(hidden=state.hidden, wide=state.sync.wide)
        if wire != "fp32":
            self._compressed.change(wire)
            self.global_bytes_sent += self._compressed.average()
            return
        count = len(self.named)
        for index in range(len(self.named[0])):
            tensors = [named[index][1] for named in self.named]
            grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
            if grads:
                wide = accumulator(grads[0].dtype)
                total = grads[0].to(wide, copy=True)
                for grad in grads[1:]:
                    total += grad
                for tensor in tensors:
                    tensor.grad = (total / count).to(tensor.dtype)
                self.global_bytes_sent += 2 * (count - 1) * total.nbytes

    def _act(self, acts: Sequence[Action], state: State) -> None:
        measurements = None
        for act in acts:
            measurements = self._carry_out(act, state) or measurements
        self.state = state
        if measurements is not None:
            acts, state = after_exchange(self.policy, state, measurements)
            for act in acts:
                self._carry_out(act, state)
            self.state = state

    def _carry_out(self, act: Action, state: State) -> Measurements | None:
        if act is Action.ANCHOR:
            self._anchor(state.batch)
        elif act is Action.SEND:
            self._send(state.batch, state.fragment, wait=state.sent_wait)
        elif act is Action.SEND_ALL:
            self._send(state.batch, None, wait=0)
        elif act is Action.SEND_SMALL:
            self._send_small(state.batch)
        elif act in (Action.RECEIVE, Action.SETTLE):
            return self._receive(state.batch, settles=act is Action.SETTLE)
        elif act is Action.MEASURE:
            return self._measure()
        elif act is Action.JOIN:
            _average([list(_state_tensors(inner)) for inner in self.inners])
        return None

    def _measure(self) -> Measurements:
        """Return the agreed measurements of synchronous steps."""
        groups = [group for inner in self.inners for group in inner.param_groups]
        times, lr = self.times, largest_rate(groups)
        return Measurements(times.step_seconds, lr=lr, exposed_seconds=times.exposed_seconds)

    # --- exchanges ---------------------------------------------------------------------------

    def _anchor(self, batch: int) -> None:
        self._size = sum(row.anchor() for rows in self.rows for row in rows) or 1.0
        self._exchanged = self.rules.start(batch, self._exchanged)
        self._last = replace(self._last, tally=Tally())

    def _rows_of(self, fragment: int | None) -> list[Row]:
        return (
            [row for rows in self.rows for row in rows] if fragment is None else self.rows[fragment]
        )

    def _send(self, batch: int, fragment: int | None, *, wait: int) -> None:
        last, times = self._last, self.times
        sent = self.rules.send(self._exchanged, batch, fragment, wait=wait)
        sent = replace(sent, wire=self._wires.get(batch) or sent.wire)
        measured = [[0.0, 0.0, 0.0] for _ in self.models]
        ahead = self.settings.eager and wait > 0
        for row in self._rows_of(fragment):
            nbytes, sums = row.send(
                sent.wire, dense=fragment is None, ahead=ahead, keeps=sent.keeps
            )
            self.global_bytes_sent += nbytes
            if row.is_small:  # also exchanged alone: their distance would bias the choice of skip
                continue
            measured = [
                [a + b for a, b in zip(*pair, strict=True)]
                for pair in zip(measured, sums, strict=True)
            ]
        groups = [group for inner in self.inners for group in inner.param_groups]
        agreed = Measurements(
            step_seconds=times.step_seconds,
            exchange_seconds=last.seconds,
            lr=largest_rate(groups),
            own_seconds=last.own_seconds,
            small_seconds=times.small_seconds if last.small_sent else 0.0,
        )
        drift, gain, _ = self.rules.statistics(self._exchanged, last.tally)
        self._flight = InFlight(sent, replace(agreed, drift=drift, required_gain=gain))
        shares = (Tally.measured(a, b, c, self._size) for a, b, c in measured)
        parts = len(self.rows) if fragment is None else 1
        self._last = LastExchange(
            sum(shares, Tally()), parts * self._seconds(sent.wire), parts * times.own_seconds
        )

    def _seconds(self, wire: str) -> float:
        """Return the seconds of an exchange of one fragment on a wire."""
        first = self.settings.wires[0]
        return self.times.exchange_seconds * _many_bytes(wire) / _many_bytes(first)

    def _send_small(self, batch: int) -> None:
        wire, keeps = self.settings.wires[0], self.rules.keeps(self._exchanged, wait=SMALL_WAIT)
        for row in self._small_rows:
            nbytes, _ = row.send(wire, dense=False, ahead=False, keeps=keeps)
            self.global_bytes_sent += nbytes
        self._flight = InFlight(Sent(batch, 0, 0, keeps, wire), Measurements(), small=True)
        self._last = replace(self._last, small_sent=True)

    def _receive(self, batch: int, *, settles: bool) -> Measurements | None:
        flight, self._flight = self._flight, None
        assert flight is not None, "the schedule receives only what was sent"
        sent = flight.sent
        rule = self.rules.merge(waited=batch - sent.batch, keeps=sent.keeps, settles=settles)
        rows = self._small_rows if flight.small else self._rows_of(sent.fragment)
        measurements = None
        if not flight.small:
            self._exchanged, measurements = self.rules.learn(self._exchanged, sent, flight.agreed)
            facts = {"sent": sent.batch, "received": batch, "wire": sent.wire}
            self.events.append(facts | asdict(measurements))
        for row in rows:
            row.merge(rule)
        return measurements


def _many_bytes(wire: str) -> int:
    """Return the bytes of many numbers on a wire."""
    return codec_named(wire).nbytes(MANY)


def _state_tensors(inner: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in inner.param_groups:
        for param in group["params"]:
            state = inner.state.get(param, {})
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


@torch.no_grad()
def _average(nodes: Sequence[Sequence[torch.Tensor]]) -> None:
    """Set floating tensors to their mean over nodes, added as differences from the first."""
    for tensors in zip(*nodes, strict=True):
        if tensors[0].is_floating_point():
            first = tensors[0].to(accumulator(tensors[0].dtype), copy=True)
            total = torch.zeros_like(first)
            for tensor in tensors:
                total += tensor - first
            total = total.div_(len(tensors)).add_(first)
            for tensor in tensors:
                tensor.copy_(total)
