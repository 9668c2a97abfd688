"""Slower copies between host and device, to predict a faster device over the same link.

A device k times as fast over the same link is equivalent to this device over a link k times as
slow, with all times divided by k: T(C / k, L) = T(C, k L) / k.

Source: US 10453167 B1, US 2019/0325549 A1.
"""

import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from daso.checks import Rule, check, number, positive
from daso.errors import ConfigError
from daso.torch_private import TO_COPY, TorchDispatchMode

MOST_FACTOR = 1000.0
MOST_OFF = 0.05
FACTORS = (1, 1.5, 2, 3, 4)
LEAST_FACTORS = 3  # of a fit, which has three parameters
TRIAL_BYTES = 16 << 20
TRIES = 20
COPIES = (TO_COPY, torch.ops.aten.copy_.default)
CALLABLE = Rule("a function without arguments", callable)


@dataclass(frozen=True, slots=True)
class LinkSweep:
    """Durations of a run by factors of its copies' durations; fitted max(floor, base + slope k).

    Args:
        factors: Factors of the copies' durations.
        seconds: Durations of the run, one per factor.
        floor: Minimum duration, with copies hidden behind computing.
        base: Seconds without copies, if these are not hidden.
        slope: Seconds of copies that are not hidden.
    """

    factors: tuple[float, ...]
    seconds: tuple[float, ...]
    floor: float
    base: float
    slope: float

    @classmethod
    def fit(cls, factors: Sequence[float], seconds: Sequence[float]) -> "LinkSweep":
        """Return the least-squares fit over all ways to split the factors into hidden and not."""
        _check_factors(factors)
        pairs = sorted(zip(factors, seconds, strict=True))
        fits = [_fit(pairs, hidden) for hidden in range(len(pairs) + 1)]
        best = min(fits, key=lambda fit: _squares(pairs, *fit))
        return cls(tuple(factors), tuple(seconds), *best)

    def seconds_with(self, factor: float) -> float:
        """Return the fitted duration of the run for a factor of its copies."""
        return max(self.floor, self.base + self.slope * factor)

    def estimate(self, times: float) -> float:
        """Return the predicted duration with a device `times` as fast over the same link.

        Args:
            times: Speedup of the device; outside the range of factors it warns about an
                extrapolation.
        """
        check("times", times, positive())
        if not min(self.factors) <= times <= max(self.factors):
            warnings.warn(
                f"{times:g} times is beyond the factors that were measured, {min(self.factors):g} "
                f"to {max(self.factors):g}: this estimate is an extrapolation",
                stacklevel=2,
            )
        return self.seconds_with(times) / times


def _check_factors(factors: Sequence[float]) -> None:
    if len(set(factors)) < LEAST_FACTORS:
        raise ConfigError(
            f"a sweep needs {LEAST_FACTORS} different factors at least, not {len(set(factors))}; "
            f"give more factors",
            code="sweep-factors-too-few",
        )


def _fit(pairs: Sequence[tuple[float, float]], hidden: int) -> tuple[float, float, float]:
    """Return floor, base and slope with the copies of the first `hidden` factors hidden."""
    floor = statistics.fmean(seconds for _, seconds in pairs[:hidden]) if hidden else 0.0
    rest = pairs[hidden:]
    if len({factor for factor, _ in rest}) < 2:
        constant = statistics.fmean(seconds for _, seconds in rest) if rest else 0.0
        return max(floor, constant), 0.0, 0.0
    line = statistics.linear_regression(*zip(*rest, strict=True))
    return floor, line.intercept, max(0.0, line.slope)


def _squares(
    pairs: Sequence[tuple[float, float]], floor: float, base: float, slope: float
) -> float:
    return sum((seconds - max(floor, base + slope * factor)) ** 2 for factor, seconds in pairs)


