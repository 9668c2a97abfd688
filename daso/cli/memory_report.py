"""Analysis of a model's call for `daso memory`: plain values, and their text and figure."""

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from daso.errors import ConfigError
from daso.memory import api
from daso.memory.api import ForwardArguments, MemoryPlan
from daso.memory.course import SimulatedStep, floor
from daso.memory.planner import choose
from daso.memory.storages import tensors_in
from daso.torch_private import COMPILED_INSIDE, is_compiled

MIB = 1 << 20
UNLIMITED = 1 << 62  # bytes
MAX_ROWS = 40  # of units
SHARES = (0, 0.1, 0.25, 0.5, 0.75, 1)  # of the way from the floor to plain: budgets to show
WAYS = {"keep": "kept", "swap": "swapped", "recompute": "recomputed"}
Values = dict[str, Any]


def analyse(
    model: Any, args: Any, kwargs: Any, *, budget: int | None, policy: str, second: str, units: Any
) -> tuple[Values, list[int] | None]:
    """Plan the memory of a call, under the modes (such as autocast) that the script has set.

    Returns:
        The report as plain values, sizes in bytes and times in seconds; and the bytes over a step
        of the plan to draw: without a budget, the one for the lowest budget that has a plan.
    """
    notes = list[str]()
    while (compiled := is_compiled(model)) or isinstance(
        model, DataParallel | DistributedDataParallel
    ):
        notes.append(f"planned for the module inside of {type(model).__name__}, as it is")
        model = getattr(model, COMPILED_INSIDE) if compiled else model.module
    if any(torch.nn.parameter.is_lazy(param) for param in model.parameters()):
        with torch.no_grad():
            model(*args, **kwargs)  # makes its parameters, which no step does again
    optimizer, batch = _optimizer_of(model), ForwardArguments(args, kwargs)
    options: Any = {"optimizer": optimizer, "second": second, "units": units}
    options["policy"] = "all_keep" if budget is None else policy
    plan = api.plan(model, batch, UNLIMITED if budget is None else budget, **options)
    others = {} if budget is not None else dict(_plans_for_budgets(plan, policy))
    params, inputs = list(model.parameters()), tensors_in((args, kwargs))
    shapes = [f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in inputs[:4]]
    drawn = next(filter(None, others.values()), None) if budget is None else plan
    planned = None if drawn is None else _bytes_over_a_step(plan, drawn.chosen.simulated)
    values = {
        "model": {
            "class": type(model).__name__,
            "parameters": sum(param.numel() for param in params),
            "trained": sum(param.numel() for param in params if param.requires_grad),
        },
        "called_with": ", ".join(shapes + ["..."] * (len(inputs) > 4)) or "no tensor",
        "optimizer": None if optimizer is None else _name(optimizer),
        "policy": policy,
        "second": plan.second,
        "static_bytes": {**plan.static._asdict(), "total": plan.static.total},
        "plain_bytes": plan.plain_bytes,
        "plain_seconds": plan.plain.seconds,
        "floor_bytes": plan.static.total + floor(plan.profile),
        "link": asdict(plan.link),
        "plan": None if budget is None else _plan_values(plan, measured_bytes=plan.measured_bytes),
        "budgets": [
            {"budget_bytes": nbytes, **(_plan_values(other) if other else {}), "fits": bool(other)}
            for nbytes, other in others.items()
        ],
        "units": [*_unit_values(plan, planned=budget is not None)],
        "bytes_over_a_step": {
            "plain": _bytes_over_a_step(plan, plan.plain),
            "planned": None if budget is None else planned,
        },
        "notes": [*notes, *_notes(params, optimizer)],
    }
    return values, planned


def _plans_for_budgets(plain: MemoryPlan, policy: str) -> Iterator[tuple[int, MemoryPlan | None]]:
    """Yield budgets from the floor to plain with their plans; None where the policy has none."""
    static, least = plain.static.total, plain.static.total + floor(plain.profile)
    for share in SHARES:
        nbytes = _rounded_up(least + share * (plain.plain_bytes - least))
        try:
            chosen = choose(plain.profile, nbytes - static, plain.link, policy=policy)
            yield nbytes, replace(plain, budget_bytes=nbytes, chosen=chosen, measured_bytes=0)
        except ConfigError:
            yield nbytes, None


def _plan_values(plan: MemoryPlan, **more: int) -> Values:
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "seconds": plan.chosen.simulated.seconds,
        "slowdown": plan.slowdown,
        **{f"{text}_bytes": plan.bytes_of(way) for way, text in WAYS.items()},
        **more,
    }


