"""What a recording shows, on world rank 0's clock: where steps' time went, and who was late."""

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daso.errors import DataError
from daso.timeline.clock_offsets import Loop, Reading, clocks, close_loop
from daso.trace import EXCHANGE, MERGE, SCHEMA, SEND, STEP, WAIT_INTER_NODE, WAIT_INTRA_NODE, Span

__all__ = ["TRAINING", "Late", "Share", "Timeline", "late_ranks", "read_timeline", "shares"]

TRAINING = 0  # index of the thread that takes steps, in what `read_timeline` returns


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank did.

    Args:
        node: Its node.
        host: Its host.
        threads: Their names; the first takes the steps.
        spans: In order of their begin, on world rank 0's clock, in seconds.
        lost: Spans that there was no room for.
    """

    node: int
    host: str
    threads: tuple[str, ...]
    spans: tuple[Span, ...]
    lost: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What all ranks did."""

    ranks: tuple[Rank, ...]
    loops: tuple[Loop, ...]  # of clocks, in order; empty for one rank
    moved: int  # merges that came before what they merge was sent, by clocks' error; set right


def read_timeline(path: Path) -> Timeline:
    """Read a file of `daso.timeline.recording.Recording`."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(
            f"a recording must be readable, but {path}: {error.strerror}; record one with `daso "
            f"train --trace=true`"
        ) from error
    try:
        # A run that was killed may leave half a line.
        head, *lines = [json.loads(line) for line in text.split("\n")[:-1]]
        if head["schema"] != SCHEMA:
            raise DataError(
                f"a recording must be of version {SCHEMA}, but {path} is of {head['schema']}; "
                f"record it anew"
            )
        return _timeline(head, lines)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DataError(
            f"a recording must be what `daso train --trace=true` writes, but {path} is not; name a "
            f"run folder, or its trace.jsonl"
        ) from error


def _timeline(head: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Timeline:
    loops = [
        close_loop([Reading(*one) for one in line["clocks"]]) for line in lines if "clocks" in line
    ]
    ticks = clocks(loops) if loops else None
    spans: dict[int, list[Span]] = defaultdict(list)
    lost: dict[int, int] = defaultdict(int)
    threads: dict[int, list[str]] = {}
    for line in lines:
        if "spans" not in line:
            continue
        rank = line["rank"]
        lost[rank] += line["lost"]
        threads[rank] = line["threads"]
        for one in line["spans"]:
            span = Span(*one)
            begins, ends = max(span.begins, line["since"]), span.ends
            if ends <= begins:  # while the last mark was made
                continue
            if ticks is not None:
                begins, ends = ticks[rank].first(begins), ticks[rank].first(ends)
            spans[rank].append(span._replace(begins=begins, ends=ends))
    moved = _set_right(spans)
    ranks = tuple(
        _rank(known, threads.get(number, []), spans[number], lost[number])
        for number, known in enumerate(head["ranks"])
    )
    return Timeline(ranks, tuple(loops), moved)


def _rank(known: Mapping[str, Any], threads: list[str], spans: list[Span], lost: int) -> Rank:
    """Return a rank whose first thread is the one that takes steps."""
    steps = next((span.thread for span in spans if span.kind == STEP), 0)
    order = sorted(range(len(threads)), key=lambda thread: thread != steps)
    place = {thread: at for at, thread in enumerate(order)}
    moved = (span._replace(thread=place[span.thread]) for span in spans)
    return Rank(
        known["node"],
        known["host"],
        tuple(threads[thread] for thread in order),
        tuple(sorted(moved, key=lambda span: (span.begins, -span.ends))),
        lost,
    )


def _set_right(spans: Mapping[int, list[Span]]) -> int:
    """Let nothing be merged before all have sent it; return how often clocks had said otherwise."""
    sent: dict[int, float] = {}
    for of_rank in spans.values():
        keys = Counter(span.key for span in of_rank if span.kind == SEND)
        if any(count > 1 for count in keys.values()):
            raise DataError(
                "a recording must be of one optimizer's exchanges, but two of a rank have the same "
                "number; record one optimizer at a time"
            )
        for span in of_rank:
            if span.kind == SEND:
                sent[span.key] = max(span.ends, sent.get(span.key, span.ends))
    moved = 0
    for of_rank in spans.values():
        for at, span in enumerate(of_rank):
            known = span.kind == MERGE and span.key >= 0  # not of an exchange of before a resume
            last = sent.get(span.key) if known else None
            if last is not None and span.begins < last:
                of_rank[at] = span._replace(begins=last, ends=max(last, span.ends))
                moved += 1
    return moved


# --- where steps' time went -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank's steps were made of; seconds are means over its steps.

    Args:
        rank: World rank.
        steps: How many.
        step_seconds: Of a whole step.
        computing_seconds: Of what is left without all below.
        node_seconds: Of standing still for other ranks of the node.
        exposed_seconds: Of standing still for other nodes.
        send_seconds: Of packing what is sent, and of merging what came.
        exchange_seconds: Of other threads' work between nodes, beside all of this.
        hidden: Part of that work beside which the training thread did not stand still.
    """

    rank: int
    steps: int
    step_seconds: float
    computing_seconds: float
    node_seconds: float
    exposed_seconds: float
    send_seconds: float
    exchange_seconds: float
    hidden: float


