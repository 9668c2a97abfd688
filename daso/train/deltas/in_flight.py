"""An exchange of parameters under way: what is known of it, and how a checkpoint keeps it."""

from dataclasses import asdict, dataclass
from typing import Any

from daso.comm.engine import WorkHandle
from daso.plan.exchange import Sent
from daso.plan.header import Header, Tally

__all__ = ["InFlight", "Outcome", "pack", "unpack"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an exchange gave."""

    header: Header  # agreed by all ranks
    tally: Tally  # summed over all ranks, about the exchange before
    measured: Tally  # by this rank, about this exchange
    nbytes: int  # sent by this rank
    sound: bool  # this rank's own values were finite
    made_seconds: float = 0.0  # of the engine's, until a device had come so far as to send
    busy_seconds: float = 0.0  # of a core, of the engine's thread


@dataclass(frozen=True, slots=True)
class InFlight:
    """An exchange under way."""

    handle: WorkHandle[Outcome]
    sent: Sent
    ahead: bool  # the node moved to its own guess of the result
    own_seconds: float  # of packing, in the training thread
    small: bool = False  # it carries small tensors alone


def pack(flight: InFlight) -> dict[str, Any]:
    """Return an exchange that is over between nodes as plain values."""
    assert flight.handle.result is not None, "an exchange is stored once it is over"
    return {
        "outcome": asdict(flight.handle.result),
        "seconds": flight.handle.seconds,
        "sent": asdict(flight.sent),
        "ahead": flight.ahead,
        "own_seconds": flight.own_seconds,
        "small": flight.small,
    }


def unpack(values: dict[str, Any]) -> InFlight:
    """Return the exchange of plain values that `pack` made."""
    outcome = values["outcome"]
    parts = {
        "header": Header(**outcome["header"]),
        "tally": Tally(**outcome["tally"]),
        "measured": Tally(**outcome["measured"]),
    }
    handle = WorkHandle.over(Outcome(**outcome | parts), values["seconds"])
    rest = (values[name] for name in ("ahead", "own_seconds", "small"))
    return InFlight(handle, Sent(**values["sent"]), *rest)