def _unit_values(plan: MemoryPlan, *, planned: bool) -> Iterator[Values]:
    rows = zip(plan.trace.names, plan.chosen.ways, plan.profile.units, strict=True)
    for number, (name, way, unit) in enumerate(rows):
        saved = sum(group.nbytes for group in plan.profile.groups if number in group.saved[:1])
        sizes = {"saved_bytes": saved, "again_bytes": unit.recomputed_bytes}
        seconds = {key: time for key, time in unit._asdict().items() if key.endswith("_seconds")}
        yield {"module": name, "way": way if planned else None, **sizes, **seconds}


def _bytes_over_a_step(plan: MemoryPlan, step: SimulatedStep) -> list[int]:
    """Return all bytes in each moment: forward of the units in order, then their backward."""
    return [plan.static.total + nbytes for nbytes in step.resident_bytes]


def _optimizer_of(model: Any) -> Any:
    """Return the newest optimizer that has parameters of a model, or None."""
    params = {id(param) for param in model.parameters() if param.requires_grad}
    optimizers = [
        candidate
        for generation in range(3)  # of Python's garbage collector: newest objects first
        for candidate in reversed(gc.get_objects(generation))
        if issubclass(type(candidate), torch.optim.Optimizer) and params & _param_ids(candidate)
    ]
    inner = {id(wrapper.inner) for wrapper in optimizers if hasattr(wrapper, "inner")}  # of DASO
    return next((optimizer for optimizer in optimizers if id(optimizer) not in inner), None)


def _param_ids(optimizer: Any) -> set[int]:
    """Return the ids of an optimizer's parameters; it may be under construction."""
    groups = getattr(optimizer, "param_groups", ())
    return {id(param) for group in groups for param in group["params"]}


def _name(optimizer: Any) -> str:
    name = type(optimizer).__name__
    return f"{name}({_name(optimizer.inner)})" if hasattr(optimizer, "inner") else name


def _notes(params: Sequence[torch.Tensor], optimizer: Any) -> Iterator[str]:
    """Yield the limits of the analysis."""
    known = set[int]() if optimizer is None else _param_ids(optimizer)
    missing = [param for param in params if param.requires_grad and id(param) not in known]
    if optimizer is None:
        yield "no optimizer has the model's parameters when it is called: its memory is not counted"
    elif missing:
        yield (
            f"{len(missing)} trained parameters are in no optimizer, or in another one than "
            f"{_name(optimizer)}: its memory is not counted"
        )
    yield "the loss is not counted: the sum of the model's outputs stands in for it"


# --- text -----------------------------------------------------------------------------------------


def _rounded_up(nbytes: float) -> int:
    """Return the bytes of a size as it is shown, which are not less."""
    return math.ceil(math.ceil(nbytes / MIB * 100) / 100 * MIB)


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.2f}"


def render(values: Values) -> str:
    """Return the report as text."""
    model, link, chosen = values["model"], values["link"], values["plan"]
    static = {name: _mib(nbytes) for name, nbytes in values["static_bytes"].items()}
    count, trained = model["parameters"], model["trained"]
    head = {
        "model": f"{model['class']}, {count:,} parameters"
        + (f", {trained:,} of them trained" if trained < count else ""),
        "called with": values["called_with"],
        "static": f"{static['total']} MiB: parameters {static['parameters']}, gradients "
        f"{static['gradients']}, {values['optimizer'] or 'optimizer'} {static['optimizer']}, "
        f"batch {static['batch']}",
        "plain peak": f"{_mib(values['plain_bytes'])} MiB",
    }
    if chosen:
        sizes = (f"{text} {_mib(chosen[f'{text}_bytes'])} MiB" for text in WAYS.values())
        head |= {
            "planned peak": f"{_mib(chosen['peak_bytes'])} MiB; {_mib(chosen['measured_bytes'])} "
            "measured in a step",
            "budget": f"{_mib(chosen['budget_bytes'])} MiB",
            "time": f"{chosen['slowdown']:.3f} of plain, predicted: forward and backward "
            f"{1e3 * chosen['seconds']:,.1f} ms",
            "activations": ", ".join(sizes),
        }
    else:
        head["floor"] = f"{_mib(_rounded_up(values['floor_bytes']))} MiB: no budget can be below"
    head["link"] = (
        f"{values['second']}: {link['bytes_per_second'] / (1 << 30):,.2f} GiB/s, "
        f"{1e6 * link['latency_seconds']:,.1f} us for each copy, measured"
    )
    lines = [f"{name:<14}{text}" for name, text in head.items()]
    table = _unit_lines(values["units"]) if chosen else _budget_lines(values)
    return "\n".join([*lines, "", *table, "", *(f"- {note}" for note in values["notes"])])


