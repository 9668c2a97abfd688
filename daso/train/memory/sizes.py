"""Numbers of bytes, as people write them."""

from daso.errors import ConfigError

__all__ = ["parse_bytes"]

UNITS_OF_BYTES = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("iB", 1024), ("B", 1000), ("", 1024))
}


def parse_bytes(name: str, text: float | str) -> int:
    """Return a number of bytes.

    Args:
        name: What it is of, to be told.
        text: Such as ``"8GiB"`` or ``"500 MB"``, or a number; ``"8G"`` is 8 GiB, as SLURM has it.

    Raises:
        ConfigError: It is neither.
    """
    words = str(text).strip()
    number = words.rstrip("KMGTiB ")
    try:
        nbytes = int(float(number) * UNITS_OF_BYTES[words[len(number) :].strip()])
    except (KeyError, ValueError, OverflowError):
        nbytes = -1
    if nbytes < 0:
        raise ConfigError(f"{name} must be bytes, such as 8GiB, 500MB or a number, not {text!r}")
    return nbytes
