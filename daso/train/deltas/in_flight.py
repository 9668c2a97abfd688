"""An exchange of parameters under way: its work for the engine, and its part of a checkpoint."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from daso.comm.engine import PeerRendezvous, Work, WorkHandle
from daso.comm.mpi import load
from daso.comm.reduction import sum_buffer
from daso.plan.cost_model import vote_rounds
from daso.plan.exchange import Sent, Tally
from daso.plan.header import Header, culprit
from daso.train.channels import Channels
from daso.train.deltas.buffer import DeltaBuffer, Measured


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an exchange on this rank."""

    header: Header  # agreed by all ranks
    tally: Tally  # of the previous exchange, summed over all ranks
    measured: Tally  # by this rank, about this exchange
    nbytes: int  # sent by this rank
    sound: bool  # this rank's own values were finite
    made_seconds: float = 0.0  # of the engine's, until a device had made the payload
    busy_seconds: float = 0.0  # of a core, of the engine's thread


@dataclass(frozen=True, slots=True)
class InFlight:
    """An exchange under way."""

    handle: WorkHandle[Outcome]
    sent: Sent
    ahead: bool  # the node moved to its own guess of the result
    own_seconds: float  # of packing, in the training thread
    small: bool = False  # it carries small tensors alone


class Votes:
    """All-reduces the headers of exchanges over the world, one at a time.

    Args:
        channels: Communicators of the model.
    """

    def __init__(self, channels: Channels) -> None:
        mpi, self._comm = load(), channels.comms.votes
        self._in_place, self._max, self._sum = mpi.IN_PLACE, mpi.MAX, mpi.SUM
        self._rounds = vote_rounds(channels.world_info.world_size) // 2
        widths = Header.width(channels.world_info.lanes), Tally.width()
        self._header, self._tally = (
            sum_buffer(torch.zeros(width, dtype=torch.float64, device="cpu")) for width in widths
        )

    def combine(self, header: Header, tally: Tally | None = None) -> Work[tuple[Header, Tally]]:
        """Return the header's elementwise maximum and the tally's sum over all ranks.

        Args:
            header: Header of this rank.
            tally: Tally of this rank; None, on all ranks alike: nothing is summed.

        Collective over the world; non-blocking, as work for the engine.
        """
        most, sums = self._header[0], self._tally[0]
        numbers = header.encode()
        most[: len(numbers)], most[len(numbers) :] = numbers, 0.0
        requests = [self._comm.Iallreduce(self._in_place, self._header, op=self._max)]
        if tally is not None:
            sums[:] = tally.encode()
            requests.append(self._comm.Iallreduce(self._in_place, self._tally, op=self._sum))
        yield PeerRendezvous(requests, rounds=self._rounds)
        return Header.decode(most.tolist()), Tally() if tally is None else Tally(*sums.tolist())


def carry_out(
    channels: Channels,
    votes: Votes,
    all_rows: Sequence[DeltaBuffer],
    rows: Sequence[DeltaBuffer],
    header: Header,
    *,
    tally: Tally | None,
    size: float,
) -> Work[Outcome]:
    """Vote first; where all values are finite, move the reference of rows by the mean delta.

    Args:
        channels: Communicators of the model.
        votes: Carries the header.
        all_rows: All rows of the model, in order.
        rows: Rows that are exchanged.
        header: Header of this rank.
        tally: Tally of the previous exchange; None: nothing is summed.
        size: About the squared norm of all parameters.

    Collective over the world; non-blocking, as work for the engine.
    """
    begun, busy = time.perf_counter(), time.thread_time()
    code, fingerprint = yield from _check_rows(channels, all_rows, rows)
    made_seconds, world = time.perf_counter() - begun, channels.world_info
    header = replace(header, nonfinite=code).with_reference(fingerprint, world.lane, world.lanes)
    agreed, sums = yield from votes.combine(header, tally)
    total = Measured()
    agreed_on = agreed.aligned and agreed.same_references
    if agreed_on and not agreed.nonfinite and world.lane is not None:
        for row in rows:
            measurements = yield from row.exchange()
            # Small tensors are also exchanged alone: their distance would bias the choice of skip.
            total += Measured(measurements.nbytes) if row.is_small else measurements
    measured = Tally.measured(total.distance, total.norm, total.moved, size)
    sound = header.nonfinite == 0.0
    busy_seconds = time.thread_time() - busy
    return Outcome(agreed, sums, measured, total.nbytes, sound, made_seconds, busy_seconds)


def _check_rows(
    channels: Channels, all_rows: Sequence[DeltaBuffer], rows: Sequence[DeltaBuffer]
) -> Work[tuple[float, int]]:
    """Return the code of these rows' first value that is not finite, or 0, and a fingerprint."""
    world, before, code, fingerprint = channels.world_info, 0, 0.0, 0
    for row in all_rows:
        if row in rows:
            element, row_fingerprint = yield from row.collect()
            fingerprint += row_fingerprint
            if element is not None and not code:
                code = culprit(before + element, world.rank, world.world_size)
        before += row.numel
    return code, fingerprint


def name_at(all_rows: Sequence[DeltaBuffer], element: int) -> str:
    """Return the name of the parameter that has an element of all rows."""
    for row in all_rows:
        if element < row.numel:
            return row.sharding.whole.name_at(element)
        element -= row.numel
    raise AssertionError("an element outside all rows")


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
