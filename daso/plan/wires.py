"""Which wire an exchange takes where the user leaves it open: 16 bits, or 4 on slow links."""

from collections.abc import Sequence
from typing import Literal

from daso.plan.schedule import Measurements

__all__ = [
    "BITS",
    "NARROW",
    "WIDE",
    "GradientWire",
    "Wire",
    "next_wire",
    "scale_to_model",
    "tells_of_wire",
]

Wire = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4", "int2", "topk"]
GradientWire = Literal["auto", "fp32", "bf16", "int8", "int4"]

WIDE, NARROW = "bf16", "int4"
# Of a number: int8 has a scale (fp32) for each 128, int4 (bf16) for each 32, topk a place and a
# number for 1 of 64.
BITS = {"fp32": 32.0, WIDE: 16.0, "fp16": 16.0, "int8": 8.25, NARROW: 4.5, "int2": 2.5, "topk": 0.5}
# Batches that an exchange of bf16 may take. More than one makes exchanges rarer than they could be
# where their work is cheap; where it is dear they are rarer anyhow, and 4 bits are more work. A
# merge that comes very late costs more accuracy than 4 bits do (Fashion-MNIST, 2 simulated nodes, 3
# epochs, one seed, synchronous 92.07 %: bf16 after 15 batches 90.92, int4 after 5 91.36), with an
# optimizer that normalizes always (a byte-level transformer, AdamW, the work of an exchange 0.7 and
# 0.9 batches: bf16 after 3 batches 43.38, 43.64, 42.71 % on 2 simulated nodes and 50.69 on 8, int4
# after 0.8 44.00, 44.12, 43.12 and 52.57).
SOON, LATE = 0.8, 4.0
BUDGET = 0.01  # part of the steps' time that exchanges may take from training
FEW = 1 << 16  # numbers: an exchange of fewer takes long for other reasons than its bytes


def next_wire(now: str, measurements: Measurements, *, numel: int) -> str:
    """Return the wire of the next exchange."""
    if measurements.step_seconds <= 0 or measurements.exchange_seconds <= 0 or numel < FEW:
        return now
    batches = measurements.exchange_seconds / measurements.step_seconds * BITS[WIDE] / BITS[now]
    work = measurements.affordable_skip(BUDGET)
    most = SOON if measurements.required_gain else min(max(SOON, work), LATE)
    if now == WIDE:
        return NARROW if batches > most else WIDE
    return WIDE if batches < most / 2 else NARROW


def tells_of_wire(numel: int, numels: Sequence[int]) -> bool:
    """Tell whether the seconds of an exchange say which wire suits all that follow.

    Args:
        numel: Numbers that it carried.
        numels: Those of each fragment: small ones would change the wire of large ones back, and all
            together take longer than any.
    """
    return max(numels) / 2 <= numel <= max(numels)


def scale_to_model(numels: Sequence[int], numel: int) -> float:
    """Return the model's size over that of an exchange; 0 where its seconds say nothing of it.

    Args:
        numels: Those of each fragment.
        numel: Those that crossed.
    """
    return sum(numels) / numel if numel and tells_of_wire(numel, numels) else 0.0