def shares(timeline: Timeline) -> list[Share]:
    """Return what the steps of every rank that took any were made of."""
    return [
        _share(number, rank.spans)
        for number, rank in enumerate(timeline.ranks)
        if any(span.kind == STEP for span in rank.spans)
    ]


def _share(number: int, spans: Sequence[Span]) -> Share:
    steps = _joined([span for span in spans if span.kind == STEP])
    count = sum(span.kind == STEP for span in spans)
    mine = [span for span in spans if span.thread == TRAINING]
    work = _common(_joined([span for span in spans if span.kind == EXCHANGE]), steps)
    waits = _joined([span for span in mine if span.kind in (WAIT_INTRA_NODE, WAIT_INTER_NODE)])

    def mean(*kinds: int) -> float:
        return _length(_common(_joined([s for s in mine if s.kind in kinds]), steps)) / count

    # What a thread does that sends or merges while it waits is waiting.
    still = mean(WAIT_INTRA_NODE, WAIT_INTER_NODE)
    node, send = mean(WAIT_INTRA_NODE), mean(SEND, MERGE, WAIT_INTRA_NODE, WAIT_INTER_NODE) - still
    whole, busy = _length(steps) / count, _length(work)
    return Share(
        rank=number,
        steps=count,
        step_seconds=whole,
        computing_seconds=whole - still - send,
        node_seconds=node,
        exposed_seconds=still - node,
        send_seconds=send,
        exchange_seconds=busy / count,
        hidden=1 - _length(_common(work, waits)) / busy if busy else 1.0,
    )


Stretch = tuple[float, float]


def _joined(spans: Sequence[Span]) -> list[Stretch]:
    """Return stretches of time in order, those that touch as one."""
    found: list[Stretch] = []
    for span in spans:  # in order of their begin
        if found and span.begins <= found[-1][1]:
            found[-1] = (found[-1][0], max(span.ends, found[-1][1]))
        else:
            found.append((span.begins, span.ends))
    return found


def _common(one: Sequence[Stretch], other: Sequence[Stretch]) -> list[Stretch]:
    """Return the time that is in both of two lists, each in order and without overlaps."""
    found, a, b = [], 0, 0
    while a < len(one) and b < len(other):
        begins, ends = max(one[a][0], other[b][0]), min(one[a][1], other[b][1])
        if begins < ends:
            found.append((begins, ends))
        if one[a][1] < other[b][1]:
            a += 1
        else:
            b += 1
    return found


def _length(stretches: Sequence[Stretch]) -> float:
    return sum(ends - begins for begins, ends in stretches)


# --- who was late ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Late:
    """How a rank came to exchanges.

    Args:
        rank: World rank.
        exchanges: How many all ranks sent to.
        last: How often it was the last.
        behind_seconds: Median of how long after the first it had sent.
    """

    rank: int
    exchanges: int
    last: int
    behind_seconds: float


def late_ranks(timeline: Timeline) -> list[Late]:
    """Return how every rank came to the exchanges that all took part in, the latest rank first."""
    sent: dict[int, dict[int, float]] = defaultdict(dict)
    for number, rank in enumerate(timeline.ranks):
        for span in rank.spans:
            if span.kind == SEND:
                sent[span.key][number] = span.ends
    everyones = [one for one in sent.values() if len(one) == len(timeline.ranks)]
    if not everyones:
        return []
    last = [max(one, key=lambda rank: one[rank]) for one in everyones]
    found = [
        Late(
            rank=number,
            exchanges=len(everyones),
            last=last.count(number),
            behind_seconds=statistics.median(one[number] - min(one.values()) for one in everyones),
        )
        for number in range(len(timeline.ranks))
    ]
    return sorted(found, key=lambda one: (-one.behind_seconds, -one.last))
