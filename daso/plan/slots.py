"""Who pushes to whom when, and what a chain that passes on in segments takes.

Where all push to all in the same order, a receiver is hit by everybody at once and the others have
nothing to do: about 2 (p - 1) services for p ranks. In slots, each a permutation, nobody is hit
twice: p - 1.
"""

__all__ = ["pipelined_seconds", "slots"]


def slots(ranks: int) -> list[tuple[int, ...]]:
    """Return to whom each rank sends in every slot: in slot k rank r sends to r + k."""
    return [tuple((rank + turn) % ranks for rank in range(ranks)) for turn in range(1, ranks)]


def pipelined_seconds(ranks: int, segments: int, latency_seconds: float, seconds: float) -> float:
    """Return how long a row takes from the first rank of a chain to the last, in segments.

    Each is passed on while the next one comes (cut-through). One segment is store-and-forward.
    """
    return (ranks - 2 + segments) * (latency_seconds + seconds / segments)
