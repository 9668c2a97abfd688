"""`daso trace`: a recorded run's time by part, late ranks, and a file for trace viewers."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from daso.cli.outputs import may_write, write_file
from daso.errors import ConfigError
from daso.paths import path_of
from daso.timeline.chrome import chrome_events
from daso.timeline.report import (
    Late,
    Share,
    Timeline,
    late_ranks,
    read_timeline,
    shares,
)

FILE = "trace.jsonl"  # in a run folder
SHOWN = 16  # ranks in a table; of more, the latest and slowest


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``daso trace``."""
    parser.add_argument(
        "recording", type=path_of, help="a run folder (its newest), or a trace.jsonl"
    )
    parser.add_argument(
        "--chrome", type=path_of, help="write events for ui.perfetto.dev or chrome://tracing"
    )
    parser.add_argument("--plot", type=path_of, help="draw some steps of all ranks (PNG, PDF, SVG)")
    parser.add_argument("--json", type=path_of, help="write the tables to this file")
    parser.set_defaults(run=lambda chosen, _: _main(chosen))


def newest(folder: Path) -> Path:
    """Return the newest recording of a run folder; a resumed run has one per part."""
    recordings = folder.glob(FILE.replace(".", "*."))
    return max(recordings, key=lambda path: path.stat().st_mtime, default=folder / FILE)


def _main(chosen: argparse.Namespace) -> int:
    may_write(chosen.json, chosen.plot)
    path = newest(chosen.recording) if chosen.recording.is_dir() else chosen.recording
    timeline = read_timeline(path)
    steps, late = shares(timeline), late_ranks(timeline)
    if chosen.chrome is not None:  # also possible for a flow, which has no steps
        events = {"traceEvents": list(chrome_events(timeline)), "displayTimeUnit": "ms"}
        write_file(chosen.chrome, json.dumps(events) + "\n")
        print(f"{chosen.chrome}: open it in ui.perfetto.dev")
    if not steps:
        raise ConfigError(
            f"a recording must have steps, but {path} has none; record a run on 2 "
            f"ranks at least, to its first epoch's end",
            code="recording-without-steps",
        )
    if chosen.json is not None:
        tables = {
            "steps": [asdict(row) for row in steps],
            "late": [asdict(row) for row in late],
            "loops": [asdict(loop) for loop in timeline.loops],
        }
        write_file(chosen.json, json.dumps(tables, indent=1) + "\n")
    if chosen.plot is not None:
        from daso.cli import plots

        plots.save(plots.draw_timeline(timeline), chosen.plot, "a picture of some steps")
    print(render(timeline, steps, late))
    return 0


def render(timeline: Timeline, steps: Sequence[Share], late: Sequence[Late]) -> str:
    """Return tables as aligned lines."""
    lines = [
        "Milliseconds of a step: computing, waiting for others, and concurrent exchanges.",
        f"{'rank':>6}{'steps':>8}{'ms/step':>10}{'computing':>11}{'in node':>9}{'exposed':>9}"
        f"{'send, merge':>13}{'exchanging':>12}{'hidden':>8}  host",
    ]
    shown = sorted(steps, key=lambda row: -row.step_seconds)[:SHOWN]
    for row in sorted(shown, key=lambda row: row.rank):
        lines.append(
            f"{row.rank:>6}{row.steps:>8}{1e3 * row.step_seconds:>10.2f}"
            f"{1e3 * row.computing_seconds:>11.2f}{1e3 * row.node_seconds:>9.2f}"
            f"{1e3 * row.exposed_seconds:>9.2f}{1e3 * row.send_seconds:>13.2f}"
            f"{1e3 * row.exchange_seconds:>12.2f}{row.hidden:>8.1%}"
            f"  {timeline.ranks[row.rank].host}"
        )
    if len(steps) > SHOWN:
        lines.append(f"  and {len(steps) - SHOWN} ranks with shorter steps")
    return "\n".join([*lines, "", *_late_lines(timeline, late), *_clock_lines(timeline)])


def _late_lines(timeline: Timeline, late: Sequence[Late]) -> list[str]:
    if not late or len(timeline.ranks) == 1:
        return ["No exchange of parameters between nodes was recorded."]
    count = late[0].exchanges
    lines = [f"Last ranks in {count} exchanges, and their delay after the first (median):"]
    for row in late[:SHOWN]:
        host = timeline.ranks[row.rank].host
        lines.append(
            f"{row.rank:>6}{row.last:>8} times{1e3 * row.behind_seconds:>10.3f} ms  {host}"
        )
    return lines


def _clock_lines(timeline: Timeline) -> list[str]:
    lost = sum(rank.lost for rank in timeline.ranks)
    lines = [f"{lost} spans were lost for lack of memory."] if lost else []
    if not timeline.loops:
        return lines
    worst = max(timeline.loops, key=lambda loop: abs(loop.closure) - loop.bound)
    bound = max(max(loop.bounds) for loop in timeline.loops)
    lines.append(
        f"Clocks: compared {len(timeline.loops)} times, right to {1e6 * bound:.1f} us; round the "
        f"ring of ranks offsets add up to {1e6 * worst.closure:.2f} us, where up to "
        f"{1e6 * worst.bound:.1f} can be."
    )
    bad = sum(not loop.sound for loop in timeline.loops)
    if bad:
        lines.append(
            f"{bad} of {len(timeline.loops)} comparisons of clocks do not add up: a link is faster "
            f"one way than the other, or a clock was set; the order between ranks is unreliable."
        )
    if timeline.moved:
        lines.append(
            f"{timeline.moved} merges preceded their sends due to that error, and were moved."
        )
    return lines
