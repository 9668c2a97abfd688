"""A node moves on when it sends, to where it expects the mean (eager updates, arXiv 2502.12996)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch

__all__ = ["Ahead"]


@dataclass(slots=True)
class Ahead:
    """Where a node went that did not wait for the others; rows are made when they are needed."""

    snapshot: torch.Tensor | None = None  # parameters when they were sent
    place: torch.Tensor | None = None  # where the node went
    others: torch.Tensor | None = None  # the other nodes' share of the last mean delta

    def go(
        self,
        reference: torch.Tensor,
        share: float,
        gather: Callable[[torch.Tensor], object],
        trial: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor:
        """Return the place to go to.

        The estimate of the mean delta is this node's own with its share, and the others' of the
        last exchange; its own alone in the first.

        Args:
            reference: What all nodes agreed on last (numel).
            share: This node's weight in the mean of all nodes.
            gather: Writes the parameters into a row.
            trial: What an outer optimizer would make of a mean delta; None: it is added.
        """
        if self.snapshot is None:
            self.snapshot = torch.empty_like(reference)
        gather(self.snapshot)
        mean = self.snapshot - reference
        if self.others is not None:
            mean.mul_(share).add_(self.others)
        self.place = mean + reference if trial is None else trial(mean)
        return self.place

    def go_back(self, way: torch.Tensor) -> None:
        """Write what takes the node back to where it was, and forget the rest."""
        assert self.snapshot is not None and self.place is not None, "the node went ahead"
        torch.sub(self.snapshot, self.place, out=way)
        self.forget()

    def others_like(self, row: torch.Tensor) -> torch.Tensor:
        """Return the row of the other nodes' delta, to be written."""
        if self.others is None:
            self.others = torch.zeros_like(row)
        return self.others

    def forget(self) -> None:
        """Forget where the node went, and what the others did."""
        self.place = self.others = None

    def rows(self) -> dict[str, torch.Tensor]:
        """Return what there is, by names for a checkpoint."""
        rows = ((f"ahead_{one.name}", getattr(self, one.name)) for one in fields(self))
        return {name: row for name, row in rows if row is not None}

    @classmethod
    def load(cls, state: Mapping[str, torch.Tensor], device: torch.device) -> "Ahead":
        """Return that of which these are the `rows`, among others."""
        rows = {one.name: state.get(f"ahead_{one.name}") for one in fields(cls)}
        return cls(
            **{k: None if row is None else row.to(device, copy=True) for k, row in rows.items()}
        )
