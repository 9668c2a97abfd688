"""What each bench runs, from its options: checks them, starts ranks, yields what they found."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING, Any

from daso.errors import ConfigError
from daso.run.bench import axes
from daso.run.bench.names import COMPUTE, DDP, OURS
from daso.run.minicluster.rate import parse_rate

if TYPE_CHECKING:
    from daso.run.bench.hosts import Place

__all__ = ["GPU_MODELS", "RUNS"]

# Contenders of --quick.
QUICK = (OURS, DDP, "DDP, gloo, fp16", "PostLocalSGD, every 4")
GPU_MODELS = ("resnet50", "gpt2")
Measured = Iterator[tuple[dict[str, Any], str, dict[str, dict[str, Any]]]]
Found = list[dict[str, Any]]


def _links(text: str) -> list[str]:
    from daso.run.bench.hosts import HERE

    links = [word.strip() for word in text.split(",")]
    for link in links:
        if link != HERE:
            parse_rate(link)
    return links


def _positive(chosen: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(chosen, name) < 1:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} must be at least 1, not {getattr(chosen, name)}")


def _above_zero(chosen: argparse.Namespace, *names: str) -> None:
    for name in names:
        if not getattr(chosen, name) > 0:
            raise ConfigError(f"--{name} must be more than 0, not {getattr(chosen, name)}")


def _rounds(chosen: argparse.Namespace) -> int:
    if chosen.rounds < 0:
        raise ConfigError(f"--rounds must be at least 1, not {chosen.rounds}")
    return chosen.rounds or (3 if chosen.quick else 7)


def _train(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import train
    from daso.run.bench.rivals import EVERYBODY, installed, must_be_installed

    links = _links(chosen.link)
    _positive(chosen, "nodes", "ranks_per_node")
    _named(chosen.only or (), EVERYBODY)
    must_be_installed(chosen.only or ())
    usual = QUICK if chosen.quick else EVERYBODY
    names = tuple(chosen.only or filter(installed, usual))
    absent = [name for name in usual if not chosen.only and not installed(name)]
    if absent:
        print(f"not installed, so left out: {'; '.join(absent)}\n", flush=True)

    def plan(link: str) -> dict[str, Any]:
        seconds = chosen.seconds or (3 if chosen.quick else 8)
        settle = chosen.settle or (6 if chosen.quick else 20)
        return asdict(train.Plan(chosen.model, names, _rounds(chosen), seconds, settle, link))

    for one in _measured("train", links, [chosen.nodes], plan, chosen.ranks_per_node):
        yield one, train.table(one) + "\n", train.figures(one)


def _gradient_order(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import order
    from daso.run.bench.contenders import FIFO, ORDERS

    links, quick = _links(chosen.link), chosen.quick
    _positive(chosen, "nodes", "ranks_per_node")
    _named(chosen.only or (), ORDERS)
    usual = list(ORDERS)[:4] if quick else ORDERS
    names = tuple(dict.fromkeys([FIFO, *(chosen.only or usual)]))

    def plan(link: str) -> dict[str, Any]:
        seconds, settle = (
            chosen.seconds or (2 if quick else 4),
            chosen.settle or (2 if quick else 4),
        )
        return asdict(order.Plan(chosen.model, names, _rounds(chosen), seconds, settle, link))

    for one in _measured("gradient-order", links, [chosen.nodes], plan, chosen.ranks_per_node):
        yield one, order.table(one) + "\n", order.figures(one)


def _host(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import inside, train
    from daso.run.bench.contenders import INSIDE
    from daso.run.bench.hosts import HERE, run_here

    _positive(chosen, "ranks")
    _named(chosen.only or (), INSIDE)
    seconds, names = chosen.seconds or (2 if chosen.quick else 4), tuple(chosen.only or INSIDE)
    plan = asdict(train.Plan(chosen.model, names, _rounds(chosen), seconds, seconds, HERE))
    one = run_here("train", plan, ranks=chosen.ranks, ranks_per_node=chosen.ranks)
    yield one, inside.table(one), inside.figures(one)


def _chunks(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import chunks
    from daso.run.bench.hosts import run_here

    _positive(chosen, "ranks")
    if chosen.steps < 0:
        raise ConfigError(f"--steps must be at least 1, not {chosen.steps}")
    steps = chosen.steps or (10 if chosen.quick else 20)
    plan = asdict(chunks.Plan(_rounds(chosen), steps, chosen.rate, chosen.latency))
    one = run_here("chunks", plan, ranks=chosen.ranks, ranks_per_node=chosen.ranks)
    yield one, chunks.table(one), chunks.figures(one)


def _named(names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"--only must be one of {'; '.join(known)}, not {name!r}")


def _to_accuracy(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import courses, to_accuracy, train
    from daso.run.bench.contenders import CONTENDERS

    quick, rounds = chosen.quick, _rounds(chosen)
    links = _links(chosen.link or ("1gbit" if quick else "1gbit,100mbit"))
    chosen.seeds = chosen.seeds or (1 if quick else 3)
    chosen.epochs = chosen.epochs or (2 if quick else 3)
    _positive(chosen, "nodes", "ranks_per_node", "seeds", "epochs", "every")
    _above_zero(chosen, "lr")
    if not 0 < chosen.level <= 100:
        raise ConfigError(f"--level must be a percentage above 0, not {chosen.level}")
    names = tuple(chosen.only or (OURS,))
    _named(names, [name for name in CONTENDERS if name not in (COMPUTE, DDP)])
    plan = to_accuracy.Plan(
        "", chosen.data, chosen.seeds, chosen.epochs, chosen.lr, chosen.every, chosen.level, ""
    )
    seconds = chosen.seconds or (2 if quick else 3)
    settle = chosen.settle or (3 if quick else 6)
    steps = train.Plan("cnn", (DDP, *names), rounds, seconds, settle, "")
    size = {"nodes": chosen.nodes, "ranks": chosen.ranks_per_node}
    for place, rates in _places(links, chosen.nodes):
        for one in to_accuracy.compare(place, rates, plan, steps, **size):
            yield one, courses.table(one) + "\n", courses.figures(one)


def _places(links: Sequence[str], count: int) -> Iterator[tuple["Place", list[str]]]:
    """Yield this machine and so many hosts, each with those of the links that it has."""
    from daso.run.bench.hosts import HERE, Here, hosts

    if HERE in links:
        yield Here(), [HERE]
    rates = [link for link in links if link != HERE]
    if rates:
        with hosts(count) as cluster:
            yield cluster, rates


def _measured(
    kind: str,
    links: Sequence[str],
    sizes: Sequence[int],
    plan: Callable[[str], dict[str, Any]],
    ranks: int,
) -> Iterator[dict[str, Any]]:
    """Measure on every link with every number of nodes."""
    for place, known in _places(links, max(sizes)):
        for link, nodes in product(known, sizes):
            yield place.run(kind, plan(link), link=link, nodes=nodes, ranks=ranks)


def _gpu(chosen: argparse.Namespace) -> Measured:
    import torch

    from daso.run.bench import gpu
    from daso.run.bench.hosts import run_here

    words, models = chosen.ranks.split(","), (chosen.model,) if chosen.model else GPU_MODELS
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--ranks must be numbers such as 1,2, not {chosen.ranks!r}")
    if set(models) & set(GPU_MODELS) and not torch.cuda.is_available():
        raise ConfigError(
            "this bench needs a CUDA device, but torch sees none; --model=tiny pretends one"
        )
    steps = 8 if chosen.quick else 16
    for model, ranks in product(models, map(int, words)):
        plan = asdict(gpu.Plan(model, _rounds(chosen), steps))
        one = run_here("gpu", plan, ranks=ranks, ranks_per_node=1)
        yield one, gpu.table(one) + "\n", gpu.figures(one)


def _exchange(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import exchange
    from daso.run.bench.hosts import HERE

    links, rounds = _links(chosen.link), _rounds(chosen)
    words = chosen.nodes.split(",")
    if not all(word.strip().isdecimal() and int(word) > 1 for word in words):
        raise ConfigError(f"--nodes must be numbers from 2 up such as 2,3,4, not {chosen.nodes!r}")
    nodes = [int(word) for word in words]

    def plan(link: str) -> dict[str, Any]:
        rate = 0.0 if link in (HERE, "none") else float(parse_rate(link) or 0)
        return asdict(exchange.Plan(exchange.PARAMETERS, rounds, link, rate, not chosen.quick))

    for one in _measured("exchange", links, nodes, plan, 1):
        yield one, exchange.table(one) + "\n", exchange.figures(one)


def _node(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import node
    from daso.run.bench.hosts import run_here

    _positive(chosen, "ranks")
    _above_zero(chosen, "mebibytes")
    plan = asdict(node.Plan(chosen.mebibytes, chosen.rounds or (20 if chosen.quick else 100)))
    one = run_here("node", plan, ranks=chosen.ranks, ranks_per_node=chosen.ranks)
    yield one, node.table(one), node.figures(one)


def _predict(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import foretold, train
    from daso.run.bench.hosts import hosts

    quick = chosen.quick
    settings = foretold.SETTINGS[:3] if quick else foretold.SETTINGS
    seconds, settle = chosen.seconds or (2 if quick else 4), chosen.settle or (5 if quick else 15)
    plan = train.Plan(chosen.model, (), _rounds(chosen), seconds, settle, "")
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
        return asdict(tracing.Plan(models, _rounds(chosen), each, link))

    for one in _measured("trace", _links(chosen.link), [chosen.nodes], plan, 1):
        yield one, tracing.table(one) + "\n", tracing.figures(one)


def _guard(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import guard

    taken = {}
    for kind, one in guard.measure(_rounds(chosen)):
        bench = guard.BENCHES[kind]
        taken[kind] = one
        yield one, bench.table(one) + "\n", bench.figures(one)
    found = guard.verdicts(chosen.recorded, taken)
    print(guard.table(found))
    print(guard.pace(chosen.recorded, taken["train"]), flush=True)
    guard.refuse(found)


def _growth(chosen: argparse.Namespace) -> Measured:
    yield from axes.run(chosen, _rounds(chosen))


RUNS: Mapping[str, Callable[[argparse.Namespace], Measured]] = {
    "train": _train,
    "gradient-order": _gradient_order,
    "host": _host,
    "chunks": _chunks,
    "time-to-accuracy": _to_accuracy,
    "gpu": _gpu,
    "exchange": _exchange,
    "node": _node,
    "predict": _predict,
    "trace": _trace,
    "guard": _guard,
    "growth": _growth,
}
