"""Many nodes of one rank each in one process, through the same schedule, parts, codecs and merges.

For statistics at a scale that is not at hand: what a schedule, a wire or a merge costs in accuracy
on 16 nodes can be seen on a laptop. Nothing is sent; time is what the caller says it is. The bits
are those of a real run with one rank per node and the same `daso.Exchange`, for every wire; but not
where the plan of means follows measured links: with ``algorithm="planned"``, and with ``"auto"``
from 17 nodes on, which is planned here by usual costs.
Values that are not finite are not looked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from daso.comm.allreduce.runners import SequentialAllReduce
from daso.comm.dtypes import accumulator
from daso.kernels.codecs import Codec, codec_named, dense_codec
from daso.kernels.rows import FlatTensors
from daso.plan.allreduce_plan import AllReducePlan
from daso.plan.cost_model import choose_plan
from daso.plan.exchange import ExchangeRules, Sent
from daso.plan.header import Tally
from daso.plan.layout import fragments
from daso.plan.merge import ADOPT, Merge
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
from daso.plan.step_restoration import rate_of
from daso.train.deltas.outer import MakeOuter
from daso.train.deltas.shard import DeltaShard, MergeOptions, cut_row
from daso.train.inner.step_restoration import make_restorations
from daso.train.model.params import Named, Trained, flat_view
from daso.train.simulated.gradients import SimulatedGradients

__all__ = ["SimulatedNodes", "Times"]

MANY = 1 << 20  # numbers
Loss = Callable[[torch.nn.Module], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Times:
    """What is known of the machine that is simulated, or whose run is replayed."""

    step_seconds: float = 1.0
    # Of an exchange, on the first wire that the settings allow; where parts take turns, of one.
    exchange_seconds: float = 1.0
    own_seconds: float = 0.0  # of a core that training wanted, for such an exchange
    on_devices: bool = False  # rows are cut as on devices: what blocks of int8 and int4 are
    exposed_seconds: float = 0.0  # of a synchronous step, in which a node stands still
    small_seconds: float = 0.0  # that an exchange of small tensors takes from training


@dataclass(frozen=True, slots=True)
class InFlight:
    """An exchange in flight; its numbers are computed, and kept until they are due."""

    sent: Sent
    agreed: Measurements
    small: bool = False  # it carries small tensors alone


@dataclass(frozen=True, slots=True)
class Told:
    """Measurements of the last exchange, that ride with the next one."""

    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    own_seconds: float = 0.0
    small_sent: bool = False  # small tensors alone, since everything was


class Row:
    """One row of one fragment on all nodes.

    Args:
        named: Names and parameters, for each node.
        dtype: fp32 or fp64.
        way: How exchanges are taken in.
        settings: How to exchange.
        on_devices: See `Times`.
        is_small: It has the small tensors of the model.
    """

    def __init__(
        self,
        named: Sequence[Named],
        dtype: torch.dtype,
        way: MergeOptions,
        settings: Settings,
        *,
        on_devices: bool,
        is_small: bool,
    ) -> None:
        self.named, self.dtype, nodes = named, dtype, len(named)
        self.is_small = is_small
        numel = sum(tensor.numel() for _, tensor in named[0])
        self.parts = [DeltaShard(torch.zeros(numel, dtype=dtype, device="cpu"), way) for _ in named]
        self.rounded: list[dict[int, torch.Tensor]] = [{} for _ in named]  # by each node
        wires = settings.wires
        codecs = {wire: codec_named(wire, dtype) for wire in wires}
        codec = codecs[wires[0]]
        plan = choose_plan(settings.exchange.algorithm, nodes, codec.nbytes(numel))
        self.wired = {wire: self._mean(one, plan) for wire, one in codecs.items()}
        self.dense = self.wired[wires[0]]
        if settings.sparse:
            self.dense = self._mean(dense_codec(wires[0], dtype), plan)
        self.chunks = cut_row(
            plan, codec, numel, settings.exchange.chunk_bytes, on_device=on_devices
        )
        self.spans = [span for parts in self.chunks for span in parts]

    def _mean(self, codec: Codec, plan: AllReducePlan) -> SequentialAllReduce:
        nodes = len(self.named)
        return SequentialAllReduce(codec, [1] * nodes, nodes, plan, self.rounded)

    def anchor(self) -> float:
        """Take the parameters, equal on all nodes, as the reference; return its squared norm."""
        for node, part in enumerate(self.parts):
            part.kernels.gather(self._values(node), 0, part.reference.numel(), part.reference)
            part.anchor()
        for rounded in self.rounded:
            rounded.clear()
        return float(self.parts[0].reference.double().square().sum())

    def send(
        self, wire: str, *, dense: bool, ahead: bool, keeps: bool
    ) -> tuple[int, list[tuple[float, float, float]]]:
        """Exchange deltas; return all nodes' bytes, and what each node's `DeltaShard` measured."""
        means = self.dense if dense and len(self.wired) == 1 else self.wired[wire]
        for node, part in enumerate(self.parts):
            values = self._values(node)
            part.encode(means.codec, self.spans, values, keeps=keeps)
            if ahead:
                part.go_ahead(values)
                part.kernels.merge(values, part.shown, ADOPT.pull)
        nbytes = means.run(self.parts, self.chunks)
        return nbytes, [part.measured(part.finish().tolist()) for part in self.parts]

    def _values(self, node: int) -> FlatTensors:
        """Return the parameters of a node."""
        return FlatTensors([flat_view(tensor) for _, tensor in self.named[node]])

    def merge(self, rule: Merge) -> None:
        """Take in the new reference."""
        for node, part in enumerate(self.parts):
            if rule == ADOPT:
                part.settle(self._values(node))
            part.show(rule)
            part.kernels.merge(self._values(node), part.shown, rule.pull, add=rule.since_send)


class SimulatedNodes:
    """Trains one replica of a model for each node, in turn, and exchanges between them.

    Args:
        build: Makes the model; every call gives the same.
        make_inner: Makes the inner optimizer of a model.
        nodes: How many.
        policy: Chooses skip and wait.
        settings: How to exchange.
        outer: Makes an optimizer for the reference.
        times: What is known of the machine; the policy sees it.
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
        way = MergeOptions(settings.eager, 1 / nodes, outer)
        pairs = zip(self.inners, self.models, strict=True)
        self.named = [Trained.by(inner, model).named for inner, model in pairs]
        self.step_restorations = [
            make_restorations(inner, settings, says=False).always for inner in self.inners
        ]
        restoration = self.step_restorations[0]
        self.rows = [self._rows(cut, way, may_select=restoration is None) for cut in self._cuts()]
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
        self._exchanged, self._told, self._size = self.rules.start(), Told(), 1.0
        wire = settings.gradient_wire(hidden=True)
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
        return [sum(row.parts[0].shown.numel() for row in one) for one in self.rows]

    def _small_share(self) -> float:
        numels = {small: 0 for small in (False, True)}
        for row in (row for rows in self.rows for row in rows):
            numels[row.is_small] += row.parts[0].shown.numel()
        return self.settings.small_share(numels[True], sum(numels.values()))

    def _rows(self, cut: Sequence[int], way: MergeOptions, *, may_select: bool) -> list[Row]:
        tensors = [tensor for _, tensor in self.named[0]]
        numels = [tensor.numel() for tensor in tensors]
        small = set(self.settings.small_tensors(numels)) if may_select else set()
        kinds = {at: (at in small, accumulator(tensors[at].dtype)) for at in cut}
        return [
            Row(
                [[one[at] for at in cut if kinds[at] == kind] for one in self.named],
                kind[1],
                way,
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
        """Tell the schedule that an epoch is over; all nodes agree afterwards."""
        self._act(*after_epoch(self.policy, self.state, loss))

    def synchronize(self) -> None:
        """Finish what is in flight; make parameters and floating buffers equal on all nodes."""
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
            tensors = [one[index][1] for one in self.named]
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
        """Return what nodes agree on about synchronous steps."""
        rates = [rate_of(group, 0.0) for inner in self.inners for group in inner.param_groups]
        times, lr = self.times, max(rates)
        return Measurements(times.step_seconds, lr=lr, exposed_seconds=times.exposed_seconds)

    # --- exchanges ---------------------------------------------------------------------------

    def _anchor(self, batch: int) -> None:
        self._size = sum(row.anchor() for rows in self.rows for row in rows) or 1.0
        self._exchanged = self.rules.start(batch, self._exchanged)
        self._told = replace(self._told, tally=Tally())

    def _rows_of(self, fragment: int | None) -> list[Row]:
        return (
            [row for rows in self.rows for row in rows] if fragment is None else self.rows[fragment]
        )

    def _send(self, batch: int, fragment: int | None, *, wait: int) -> None:
        told, times = self._told, self.times
        sent = self.rules.send(self._exchanged, batch, fragment, wait=wait)
        sent = replace(sent, wire=self._wires.get(batch) or sent.wire)
        measured = [[0.0, 0.0, 0.0] for _ in self.models]
        ahead = self.settings.eager and wait > 0
        for row in self._rows_of(fragment):
            nbytes, found = row.send(
                sent.wire, dense=fragment is None, ahead=ahead, keeps=sent.keeps
            )
            self.global_bytes_sent += nbytes
            if row.is_small:  # they went lately, and say nothing of skip
                continue
            measured = [
                [a + b for a, b in zip(*pair, strict=True)]
                for pair in zip(measured, found, strict=True)
            ]
        rates = [rate_of(group, 0.0) for inner in self.inners for group in inner.param_groups]
        agreed = Measurements(
            times.step_seconds,
            told.seconds,
            max(rates),
            *(0.0, told.own_seconds),
            small_seconds=times.small_seconds if told.small_sent else 0.0,
        )
        drift, gain, _ = self.rules.statistics(self._exchanged, told.tally)
        self._flight = InFlight(sent, replace(agreed, drift=drift, required_gain=gain))
        shares = (Tally.measured(a, b, c, self._size) for a, b, c in measured)
        parts = len(self.rows) if fragment is None else 1
        self._told = Told(
            sum(shares, Tally()), parts * self._seconds(sent.wire), parts * times.own_seconds
        )

    def _seconds(self, wire: str) -> float:
        """Return how long one part takes on a wire."""
        first = self.settings.wires[0]
        return self.times.exchange_seconds * _many_bytes(wire) / _many_bytes(first)

    def _send_small(self, batch: int) -> None:
        wire, keeps = self.settings.wires[0], self.rules.keeps(self._exchanged, wait=SMALL_WAIT)
        for row in self._small_rows:
            nbytes, _ = row.send(wire, dense=False, ahead=False, keeps=keeps)
            self.global_bytes_sent += nbytes
        self._flight = InFlight(Sent(batch, 0, 0, keeps, wire), Measurements(), small=True)
        self._told = replace(self._told, small_sent=True)

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
    """Return what many numbers take on a wire."""
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