def _budget_lines(values: Values) -> Iterator[str]:
    policy, rows = values["policy"], values["budgets"]
    yield f"Costs of budgets, by {policy}; sizes in MiB, time relative to plain:"
    heads = "".join(f"{text:>12}" for text in WAYS.values())
    yield f"{'budget':>12}{'peak':>12}{'time':>8}{heads}"
    for row in rows:
        size = f"{_mib(row['budget_bytes']):>12}"
        if row["fits"]:
            sizes = "".join(f"{_mib(row[f'{text}_bytes']):>12}" for text in WAYS.values())
            yield f"{size}{_mib(row['peak_bytes']):>12}{row['slowdown']:>8.3f}{sizes}"
        else:
            yield f"{size}  no plan by {policy}"
    good = [row["budget_bytes"] for row in rows if row["fits"]]
    if good:
        yield f"Choose one, as in: --budget {good[len(good) // 2] / MIB:.2f}MiB"


def _unit_lines(rows: Sequence[Values]) -> Iterator[str]:
    width = max(len("module"), *(len(row["module"]) for row in rows)) + 2
    yield (
        f"{'module':<{width}}{'way':<16}{'saved MiB':>10}{'again MiB':>10}"
        f"{'forward ms':>12}{'backward ms':>13}{'recompute ms':>14}"
    )
    half, hidden = MAX_ROWS // 2, len(rows) - MAX_ROWS
    for number, row in enumerate(rows):
        if hidden <= 0 or not half <= number < half + hidden:
            module, way, saved, again, *seconds = row.values()
            times = "".join(f"{1e3 * time:>{12 + at}.3f}" for at, time in enumerate(seconds))
            yield f"{module:<{width}}{way:<16}{_mib(saved):>10}{_mib(again):>10}{times}"
        elif number == half:
            yield f"...  {hidden} rows more"


# --- figure ---------------------------------------------------------------------------------------


def draw(values: Values, planned: Sequence[int] | None) -> Any:
    """Return a figure of memory over one step: plain, planned (see `analyse`) and static."""
    from matplotlib.figure import Figure

    names = [row["module"] for row in values["units"]]
    static, count = values["static_bytes"]["total"] / MIB, len(names)
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes, edges = figure.add_subplot(), range(2 * count + 1)
    heights = [nbytes / MIB for nbytes in values["bytes_over_a_step"]["plain"]]
    axes.stairs(heights, edges, baseline=None, color="0.35", label="plain")
    model, top = values["model"], max(heights)
    title = f"{model['class']}, {model['parameters'] / 1e6:,.2f} M parameters"
    if planned is not None:
        chosen = values["plan"] or next(row for row in values["budgets"] if row["fits"])
        heights, budget = [nbytes / MIB for nbytes in planned], chosen["budget_bytes"] / MIB
        axes.stairs(heights, edges, baseline=static, fill=True, color="tab:blue", alpha=0.55)
        axes.stairs(heights, edges, baseline=None, color="tab:blue", label="planned")
        axes.axhline(budget, color="tab:red", linestyle="--", label=f"budget, {budget:,.2f} MiB")
        top = max(top, budget)
        title += f"; planned by {values['policy']}: {chosen['slowdown']:.2f} of plain's time"
    axes.stairs([static] * 2 * count, edges, fill=True, color="0.82", label="static")
    axes.set_ylim(0, 1.12 * top)
    axes.axvline(count, color="0.35", linestyle=":", linewidth=1)
    axes.set_xlim(0, 2 * count)
    for at, text in ((0.25, "forward"), (0.75, "backward")):
        axes.text(at, 0.97, text, transform=axes.transAxes, ha="center", va="top", color="0.35")
    shown = range(0, count, math.ceil(count / 8))
    ticks = [unit + 0.5 for unit in shown] + [2 * count - unit - 0.5 for unit in reversed(shown)]
    labels = [names[unit] for unit in (*shown, *reversed(shown))]
    axes.set_xticks(ticks, labels, rotation=45, ha="right", fontsize=8)
    axes.set_ylabel("memory, MiB")
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside right upper")
    return figure
