"""`daso bench`: starts hosts with links of a known rate, measures there, prints, writes JSON."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from daso.errors import ConfigError
from daso.run.minicluster.rate import parse_rate

__all__ = ["add_parser"]

# Contenders of --quick.
QUICK = ("DASO Auto, bf16", "DDP, gloo", "DDP, gloo, fp16", "PostLocalSGD, every 4")
PARAMETERS = 4_575_000  # elements of the exchange: 18.3 MB of fp32
HERE = "here"
Found = list[dict[str, Any]]
GROWTH = (  # axis, what its numbers are, the usual ones and those of --quick
    ("parameters", "millions", ("1,3,10,30,100", "1,3,10,30")),
    ("tensors", "of one size", ("10,30,100,300,1000", "10,100,1000")),
    ("ranks", "each a node", ("2,3,4,6,8", "2,4,8")),
    ("chunks", "KiB on the wire", ("256,1024,4096,16384", "256,4096")),
    ("memory", "millions", ("10,50", "10,30")),
)
MILLIONS = ("parameters", "memory")
RANKS, TENSORS = 2, 10  # where they do not grow
WIRES = ("bf16", "int4", "fp32")  # whose memory is measured; --quick: the first


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
    train.add_argument("--nodes", type=int, default=2, help="hosts (2)")
    train.add_argument("--ranks-per-node", type=int, default=1, help="on each (1)")
    train.add_argument("--model", choices=("cnn", "resnet18", "gpt"), default="cnn")
    train.add_argument("--only", action="append", help="a contender; may be given several times")
    train.add_argument("--seconds", type=float, default=0, help="of a round (8; quick 3)")
    train.add_argument("--settle", type=float, default=0, help="before the first (20; quick 6)")
    train.add_argument("--plot", type=Path, help="draw step times to this PNG")
    exchange = add("exchange", _exchange, "one exchange between nodes against its link's limit")
    _add_links(exchange, "1gbit")
    exchange.add_argument("--nodes", default="2,3,4", help="hosts, separated by commas (2,3,4)")
    node = add("node", _node, "the mean of a buffer over the ranks of this machine")
    node.add_argument("--ranks", type=int, default=2, help="how many (2)")
    node.add_argument("--mebibytes", type=float, default=8, help="of the buffer, fp32 (8)")
    growth = add("growth", _growth, "overhead and memory as models, ranks and chunks grow")
    for axis, text, usual in GROWTH:
        growth.add_argument(
            f"--{axis}", help=f"{text}, separated by commas ({'; quick '.join(usual)})"
        )
    growth.add_argument("--size", type=float, default=10, help="millions on other axes (10)")
    growth.add_argument("--only", action="append", choices=[axis for axis, *_ in GROWTH])
    growth.add_argument("--plot", type=Path, help="draw costs to this PNG")


def _add_links(parser: argparse.ArgumentParser, usual: str) -> None:
    parser.add_argument(
        "--link",
        default=usual,
        help=f"rates of links, separated by commas; none: unshaped; here: no hosts ({usual})",
    )


def _main(chosen: argparse.Namespace, run: Any) -> int:
    found: Found = []
    figures: dict[str, dict[str, Any]] = {}
    for one, text, more in run(chosen):
        print(text, flush=True)
        found.append(one)
        figures |= more
    if getattr(chosen, "plot", None):
        from daso.run.bench import draw

        drawn = (draw.draw_growth if chosen.bench == "growth" else draw.draw)(found)
        draw.save(drawn, chosen.plot)
    if chosen.json:
        known = {"versions": found[0]["versions"], "date": date.today().isoformat()}
        text = json.dumps({"figures": figures, **known, "runs": found}, indent=1)
        chosen.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _links(text: str) -> list[str]:
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


def _rounds(chosen: argparse.Namespace) -> int:
    if chosen.rounds < 0:
        raise ConfigError(f"--rounds must be at least 1, not {chosen.rounds}")
    return chosen.rounds or (3 if chosen.quick else 7)


Measured = Iterator[tuple[dict[str, Any], str, dict[str, dict[str, Any]]]]


def _train(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import train
    from daso.run.bench.contenders import CONTENDERS

    links = _links(chosen.link)
    _positive(chosen, "nodes", "ranks_per_node")
    unknown = [name for name in chosen.only or () if name not in CONTENDERS]
    if unknown:
        raise ConfigError(f"--only must be one of {'; '.join(CONTENDERS)}, not {unknown[0]!r}")
    names = tuple(chosen.only or (QUICK if chosen.quick else CONTENDERS))

    def plan(link: str) -> dict[str, Any]:
        seconds = chosen.seconds or (3 if chosen.quick else 8)
        settle = chosen.settle or (6 if chosen.quick else 20)
        return asdict(train.Plan(chosen.model, names, _rounds(chosen), seconds, settle, link))

    for one in _measured("train", links, [chosen.nodes], plan, chosen.ranks_per_node):
        yield one, train.table(one) + "\n", train.figures(one)


def _measured(
    kind: str,
    links: Sequence[str],
    sizes: Sequence[int],
    plan: Callable[[str], dict[str, Any]],
    ranks: int,
) -> Iterator[dict[str, Any]]:
    """Measure on every link with every number of nodes."""
    from daso.run.bench.hosts import hosts, run_here

    if HERE in links:
        for nodes in sizes:
            yield run_here(kind, plan(HERE), ranks=nodes * ranks, ranks_per_node=ranks)
    rates = [link for link in links if link != HERE]
    if not rates:
        return
    with hosts(max(sizes)) as cluster:
        for link, nodes in product(rates, sizes):
            yield cluster.run(kind, plan(link), link=link, nodes=nodes, ranks=ranks)


def _exchange(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import exchange

    links, rounds = _links(chosen.link), _rounds(chosen)
    words = chosen.nodes.split(",")
    if not all(word.strip().isdecimal() and int(word) > 1 for word in words):
        raise ConfigError(f"--nodes must be numbers from 2 up such as 2,3,4, not {chosen.nodes!r}")
    nodes = [int(word) for word in words]

    def plan(link: str) -> dict[str, Any]:
        rate = 0.0 if link in (HERE, "none") else float(parse_rate(link) or 0)
        return asdict(exchange.Plan(PARAMETERS, rounds, link, rate, rivals=not chosen.quick))

    for one in _measured("exchange", links, nodes, plan, 1):
        yield one, exchange.table(one) + "\n", exchange.figures(one)


def _node(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import node
    from daso.run.bench.hosts import run_here

    _positive(chosen, "ranks")
    if not chosen.mebibytes > 0:
        raise ConfigError(f"--mebibytes must be more than 0, not {chosen.mebibytes}")
    plan = asdict(node.Plan(chosen.mebibytes, chosen.rounds or (20 if chosen.quick else 100)))
    one = run_here("node", plan, ranks=chosen.ranks, ranks_per_node=chosen.ranks)
    yield one, node.table(one), node.figures(one)


def _growth(chosen: argparse.Namespace) -> Measured:
    from daso.run.bench import growth, memory

    sizes = {axis: _sizes(chosen, axis) for axis, *_ in GROWTH}
    wanted = [axis for axis, *_ in GROWTH if axis in (chosen.only or sizes)]
    for axis in wanted:
        if axis == "memory":
            for one in _memory(sizes[axis], WIRES[:1] if chosen.quick else WIRES):
                yield one, memory.table(one) + "\n", memory.figures(one)
        else:
            one = _grown(axis, sizes[axis], chosen.size, _rounds(chosen))
            yield one, growth.table(one) + "\n", growth.figures(one)


def _sizes(chosen: argparse.Namespace, axis: str) -> list[float]:
    """Return the numbers of an axis: those asked for, or the usual ones."""
    usual = next(numbers for name, _, numbers in GROWTH if name == axis)
    text = getattr(chosen, axis) or usual[chosen.quick]
    try:
        found = sorted({float(word) for word in text.split(",")})
    except ValueError:
        found = []
    least = 2 if axis == "ranks" else 1
    fit = [size > 0 if axis in MILLIONS else size.is_integer() and size >= least for size in found]
    if len(found) < 2 or not all(fit):
        what = "numbers above 0" if axis in MILLIONS else f"whole numbers from {least} up"
        raise ConfigError(f"--{axis} must be two {what} or more, as in {usual[1]}, not {text!r}")
    return found


def _grown(axis: str, sizes: Sequence[float], millions: float, rounds: int) -> dict[str, Any]:
    """Measure along one axis; another number of ranks is another run."""
    from daso.plan.options import Exchange
    from daso.run.bench.growth import Plan, Point
    from daso.run.bench.hosts import run_here

    usual = Point(round(1e6 * millions), TENSORS, Exchange().chunk_bytes)
    points = {
        "parameters": [usual._replace(parameters=round(1e6 * size)) for size in sizes],
        "tensors": [usual._replace(tensors=int(size)) for size in sizes],
        "chunks": [usual._replace(chunk_bytes=int(1024 * size)) for size in sizes],
    }.get(axis, [usual])
    if any(point.parameters < point.tensors for point in points):
        raise ConfigError(
            f"every tensor must have a parameter, but {max(p.tensors for p in points)} tensors "
            f"share {min(p.parameters for p in points)}; raise --size or --parameters"
        )
    plan = asdict(Plan("chunk_bytes" if axis == "chunks" else axis, points, rounds))
    worlds = [int(size) for size in sizes] if axis == "ranks" else [RANKS]
    runs = [run_here("growth", plan, ranks=ranks, ranks_per_node=1) for ranks in worlds]
    return {**runs[-1], "rows": [row for run in runs for row in run["rows"]]}


def _memory(millions: Sequence[float], wires: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Measure memory where every rank is a node, then in two nodes of two ranks."""
    from daso.plan.options import Exchange
    from daso.run.bench.hosts import run_here
    from daso.run.bench.memory import Plan

    sizes = [round(1e6 * size) for size in millions]
    plan = asdict(Plan(sizes, 2, wires, Exchange().chunk_bytes))
    for ranks_per_node in (1, 2):
        ranks = 2 * ranks_per_node
        yield run_here("memory", plan, ranks=ranks, ranks_per_node=ranks_per_node)
