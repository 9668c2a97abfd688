"""What each benchmark runs, from its options: checks them, starts ranks, yields what they found."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from types import ModuleType
from typing import Any

from benchmarks import growth_axes
from daso.cli.bench import options
from daso.cli.bench.names import COMPUTE, DDP, OURS
from daso.cli.bench.runs import QUICK, Measured
from daso.cli.bench.runs import train as run_train
from daso.errors import ConfigError

__all__ = ["GPU_MODELS", "RUNS", "train"]

GPU_MODELS = ("resnet50", "gpt2")
Found = list[dict[str, Any]]


def train(chosen: argparse.Namespace) -> Measured:
    """Run the bench of step times with rivals that are installed besides."""
    from benchmarks.third_party import EVERYBODY, installed, must_be_installed

    options.named(chosen.only or (), EVERYBODY)
    must_be_installed(chosen.only or ())
    usual = QUICK if chosen.quick else EVERYBODY
    names = tuple(chosen.only or filter(installed, usual))
    absent = [name for name in usual if not chosen.only and not installed(name)]
    if absent:
        print(f"not installed, so left out: {'; '.join(absent)}\n", flush=True)
    yield from run_train(chosen, "benchmarks.rivals", names)


def _gradient_order(chosen: argparse.Namespace) -> Measured:
    from benchmarks import gradient_order
    from benchmarks.contenders import FIFO, ORDERS

    links = options.links(chosen)
    options.named(chosen.only or (), ORDERS)
    usual = list(ORDERS)[:4] if chosen.quick else ORDERS
    names = tuple(dict.fromkeys([FIFO, *(chosen.only or usual)]))

    yield from _trained(chosen, gradient_order, names, links, usual=(4, 4), quick=(2, 2))


def _trained(
    chosen: argparse.Namespace,
    bench: ModuleType,
    names: Sequence[str],
    links: Sequence[str],
    *,
    usual: tuple[float, float],
    quick: tuple[float, float],
) -> Measured:
    """Run a bench of training steps; seconds of a round, and before the first, where not given."""
    seconds, settle = quick if chosen.quick else usual

    def plan(link: str) -> dict[str, Any]:
        long, before = chosen.seconds or seconds, options.settle_seconds(chosen, settle)
        return asdict(
            bench.Plan(chosen.model, tuple(names), options.rounds(chosen), long, before, link)
        )

    for one in options.measured(
        chosen, bench.__name__, links, [chosen.nodes], plan, chosen.ranks_per_node
    ):
        yield one, bench.table(one) + "\n", bench.figures(one)


def _sharded(chosen: argparse.Namespace) -> Measured:
    from benchmarks import sharded
    from daso.cli.bench.names import COMPUTE

    names, links = (COMPUTE, *sharded.SHARDED), options.links(chosen)
    yield from _trained(chosen, sharded, names, links, usual=(8, 20), quick=(3, 4))


def _host(chosen: argparse.Namespace) -> Measured:
    from benchmarks import node_reducers
    from benchmarks.contenders import INSIDE
    from daso.cli.bench import train
    from daso.cli.bench.places import HERE, run_here

    options.named(chosen.only or (), INSIDE)
    seconds, names = chosen.seconds or (2 if chosen.quick else 4), tuple(chosen.only or INSIDE)
    plan = asdict(train.Plan(chosen.model, names, options.rounds(chosen), seconds, seconds, HERE))
    one = run_here(
        "benchmarks.node_reducers", plan, ranks=chosen.ranks, ranks_per_node=chosen.ranks
    )
    yield one, node_reducers.table(one), node_reducers.figures(one)


def _checkpoint(chosen: argparse.Namespace) -> Measured:
    from benchmarks import checkpoint_stall
    from daso.cli.bench.places import run_here

    steps = chosen.steps or (20 if chosen.quick else 60)
    plan = asdict(checkpoint_stall.Plan(chosen.model, options.rounds(chosen), steps, chosen.folder))
    one = run_here("benchmarks.checkpoint_stall", plan, ranks=chosen.ranks, ranks_per_node=1)
    yield one, checkpoint_stall.table(one), checkpoint_stall.figures(one)


def _chunks(chosen: argparse.Namespace) -> Measured:
    from benchmarks import chunks
    from daso.cli.bench.places import run_here

    steps = chosen.steps or (10 if chosen.quick else 20)
    plan = asdict(chunks.Plan(options.rounds(chosen), steps, chosen.rate, chosen.latency))
    one = run_here("benchmarks.chunks", plan, ranks=chosen.ranks, ranks_per_node=chosen.ranks)
    yield one, chunks.table(one), chunks.figures(one)


def _to_accuracy(chosen: argparse.Namespace) -> Measured:
    from benchmarks import learning_curves, time_to_accuracy
    from daso.cli.bench import train
    from daso.cli.bench.baselines import CONTENDERS

    quick, rounds = chosen.quick, options.rounds(chosen)
    links = options.links(chosen, "1gbit" if quick else "1gbit,100mbit")
    chosen.seeds = chosen.seeds or (1 if quick else 3)
    chosen.epochs = chosen.epochs or (2 if quick else 3)
    if not 0 < chosen.level <= 100:
        raise ConfigError(f"--level must be a percentage above 0, not {chosen.level}")
    names = tuple(chosen.only or (OURS,))
    options.named(names, [name for name in CONTENDERS if name not in (COMPUTE, DDP)])
    plan = time_to_accuracy.Plan(
        "", chosen.data, chosen.seeds, chosen.epochs, chosen.lr, chosen.every, chosen.level, ""
    )
    seconds = chosen.seconds or (2 if quick else 3)
    settle = options.settle_seconds(chosen, 3 if quick else 6)
    model = "gpt" if chosen.data == time_to_accuracy.TEXT else "cnn"
    steps = train.Plan(model, (DDP, *names), rounds, seconds, settle, "")
    size = {"nodes": chosen.nodes, "ranks": chosen.ranks_per_node}
    for place, rates in options.places(chosen, links, chosen.nodes):
        for one in time_to_accuracy.compare(place, rates, plan, steps, **size):
            yield one, learning_curves.table(one) + "\n", learning_curves.figures(one)


def _gpu(chosen: argparse.Namespace) -> Measured:
    import torch

    from benchmarks import gpu
    from daso.cli.bench.places import run_here

    counts = options.counts("ranks", chosen.ranks)
    models = (chosen.model,) if chosen.model else GPU_MODELS
    if set(models) & set(GPU_MODELS) and not torch.cuda.is_available():
        raise ConfigError(
            "this bench needs a CUDA device, but torch sees none; --model=tiny pretends one"
        )
    steps = 8 if chosen.quick else 16
    for model, ranks in product(models, counts):
        plan = asdict(gpu.Plan(model, options.rounds(chosen), steps))
        one = run_here("benchmarks.gpu", plan, ranks=ranks, ranks_per_node=1)
        yield one, gpu.table(one) + "\n", gpu.figures(one)


def _push(chosen: argparse.Namespace) -> Measured:
    from benchmarks import push

    links, nodes, rounds = (
        options.links(chosen),
        options.nodes(chosen.nodes),
        options.rounds(chosen),
    )
    nbytes = max(1, int(chosen.mebibytes * (1 << 20)))

    def plan(link: str) -> dict[str, Any]:
        return asdict(push.Plan(nbytes, rounds, link, options.rate(link)))

    for one in options.measured(chosen, "benchmarks.push", links, nodes, plan, 1):
        yield one, push.table(one) + "\n", push.figures(one)


def _server(chosen: argparse.Namespace) -> Measured:
    from benchmarks import server
    from benchmarks.contenders import SERVERS
    from benchmarks.time_to_accuracy import TEXT

    links, nodes, quick = options.links(chosen), options.nodes(chosen.nodes), chosen.quick
    chosen.seeds = chosen.seeds or (1 if quick else 3)
    chosen.epochs = chosen.epochs or (1 if quick else 3)
    options.named(chosen.only or (), SERVERS)
    names = tuple(dict.fromkeys([DDP, *(chosen.only or SERVERS)]))
    if chosen.data == TEXT:  # in processes
        slow = [float(count) for count in options.counts("slow", chosen.slow or "3")]
    else:
        slow = options.numbers("slow", chosen.slow or ("3" if quick else "3,1.5,1"))
    seconds = chosen.seconds or (12 if quick else 16)
    accurate = (DDP, *server.GAPS.values())
    for place, rates in options.places(chosen, links, max(nodes)):
        # To a loss, and to an accuracy: all alike, and where one is the slowest.
        wanted = [*((times, 0) for times in slow), (0.0, chosen.epochs), (max(slow), chosen.epochs)]
        for link, count, (times, epochs) in product(rates, nodes, wanted[: -1 if quick else None]):
            plan = server.Plan(
                data=chosen.data,
                names=accurate if epochs else names,
                slow=times,
                seeds=chosen.seeds,
                seconds=seconds,
                epochs=epochs,
                every=chosen.every,
                loss=chosen.loss,
                lr=chosen.lr,
                momentum=chosen.momentum,
                link=link,
            )
            one = place.run("benchmarks.server", asdict(plan), link=link, nodes=count, ranks=1)
            yield one, server.table(one) + "\n", server.figures(one)


def _throttle(chosen: argparse.Namespace) -> Measured:
    from benchmarks import link_ratio, throttle_error, throttle_links
    from benchmarks.hosts import hosts
    from daso.cli.bench.places import run_here

    factors, rates = ((2.0,), (2e8,)) if chosen.quick else ((2.0, 3.0), (1e8, 4e8))
    steps = chosen.steps or 60
    plan = asdict(throttle_error.Plan(factors, rates, steps))
    one = run_here("benchmarks.throttle_error", plan, ranks=2, ranks_per_node=1)
    yield one, throttle_error.table(one) + "\n", throttle_error.figures(one)
    two = link_ratio.measure()
    yield two | {"versions": one["versions"]}, link_ratio.table(two) + "\n", link_ratio.figures(two)
    targets = throttle_links.TARGETS[-1:] if chosen.quick else throttle_links.TARGETS
    with hosts(2) as place:
        three = throttle_links.compare(place, steps, targets) | {"versions": one["versions"]}
    yield three, throttle_links.table(three), throttle_links.figures(three)


def _predict(chosen: argparse.Namespace) -> Measured:
    from benchmarks import prediction_error
    from benchmarks.hosts import hosts
    from daso.cli.bench import train

    quick = chosen.quick
    settings = prediction_error.SETTINGS[:3] if quick else prediction_error.SETTINGS
    seconds = chosen.seconds or (2 if quick else 4)
    settle = options.settle_seconds(chosen, 5 if quick else 15)
    plan = train.Plan(chosen.model, (), options.rounds(chosen), seconds, settle, "")
    one, text, figures = prediction_error.pace()
    yield one, text + "\n", figures
    found: Found = []
    with hosts(max(nodes for _, nodes in settings)) as place:
        for one in prediction_error.compare(place, plan, settings):
            found.append(one)
            yield one, prediction_error.table(one) + "\n", prediction_error.figures(found)


def _trace(chosen: argparse.Namespace) -> Measured:
    from benchmarks import recording_cost

    models, seconds = tuple(chosen.model or ("cnn", "tiny")), chosen.seconds
    if not chosen.nodes > 1:
        raise ConfigError(f"--nodes must be at least 2, not {chosen.nodes}")

    def plan(link: str) -> dict[str, Any]:
        each = seconds or (1 if chosen.quick else 4)
        return asdict(recording_cost.Plan(models, options.rounds(chosen), each, link))

    for one in options.measured(
        chosen, "benchmarks.recording_cost", options.links(chosen), [chosen.nodes], plan, 1
    ):
        yield one, recording_cost.table(one) + "\n", recording_cost.figures(one)


def _flow(chosen: argparse.Namespace) -> Measured:
    from benchmarks import flow
    from benchmarks.plain_torch import MAKERS
    from daso.cli.bench.places import run_here

    quick, tasks = chosen.quick, chosen.task or list(MAKERS)
    for name in ("count", "epochs", "seeds"):
        usual = {"count": (200, 400), "epochs": (2, 6), "seeds": (1, 3)}[name]
        setattr(chosen, name, getattr(chosen, name) or usual[0 if quick else 1])
    at_once = options.counts("at-once", chosen.at_once)
    courses = {
        "at_once": at_once,
        "samples": chosen.samples,
        "tests": 1000,
        "epochs": chosen.epochs,
        "every": chosen.every,
        "seeds": chosen.seeds,
        "target": 0.97,
    }
    learned = {
        "samples": 200 if quick else 2000,
        "tests": 1000,
        "epochs": chosen.epochs,
        "seeds": chosen.seeds,
    }
    found: list[dict[str, Any]] = []
    for task in tasks:
        learns = chosen.learn and task == "lists"
        plan = flow.Plan(
            task,
            chosen.width,
            at_once,
            chosen.interval,
            chosen.count,
            options.rounds(chosen),
            courses if learns else None,
            learned if chosen.learn and task != "lists" else None,
        )
        one = run_here(
            "benchmarks.flow", asdict(plan), ranks=chosen.ranks, ranks_per_node=chosen.ranks
        )
        found.append(one)
        yield one, flow.table(one) + "\n", flow.figures(one) | flow.spread_figures(found)


def _memory(chosen: argparse.Namespace) -> Measured:
    from benchmarks import memory_budget
    from daso.cli.bench.places import run_here

    quick, rounds = chosen.quick, options.rounds(chosen)
    models = chosen.model or (["tiny"] if quick else ["resnet18", "gpt"])
    parts = [part / 100 for part in options.counts("budget", chosen.budget)]
    rates = options.rates("rate", chosen.rate)
    found: Found = []
    for model in models:
        plan = memory_budget.Plan(model, rounds, chosen.steps, parts, rates, True, chosen.folder)
        one, two = (
            run_here("benchmarks.memory_budget", asdict(plan), ranks=ranks, ranks_per_node=ranks)
            for ranks in (1, 2)
        )
        two.pop("versions")  # those of the other
        found.append(one | {"captured_daso": two})
        yield found[-1], memory_budget.table(found[-1]) + "\n", memory_budget.figures(found)


def _guard(chosen: argparse.Namespace) -> Measured:
    from benchmarks import regression_check

    taken = {}
    for kind, one in regression_check.measure(options.rounds(chosen)):
        bench = regression_check.BENCHES[kind]
        taken[kind] = one
        yield one, bench.table(one) + "\n", bench.figures(one)
    found = regression_check.verdicts(chosen.recorded, taken)
    print(regression_check.table(found))
    line, slowdown = regression_check.pace(chosen.recorded, taken["train"])
    print(line, flush=True)
    regression_check.refuse(found, slowdown)


def _growth(chosen: argparse.Namespace) -> Measured:
    yield from growth_axes.run(chosen, options.rounds(chosen))


RUNS: Mapping[str, Callable[[argparse.Namespace], Measured]] = {
    "gradient-order": _gradient_order,
    "sharded": _sharded,
    "checkpoint": _checkpoint,
    "host": _host,
    "chunks": _chunks,
    "time-to-accuracy": _to_accuracy,
    "gpu": _gpu,
    "push": _push,
    "server": _server,
    "flow": _flow,
    "memory": _memory,
    "predict": _predict,
    "throttle": _throttle,
    "trace": _trace,
    "guard": _guard,
    "growth": _growth,
}
