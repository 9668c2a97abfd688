"""An exchange of parameters under way: what is known of it, and how a checkpoint keeps it."""

from dataclasses import asdict, dataclass
from typing import Any

from daso.comm.engine import WorkHandle
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
    batch: int  # batch after which it was sent
    batches: int  # of work that it carries
    fragment: int | None  # None: all of them
    ahead: bool  # the node went where it will probably bring it
    keeps: bool  # the merge keeps local work
    wire: str
    own_seconds: float  # that the training thread packed
    small: bool = False  # it carries small tensors alone


def pack(flight: InFlight) -> dict[str, Any]:
    """Return an exchange that is over between nodes as plain values."""
    assert flight.handle.result is not None, "an exchange is stored once it is over"
    return {
        "outcome": asdict(flight.handle.result),
        "seconds": flight.handle.seconds,
        "batch": flight.batch,
        "batches": flight.batches,
        "fragment": flight.fragment,
        "ahead": flight.ahead,
        "keeps": flight.keeps,
        "wire": flight.wire,
        "own_seconds": flight.own_seconds,
        "small": flight.small,
    }


def unpack(values: dict[str, Any]) -> InFlight:
    """Return what `pack` made plain."""
    outcome = values["outcome"]
    parts = {
        "header": Header(**outcome["header"]),
        "tally": Tally(**outcome["tally"]),
        "measured": Tally(**outcome["measured"]),
    }
    handle = WorkHandle.over(Outcome(**outcome | parts), values["seconds"])
    names = ("batch", "batches", "fragment", "ahead", "keeps", "wire", "own_seconds", "small")
    return InFlight(handle, *(values[name] for name in names))
