"""`daso bench`: starts hosts with links of a known rate, measures there, prints, writes JSON."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import date
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daso.errors import ConfigError
from daso.run.bench import axes
from daso.run.bench.names import COMPUTE, DDP, OURS
from daso.run.minicluster.rate import parse_rate

if TYPE_CHECKING:
    from daso.run.bench.hosts import Place

__all__ = ["add_parser"]

# Contenders of --quick.
QUICK = (OURS, DDP, "DDP, gloo, fp16", "PostLocalSGD, every 4")
MODELS = ("cnn", "resnet18", "gpt", "tiny")
GPU_MODELS = ("resnet50", "gpt2")
DEVICES = ("device", "device-even")  # layers that take a known time and no core
Found = list[dict[str, Any]]


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``daso bench``.

    Args:
        parser: Its parser.
    """
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")

    def add(name: str, run: object, text: str) -> argparse.ArgumentParser:
        bench = kinds.add_parser(name, help=text, description=text, allow_abbrev=False)
        bench.set_defaults(run=lambda chosen, _: _main(chosen, run))
        bench.add_argument("--quick", action="store_true", help="a few minutes at most")
        bench.add_argument("--rounds", type=int, default=0, help="of each contender (7; quick 3)")
        bench.add_argument("--json", type=Path, help="write figures and rows to this file")
        return bench

    train = add("train", _train, "step times of ways to train, on links of a known rate")
    _add_links(train, "1gbit,100mbit,10mbit")
    train.add_argument("--model", choices=MODELS, default="cnn")
    train.add_argument("--only", action="append", help="a contender; may be given several times")
    _add_steps(train, "8; quick 3", "20; quick 6")
    train.add_argument("--plot", type=Path, help="draw step times to this PNG")
    _add_synchronous(add)
    gpu = add("gpu", _gpu, "a GPU: overhead, packing, what stays exposed, memory")
    gpu.add_argument("--model", choices=(*GPU_MODELS, "tiny"), help="one alone; tiny: no GPU")
    gpu.add_argument("--ranks", default="1,2", help="that share the GPU, by commas (1,2)")
    _add_to_accuracy(add("time-to-accuracy", _to_accuracy, "whole trainings beside DDP's"))
    exchange = add("exchange", _exchange, "one exchange between nodes against its link's limit")
    _add_links(exchange, "1gbit")
    exchange.add_argument("--nodes", default="2,3,4", help="hosts, separated by commas (2,3,4)")
    node = add("node", _node, "the mean of a buffer over the ranks of this machine")
    node.add_argument("--ranks", type=int, default=2, help="how many (2)")
    node.add_argument("--mebibytes", type=float, default=8, help="of the buffer, fp32 (8)")
    _add_trace(add("trace", _trace, "what recording costs, and how well clocks are compared"))
    guard = add("guard", _guard, "a short run of all, its ratios beside the recorded ones")
    guard.add_argument(
        "--recorded",
        type=Path,
        default=Path("scripts/figures"),
        help="folder of train.json, exchange.json and node.json (scripts/figures)",
    )
    axes.add_options(add("growth", _growth, "overhead and memory as all of it grows"))


def _add_synchronous(add: Callable[[str, object, str], argparse.ArgumentParser]) -> None:
    """Add benches of gradients that are averaged at every step."""
    order = add("gradient-order", _gradient_order, "what crosses first when steps are synchronous")
    _add_links(order, "500mbit,1gbit,2gbit")
    order.add_argument("--model", choices=(*MODELS, *DEVICES), default="cnn")
    order.add_argument("--only", action="append", help="an order; may be given several times")
    _add_steps(order, "4; quick 2", "4; quick 2")
    order.add_argument("--plot", type=Path, help="draw step times to this PNG")
    host = add("host", _host, "gradients inside a node: who adds them, and when")
    host.add_argument("--model", choices=(*MODELS, *DEVICES), default="cnn")
    host.add_argument("--ranks", type=int, default=2, help="of the node (2)")
    host.add_argument("--only", action="append", help="a way; may be given several times")
    host.add_argument("--seconds", type=float, default=0, help="of a round (4; quick 2)")
    chunks = add("chunks", _chunks, "sizes of chunks that go to the host and back, and a model")
    chunks.add_argument("--ranks", type=int, default=2, help="of the node (2)")
    chunks.add_argument("--steps", type=int, default=0, help="of a round (20; quick 10)")
    chunks.add_argument("--rate", type=float, default=0.5, help="of copies, in GB/s (0.5)")
    chunks.add_argument("--latency", type=float, default=1.0, help="of a copy, in ms (1)")


def _add_trace(parser: argparse.ArgumentParser) -> None:
    _add_links(parser, "1gbit")
    parser.add_argument("--nodes", type=int, default=2, help="hosts (2)")
    parser.add_argument("--model", choices=MODELS, action="append", help="several (cnn, tiny)")
    parser.add_argument("--seconds", type=float, default=0, help="of a round (4; quick 1)")


def _add_to_accuracy(parser: argparse.ArgumentParser) -> None:
    _add_links(parser, "1gbit,100mbit; quick 1gbit", default="")
    _add_steps(parser, "3; quick 2", "6; quick 3")
    parser.add_argument("--only", action="append", help="a contender beside DDP, gloo; several")
    parser.add_argument("--data", choices=("fashion", "digits"), default="fashion")
    parser.add_argument("--level", type=float, default=90, help="percentage to be reached (90)")
    parser.add_argument("--seeds", type=int, default=0, help="trainings of each (3; quick 1)")
    parser.add_argument("--epochs", type=int, default=0, help="of each training (3; quick 2)")
    parser.add_argument("--every", type=int, default=26, help="steps between tests (26)")
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate (0.1)")
    parser.add_argument("--plot", type=Path, help="draw accuracy over seconds to this PNG")


def _add_steps(parser: argparse.ArgumentParser, seconds: str, settle: str) -> None:
    parser.add_argument("--nodes", type=int, default=2, help="hosts (2)")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="on each (1)")
    parser.add_argument("--seconds", type=float, default=0, help=f"of a round ({seconds})")
    parser.add_argument("--settle", type=float, default=0, help=f"before the first ({settle})")


def _add_links(parser: argparse.ArgumentParser, usual: str, *, default: str | None = None) -> None:
    parser.add_argument(
        "--link",
        default=usual if default is None else default,
        help=f"rates of links, separated by commas; none: unshaped; here: no hosts ({usual})",
    )


def _main(chosen: argparse.Namespace, run: Any) -> int:
    found: Found = []
    figures: dict[str, dict[str, Any]] = {}
    try:
        with closing(run(chosen)) as measured:
            for one, text, more in measured:
                print(text, flush=True)
                found.append(one)
                figures |= more
                _write(chosen.json, figures, found)  # now: the next link may take long, or fail
    except KeyboardInterrupt:
        kept = f"; {chosen.json} has what was measured" if found and chosen.json else ""
        print(f"daso: interrupted{kept}", file=sys.stderr)
        return 130
    if getattr(chosen, "plot", None):
        from daso.run.bench import draw

        drawn = {"time-to-accuracy": draw.draw_courses, "growth": draw.draw_growth}
        draw.save(drawn.get(chosen.bench, draw.draw)(found), chosen.plot)
    return 0


def _write(path: Path | None, figures: Mapping[str, Any], found: Found) -> None:
    if path is not None:
        known = {"versions": found[0]["versions"], "date": date.today().isoformat()}
        text = json.dumps({"figures": figures, **known, "runs": found}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")


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


Measured = Iterator[tuple[dict[str, Any], str, dict[str, dict[str, Any]]]]


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
