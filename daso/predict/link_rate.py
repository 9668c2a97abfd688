"""The rate of a link: as a person writes it, and as tc takes it. Pure."""

import re
from collections.abc import Iterator
from fractions import Fraction

from daso.errors import ConfigError

__all__ = ["FASTEST_PREDICTED", "discipline", "parse_rate"]

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
LARGEST = 72 * 1024  # bytes: 64 KiB of data, and what 45 packets' headers add
SLOWEST, FASTEST = 10**6, 100 * 10**9  # bits per second; SLURM's own messages must get through
FASTEST_PREDICTED = 1600 * 10**9  # bits per second, of links that are only predicted


def parse_rate(word: str, fastest: int = FASTEST) -> int | None:
    """Return the bits per second of a rate such as ``1gbit``, or None for ``none``."""
    if word == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", word)
    bits = int(Fraction(found[1]) * UNITS[found[2]]) if found else 0
    if not SLOWEST <= bits <= fastest:
        raise ConfigError(
            f"the rate of a link must be none or from 1mbit to {fastest // 10**9}gbit, not "
            f"{word!r}; write it as in 10mbit, 2.5gbit"
        )
    return bits


def discipline(bits: int | None) -> Iterator[str]:
    """Yield the words of the queueing discipline that holds a link to a rate in bits per second."""
    if bits is None:
        yield "noqueue"
        return
    yield f"tbf rate {bits}bit"
    # One millisecond, and no less than what the kernel hands over at once: a card cuts that into
    # packets itself, a queue that must do it takes a core.
    yield f"burst {max(bits // 8000, LARGEST)}"
    yield "latency 50ms"
