"""Runners of the package's benches: start ranks from options, and yield results."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from daso.cli.bench import options
from daso.cli.bench.names import DDP, OURS

# Contenders of --quick.
QUICK = (OURS, DDP, "DDP, gloo, fp16", "PostLocalSGD, every 4")
Measured = Iterator[tuple[dict[str, Any], str, dict[str, dict[str, Any]]]]


def _train(chosen: argparse.Namespace) -> Measured:
    from daso.cli.bench.baselines import CONTENDERS, can_run, check_can_run

    options.named(chosen.only or (), CONTENDERS)
    check_can_run(chosen.only or ())
    names = chosen.only or filter(can_run, QUICK if chosen.quick else CONTENDERS)
    yield from train(chosen, "daso.cli.bench.train", tuple(names))


def train(chosen: argparse.Namespace, module: str, names: tuple[str, ...]) -> Measured:
    """Run a bench of step times on each link.

    Args:
        chosen: Options of the command.
        module: Module whose `measure` ranks call.
        names: Contenders.
    """
    from daso.cli.bench import train

    def plan(link: str) -> dict[str, Any]:
        seconds = chosen.seconds or (3 if chosen.quick else 8)
        settle = options.settle_seconds(chosen, 6 if chosen.quick else 20)
        return asdict(
            train.Plan(chosen.model, names, options.rounds(chosen), seconds, settle, link)
        )

    links, legend = options.links(chosen), f"{train.LEGEND}\n"  # before the first table alone
    for result in options.measured(
        chosen, module, links, [chosen.nodes], plan, chosen.ranks_per_node
    ):
        yield result, f"{legend}{train.table(result)}\n", train.figures(result)
        legend = ""


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

    for result in options.measured(chosen, "daso.cli.bench.exchange", links, nodes, plan, 1):
        yield result, exchange.table(result) + "\n", exchange.figures(result)


def _node(chosen: argparse.Namespace) -> Measured:
    from daso.cli.bench import node
    from daso.cli.bench.places import run_here

    plan = asdict(node.Plan(chosen.mebibytes, chosen.rounds or (20 if chosen.quick else 100)))
    result = run_here("daso.cli.bench.node", plan, ranks=chosen.ranks, ranks_per_node=chosen.ranks)
    yield result, node.table(result), node.figures(result)


RUNS: Mapping[str, Callable[[argparse.Namespace], Measured]] = {
    "train": _train,
    "exchange": _exchange,
    "node": _node,
}
