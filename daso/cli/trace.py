"""`daso trace`: where the time of a recorded run went, who was late, and a file for a viewer."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from daso.cli.outputs import may_write, write_file
from daso.environment import path_of
from daso.errors import ConfigError
from daso.timeline.chrome import chrome_events
from daso.timeline.report import (
    Late,
    Share,
    Timeline,
    late_ranks,
    read_timeline,
    shares,
)

__all__ = ["FILE", "add_parser", "newest", "render"]

FILE = "trace.jsonl"  # in a run folder
SHOWN = 16  # ranks in a table; of more, those that are late or wait most


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
    """Return the newest recording of a run folder: of one that went on, that of its last part."""
    found = folder.glob(FILE.replace(".", "*."))
    return max(found, key=lambda path: path.stat().st_mtime, default=folder / FILE)


def _main(chosen: argparse.Namespace) -> int:
    may_write(chosen.json, chosen.plot)
    path = newest(chosen.recording) if chosen.recording.is_dir() else chosen.recording
    timeline = read_timeline(path)
    found, late = shares(timeline), late_ranks(timeline)
    if chosen.chrome is not None:  # of a flow, too, which has no steps
        events = {"traceEvents": list(chrome_events(timeline)), "displayTimeUnit": "ms"}
        write_file(chosen.chrome, json.dumps(events) + "\n")
        print(f"{chosen.chrome}: open it in ui.perfetto.dev")
    if not found:
        raise ConfigError(
            f"a recording must have steps to tell of them, but {path} has none; record a run on 2 "
            f"ranks at least, to its first epoch's end"
        )
    if chosen.json is not None:
        tables = {
            "steps": [asdict(one) for one in found],
            "late": [asdict(one) for one in late],
            "loops": [asdict(loop) for loop in timeline.loops],
        }
        write_file(chosen.json, json.dumps(tables, indent=1) + "\n")
    if chosen.plot is not None:
        from daso.cli import plots

        plots.save(plots.draw_timeline(timeline), chosen.plot)
    print(render(timeline, found, late))
    return 0


def render(timeline: Timeline, found: Sequence[Share], late: Sequence[Late]) -> str:
    """Return tables as aligned lines."""
    lines = [
        "Milliseconds of a step: computing, standing still for others, and what went on beside.",
        f"{'rank':>6}{'steps':>8}{'ms/step':>10}{'computing':>11}{'in node':>9}{'exposed':>9}"
        f"{'send, merge':>13}{'exchanging':>12}{'hidden':>8}  host",
    ]
    shown = sorted(found, key=lambda one: -one.step_seconds)[:SHOWN]
    for one in sorted(shown, key=lambda one: one.rank):
        lines.append(
            f"{one.rank:>6}{one.steps:>8}{1e3 * one.step_seconds:>10.2f}"
            f"{1e3 * one.computing_seconds:>11.2f}{1e3 * one.node_seconds:>9.2f}"
            f"{1e3 * one.exposed_seconds:>9.2f}{1e3 * one.send_seconds:>13.2f}"
            f"{1e3 * one.exchange_seconds:>12.2f}{one.hidden:>8.1%}"
            f"  {timeline.ranks[one.rank].host}"
        )
    if len(found) > SHOWN:
        lines.append(f"  and {len(found) - SHOWN} ranks with shorter steps")
    return "\n".join([*lines, "", *_late_lines(timeline, late), *_clock_lines(timeline)])


def _late_lines(timeline: Timeline, late: Sequence[Late]) -> list[str]:
    if not late or len(timeline.ranks) == 1:
        return ["No exchange of parameters between nodes was recorded."]
    count = late[0].exchanges
    lines = [f"Who came last to {count} exchanges, and how long after the first (median):"]
    for one in late[:SHOWN]:
        host = timeline.ranks[one.rank].host
        lines.append(
            f"{one.rank:>6}{one.last:>8} times{1e3 * one.behind_seconds:>10.3f} ms  {host}"
        )
    return lines


def _clock_lines(timeline: Timeline) -> list[str]:
    lost = sum(rank.lost for rank in timeline.ranks)
    lines = [f"{lost} spans were lost: there was no room for them."] if lost else []
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
            f"one way than the other, or a clock was set; order between ranks is not to be trusted."
        )
    if timeline.moved:
        lines.append(
            f"{timeline.moved} merges came before what they merge was sent, by that error; moved."
        )
    return lines
