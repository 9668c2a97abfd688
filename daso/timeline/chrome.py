"""Export of a recording to Chrome's trace format."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from daso.timeline.report import TRAINING, Timeline
from daso.trace import KINDS, MERGE, MESSAGES, SEND, STEP, Span


def chrome_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the events of Chrome's trace format, one process per rank.

    Arrows lead from a rank's send to its own merge, and from the last send to all merges.
    Format: "Trace Event Format", Google, 2016, which ui.perfetto.dev reads.
    """
    begins = min((span.begins for rank in timeline.ranks for span in rank.spans), default=0.0)
    for pid, rank in enumerate(timeline.ranks):
        name = f"rank {pid} on {rank.host}, node {rank.node}"
        yield _named("process_name", pid, 0, name)
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for tid, thread in enumerate(rank.threads):
            yield _named("thread_name", pid, tid, "training" if tid == TRAINING else thread)
        for span in rank.spans:
            what = {STEP: "step", MESSAGES: "chunk"}.get(span.kind, "exchange")
            args = {what: span.key} if span.key >= 0 else {}
            yield {
                "ph": "X",
                "name": KINDS[span.kind],
                "pid": pid,
                "tid": span.thread,
                "ts": 1e6 * (span.begins - begins),
                "dur": 1e6 * (span.ends - span.begins),
                "args": args | ({"bytes": span.nbytes} if span.nbytes else {}),
            }
    yield from _arrows(timeline, begins)


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _arrows(timeline: Timeline, begins: float) -> Iterator[dict[str, Any]]:
    sent: dict[int, dict[int, Span]] = defaultdict(dict)
    merged: dict[int, dict[int, Span]] = defaultdict(dict)
    for number, rank in enumerate(timeline.ranks):
        for span in rank.spans:
            if span.kind in (SEND, MERGE):
                (sent if span.kind == SEND else merged)[span.key][number] = span
    arrow = 0
    for key, of_ranks in sent.items():
        last = max(of_ranks, key=lambda number: of_ranks[number].ends)
        for number, merge in merged[key].items():
            for source in {number, last} & set(of_ranks):
                arrow += 1
                end = of_ranks[source]
                common = {"cat": "exchange", "name": "exchange", "id": arrow}
                yield {
                    **common,
                    "ph": "s",
                    "pid": source,
                    "tid": end.thread,
                    "ts": 1e6 * (end.begins - begins),
                }
                yield {
                    **common,
                    "ph": "f",
                    "bp": "e",
                    "pid": number,
                    "tid": merge.thread,
                    "ts": 1e6 * (merge.begins - begins),
                }
