"""Computing that takes longer where it happens: a pause after torch's operations on the CPU."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from daso.comm.emulation import sleep_for

__all__ = ["ComputePadding"]

LEAST_SECONDS = 5e-3  # of a pause: after each a core is slower for some tenths of a millisecond
LOOKS = 30  # steps by which the cost of looking at an operation is measured
WIDTH_OF_NONE = 8  # of a model whose operations take next to nothing
WIDTH, BATCH = 512, 128  # of matrices that are multiplied to try the padding
PRODUCTS = 40  # of a try: some pauses
WOKEN = 3  # products after a pause that are looked at
TRIES = 15
MOST_TRIES = 60  # on a busy machine
WELL = 0.04  # so far off, no more tries are taken
PAUSES = 15  # by which what a core is slower after one is measured


class ComputePadding(TorchDispatchMode):
    """Lets operations of this thread, and of its backwards, take as many times as long.

    Pauses are collected to some milliseconds and slept: other threads get the core, and exchanges
    go on. What looking at operations takes, and what a core is slower after a pause, is part of
    the pauses.

    Args:
        factor: How many times; 1 at least.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.factor = factor
        self.seconds = self.slept = 0.0  # that were added until now, and of them in pauses
        self.in_operations = 0.0  # seconds that these took by themselves
        self._owed = 0.0  # seconds of pauses to come; below 0: operations took too long
        self._look_seconds = self._wake_seconds = 0.0  # of an operation, after a pause

    def acquire(self) -> None:
        """Measure what looking and pausing take by themselves; pad from now on."""
        self._wake_seconds = _wake_seconds()
        self._look_seconds = _look_seconds()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's

    def release(self) -> None:
        """Pad no more."""
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's

    def __enter__(self) -> "ComputePadding":
        """As `acquire`."""
        self.acquire()
        return self

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Carry an operation out, and pause."""
        begun = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        taken = time.perf_counter() - begun
        self.in_operations += taken
        self.seconds += self._look_seconds
        self._owed += (self.factor - 1) * taken - self._look_seconds
        if self._owed > LEAST_SECONDS:
            self._pause()
        return result

    def _pause(self) -> None:
        slept = sleep_for(self._owed)
        self.slept += slept
        self.seconds += slept + self._wake_seconds
        self.in_operations -= self._wake_seconds
        # The operation to come will take this longer, and be padded for it.
        self._owed -= slept + self.factor * self._wake_seconds

    def off(self) -> float:
        """Compute, padded; return how far off what it takes is, in parts. It must be acquired.

        How long this thread slept is told by its processor time, which stands still meanwhile.
        Whatever comes between only adds: of some tries the shortest counts.
        """
        least = math.inf
        for tries in range(MOST_TRIES):
            least = min(least, self._try(_matrices()))
            if tries >= TRIES and least < WELL:
                break
        return least

    def _try(self, matrices: Sequence[torch.Tensor]) -> float:
        own, added = self.in_operations, self.seconds - self.slept
        owed, begun, busy = self._owed, time.perf_counter(), time.thread_time()
        _multiply(matrices, PRODUCTS)
        asleep = time.perf_counter() - begun - (time.thread_time() - busy)
        own, added = self.in_operations - own, self.seconds - self.slept - added
        return (own + added + asleep + self._owed - owed) / (self.factor * own) - 1


class _Counted(TorchDispatchMode):
    """Looks at operations as a padding does, and counts them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.count, self._inside = 0, 0.0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        begun = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self._inside += time.perf_counter() - begun
        self.count += 1
        return result


def _look_seconds() -> float:
    """Return what an operation takes longer when it is looked at, as a small model's step does."""
    with torch.random.fork_rng(devices=[]):  # the program's numbers stay its own
        layers = [torch.nn.Linear(WIDTH_OF_NONE, WIDTH_OF_NONE, device="cpu") for _ in range(3)]
    model, ratios = torch.nn.Sequential(*layers), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    _step_seconds(model, optimizer)
    for _ in range(LOOKS):
        plain = _step_seconds(model, optimizer)
        with _Counted() as counted:
            ratios.append((_step_seconds(model, optimizer) - plain) / counted.count)
    return max(0.0, statistics.median(ratios))


def _step_seconds(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    begun = time.perf_counter()
    optimizer.zero_grad()
    model(torch.ones(1, WIDTH_OF_NONE, device="cpu")).sum().backward()
    optimizer.step()
    return time.perf_counter() - begun


def _matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two matrices, and where their product goes."""
    shapes = (WIDTH, WIDTH), (WIDTH, BATCH), (WIDTH, BATCH)
    one, other, product = (torch.full(shape, 1 / WIDTH, device="cpu") for shape in shapes)
    return one, other, product


def _wake_seconds() -> float:
    """Return how much longer operations take after a pause, all together."""
    matrices, after, before = _matrices(), [], []
    for _ in range(PAUSES):
        _multiply(matrices, WOKEN)
        before.append(_multiply(matrices, WOKEN))
        time.sleep(LEAST_SECONDS)
        after.append(_multiply(matrices, WOKEN))
    return max(0.0, statistics.median(after) - statistics.median(before))


def _multiply(matrices: Sequence[torch.Tensor], times: int) -> float:
    """Return how long products take."""
    one, other, product = matrices
    begun = time.perf_counter()
    for _ in range(times):
        torch.mm(one, other, out=product)
    return time.perf_counter() - begun
