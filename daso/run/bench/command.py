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
HERE = "here"
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
    train.add_argument("--nodes", type=int, default=2, help="hosts (2)")
    train.add_argument("--ranks-per-node", type=int, default=1, help="on each (1)")
    train.add_argument("--model", choices=("cnn", "resnet18", "gpt", "tiny"), default="cnn")
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
    guard = add("guard", _guard, "a short run of all, its ratios beside the recorded ones")
    guard.add_argument(
        "--recorded",
        type=Path,
        default=Path("scripts/figures"),
        help="folder of train.json, exchange.json and node.json (scripts/figures)",
    )


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
        from daso.run.bench.draw import save

        save(found, chosen.plot)
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
    from daso.run.bench.rivals import EVERYBODY, installed, must_be_installed

    links = _links(chosen.link)
    _positive(chosen, "nodes", "ranks_per_node")
    only = chosen.only or ()
    unknown = [name for name in only if name not in EVERYBODY]
    if unknown:
        raise ConfigError(f"--only must be one of {'; '.join(EVERYBODY)}, not {unknown[0]!r}")
    must_be_installed(only)
    usual = QUICK if chosen.quick else EVERYBODY
    names = tuple(only or filter(installed, usual))
    absent = [name for name in usual if not only and not installed(name)]
    if absent:
        print(f"not installed, so left out: {'; '.join(absent)}\n", flush=True)

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
        return asdict(exchange.Plan(exchange.PARAMETERS, rounds, link, rate, not chosen.quick))

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
