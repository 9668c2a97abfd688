"""Clocks of many ranks brought to one: offsets round a ring, and what their sum round it tells.

Each rank asks the next one for its time and halves the round trip, which is right to half of that
trip. Offsets add up to 0 round a closed loop, but for these errors: a link that answers faster one
way than the other by more than it should be able to shows there. A tree has no such check.
"""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Clock", "Loop", "Reading", "clocks", "close_loop"]

LEAST_SECONDS = 1.0  # between two loops, for drift to show above the error of offsets
MOST_DRIFT = 1e-4  # seconds a second, between two crystals of 50 ppm


@dataclass(frozen=True, slots=True)
class Reading:
    """What a rank learnt of the next one's clock.

    Args:
        at: Seconds on this rank's clock.
        offset: Seconds that the next rank's clock is ahead of this one's.
        trip: Seconds to the next rank and back, the shortest seen.
    """

    at: float
    offset: float
    trip: float


@dataclass(frozen=True, slots=True)
class Loop:
    """All clocks at one time.

    Args:
        ats: Seconds on each rank's clock.
        offsets: Seconds that each rank's clock is ahead of rank 0's.
        bounds: Seconds by which each of them may be wrong.
        closure: Seconds that offsets round the ring do not add up to 0 by.
        bound: Seconds that this can be at most where every trip takes as long there as back, give
            or take all of it: half of all trips, and what clocks drift apart between the readings.
    """

    ats: tuple[float, ...]
    offsets: tuple[float, ...]
    bounds: tuple[float, ...]
    closure: float
    bound: float

    @property
    def sound(self) -> bool:
        """Whether the loop closes."""
        return abs(self.closure) <= self.bound


def close_loop(readings: Sequence[Reading]) -> Loop:
    """Return all clocks, from every rank's reading of the next one's, the last rank's of rank 0's.

    What does not close is spread over the links by their trips, if it can be their error.
    """
    closure = sum(reading.offset for reading in readings)
    trips = sum(reading.trip for reading in readings)
    drifted = MOST_DRIFT * max(0.0, _seconds_between(readings) - trips)
    bound = trips / 2 + drifted
    share = closure / trips if trips and abs(closure) <= bound else 0.0
    offsets, there = [0.0], [0.0]  # along the ring, with trips so far
    for reading in readings[:-1]:
        offsets.append(offsets[-1] + reading.offset - share * reading.trip)
        there.append(there[-1] + reading.trip)
    return Loop(
        ats=tuple(reading.at for reading in readings),
        offsets=tuple(offsets),
        bounds=tuple(
            _bound(way, trips, closed=share != 0.0 or closure == 0.0) + (drifted if rank else 0.0)
            for rank, way in enumerate(there)
        ),
        closure=closure,
        bound=bound,
    )


def _seconds_between(readings: Sequence[Reading]) -> float:
    """Return the seconds between the first and the last reading, give or take all trips."""
    ahead = itertools.accumulate((reading.offset for reading in readings[:-1]), initial=0.0)
    times = [reading.at - offset for reading, offset in zip(readings, ahead, strict=True)]
    return max(times) - min(times)


def _bound(way: float, trips: float, *, closed: bool) -> float:
    """Return how wrong an offset can be, so many seconds of trips from rank 0 along the ring.

    Where what does not close is spread by trips, w of T of it is taken off after w: the errors of
    the links up to there, each half a trip, count (T - w) / T times, those of the others w / T.
    """
    return way * (trips - way) / trips if closed and trips else way / 2


class Clock:
    """One rank's clock, brought to rank 0's; between two loops its drift is even.

    Args:
        points: Seconds on its own clock, and how many it is ahead then, in order of time.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._points = [points[0]]
        for at, ahead in points[1:]:
            if at - self._points[-1][0] >= LEAST_SECONDS:
                self._points.append((at, ahead))
        self._ats = [at for at, _ in self._points]

    def first(self, at: float) -> float:
        """Return what rank 0's clock showed when this one showed ``at``, in seconds."""
        points = self._points
        if len(points) == 1:
            return at - points[0][1]
        number = min(max(1, bisect_left(self._ats, at)), len(points) - 1)
        (begin, ahead), (end, later) = points[number - 1 : number + 1]
        return at - ahead - (later - ahead) * (at - begin) / (end - begin)


def clocks(loops: Sequence[Loop]) -> list[Clock]:
    """Return the clock of every rank, from all loops of a run; those that do not close are left."""
    sound = [loop for loop in loops if loop.sound] or loops
    ranks = range(len(loops[0].offsets))
    return [Clock([(loop.ats[rank], loop.offsets[rank]) for loop in sound]) for rank in ranks]