class CopyDelay(TorchDispatchMode):
    """Makes the program's copies between host and device take `factor` times as long.

    Each copy is followed by additional bytes on the same stream, in the same way (pinned or not,
    blocking or not), into memory that is never read. Backwards of this thread are included.

    Args:
        factor: Factor of durations; at least 1.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.factor = factor
        self.bytes = [0, 0]  # of the program's copies so far: to devices, to the host
        self._spare: dict[tuple[Any, ...], torch.Tensor] = {}  # targets of the added bytes
        self._lock = threading.Lock()  # backwards run in device threads

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation; if it is a copy, add bytes."""
        result = func(*args, **(kwargs or {}))
        if func in COPIES:
            source, target = (args[1], args[0]) if len(args) > 1 else (args[0], result)
            if source.is_cpu != target.is_cpu and source.numel():
                late = args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)
                with self._lock:
                    self.bytes[target.is_cpu] += target.nbytes
                    self._copy_more(source, target, late=bool(late))
        return result

    def _copy_more(self, source: torch.Tensor, target: torch.Tensor, *, late: bool) -> None:
        source = source.detach().reshape(-1)
        device = source.device if target.is_cpu else target.device
        spare = self._spare_like(target, source.is_pinned() or target.is_pinned(), device)
        left = (self.factor - 1) * source.numel()
        while (count := min(round(left), source.numel())) > 0:
            spare[:count].copy_(source[:count], non_blocking=late)
            left -= count

    def _spare_like(self, target: torch.Tensor, pinned: bool, device: torch.device) -> torch.Tensor:
        pinned = pinned and target.is_cpu
        # A target per stream: another stream may still be writing to its own.
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = target.device, target.dtype, pinned, stream
        spare = self._spare.get(key)
        if spare is None or spare.numel() < target.numel():
            spare = torch.empty(
                target.numel(), dtype=target.dtype, device=target.device, pin_memory=pinned
            )
            self._spare[key] = spare
        return spare

    def off(self) -> float:
        """Copy to a device and back, delayed; return the relative error of the duration."""
        host = torch.empty(TRIAL_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        device = torch.empty(TRIAL_BYTES, dtype=torch.uint8, device="cuda")
        parts = [self._off(*pair) for pair in ((device, host), (host, device))]
        self.bytes = [0, 0]
        return max(parts, key=abs)

    def _off(self, target: torch.Tensor, source: torch.Tensor) -> float:
        factor, least = self.factor, [math.inf, math.inf]  # seconds, plain and slowed down
        for _ in range(TRIES):
            for at, self.factor in enumerate((1.0, factor)):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                least[at] = min(least[at], time.perf_counter() - begun)  # other load only adds
        return least[1] / least[0] / factor - 1


@contextmanager
def slow_copies(factor: float) -> Iterator[CopyDelay]:
    """Make a program's copies between host and device take `factor` times as long.

    It affects ``Tensor.to``, ``cpu``, ``cuda``, ``copy_``, blocking or not, from pinned memory or
    not, in this thread and its backwards: additional bytes on the same stream occupy the link.
    Results keep the same bits.

    Args:
        factor: Factor of durations; at least 1.

    Yields:
        The `CopyDelay`; its ``bytes`` are the program's own, to devices and to the host.

    Raises:
        ConfigError: torch sees no CUDA device, or copies are more than 5 % off in a trial.
    """
    check("factor", factor, number(1, MOST_FACTOR))
    if not torch.cuda.is_available():
        raise ConfigError(
            "copies are slowed down between host and a CUDA device, but torch sees none; run it on "
            "a machine that has one",
            code="no-cuda-to-slow",
        )
    with CopyDelay(float(factor)) as delay:
        off = delay.off() if factor > 1 else 0.0
        if abs(off) > MOST_OFF:
            raise ConfigError(
                f"copies must be slowed down right to {MOST_OFF:.0%}, but on trial they take "
                f"{1 + off:.2f} of the requested time; let nothing else use the device",
                code="copies-not-slowed",
            )
        yield delay


def sweep_link(run: Callable[[], object], factors: Sequence[float] = FACTORS) -> LinkSweep:
    """Run a program with copies slowed down by each factor; return the fitted durations.

    Args:
        run: Some steps of the program, the same each time; it is called once before, untimed.
        factors: Factors of the copies' durations.

    Returns:
        The durations and the fit; its ``estimate(k)`` is the time of ``run`` with a device k times
        as fast over the same link.

    Raises:
        ConfigError: As for `slow_copies`.
    """
    check("run", run, CALLABLE)
    _check_factors(factors)
    seconds = []
    for at, factor in enumerate(factors):
        with slow_copies(factor):
            if at == 0:
                run()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
    return LinkSweep.fit(factors, seconds)
