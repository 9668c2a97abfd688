"""The errors that a caller can act on. Every message states the rule, the value and the remedy."""

__all__ = [
    "CheckpointError",
    "CheckpointWriteError",
    "ConfigError",
    "DasoError",
    "DataError",
    "DivergenceError",
    "ExchangeError",
    "FlowError",
    "LayoutError",
    "NonFiniteError",
    "StallError",
    "TopologyError",
    "summarize",
]


class DasoError(Exception):
    """Base of every error that daso raises on purpose.

    Args:
        *args: The message: rule, value, remedy. It may change between versions.
        code: The stable name of the broken rule, such as "spare-must-wait", for programs and tests
            that tell errors apart. The same on every rank that raises the error.
    """

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        self.code = code


class TopologyError(DasoError):
    """The ranks, nodes or MPI library differ from those declared by the launcher or the caller."""


class LayoutError(DasoError, ValueError):
    """The parameters cannot be exchanged as they are, or differ between ranks."""


class ExchangeError(DasoError):
    """An exchange failed in the communication thread."""


class DivergenceError(DasoError):
    """Nodes hold different bits where all must hold the same: a host computes wrongly."""


class NonFiniteError(DasoError):
    """Too many consecutive exchanges contained NaN or infinity."""


class StallError(DasoError):
    """A rank did not reach a collective operation within `Exchange.timeout_seconds`."""


class ConfigError(DasoError, ValueError):
    """A configuration key or value is not valid."""


class DataError(DasoError, FileNotFoundError):
    """A data set is not in the searched folders."""


class CheckpointError(DasoError):
    """A checkpoint cannot be written, or no existing checkpoint is valid."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint cannot be written: a disk is full or temporarily unavailable."""


class FlowError(DasoError):
    """A flow's graph is invalid, or one of its nodes failed."""


def summarize(error: Exception) -> str:
    """Return an error's class and its message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[-500:]}"
