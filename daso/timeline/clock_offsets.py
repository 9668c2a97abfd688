"""Conversion of many ranks' clocks to one: offsets around a ring, checked by their sum.

Each rank requests the next rank's time and halves the round trip, an error of at most half of that
trip. Around a closed loop offsets add up to 0, except for these errors, so that a link with very
unequal latencies of both directions is detected. A tree has no such check.
"""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SECONDS = 1.0  # between two loops, for drift to show above the error of offsets
MOST_DRIFT = 1e-4  # seconds a second, between two crystals of 50 ppm


@dataclass(frozen=True, slots=True)
class Reading:
    """Measurement of the next rank's clock by one rank.

    Args:
        at: Seconds on this rank's clock.
        offset: Seconds that the next rank's clock is ahead of this one's.
        trip: Seconds of the shortest round trip to the next rank.
    """

    at: float
    offset: float
    trip: float


@dataclass(frozen=True, slots=True)
class Loop:
    """Measurements of all clocks around the ring at one time.

    Args:
        ats: Seconds on each rank's clock.
        offsets: Seconds that each rank's clock is ahead of rank 0's.
        bounds: Maximum error of each offset, in seconds.
        closure: Sum of the offsets around the ring, in seconds, which should be 0.
        bound: Maximum closure that errors of the readings explain: half of all trips, plus the
            drift of clocks between the readings.
    """

    ats: tuple[float, ...]
    offsets: tuple[float, ...]
    bounds: tuple[float, ...]
    closure: float
    bound: float

    @property
    def sound(self) -> bool:
        """Return whether the closure is within its bound."""
        return abs(self.closure) <= self.bound


def close_loop(readings: Sequence[Reading]) -> Loop:
    """Return all clocks from the readings of each rank, each of the next rank's clock.

    The closure is distributed over the links by their trips, if it can be their error.
    """
    closure = sum(reading.offset for reading in readings)
    trips = sum(reading.trip for reading in readings)
    drifted = MOST_DRIFT * max(0.0, _seconds_between(readings) - trips)
    bound = trips / 2 + drifted
    share = closure / trips if trips and abs(closure) <= bound else 0.0
    offsets, trips_to = [0.0], [0.0]  # along the ring, with trips so far
    for reading in readings[:-1]:
        offsets.append(offsets[-1] + reading.offset - share * reading.trip)
        trips_to.append(trips_to[-1] + reading.trip)
    return Loop(
        ats=tuple(reading.at for reading in readings),
        offsets=tuple(offsets),
        bounds=tuple(
            _bound(way, trips, closed=share != 0.0 or closure == 0.0) + (drifted if rank else 0.0)
            for rank, way in enumerate(trips_to)
        ),
        closure=closure,
        bound=bound,
    )


def _seconds_between(readings: Sequence[Reading]) -> float:
    """Return the seconds between the first and the last reading, up to an error of all trips."""
    ahead = itertools.accumulate((reading.offset for reading in readings[:-1]), initial=0.0)
    times = [reading.at - offset for reading, offset in zip(readings, ahead, strict=True)]
    return max(times) - min(times)


def _bound(trips_to: float, trips: float, *, closed: bool) -> float:
    """Return the maximum error of an offset at `trips_to` seconds of trips from rank 0.

    If the closure is distributed, w / T of it is subtracted after w seconds of T: errors of the
    links before, each half a trip, count (T - w) / T times, those of the links after w / T times.
    """
    return trips_to * (trips - trips_to) / trips if closed and trips else trips_to / 2


class Clock:
    """Conversion of one rank's clock to rank 0's, with constant drift between two loops.

    Args:
        points: Seconds on its own clock, and the seconds that it is ahead then, in order of time.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._points = [points[0]]
        for at, ahead in points[1:]:
            if at - self._points[-1][0] >= LEAST_SECONDS:
                self._points.append((at, ahead))
        self._ats = [at for at, _ in self._points]

    def first(self, at: float) -> float:
        """Return rank 0's time, in seconds, when this clock showed ``at``."""
        points = self._points
        if len(points) == 1:
            return at - points[0][1]
        number = min(max(1, bisect_left(self._ats, at)), len(points) - 1)
        (begin, ahead), (end, later) = points[number - 1 : number + 1]
        return at - ahead - (later - ahead) * (at - begin) / (end - begin)


def clocks(loops: Sequence[Loop]) -> list[Clock]:
    """Return every rank's clock from all loops of a run, without loops that are not sound."""
    sound = [loop for loop in loops if loop.sound] or loops
    ranks = range(len(loops[0].offsets))
    return [Clock([(loop.ats[rank], loop.offsets[rank]) for loop in sound]) for rank in ranks]
