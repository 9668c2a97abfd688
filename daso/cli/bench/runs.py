"""What each bench of the package runs, from its options: starts ranks, yields what they found."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from daso.cli.bench import options
from daso.cli.bench.names import DDP, OURS

__all__ = ["RUNS", "Measured"]

# Contenders of --quick.
QUICK = (OURS, DDP, "DDP, gloo, fp16", "PostLocalSGD, every 4")
Measured = Iterator[tuple[dict[str, Any], str, dict[str, dict[str, Any]]]]


def _train(chosen: argparse.Namespace) -> Measured:
    from daso.cli.bench import train
    from daso.cli.bench.third_party import EVERYBODY, installed, must_be_installed

    links = options.links(chosen)
    options.named(chosen.only or (), EVERYBODY)
    must_be_installed(chosen.only or ())
    usual = QUICK if chosen.quick else EVERYBODY
    names = tuple(chosen.only or filter(installed, usual))
    absent = [name for name in usual if not chosen.only and not installed(name)]
    if absent:
        print(f"not installed, so left out: {'; '.join(absent)}\n", flush=True)

    def plan(link: str) -> dict[str, Any]:
        seconds = chosen.seconds or (3 if chosen.quick else 8)
        settle = options.settle_seconds(chosen, 6 if chosen.quick else 20)
        return asdict(
            train.Plan(chosen.model, names, options.rounds(chosen), seconds, settle, link)
        )

    for one in options.measured(
        chosen, "daso.cli.bench.train", links, [chosen.nodes], plan, chosen.ranks_per_node
    ):
        yield one, train.table(one) + "\n", train.figures(one)


def _exchange(chosen: argparse.Namespace) -> Measured:
    from daso.cli.bench import exchange

    links, nodes, rounds = (
        options.links(chosen),
        options.nodes(chosen.nodes),
        options.rounds(chosen),
    )
    algorithms, wires = options.algorithms(chosen.algorithm), options.wires(chosen.wire)

    def plan(link: str) -> dict[str, Any]:
        rate, rivals = options.rate(link), not chosen.quick
        differ = options.unequal(chosen)
        return asdict(
            exchange.Plan(
                chosen.parameters, rounds, link, rate, rivals, algorithms, wires, **differ
            )
        )

    for one in options.measured(chosen, "daso.cli.bench.exchange", links, nodes, plan, 1):
        yield one, exchange.table(one) + "\n", exchange.figures(one)


def _node(chosen: argparse.Namespace) -> Measured:
    from daso.cli.bench import node
    from daso.cli.bench.places import run_here

    plan = asdict(node.Plan(chosen.mebibytes, chosen.rounds or (20 if chosen.quick else 100)))
    one = run_here("daso.cli.bench.node", plan, ranks=chosen.ranks, ranks_per_node=chosen.ranks)
    yield one, node.table(one), node.figures(one)


RUNS: Mapping[str, Callable[[argparse.Namespace], Measured]] = {
    "train": _train,
    "exchange": _exchange,
    "node": _node,
}
