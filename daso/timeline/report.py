"""Analysis of a recording on world rank 0's clock: time of steps by part, and late ranks."""

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

TRAINING = 0  # index of the training thread in `read_timeline`'s ranks


@dataclass(frozen=True, slots=True)
class Rank:
    """Recorded spans of one rank.

    Args:
        node: Its node.
        host: Its host.
        threads: Names of its threads; the first is the training thread.
        spans: Spans in order of their begin, on world rank 0's clock, in seconds.
        lost: Number of spans that did not fit into memory.
    """

    node: int
    host: str
    threads: tuple[str, ...]
    spans: tuple[Span, ...]
    lost: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Recorded spans of all ranks."""

    ranks: tuple[Rank, ...]
    loops: tuple[Loop, ...]  # of clocks, in order; empty for one rank
    moved: int  # merges moved because a clock error put them before their send


def read_timeline(path: Path) -> Timeline:
    """Read a file written by `daso.timeline.recording.Recording`."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(
            f"a recording must be readable, but {path}: {error.strerror}; record one with `daso "
            f"train --trace=true`",
            code="recording-not-readable",
        ) from error
    try:
        # A killed run may leave half a line.
        head, *lines = [json.loads(line) for line in text.split("\n")[:-1]]
        if head["schema"] != SCHEMA:
            raise DataError(
                f"a recording must be of version {SCHEMA}, but {path} is of {head['schema']}; "
                f"record it again",
                code="recording-of-other-version",
            )
        return _timeline(head, lines)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DataError(
            f"a recording must be what `daso train --trace=true` writes, but {path} is not; name a "
            f"run folder, or its trace.jsonl",
            code="recording-not-valid",
        ) from error


def _timeline(head: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Timeline:
    loops = [
        close_loop([Reading(*reading) for reading in line["clocks"]])
        for line in lines
        if "clocks" in line
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
        for row in line["spans"]:
            span = Span(*row)
            begins, ends = max(span.begins, line["since"]), span.ends
            if ends <= begins:  # it ended during the last mark
                continue
            if ticks is not None:
                begins, ends = ticks[rank].first(begins), ticks[rank].first(ends)
            spans[rank].append(span._replace(begins=begins, ends=ends))
    moved = _move_early_merges(spans)
    ranks = tuple(
        _rank(known, threads.get(number, []), spans[number], lost[number])
        for number, known in enumerate(head["ranks"])
    )
    return Timeline(ranks, tuple(loops), moved)


def _rank(known: Mapping[str, Any], threads: list[str], spans: list[Span], lost: int) -> Rank:
    """Return a rank with its training thread first."""
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


def _move_early_merges(spans: Mapping[int, list[Span]]) -> int:
    """Move merges that precede a send of the same exchange; return how many were moved."""
    sent: dict[int, float] = {}
    for of_rank in spans.values():
        keys = Counter(span.key for span in of_rank if span.kind == SEND)
        if any(count > 1 for count in keys.values()):
            raise DataError(
                "a recording must be of one optimizer's exchanges, but two of a rank have the same "
                "number; record one optimizer at a time",
                code="recording-of-two-optimizers",
            )
        for span in of_rank:
            if span.kind == SEND:
                sent[span.key] = max(span.ends, sent.get(span.key, span.ends))
    moved = 0
    for of_rank in spans.values():
        for at, span in enumerate(of_rank):
            known = span.kind == MERGE and span.key >= 0  # not an exchange started before a resume
            last = sent.get(span.key) if known else None
            if last is not None and span.begins < last:
                of_rank[at] = span._replace(begins=last, ends=max(last, span.ends))
                moved += 1
    return moved


# --- steps' time by part --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """Mean seconds of a rank's steps by part.

    Args:
        rank: World rank.
        steps: Number of steps.
        step_seconds: A whole step.
        computing_seconds: The remainder without the parts below.
        node_seconds: Waiting for other ranks of the node.
        exposed_seconds: Waiting for other nodes.
        send_seconds: Packing payloads and merging results.
        exchange_seconds: Inter-node work of other threads, concurrent with the parts above.
        hidden: Fraction of that work during which the training thread did not wait.
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
    """Return the parts of the steps of every rank that took steps."""
    return [
        _share(number, rank.spans)
        for number, rank in enumerate(timeline.ranks)
        if any(span.kind == STEP for span in rank.spans)
    ]


def _share(number: int, spans: Sequence[Span]) -> Share:
    steps = _joined([span for span in spans if span.kind == STEP])
    count = sum(span.kind == STEP for span in spans)
    own_spans = [span for span in spans if span.thread == TRAINING]
    work = _common(_joined([span for span in spans if span.kind == EXCHANGE]), steps)
    waits = _joined([span for span in own_spans if span.kind in (WAIT_INTRA_NODE, WAIT_INTER_NODE)])

    def mean(*kinds: int) -> float:
        return _length(_common(_joined([s for s in own_spans if s.kind in kinds]), steps)) / count

    # Sends and merges during a wait count as waiting.
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
    """Return disjoint stretches of time in order; touching ones are joined."""
    stretches: list[Stretch] = []
    for span in spans:  # in order of their begin
        if stretches and span.begins <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(span.ends, stretches[-1][1]))
        else:
            stretches.append((span.begins, span.ends))
    return stretches


def _common(first: Sequence[Stretch], second: Sequence[Stretch]) -> list[Stretch]:
    """Return the intersection of two lists of disjoint stretches in order."""
    stretches, a, b = [], 0, 0
    while a < len(first) and b < len(second):
        begins, ends = max(first[a][0], second[b][0]), min(first[a][1], second[b][1])
        if begins < ends:
            stretches.append((begins, ends))
        if first[a][1] < second[b][1]:
            a += 1
        else:
            b += 1
    return stretches


def _length(stretches: Sequence[Stretch]) -> float:
    return sum(ends - begins for begins, ends in stretches)


# --- late ranks -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Late:
    """A rank's lateness in exchanges.

    Args:
        rank: World rank.
        exchanges: Number of exchanges with sends of all ranks.
        last: How often it sent last.
        behind_seconds: Median time between the first rank's send and its own.
    """

    rank: int
    exchanges: int
    last: int
    behind_seconds: float


def late_ranks(timeline: Timeline) -> list[Late]:
    """Return every rank's lateness in the exchanges with sends of all ranks, the latest first."""
    sent: dict[int, dict[int, float]] = defaultdict(dict)
    for number, rank in enumerate(timeline.ranks):
        for span in rank.spans:
            if span.kind == SEND:
                sent[span.key][number] = span.ends
    complete = [times for times in sent.values() if len(times) == len(timeline.ranks)]
    if not complete:
        return []
    last = [max(times, key=lambda rank: times[rank]) for times in complete]
    rows = [
        Late(
            rank=number,
            exchanges=len(complete),
            last=last.count(number),
            behind_seconds=statistics.median(
                times[number] - min(times.values()) for times in complete
            ),
        )
        for number in range(len(timeline.ranks))
    ]
    return sorted(rows, key=lambda row: (-row.behind_seconds, -row.last))
