"""What each bench runs, from its options: checks them, starts ranks, yields what they found."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

from daso.errors import ConfigError
from daso.run.bench import asked, axes
from daso.run.bench.names import COMPUTE, DDP, OURS

__all__ = ["GPU_MODELS", "RUNS"]

# Contenders of --quick.
QUICK = (OURS, DDP, "DDP, gloo, fp16", "PostLocalSGD, every 4")
GPU_MODELS = ("resnet50", "gpt2")
Measured = Iterator[tuple[dict[str, Any], str, dict[str, dict[str, Any]]]]
Found = list[dict[str, Any]]


def _train(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import train
    from daso.run.bench.rivals import EVERYBODY, installed, must_be_installed

    links = asked.links(chosen.link)
    asked.positive(chosen, "nodes", "ranks_per_node")
    asked.named(chosen.only or (), EVERYBODY)
    must_be_installed(chosen.only or ())
    usual = QUICK if chosen.quick else EVERYBODY
    names = tuple(chosen.only or filter(installed, usual))
    absent = [name for name in usual if not chosen.only and not installed(name)]
    if absent:
        print(f"not installed, so left out: {'; '.join(absent)}\n", flush=True)

    def plan(link: str) -> dict[str, Any]:
        seconds = chosen.seconds or (3 if chosen.quick else 8)
        settle = chosen.settle or (6 if chosen.quick else 20)
        return asdict(train.Plan(chosen.model, names, asked.rounds(chosen), seconds, settle, link))

    for one in asked.measured("train", links, [chosen.nodes], plan, chosen.ranks_per_node):
        yield one, train.table(one) + "\n", train.figures(one)


def _gradient_order(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import order
    from daso.run.bench.contenders import FIFO, ORDERS

    links, quick = asked.links(chosen.link), chosen.quick
    asked.positive(chosen, "nodes", "ranks_per_node")
    asked.named(chosen.only or (), ORDERS)
    usual = list(ORDERS)[:4] if quick else ORDERS
    names = tuple(dict.fromkeys([FIFO, *(chosen.only or usual)]))

    def plan(link: str) -> dict[str, Any]:
        seconds, settle = (
            chosen.seconds or (2 if quick else 4),
            chosen.settle or (2 if quick else 4),
        )
        return asdict(order.Plan(chosen.model, names, asked.rounds(chosen), seconds, settle, link))

    for one in asked.measured("gradient-order", links, [chosen.nodes], plan, chosen.ranks_per_node):
        yield one, order.table(one) + "\n", order.figures(one)


def _host(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import inside, train
    from daso.run.bench.contenders import INSIDE
    from daso.run.bench.hosts import HERE, run_here

    asked.positive(chosen, "ranks")
    asked.named(chosen.only or (), INSIDE)
    seconds, names = chosen.seconds or (2 if chosen.quick else 4), tuple(chosen.only or INSIDE)
    plan = asdict(train.Plan(chosen.model, names, asked.rounds(chosen), seconds, seconds, HERE))
    one = run_here("train", plan, ranks=chosen.ranks, ranks_per_node=chosen.ranks)
    yield one, inside.table(one), inside.figures(one)


def _chunks(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import chunks
    from daso.run.bench.hosts import run_here

    asked.positive(chosen, "ranks")
    if chosen.steps < 0:
        raise ConfigError(f"--steps must be at least 1, not {chosen.steps}")
    steps = chosen.steps or (10 if chosen.quick else 20)
    plan = asdict(chunks.Plan(asked.rounds(chosen), steps, chosen.rate, chosen.latency))
    one = run_here("chunks", plan, ranks=chosen.ranks, ranks_per_node=chosen.ranks)
    yield one, chunks.table(one), chunks.figures(one)


def _to_accuracy(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import courses, to_accuracy, train
    from daso.run.bench.contenders import CONTENDERS

    quick, rounds = chosen.quick, asked.rounds(chosen)
    links = asked.links(chosen.link or ("1gbit" if quick else "1gbit,100mbit"))
    chosen.seeds = chosen.seeds or (1 if quick else 3)
    chosen.epochs = chosen.epochs or (2 if quick else 3)
    asked.positive(chosen, "nodes", "ranks_per_node", "seeds", "epochs", "every")
    asked.above_zero(chosen, "lr")
    if not 0 < chosen.level <= 100:
        raise ConfigError(f"--level must be a percentage above 0, not {chosen.level}")
    names = tuple(chosen.only or (OURS,))
    asked.named(names, [name for name in CONTENDERS if name not in (COMPUTE, DDP)])
    plan = to_accuracy.Plan(
        "", chosen.data, chosen.seeds, chosen.epochs, chosen.lr, chosen.every, chosen.level, ""
    )
    seconds = chosen.seconds or (2 if quick else 3)
    settle = chosen.settle or (3 if quick else 6)
    steps = train.Plan("cnn", (DDP, *names), rounds, seconds, settle, "")
    size = {"nodes": chosen.nodes, "ranks": chosen.ranks_per_node}
    for place, rates in asked.places(links, chosen.nodes):
        for one in to_accuracy.compare(place, rates, plan, steps, **size):
            yield one, courses.table(one) + "\n", courses.figures(one)


def _gpu(chosen: argparse.Namespace) -> Measured:
    import torch

    from daso.run.bench import gpu
    from daso.run.bench.hosts import run_here

    counts = asked.counts("ranks", chosen.ranks)
    models = (chosen.model,) if chosen.model else GPU_MODELS
    if set(models) & set(GPU_MODELS) and not torch.cuda.is_available():
        raise ConfigError(
            "this bench needs a CUDA device, but torch sees none; --model=tiny pretends one"
        )
    steps = 8 if chosen.quick else 16
    for model, ranks in product(models, counts):
        plan = asdict(gpu.Plan(model, asked.rounds(chosen), steps))
        one = run_here("gpu", plan, ranks=ranks, ranks_per_node=1)
        yield one, gpu.table(one) + "\n", gpu.figures(one)


def _push(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import push

    links, nodes, rounds = asked.links(chosen.link), asked.nodes(chosen.nodes), asked.rounds(chosen)
    asked.above_zero(chosen, "mebibytes")
    nbytes = max(1, int(chosen.mebibytes * (1 << 20)))

    def plan(link: str) -> dict[str, Any]:
        return asdict(push.Plan(nbytes, rounds, link, asked.rate(link)))

    for one in asked.measured("push", links, nodes, plan, 1):
        yield one, push.table(one) + "\n", push.figures(one)


def _server(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import server
    from daso.run.bench.contenders import SERVERS

    links, nodes, quick = asked.links(chosen.link), asked.nodes(chosen.nodes), chosen.quick
    chosen.seeds = chosen.seeds or (1 if quick else 3)
    chosen.epochs = chosen.epochs or (1 if quick else 3)
    asked.positive(chosen, "seeds", "epochs")
    asked.above_zero(chosen, "loss", "every", "lr")
    asked.named(chosen.only or (), SERVERS)
    names = tuple(dict.fromkeys([DDP, *(chosen.only or SERVERS)]))
    slow = asked.numbers("slow", chosen.slow or ("3" if quick else "3,1.5,1"))
    seconds = chosen.seconds or (12 if quick else 16)
    accurate = (DDP, *server.GAPS.values())
    for place, rates in asked.places(links, max(nodes)):
        for link, count, times in product(rates, nodes, [*slow, 0.0]):
            plan = server.Plan(
                data=chosen.data,
                names=names if times else accurate,
                slow=times,
                seeds=chosen.seeds,
                seconds=seconds if times else chosen.epochs,
                every=chosen.every,
                loss=chosen.loss,
                lr=chosen.lr,
                momentum=chosen.momentum,
                link=link,
            )
            one = place.run("server", asdict(plan), link=link, nodes=count, ranks=1)
            yield one, server.table(one) + "\n", server.figures(one)


def _exchange(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import exchange

    links, nodes, rounds = asked.links(chosen.link), asked.nodes(chosen.nodes), asked.rounds(chosen)

    def plan(link: str) -> dict[str, Any]:
        rivals = not chosen.quick
        return asdict(exchange.Plan(exchange.PARAMETERS, rounds, link, asked.rate(link), rivals))

    for one in asked.measured("exchange", links, nodes, plan, 1):
        yield one, exchange.table(one) + "\n", exchange.figures(one)


def _node(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import node
    from daso.run.bench.hosts import run_here

    asked.positive(chosen, "ranks")
    asked.above_zero(chosen, "mebibytes")
    plan = asdict(node.Plan(chosen.mebibytes, chosen.rounds or (20 if chosen.quick else 100)))
    one = run_here("node", plan, ranks=chosen.ranks, ranks_per_node=chosen.ranks)
    yield one, node.table(one), node.figures(one)


def _predict(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import foretold, train
    from daso.run.bench.hosts import hosts

    quick = chosen.quick
    settings = foretold.SETTINGS[:3] if quick else foretold.SETTINGS
    seconds, settle = chosen.seconds or (2 if quick else 4), chosen.settle or (5 if quick else 15)
    plan = train.Plan(chosen.model, (), asked.rounds(chosen), seconds, settle, "")
    one, text, figures = foretold.pace()
    yield one, text + "\n", figures
    found: Found = []
    with hosts(max(nodes for _, nodes in settings)) as place:
        for one in foretold.compare(place, plan, settings):
            found.append(one)
            yield one, foretold.table(one) + "\n", foretold.figures(found)


def _trace(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import tracing

    models, seconds = tuple(chosen.model or ("cnn", "tiny")), chosen.seconds
    if not chosen.nodes > 1:
        raise ConfigError(f"--nodes must be at least 2, not {chosen.nodes}")

    def plan(link: str) -> dict[str, Any]:
        each = seconds or (1 if chosen.quick else 4)
        return asdict(tracing.Plan(models, asked.rounds(chosen), each, link))

    for one in asked.measured("trace", asked.links(chosen.link), [chosen.nodes], plan, 1):
        yield one, tracing.table(one) + "\n", tracing.figures(one)


def _flow(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import flow
    from daso.run.bench.hosts import run_here
    from daso.run.bench.plain import MAKERS

    quick, tasks = chosen.quick, chosen.task or list(MAKERS)
    for name in ("count", "epochs", "seeds"):
        usual = {"count": (200, 400), "epochs": (2, 6), "seeds": (1, 3)}[name]
        setattr(chosen, name, getattr(chosen, name) or usual[0 if quick else 1])
    asked.positive(chosen, "ranks", "width", "interval", "count", "epochs", "seeds")
    asked.positive(chosen, "samples", "every")
    at_once = asked.counts("at-once", chosen.at_once)
    courses = {
        "at_once": at_once,
        "samples": chosen.samples,
        "tests": 1000,
        "epochs": chosen.epochs,
        "every": chosen.every,
        "seeds": chosen.seeds,
        "target": 0.97,
    }
    for task in tasks:
        learns = chosen.learn and task == "lists"
        plan = flow.Plan(
            task,
            chosen.width,
            at_once,
            chosen.interval,
            chosen.count,
            asked.rounds(chosen),
            courses if learns else None,
        )
        one = run_here("flow", asdict(plan), ranks=chosen.ranks, ranks_per_node=chosen.ranks)
        yield one, flow.table(one) + "\n", flow.figures(one)


def _memory(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import fitting
    from daso.run.bench.hosts import run_here

    quick, rounds = chosen.quick, asked.rounds(chosen)
    models = chosen.model or (["tiny"] if quick else ["resnet18", "gpt"])
    asked.positive(chosen, "steps")
    parts = [part / 100 for part in asked.counts("budget", chosen.budget)]
    rates = asked.rates("rate", chosen.rate)
    found: Found = []
    for model in models:
        plan = fitting.Plan(model, rounds, chosen.steps, parts, rates, True, chosen.folder)
        found.append(run_here("fitting", asdict(plan), ranks=1, ranks_per_node=1))
        yield found[-1], fitting.table(found[-1]) + "\n", fitting.figures(found)


def _guard(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import guard

    taken = {}
    for kind, one in guard.measure(asked.rounds(chosen)):
        bench = guard.BENCHES[kind]
        taken[kind] = one
        yield one, bench.table(one) + "\n", bench.figures(one)
    found = guard.verdicts(chosen.recorded, taken)
    print(guard.table(found))
    print(guard.pace(chosen.recorded, taken["train"]), flush=True)
    guard.refuse(found)


def _growth(chosen: argparse.Namespace) -> Measured:
    yield from axes.run(chosen, asked.rounds(chosen))


RUNS: Mapping[str, Callable[[argparse.Namespace], Measured]] = {
    "train": _train,
    "gradient-order": _gradient_order,
    "host": _host,
    "chunks": _chunks,
    "time-to-accuracy": _to_accuracy,
    "gpu": _gpu,
    "exchange": _exchange,
    "push": _push,
    "server": _server,
    "node": _node,
    "flow": _flow,
    "memory": _memory,
    "predict": _predict,
    "trace": _trace,
    "guard": _guard,
    "growth": _growth,
}
