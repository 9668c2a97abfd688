"""What `daso memory` found, as text, as plain values, and as a picture."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from daso.errors import ConfigError
from daso.memory.api import MemoryPlan
from daso.memory.planner import Unit, choose, floor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Found", "as_json", "draw", "render"]

MIB = 1 << 20
SHOWN = 40  # rows of units
MANY = 64  # units: the search would look for minutes, once for each of some budgets
QUICK = ("keep_late_swap", "keep_late_recompute", "keep_late_both")
PARTS = (0, 0.1, 0.25, 0.5, 0.75, 1)  # of the way from the floor to plain: budgets to show


@dataclass(frozen=True)
class Found:
    """What was found at the first call of a script's model.

    Args:
        made: Its plan; if no budget was asked for, that all is kept.
        program: The script and its arguments.
        planned: Whether a budget was asked for.
        policy: Who decides.
        given: What the model was called with, to be read.
        optimizer: Whose memory is counted, by its class; None: there is none.
        notes: What is not counted, and what else is to be known.
    """

    made: MemoryPlan
    program: tuple[str, ...]
    planned: bool
    policy: str
    given: str
    optimizer: str | None
    notes: tuple[str, ...]

    @property
    def floor_bytes(self) -> int:
        """Bytes below which no plan can go, with all that is there all the time."""
        return self.made.static.total + floor(self.made.script.units)

    @cached_property
    def budgets(self) -> dict[int, MemoryPlan | None]:
        """Plans for some budgets, from the floor to plain; None where the policy has none."""
        least, most = self.floor_bytes, self.made.plain_bytes
        some = (least + part * (most - least) for part in PARTS)
        return {nbytes: self._within(nbytes) for nbytes in map(_typed, some)}

    @property
    def deciders(self) -> tuple[str, ...]:
        """Policies of which the fastest decides within each of these budgets."""
        many = len(self.made.script.units) > MANY
        return QUICK if many and self.policy == "search" else (self.policy,)

    def _within(self, nbytes: int) -> MemoryPlan | None:
        made, plans = self.made, list[MemoryPlan]()
        for policy in self.deciders:
            try:
                chosen = choose(
                    made.script.units, nbytes - made.static.total, made.link, policy=policy
                )
            except ConfigError:  # what it does needs more
                continue
            plans.append(replace(made, budget_bytes=nbytes, chosen=chosen))
            if plans[-1].slowdown <= 1:
                break
        return min(plans, key=lambda one: one.slowdown, default=None)


def _typed(nbytes: float) -> int:
    """Return the bytes of a size as it is shown, which are not less."""
    return math.ceil(math.ceil(nbytes / MIB * 100) / 100 * MIB)


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.2f}"


# --- text -----------------------------------------------------------------------------------------


def render(found: Found) -> str:
    """Return all as lines for people."""
    table = _unit_lines(found) if found.planned else _budget_lines(found)
    return "\n".join([*_head(found), "", *table, "", *(f"- {note}" for note in found.notes)])


def _head(found: Found) -> Iterator[str]:
    """Say what it comes to, one line each."""
    made, static = found.made, found.made.static
    count, trained = _parameters(made)
    frozen = "" if count == trained else f", {trained:,} of them trained"
    yield f"model         {type(made.model).__name__}, {count:,} parameters{frozen}"
    yield f"called with   {found.given}"
    yield (
        f"static        {_mib(static.total)} MiB: parameters {_mib(static.parameters)}, gradients "
        f"{_mib(static.gradients)}, {found.optimizer or 'optimizer'} {_mib(static.optimizer)}, "
        f"batch {_mib(static.batch)}, casts {_mib(static.casts)}"
    )
    yield f"plain peak    {_mib(made.plain_bytes)} MiB"
    if found.planned:
        yield f"planned peak  {_mib(made.peak_bytes)} MiB"
        yield f"budget        {_mib(made.budget_bytes)} MiB"
        yield (
            f"time          {made.slowdown:.3f} of plain, predicted: forward and backward "
            f"{1e3 * made.chosen.course.seconds:,.1f} ms"
        )
        yield "activations   " + ", ".join(
            f"{text} {_mib(made.bytes_of(way))} MiB" for way, text in FATES.items()
        )
    else:
        yield f"floor         {_mib(_typed(found.floor_bytes))} MiB: no budget can be below"
    yield (
        f"link          {made.second}: {made.link.bytes_per_second / (1 << 30):,.2f} GiB/s, "
        f"{1e6 * made.link.latency_seconds:,.1f} us for each copy, measured"
    )


FATES = {"keep": "kept", "swap": "swapped", "recompute": "recomputed"}


def _parameters(made: MemoryPlan) -> tuple[int, int]:
    """Return how many numbers are parameters, and how many of them are trained."""
    params = list(made.model.parameters())
    return sum(p.numel() for p in params), sum(p.numel() for p in params if p.requires_grad)


def _budget_lines(found: Found) -> Iterator[str]:
    """Say what time some budgets would cost."""
    by = f"by {found.policy}"
    if found.policy not in found.deciders:
        by = f"at most ({found.policy} looks longer once --budget is there)"
    yield f"What a budget would cost, {by}; sizes in MiB, time over that of plain:"
    yield f"{'budget':>12}{'peak':>12}{'time':>8}" + "".join(
        f"{text:>12}" for text in FATES.values()
    )
    for nbytes, made in found.budgets.items():
        if made is None:
            yield f"{_mib(nbytes):>12}  no plan by {' or '.join(found.deciders)}"
        else:
            ways = "".join(f"{_mib(made.bytes_of(way)):>12}" for way in FATES)
            yield f"{_mib(nbytes):>12}{_mib(made.peak_bytes):>12}{made.slowdown:>8.3f}{ways}"
    good = [nbytes for nbytes, made in found.budgets.items() if made is not None]
    if good:
        yield f"Choose one, as in: --budget {good[len(good) // 2] / MIB:.2f}MiB"


class _Row(NamedTuple):
    """A unit, or several one behind the other that go the same way."""

    number: str
    name: str
    way: str
    units: Sequence[Unit]


def _unit_lines(found: Found) -> Iterator[str]:
    """Say what becomes of each unit, or of units that go the same way where there are many."""
    script, ways = found.made.script, found.made.chosen.ways
    rows = [
        _Row(str(number), name, way, [unit])
        for number, (name, way, unit) in enumerate(
            zip(script.names, ways, script.units, strict=True)
        )
    ]
    if len(rows) > SHOWN:
        rows = [_folded(list(same)) for _, same in groupby(rows, key=lambda row: row.way)]
    wide = max(len("begins with"), *(len(row.name) for row in rows)) + 2
    yield (
        f"{'unit':>9}  {'begins with':<{wide}}{'way':<16}{'head MiB':>9}{'tail MiB':>10}"
        f"{'forward ms':>12}{'backward ms':>13}{'recompute ms':>14}"
    )
    for at, row in enumerate(rows):
        if len(rows) > SHOWN and SHOWN // 2 <= at < len(rows) - SHOWN // 2:
            if at == SHOWN // 2:
                yield f"{'...':>9}  {len(rows) - SHOWN // 2 * 2} rows more"
            continue
        yield (
            f"{row.number:>9}  {row.name:<{wide}}{row.way:<16}"
            f"{_mib(sum(unit.head.nbytes for unit in row.units)):>9}"
            f"{_mib(sum(unit.tail.nbytes for unit in row.units)):>10}"
            f"{1e3 * sum(unit.forward_seconds for unit in row.units):>12.3f}"
            f"{1e3 * sum(unit.backward_seconds for unit in row.units):>13.3f}"
            f"{1e3 * sum(unit.recompute_seconds for unit in row.units):>14.3f}"
        )


def _folded(rows: Sequence[_Row]) -> _Row:
    """Return one row of several."""
    if len(rows) == 1:
        return rows[0]
    names = [name for name, _ in Counter(row.name for row in rows).most_common(3)]
    name = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
    units = [unit for row in rows for unit in row.units]
    return _Row(f"{rows[0].number}-{rows[-1].number}", name, rows[0].way, units)


# --- plain values ---------------------------------------------------------------------------------


def as_json(found: Found) -> dict[str, Any]:
    """Return all as plain values, sizes in bytes and times in seconds."""
    made = found.made
    count, trained = _parameters(made)
    static = made.static
    return {
        "script": list(found.program),
        "model": {"class": type(made.model).__name__, "parameters": count, "trained": trained},
        "called_with": found.given,
        "optimizer": found.optimizer,
        "policy": found.policy,
        "deciders": list(found.deciders),
        "second": made.second,
        "static_bytes": {**static._asdict(), "total": static.total},
        "plain_bytes": made.plain_bytes,
        "plain_seconds": made.plain.seconds,
        "floor_bytes": found.floor_bytes,
        "link": asdict(made.link),
        "plan": _plan(made) if found.planned else None,
        "budgets": []
        if found.planned
        else [
            {"budget_bytes": nbytes, **({} if one is None else _plan(one)), "fits": one is not None}
            for nbytes, one in found.budgets.items()
        ],
        "units": [*_units(found)],
        "bytes_over_a_step": {
            "plain": _over_a_step(made, made.plain.there),
            "planned": _over_a_step(made, made.chosen.course.there) if found.planned else None,
        },
        "notes": list(found.notes),
    }


def _plan(made: MemoryPlan) -> dict[str, Any]:
    return {
        "budget_bytes": made.budget_bytes,
        "peak_bytes": made.peak_bytes,
        "seconds": made.chosen.course.seconds,
        "slowdown": made.slowdown,
        **{f"{text}_bytes": made.bytes_of(way) for way, text in FATES.items()},
    }


def _units(found: Found) -> Iterator[dict[str, Any]]:
    script, ways = found.made.script, found.made.chosen.ways
    for number, (name, way, unit) in enumerate(zip(script.names, ways, script.units, strict=True)):
        yield {
            "number": number,
            "begins_with": name,
            "way": way if found.planned else None,
            "head_bytes": unit.head.nbytes,
            "tail_bytes": unit.tail.nbytes,
            "forward_seconds": unit.forward_seconds,
            "backward_seconds": unit.backward_seconds,
            "recompute_seconds": unit.recompute_seconds,
        }


def _over_a_step(made: MemoryPlan, there: Sequence[int]) -> list[int]:
    """Return bytes in each moment: forward of the first unit to the last, then backward."""
    return [made.static.total + nbytes for nbytes in there]


# --- a picture ------------------------------------------------------------------------------------


def draw(found: Found) -> "Figure":
    """Draw memory over one step: plain, as planned, and what is there all the time.

    Without a budget, the plan for the lowest one that was found is drawn.
    """
    from matplotlib.figure import Figure

    made: MemoryPlan | None = found.made
    if not found.planned:
        made = next((one for one in found.budgets.values() if one is not None), None)
    static, count = found.made.static.total / MIB, len(found.made.script.units)
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.add_subplot()
    edges = range(2 * count + 1)
    plain = _over_a_step(found.made, found.made.plain.there)
    axes.stairs([one / MIB for one in plain], edges, baseline=None, color="0.35", label="plain")
    if made is not None:
        there = [one / MIB for one in _over_a_step(made, made.chosen.course.there)]
        axes.stairs(there, edges, baseline=static, fill=True, color="tab:blue", alpha=0.55)
        axes.stairs(there, edges, baseline=None, color="tab:blue", label="planned")
        budget = made.budget_bytes / MIB
        label = f"budget, {budget:,.2f} MiB"
        axes.axhline(budget, color="tab:red", linestyle="--", linewidth=1.2, label=label)
    axes.stairs([static] * 2 * count, edges, fill=True, color="0.82", label="static")
    axes.set_ylim(0, 1.12 * max(*plain, made.budget_bytes if made else 0) / MIB)
    _label(axes, count)
    axes.set_title(_title(found, made), fontsize=10)
    figure.legend(loc="outside right upper")
    return figure


def _label(axes: "Axes", count: int) -> None:
    """Tell whose forward or backward each moment is."""
    axes.axvline(count, color="0.35", linestyle=":", linewidth=1)
    axes.set_xlim(0, 2 * count)
    for at, text in ((0.25, "forward"), (0.75, "backward")):
        axes.text(at, 0.97, text, transform=axes.transAxes, ha="center", va="top", color="0.35")
    units = range(0, count, math.ceil(count / 8))
    places = [one + 0.5 for one in units] + [2 * count - one - 0.5 for one in reversed(units)]
    axes.set_xticks(places, [str(one) for one in (*units, *reversed(units))])
    axes.set_xlabel("unit whose forward, and then whose backward it is")
    axes.set_ylabel("memory, MiB")


def _title(found: Found, made: MemoryPlan | None) -> str:
    count, _ = _parameters(found.made)
    name = f"{type(found.made.model).__name__}, {count / 1e6:,.2f} M parameters"
    if made is None:
        return name
    quick = not found.planned and found.policy not in found.deciders
    by = "" if quick else f" by {found.policy}"
    return f"{name}; planned{by}: {made.slowdown:.2f} of plain's time"
