"""A program whose own copies between host and device are slowed down, and what that tells."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from daso.checks import Rule, check, number
from daso.errors import ConfigError
from daso.predict.link_sweep import LinkSweep, check_factors
from daso.predict.throttles.copies import CopyDelay

__all__ = ["slow_copies", "sweep_link"]

MOST_FACTOR = 1000.0
MOST_OFF = 0.05
FACTORS = (1, 1.5, 2, 3, 4)
CALLABLE = Rule("a function without arguments", callable)


@contextmanager
def slow_copies(factor: float) -> Iterator[CopyDelay]:
    """Let a program's own copies between host and device take so many times as long.

    ``Tensor.to``, ``cpu``, ``cuda``, ``copy_``, blocking or not, from pinned memory or not, of this
    thread and of its backwards: each is followed by as many more bytes on its stream as it takes,
    so that the link is occupied. Results stay the same bits.

    Args:
        factor: How many times as long; 1 at least.

    Yields:
        What slows them down; its ``bytes`` are the program's own to devices and to the host.

    Raises:
        ConfigError: There is no device, or on trial copies are more than 5 % off.
    """
    check("factor", factor, number(1, MOST_FACTOR))
    if not torch.cuda.is_available():
        raise ConfigError(
            "copies are slowed down between host and a CUDA device, but torch sees none; run it on "
            "a machine that has one"
        )
    with CopyDelay(float(factor)) as delay:
        off = delay.off() if factor > 1 else 0.0
        if abs(off) > MOST_OFF:
            raise ConfigError(
                f"copies must be slowed down right to {MOST_OFF:.0%}, but on trial they take "
                f"{1 + off:.2f} of what was asked; let nothing else use the device"
            )
        yield delay


def sweep_link(run: Callable[[], object], factors: Sequence[float] = FACTORS) -> LinkSweep:
    """Run a program with copies slowed down by each factor; return what faster devices would take.

    Args:
        run: Some steps of the program, the same each time; it is called once before, untimed.
        factors: Of copies.

    Returns:
        The times, and the function of the factor that was fitted to them; its ``estimate(k)`` is
        the time of ``run`` with a device k times as fast over the same link.

    Raises:
        ConfigError: As of `slow_copies`.
    """
    check("run", run, CALLABLE)
    check_factors(factors)
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
