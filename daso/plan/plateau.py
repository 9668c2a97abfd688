"""Has the loss stopped improving? A detector as two plain functions over one frozen record."""

from dataclasses import dataclass, replace

__all__ = ["PlateauState", "observe"]


@dataclass(frozen=True, slots=True)
class PlateauState:
    """What the detector remembers between epochs."""

    best: float | None = None  # lowest loss that counted as an improvement
    bad_epochs: int = 0  # epochs in a row without an improvement


def observe(
    state: PlateauState, loss: float, *, threshold: float, patience: int
) -> tuple[bool, PlateauState]:
    """Take in one epoch's loss.

    An epoch improves when ``loss < best * (1 - threshold)`` for a positive best, and when it lies
    below best by ``threshold * |best|`` in general. A loss that is not finite is a bad epoch.
    """
    best = state.best
    improved = loss - loss == 0 and (best is None or loss < best - threshold * abs(best))
    if improved:
        return False, PlateauState(best=loss)
    bad = state.bad_epochs + 1
    if bad >= patience:
        return True, replace(state, bad_epochs=0)
    return False, replace(state, bad_epochs=bad)
