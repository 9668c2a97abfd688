"""Which wire an exchange takes where the user leaves it open: 16 bits, or 4 on slow links."""

from typing import Literal

from daso.plan.schedule import Seen

__all__ = ["BITS", "NARROW", "WIDE", "Wire", "next_wire"]

Wire = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4", "topk"]

WIDE, NARROW = "bf16", "int4"
# Of a number: int8 and int4 have a scale for each 128, topk a place and a number for 1 of 64.
BITS = {"fp32": 32.0, WIDE: 16.0, "fp16": 16.0, "int8": 8.25, NARROW: 4.25, "topk": 0.5}
# Batches. A merge that comes later than one batch after, and exchanges that are rarer for it, cost
# more accuracy than 4 bits do, of which what is rounded away is sent later.
LATE, EARLY = 0.8, 0.4
FEW = 1 << 19  # numbers: an exchange of fewer takes long for other reasons than its bytes


def next_wire(now: str, seen: Seen, *, numel: int) -> str:
    """Return the wire of the next exchange.

    Args:
        now: The wire that was measured.
        seen: What all ranks agreed on.
        numel: Numbers that were exchanged.

    Returns:
        ``"int4"`` where an exchange of bf16 takes a batch or more; back to ``"bf16"`` where it
        would take much less. The same on every rank.
    """
    if seen.step_seconds <= 0 or seen.exchange_seconds <= 0 or numel < FEW:
        return now
    batches = seen.exchange_seconds / seen.step_seconds * BITS[WIDE] / BITS[now]
    if now == WIDE:
        return NARROW if batches > LATE else WIDE
    return WIDE if batches < EARLY else NARROW
