"""What one lane of one node keeps of a row of parameters, and all arithmetic of an exchange on it.

Nothing here knows of MPI or of other ranks: the same code runs between nodes, driven by
`daso.train.rows`, and for many simulated nodes in one process, driven by `daso.train.simulated`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from daso.comm.compress import Codec
from daso.plan.merge import ADOPT, Merge
from daso.train.outer import MakeOuter, Outer

__all__ = ["Part", "Way", "merge_pairs", "message_numel"]

KIBI = 1024  # numbers by which a codec's rate is asked: headers of blocks do not count then
MOST = 1 << 18  # numbers of a message: one that takes long to encode keeps the link waiting


@dataclass(frozen=True, slots=True)
class Way:
    """How parts take in exchanges."""

    lossless: bool  # the wire loses nothing: no residual is kept
    eager: bool = False  # a node goes ahead when it sends
    share: float = 1.0  # this node's weight in the mean of all nodes
    outer: MakeOuter | None = None


class Part:
    """Reference, snapshot and residual of one part of a row; a `daso.comm.exchange.Source`.

    An exchange carries snapshot - reference + residual: what the node did since all nodes agreed,
    and what the wire rounded away before, so that a 16-bit wire never freezes a weight.

    Args:
        shown: Memory that the whole node reads (numel), fp32 or fp64.
        way: How exchanges are taken in.
    """

    def __init__(self, shown: torch.Tensor, way: Way) -> None:
        self.shown, self.way, self.dtype = shown, way, shown.dtype
        self.reference = torch.zeros_like(shown)  # what the nodes agreed on last
        self.residual = None if way.lossless else torch.zeros_like(shown)
        # Parameters s when the exchange was sent, then g - s once the mean g is there. A node that
        # goes ahead shows where it goes instead.
        self.snapshot = torch.zeros_like(shown) if way.eager else shown
        self.outer = None if way.outer is None else Outer(way.outer, self.reference)
        self.ahead: torch.Tensor | None = None  # where the node went when it sent
        self.others: torch.Tensor | None = None  # the other nodes' share of the last mean delta
        # Squared, in the last exchange: distance from the mean of all nodes; norm of the reference.
        self.distance = self.norm = 0.0
        self._room = torch.empty(0, dtype=shown.dtype)  # for a piece

    def anchor(self) -> None:
        """Forget what belonged to an earlier reference; the caller has written the new one.

        The outer optimizer goes on with the momentum it has.
        """
        if self.residual is not None:
            self.residual.zero_()
        self.ahead = self.others = None

    # --- one exchange, as its source ---------------------------------------------------------

    def values(self, start: int, stop: int, room: torch.Tensor) -> torch.Tensor:
        """Return delta + residual."""
        values = torch.sub(self.snapshot[start:stop], self.reference[start:stop], out=room)
        return values if self.residual is None else values.add_(self.residual[start:stop])

    def sent(self, start: int, stop: int, values: torch.Tensor, carried: torch.Tensor) -> None:
        """Keep what the wire rounded away, and what this node's share of the mean will be."""
        if self.residual is not None:
            torch.sub(values, carried, out=self.residual[start:stop])
        if self.way.eager:
            if self.others is None:
                self.others = torch.zeros_like(self.reference)
            torch.mul(carried, -self.way.share, out=self.others[start:stop])

    def deliver(self, start: int, stop: int, mean: torch.Tensor) -> None:
        """Move the reference by the mean delta, or keep it for the outer optimizer.

        Args:
            start: First element.
            stop: Behind the last one.
            mean: Mean delta (stop - start); overwritten.
        """
        snapshot, reference = self.snapshot[start:stop], self.reference[start:stop]
        if self.others is not None:
            self.others[start:stop].add_(mean)
        if self.outer is not None:
            torch.neg(mean, out=self.outer.grad[start:stop])
            mean.add_(reference)
        else:
            mean = torch.add(reference, mean, out=reference)
            self.norm += float(mean.dot(mean))
        # g - s is what most merges need: it is written while all of it is in the core's cache.
        room = snapshot if self._ready else self._piece(stop - start)
        apart = torch.sub(mean, snapshot, out=room)
        self.distance += float(apart.dot(apart))

    @property
    def _ready(self) -> bool:
        """Whether an exchange leaves g - s where s was."""
        return self.outer is None and not self.way.eager

    def _piece(self, numel: int) -> torch.Tensor:
        if self._room.numel() < numel:
            self._room = torch.empty(numel, dtype=self.dtype)
        return self._room[:numel]

    def start(self) -> None:
        """Begin an exchange."""
        self.distance = self.norm = 0.0

    def finish(self) -> tuple[float, float]:
        """End an exchange: let the outer optimizer move the reference.

        Returns:
            Squared distance of the snapshot from the mean of all nodes, squared norm of the
            reference.
        """
        if self.outer is not None:
            self.outer.step()
            self.norm = float(self.reference.dot(self.reference))
        return self.distance, self.norm

    # --- merging -----------------------------------------------------------------------------

    def go_ahead(self) -> None:
        """Show where the node would stand if the others did what they did in the last exchange.

        The estimate of the mean delta is this node's own with its share, and the others' of the
        last exchange; its own alone in the first (eager updates, arXiv 2502.12996).
        """
        mean = self.snapshot - self.reference
        if self.others is not None:
            mean.mul_(self.way.share).add_(self.others)
        self.ahead = self.outer.trial(mean) if self.outer is not None else mean + self.reference
        self.shown.copy_(self.ahead)

    def turn_back(self) -> None:
        """Show what takes the node back from where it went ahead to where it was."""
        if self.ahead is not None:
            torch.sub(self.snapshot, self.ahead, out=self.shown)
        self.ahead = self.others = None

    def show(self, rule: Merge) -> None:
        """Write what every rank of the node needs for a merge, g or g - s, unless it lies there."""
        if not rule.since_send:
            self.shown.copy_(self.reference)
        elif not self._ready:
            torch.sub(
                self.reference,
                self.snapshot if self.ahead is None else self.ahead,
                out=self.shown,
            )
        self.ahead = None

    # --- checkpoint --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values; what is None is left out."""
        tensors = {
            "reference": self.reference,
            "snapshot": self.snapshot,
            "residual": self.residual,
            "ahead": self.ahead,
            "others": self.others,
        }
        state: dict[str, Any] = {k: t.clone() for k, t in tensors.items() if t is not None}
        return state if self.outer is None else {**state, "outer": self.outer.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.reference.copy_(state["reference"])
        self.snapshot.copy_(state["snapshot"])
        if self.residual is not None:
            self.residual.copy_(state["residual"])
        self.ahead, self.others = (
            state[key].clone() if key in state else None for key in ("ahead", "others")
        )
        if self.outer is not None:
            self.outer.load(state["outer"])


def message_numel(codec: Codec, chunk_bytes: int) -> int:
    """Return how many numbers of a row make a message of about so many bytes on the wire."""
    return max(1, min(MOST, chunk_bytes * KIBI // codec.nbytes(KIBI)))


def merge_pairs(pairs: list[tuple[torch.Tensor, torch.Tensor]], rule: Merge) -> None:
    """Carry out a merge for pairs (x, c), c being g, or g - s where the rule says since_send.

    Args:
        pairs: Flat views of parameters and of what a part shows, of the same elements.
        rule: What to do.
    """
    if not pairs:
        return
    here, there = [x for x, _ in pairs], [c for _, c in pairs]
    if rule == ADOPT:
        torch._foreach_copy_(here, there)
    elif any(x.dtype != c.dtype for x, c in pairs):
        _merge_wide(pairs, rule)
    elif rule.since_send:
        torch._foreach_add_(here, there)
    else:
        torch._foreach_lerp_(here, there, rule.pull)


def _merge_wide(pairs: list[tuple[torch.Tensor, torch.Tensor]], rule: Merge) -> None:
    """Merge 16-bit parameters: compute in the reference's type, round once."""
    for x, c in pairs:
        wide = x.to(c.dtype)
        x.copy_(wide.add_(c) if rule.since_send else wide.lerp_(c, rule.pull))
