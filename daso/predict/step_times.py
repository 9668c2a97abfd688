"""Times of steps, whoever's optimizer takes them, and what a throttled step has still to take."""

import threading
import time
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from daso import trace
from daso.comm.emulation import sleep_for
from daso.predict.throttles.compute import ComputePadding
from daso.predict.throttles.disk import DiskDelay

__all__ = ["StepTimes"]


class StepTimes:
    """Takes the times of the steps of this thread, from the end of each to the end of the next.

    Steps are those of daso's optimizers; in a program that has none, those of the first torch
    optimizer that steps, which are throttled here for what no padding sees of them.

    Args:
        factor: How many times as long computing shall take.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self.seconds: list[float] = []  # of steps, in order
        self.padding: ComputePadding | None = None
        self.disk: DiskDelay | None = None
        self._factor, self._thread = factor, 0
        self._optimizer: int | None = None  # whose steps count: its id; None: nobody's yet
        self._of_daso = self._settled = False
        self._ended = self._own = 0.0  # when the last step ended, and what was computed by then

    def acquire(self) -> None:
        """Take the times of steps of this thread from now on."""
        self._thread = threading.get_ident()
        self._hook = register_optimizer_step_post_hook(self._after_any_step)
        trace.watch(self._after_span)

    def release(self) -> None:
        """Take none any more; idempotent."""
        self._hook.remove()
        trace.watch(None)

    def __enter__(self) -> "StepTimes":
        """As `acquire`."""
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """As `release`."""
        self.release()

    def padded_seconds(self) -> float:
        """Return the seconds that were added inside of steps; for who stretches steps itself."""
        self._settled = True
        return 0.0 if self.padding is None else self.padding.seconds

    def _after_any_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._of_daso or threading.get_ident() != self._thread:
            return
        self._optimizer = self._optimizer or id(optimizer)
        if self._optimizer == id(optimizer):
            self._end_step()

    def _after_span(self, kind: int) -> None:
        if kind != trace.STEP or threading.get_ident() != self._thread:
            return
        if not self._of_daso:  # until now its inner optimizer was taken for the program's own
            self._of_daso, self._ended = True, 0.0
            self.seconds.clear()
        self._end_step()

    def _end_step(self) -> None:
        own = self._own_seconds()
        if self._ended and not self._settled:
            sleep_for((self._factor - 1) * (own - self._own))
        if self.disk is not None:
            self.disk.settle()
        self._settled, self._own = False, self._own_seconds()
        now = time.perf_counter()
        if self._ended:
            self.seconds.append(now - self._ended)
        self._ended = now

    def _own_seconds(self) -> float:
        """Return for how long this thread computed until now what no padding has seen."""
        if self.padding is None:
            # A device computes while its thread waits, or goes on.
            return time.perf_counter() if torch.cuda.is_available() else time.thread_time()
        padding = self.padding
        return time.thread_time() - padding.in_operations - (padding.seconds - padding.slept)
