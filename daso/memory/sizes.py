"""Parser of byte sizes such as 8GiB."""

from daso.errors import ConfigError

UNITS_OF_BYTES = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("ib", 1024), ("b", 1000), ("", 1024))
}
MAX_BYTES = 2**62


def parse_bytes(name: str, text: float | str) -> int:
    """Parse a number of bytes."""
    words = str(text).strip().lower()
    number = words.rstrip("kmgtib ")
    try:
        nbytes = float(number) * UNITS_OF_BYTES[words[len(number) :].strip()]
    except (KeyError, ValueError, OverflowError):
        nbytes = 0.0
    if not 1 <= nbytes <= MAX_BYTES:
        raise ConfigError(
            f"{name} must be bytes, such as 8GiB, 500MB or a number, from 1 to 2^62, not {text!r}",
            code="size-not-bytes",
        )
    return int(nbytes)
