"""The errors a caller can act on. Every message says the rule, the value and the remedy."""

__all__ = [
    "CheckpointError",
    "CheckpointWriteError",
    "ConfigError",
    "DasoError",
    "DataError",
    "ExchangeError",
    "FlowError",
    "LayoutError",
    "NonFiniteError",
    "StallError",
    "TopologyError",
    "told",
]


class DasoError(Exception):
    """Base of every error that daso raises on purpose."""


class TopologyError(DasoError):
    """The ranks, nodes or MPI library are not what the launcher or the caller says."""


class LayoutError(DasoError, ValueError):
    """The parameters cannot be exchanged as they are, or differ between ranks."""


class ExchangeError(DasoError):
    """An exchange failed in the communication thread."""


class NonFiniteError(DasoError):
    """Too many exchanges in a row met NaN or infinity."""


class StallError(DasoError):
    """A rank did not come to a meeting within `Exchange.timeout_seconds`."""


class ConfigError(DasoError, ValueError):
    """A configuration key or value is not valid."""


class DataError(DasoError, FileNotFoundError):
    """A data set is not where it was looked for."""


class CheckpointError(DasoError):
    """A checkpoint cannot be written, or none of those found is sound."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint cannot be written: a disk is full, or away for a while."""


class FlowError(DasoError):
    """A flow is not put together as it must be, or one of its nodes failed."""


def told(error: Exception) -> str:
    """Return an error's kind, and in one line what it says: some say a number, or nothing."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[-500:]}"
