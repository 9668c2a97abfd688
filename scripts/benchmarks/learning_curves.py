"""What is read off courses of trainings: accuracy over steps and seconds."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from daso.cli.bench.names import DDP, OURS, size_of_nodes

__all__ = ["figures", "is_tested", "on_link", "reached", "table"]

SPARSE = 4  # of so many copies one is tested, once the level was reached
Course = Mapping[str, Any]


def is_tested(index: int, count: int, *, had_level: bool) -> bool:
    """Return whether a copy is tested: all until the level was reached, then some and the last.

    Args:
        index: Of the copy, from 0.
        count: Of all copies.
        had_level: Whether an earlier one had the level.
    """
    return not had_level or index % SPARSE == 0 or index == count - 1


def reached(course: Course, level: float) -> int | None:
    """Return the index of the first test that had the level; None where none had.

    Args:
        course: With "accuracy", in percent.
        level: In percent.
    """
    return next((at for at, percent in enumerate(course["accuracy"]) if percent >= level), None)


def on_link(
    rivals: Sequence[Mapping[str, Any]],
    times: Mapping[str, Any],
    own: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Join trainings and step times of a link.

    The results of a rival do not depend on the link, so its seconds are its steps times its step
    time there. Ours trained on the link itself, because its schedule depends on times.

    Args:
        rivals: Trainings of contenders with a fixed schedule, DDP's first.
        times: Step times on the link.
        own: Trainings of ours.

    Returns:
        Rows for JSON, DDP's first; means over seeds.
    """
    rival = rivals[0]
    level = rival["plan"]["level"]
    step_ms = {row["name"]: row["step_ms"] for row in times["rows"]}
    rows = []
    for one in rivals:
        name = one["plan"]["name"]
        moved = [_moved(course, step_ms[name] / 1e3) for course in one["courses"]]
        rows.append(_row(name, moved, level, step_ms[name]))
    base = rows[0]
    for one in own:
        name = one["plan"]["name"]
        rows.append(_row(name, one["courses"], level, step_ms[name]))
    for row in rows:
        row["gap"] = base["final"] - row["final"]
        both = row["seconds_to"] is not None and base["seconds_to"] is not None
        row["over_ddp"] = row["seconds_to"] / base["seconds_to"] if both else None
    kept = ("parameters", "batch", "nodes", "versions")
    plan = {**rival["plan"], "link": times["plan"]["link"], "rounds": times["plan"]["rounds"]}
    del plan["name"]
    return {"plan": plan, **{key: rival[key] for key in kept}, "rows": rows, "steps": times["rows"]}


def _moved(course: Course, step_seconds: float) -> dict[str, Any]:
    return {**course, "seconds": [step * step_seconds for step in course["steps"]]}


def _row(name: str, courses: Sequence[Course], level: float, step_ms: float) -> dict[str, Any]:
    finals = [course["accuracy"][-1] for course in courses]
    return {
        "name": name,
        "step_ms": step_ms,
        "steps_to": _mean_to(courses, "steps", level),
        "seconds_to": _mean_to(courses, "seconds", level),
        "final": statistics.mean(finals),
        "spread": statistics.stdev(finals) if len(finals) > 1 else None,
        "courses": list(courses),
    }


def _mean_to(courses: Sequence[Course], key: str, level: float) -> float | None:
    """Return the mean over seeds of steps or seconds to the level; None where one never had it."""
    found = [(course, reached(course, level)) for course in courses]
    values = [course[key][at] for course, at in found if at is not None]
    return statistics.mean(values) if len(values) == len(courses) else None


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    level = f"{found['plan']['level']:g} %"
    titles = (f"steps to {level}", f"s to {level}", "x DDP", "final %", "+-", "gap", "ms/step")
    widths = (15, 11, 9, 9, 7, 7, 9)
    columns = "".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True))
    lines = [_head(found), f"{'':<26}{columns}"]
    for row in found["rows"]:
        keys = (
            *(("steps_to", 0), ("seconds_to", 1), ("over_ddp", 3)),
            *(("final", 2), ("spread", 2), ("gap", 2), ("step_ms", 1)),
        )
        cells = ("-" if row[key] is None else f"{row[key]:.{digits}f}" for key, digits in keys)
        values = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{row['name']:<26}{values}")
    return "\n".join(lines)


def _head(found: Mapping[str, Any]) -> str:
    plan = found["plan"]
    steps = found["rows"][0]["courses"][0]["steps"][-1]
    text = plan["data"] == "text"
    model = "byte-level transformer (AdamW, percentages are 100 exp(-loss))" if text else "CNN"
    return (
        f"{plan['data']}, {model} of {found['parameters'] / 1e6:.2f} M parameters, batch "
        f"{found['batch']}, {size_of_nodes(found['nodes'])}, link "
        f"{plan['link']}, {plan['epochs']} epochs of {steps // plan['epochs']} steps, learning "
        f"rate {plan['peak']:g}, mean of {plan['seeds']} seeds"
    )


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of this link, named as everywhere; a level never reached has none."""
    ours = next((row for row in found["rows"] if row["name"] == OURS), None)
    if ours is None:
        return {}
    plan = found["plan"]
    suffix = plan["link"] if plan["data"] == "fashion" else f"{plan['link']}_{plan['data']}"
    conditions = (
        f"{OURS} against {DDP}: {_head(found)}; means of the ranks' models every {plan['every']} "
        f"steps, tested later, each rank on its share of all tests; seconds of {DDP} and of other "
        f"rivals are its steps times its step time on the link, the median of {plan['rounds']} "
        f"alternating rounds"
    )
    values: dict[str, tuple[float | None, str]] = {
        f"time_to_accuracy_over_best_{suffix}": (
            _over_best(found["rows"]),
            f"ratio of seconds to {plan['level']:g} % test accuracy, over the best rival's",
        ),
        f"time_to_accuracy_ratio_{suffix}": (
            ours["over_ddp"],
            f"ratio of seconds to {plan['level']:g} % test accuracy, over DDP's",
        ),
        f"accuracy_gap_{suffix}": (ours["gap"], "points of final test accuracy below DDP"),
    }
    return {
        name: {"value": value, "unit": unit, "conditions": conditions}
        for name, (value, unit) in values.items()
        if value is not None
    }


def _over_best(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the seconds of ours over the least of several rivals; None with DDP alone."""
    seconds = {row["name"]: row["seconds_to"] for row in rows}
    ours = seconds.pop(OURS)
    reached_level = [one for one in seconds.values() if one is not None]
    return ours / min(reached_level) if ours and reached_level and len(seconds) > 1 else None
