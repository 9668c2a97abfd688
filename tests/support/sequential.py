"""One process that does, in the most obvious way, what all ranks together should do.

It shares the schedule with the program under test and nothing else: sums, rounding, references and
merges are written out here for whole tensors.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from daso.plan.layout import fragments as cut
from daso.plan.layout import small_tensors
from daso.plan.schedule import Policy, after_batch, after_epoch, drain, shared_gain
from daso.plan.small_tensors import SmallTensors

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def divided(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Divide as IEEE 754 says: by a number a CUDA device multiplies with its reciprocal."""
    return tensor / torch.full((), by, dtype=tensor.dtype, device=tensor.device)


class Sequential:
    """All nodes of a run, in one process.

    Args:
        build: Makes the model; every call gives the same.
        make_inner: Makes the inner optimizer.
        batch_loss: (model, world rank, step) -> loss.
        node_sizes: Ranks of each node.
    """

    def __init__(
        self,
        build: Callable[[], torch.nn.Module],
        make_inner: Callable[[torch.nn.Module], torch.optim.Optimizer],
        batch_loss: Callable[[torch.nn.Module, int, int], torch.Tensor],
        node_sizes: Sequence[int],
        *,
        policy: Policy,
        wire: str = "fp32",
        merge: str | float = "daso",
        outer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
        fragments: int = 1,
    ) -> None:
        self.models = [build() for _ in node_sizes]
        self.inners = [make_inner(model) for model in self.models]
        self.batch_loss, self.node_sizes = batch_loss, node_sizes
        self.policy, self.wire, self.merge = policy, WIRES[wire], merge
        self.memory = self.inners[0].param_groups[0].get("betas", (0.0, 0.0))[1]
        self.state = replace(policy.start(), fragments=fragments, memory=self.memory)
        self.small = self.small_of(policy, merge, outer, fragments)
        numels = [p.numel() for p in self.params(0)]
        share = sum(numels[at] for at in self.small) / sum(numels)
        self.state = replace(self.state, small=SmallTensors(share))
        self.step_number = 0
        self.cuts = cut([p.numel() for p in self.params(0)], fragments)
        self.make_outer, self.outer = outer, None
        self.gain = 1.0  # of learning rates; what it has to be is measured here as well
        self.gain_measured = 1.0
        self.noise = 1.0  # share of squares in the optimizers' memory that nodes saw alone
        self.anchor(0)
        self.outer = self.outer_of(self.reference)
        self.snapshot: list[list[torch.Tensor]] = []
        self.sent = 0
        self.sending: Sequence[int] = ()
        self.settles = False  # all nodes agree right after this
        self.keeps = False  # the merge of what is on its way keeps local work

    def small_of(self, policy: Policy, merge, outer, fragments: int) -> list[int]:
        plain = outer is None and merge != "eager" and fragments == 1 and self.memory == 0
        if not (plain and getattr(policy, "selective", None)):
            return []
        return small_tensors([p.numel() for p in self.params(0)])

    def params(self, node: int) -> list[torch.Tensor]:
        return [p for p in self.models[node].parameters() if p.requires_grad]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.gradients()
            for inner in self.inners:
                self.step_longer(inner, self.step_gain())
            self.step_number += 1
            self.remember()
            self.act(*after_batch(self.policy, self.state))

    def step_gain(self) -> float:
        gain = shared_gain(self.gain, self.state.noise_share)
        assert abs(gain - (1 + (self.gain**2 - 1) * self.noise) ** 0.5) < 1e-9
        return gain

    def remember(self) -> None:
        """Weigh every batch so far as a running mean that is corrected for its beginning does."""
        kept = 1 - (1 - self.memory) / (1 - self.memory**self.step_number)
        self.noise = kept * self.noise + (1 - kept) * (not self.state.synchronous)

    def step_longer(self, inner: torch.optim.Optimizer, gain: float) -> None:
        kept = [(group["lr"], group["weight_decay"]) for group in inner.param_groups]
        for group, (rate, decay) in zip(inner.param_groups, kept, strict=True):
            if gain != 1.0:
                group["lr"], group["weight_decay"] = rate * gain, decay / gain
        inner.step()
        for group, (rate, decay) in zip(inner.param_groups, kept, strict=True):
            group["lr"], group["weight_decay"] = rate, decay

    def end_epoch(self, loss: float) -> None:
        self.act(*after_epoch(self.policy, self.state, loss))

    def synchronize(self) -> None:
        self.act(*drain(self.state))

    def gradients(self) -> None:
        """Every rank's gradient on its own, added in rank order inside a node, then by node."""
        sums, first_rank = [], 0
        for model, size in zip(self.models, self.node_sizes, strict=True):
            total: list[torch.Tensor | None] = [None] * len(self.params(0))
            for rank in range(first_rank, first_rank + size):
                for p in model.parameters():
                    p.grad = None
                self.batch_loss(model, rank, self.step_number).backward()
                grads = [p.grad for p in model.parameters() if p.requires_grad]
                total = [add(a, g) for a, g in zip(total, grads, strict=True)]
            sums.append(total)
            first_rank += size
        if self.state.synchronous:
            everything = sums[0]
            for total in sums[1:]:
                everything = [add(a, g) for a, g in zip(everything, total, strict=True)]
            sums = [everything] * len(sums)
        for node, total in enumerate(sums):
            count = sum(self.node_sizes) if self.state.synchronous else self.node_sizes[node]
            for p, g in zip(self.params(node), total, strict=True):
                p.grad = None if g is None else divided(g, count).to(p.dtype)

    def act(self, acts, state) -> None:
        for act in acts:
            self.turn = state
            getattr(self, act.value)(state.batch)
        self.state = state

    def anchor(self, batch: int) -> None:
        self.since = [batch] * len(self.cuts)  # the last send of each fragment
        self.last: tuple[float, float, int] | None = None  # what the last exchange was like
        self.reference = [wide(p).clone() for p in self.params(0)]
        self.residual = [[torch.zeros_like(g) for g in self.reference] for _ in self.models]
        self.rounded = [torch.zeros_like(g) for g in self.reference]
        for reference, outer in zip(self.reference, self.outer or (), strict=False):
            outer.param_groups[0]["params"][0].data.copy_(reference)
        self.others: list[list[torch.Tensor | None]] = [
            [None] * len(self.reference) for _ in self.models
        ]

    def outer_of(self, values: Sequence[torch.Tensor]) -> list[torch.optim.Optimizer] | None:
        if self.make_outer is None:
            return None
        return [self.make_outer([torch.nn.Parameter(value)]) for value in values]

    def send(self, batch: int) -> None:
        self.sending = self.cuts[self.turn.fragment]
        self.take_snapshot(batch)
        outer = self.make_outer is not None
        eager = self.merge == "eager" or (self.merge == "auto" and outer)
        self.keeps = self.turn.wait > 0 and not eager and self.merge in ("delta", "auto")
        if self.turn.wait > 0 and eager:
            for node in range(len(self.models) if len(self.models) > 1 else 0):
                for index in self.sending:
                    self.go_ahead(node, index)

    def send_small(self, batch: int) -> None:
        self.sending, self.keeps = self.small, self.merge in ("delta", "auto")
        self.take_snapshot(batch)
        self.measures = False

    def send_all(self, batch: int) -> None:
        self.sending, self.keeps = range(len(self.reference)), False
        self.take_snapshot(batch)

    def take_snapshot(self, batch: int) -> None:
        self.snapshot = [[wide(p).clone() for p in self.params(n)] for n in range(len(self.models))]
        self.ahead = [[s.clone() for s in node] for node in self.snapshot]
        self.step = [[s.clone() for s in node] for node in self.snapshot]
        self.sent, self.measures = batch, True

    def share(self, node: int) -> float:
        return self.node_sizes[node] / sum(self.node_sizes)

    def go_ahead(self, node: int, index: int) -> None:
        """Go where the reference would go if the others did what they did before."""
        mean = self.snapshot[node][index] - self.reference[index]
        others = self.others[node][index]
        if others is not None:
            mean = mean * self.share(node) + others
        if self.outer is None:
            there = mean + self.reference[index]
        else:
            trial = copy.deepcopy(self.outer[index])
            there = trial.param_groups[0]["params"][0]
            there.grad = -mean
            trial.step()
        self.ahead[node][index] = there.detach()
        self.params(node)[index].data.copy_(there.detach())

    def settle(self, batch: int) -> None:
        """An exchange of all that was done since follows: an old mean would take work back."""
        self.settles = True
        self.receive(batch)
        self.settles = False

    def receive(self, batch: int) -> None:
        if len(self.models) == 1:
            return
        apart = moved = 0.0
        for index in self.sending:
            mean, sent = self.receive_tensor(index, batch - self.sent)
            apart += sum(float((one - mean).double().square().sum()) for one in sent)
            moved += float(mean.double().square().sum())
        if self.measures:
            self.measure(apart / len(self.models), moved)

    def measure(self, apart: float, moved: float) -> None:
        """Move the gain by what the exchange before was like, as the header tells it."""
        if self.last is not None and self.normalizes():
            n, b = self.last[2], self.inners[0].defaults["betas"][0]
            lag = sum((1 - j / n) * b**j for j in range(1, n))
            noise = self.last[0] / (n * (1 - b) / (1 + b) * (1 + 2 * lag))
            nodes = len(self.models)
            noise *= nodes / (nodes - 1)
            signal = max(0.0, self.last[1] - self.last[0] / (nodes - 1)) / n**2
            lacked = ((signal + noise) / (signal + noise / nodes)) ** 0.5
            self.gain_measured += 0.3 * (min(max(lacked, 1.0), nodes**0.5) - self.gain_measured)
        fragments = [f for f, cut in enumerate(self.cuts) if set(cut) <= set(self.sending)]
        self.last = apart, moved, self.sent - min(self.since[f] for f in fragments)
        for fragment in fragments:
            self.since[fragment] = self.sent

    def normalizes(self) -> bool:
        return self.make_outer is None and isinstance(
            self.inners[0], torch.optim.Adam | torch.optim.AdamW
        )

    def receive_tensor(self, index: int, waited: int):
        """Take in one tensor; return its mean delta, and what each node sent."""
        smallest = min(self.node_sizes)
        whole = all(size % smallest == 0 for size in self.node_sizes)
        weights = [size // smallest for size in self.node_sizes] if whole else self.node_sizes
        carried, carried_by, kept_by = self.mean_delta(index, weights)
        for node in range(len(self.models)):
            self.others[node][index] = carried - carried_by[node] * self.share(node)
            if self.keeps:
                self.keep(index, node, carried, carried_by[node], kept_by[node])
        if self.outer is None:
            self.reference[index] = self.reference[index] + carried
        else:
            (param,) = self.outer[index].param_groups[0]["params"]
            param.grad = -carried
            self.outer[index].step()
            self.reference[index] = param.detach().clone()
        for node in range(len(self.models)):
            p = self.params(node)[index]
            if self.keeps:
                self.let_go(index, node, wide(p), waited)
            p.data.copy_(self.merged(wide(p), index, node, waited))
        return carried, carried_by

    def mean_delta(self, index: int, weights: Sequence[int]):
        """What crosses: the mean, what each node sent, and the residual that was in it."""
        total, carried_by, kept_by = None, [], []
        for node, weight in enumerate(weights):
            delta = self.snapshot[node][index] - self.reference[index] + self.residual[node][index]
            carried = delta.to(self.wire).to(delta.dtype)
            carried_by.append(carried)
            kept_by.append(self.residual[node][index])
            self.residual[node][index] = delta - carried
            term = carried * weight
            total = term if total is None else total + term
        mean = carried = divided(total, sum(weights))
        if len(self.models) > 2:  # two nodes send each other everything; more, the mean once more
            mean = mean + self.rounded[index]
            carried = mean.to(self.wire).to(mean.dtype)
            self.rounded[index] = mean - carried
        return carried, carried_by, kept_by

    def keep(self, index: int, node: int, mean, carried, kept) -> None:
        """What the wire rounds away stays in the parameters."""
        if self.outer is None:
            self.step[node][index] = mean - carried + kept
        else:
            self.step[node][index] = -(carried + self.reference[index]) + kept
        self.residual[node][index] = torch.zeros_like(mean)

    def let_go(self, index: int, node: int, x: torch.Tensor, waited: int) -> None:
        """What stayed in the parameters leaves them where nodes agree at once."""
        if self.outer is not None:
            self.step[node][index] = self.step[node][index] + self.reference[index]
        if waited == 0 and self.wire != x.dtype:
            self.residual[node][index] = x - self.reference[index] + self.step[node][index]

    def merged(self, x: torch.Tensor, index: int, node: int, waited: int) -> torch.Tensor:
        g = self.reference[index]
        if waited == 0:
            return g
        if self.keeps:
            return x + self.step[node][index]
        if self.merge in ("delta", "eager", "auto"):
            return x + (g - self.ahead[node][index])
        if self.settles:
            return x
        if self.merge != "daso":
            return x + (g - x) * (1.0 - self.merge) if self.merge else g
        nodes = len(self.models)
        return x + (g - x) * (nodes / (2 * waited + nodes))

    def join(self, _: int) -> None:
        """Average the inner optimizers' state: over the ranks of each node, then over nodes."""
        if len(self.models) == 1:
            return
        for key in range(len(self.params(0))):
            states = [i.state.get(self.params(n)[key], {}) for n, i in enumerate(self.inners)]
            for name, value in list(states[0].items()):
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    self.join_tensor([state[name] for state in states])

    def join_tensor(self, values: list[torch.Tensor]) -> None:
        total, first = None, wide(values[0]).clone()
        for value, size in zip(values, self.node_sizes, strict=True):
            of_node = None
            for _ in range(size):
                of_node = add(of_node, wide(value) - first)
            total = add(total, of_node)
        assert total is not None
        for value in values:
            value.copy_(divided(total, sum(self.node_sizes)) + first)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the type in which it is accumulated."""
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.detach().to(dtype)


def add(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """Add in wide arithmetic; None is a gradient that is not there."""
    if b is None:
        return a
    return wide(b).clone() if a is None else a + wide(b)
