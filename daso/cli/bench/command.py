"""`daso bench`: starts ranks, measures there, prints, writes JSON."""

import argparse
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from datetime import date
from pathlib import Path
from typing import Any

from daso.cli.bench.names import WIRES
from daso.cli.bench.options import at_least_one, more_than_zero
from daso.cli.bench.places import HERE, RankStarter
from daso.cli.bench.runs import RUNS, Measured
from daso.cli.outputs import may_write, write_file
from daso.paths import path_of
from daso.strict import json_by_rows

MODELS = ("cnn", "resnet18", "gpt", "tiny")
PARAMETERS = 4_575_000  # of the exchange bench: 18.3 MB of fp32
Results = list[dict[str, Any]]  # of measurements, one per setting
Run = Callable[[argparse.Namespace], Measured]
Add = Callable[[str, str], argparse.ArgumentParser]
Hosts = Callable[..., AbstractContextManager[RankStarter]]


def add_parser(
    parser: argparse.ArgumentParser,
    hosts: Hosts | None = None,
    more: Mapping[str, Run] | None = None,
) -> Any:
    """Add the options of ``daso bench``.

    Args:
        parser: Parser of the command.
        hosts: Starts hosts with shaped links.
        more: Benches that replace or extend those of the package.
    """
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    add = adder(kinds, {**RUNS, **(more or {})}, hosts)
    train = add("train", "step times of ways to train")
    add_links(train, "1gbit,100mbit,10mbit" if hosts else HERE)
    train.add_argument("--model", choices=MODELS, default="cnn")
    train.add_argument("--only", action="append", help="a contender; may be given several times")
    add_steps(train, "8; quick 3", "20; quick 6")
    train.add_argument("--plot", type=path_of, help="draw step times (PNG, PDF or SVG)")
    exchange = add("exchange", "one exchange between nodes; on a link, against its limit")
    add_links(exchange, "1gbit" if hosts else HERE)
    exchange.add_argument("--nodes", default="2,3,4", help="how many, by commas (2,3,4)")
    exchange.add_argument(
        "--algorithm", default="auto", help="algorithms of the mean, by commas (auto)"
    )
    exchange.add_argument(
        "--wire", default=",".join(WIRES), help=f"wires, by commas ({','.join(WIRES)})"
    )
    exchange.add_argument(
        "--parameters", type=at_least_one, default=PARAMETERS, help=f"of the model ({PARAMETERS})"
    )
    if hosts:
        exchange.add_argument(
            "--racks", type=at_least_one, default=1, help="with a bridge each (1)"
        )
        exchange.add_argument("--uplink", default="none", help="rate of each rack's link")
        exchange.add_argument("--slow-link", default="none", help="rate of one host's link")
    node = add("node", "the mean of a buffer over the ranks of this machine")
    node.add_argument("--ranks", type=at_least_one, default=2, help="how many (2)")
    node.add_argument("--mebibytes", type=more_than_zero, default=8, help="of the buffer, fp32 (8)")
    return kinds


def adder(kinds: Any, runs: Mapping[str, Run], hosts: Hosts | None) -> Add:
    """Return a function that adds one bench's parser with the common options."""

    def add(name: str, text: str) -> argparse.ArgumentParser:
        bench: argparse.ArgumentParser = kinds.add_parser(
            name, help=text, description=text, allow_abbrev=False
        )
        bench.set_defaults(run=lambda chosen, _: _main(chosen, runs[name]), draw=_draw, hosts=hosts)
        bench.add_argument("--quick", action="store_true", help="a few minutes at most")
        bench.add_argument("--rounds", type=at_least_one, help="of each contender (7; quick 3)")
        bench.add_argument("--json", type=path_of, help="write figures and rows to this file")
        return bench

    return add


def _draw(results: Results) -> Any:
    from daso.cli import plots

    return plots.draw(results)


def add_steps(parser: argparse.ArgumentParser, seconds: str, settle: str) -> None:
    """Add options of benches that take steps."""
    parser.add_argument("--nodes", type=at_least_one, default=2, help="how many (2)")
    parser.add_argument("--ranks-per-node", type=at_least_one, default=1, help="on each (1)")
    parser.add_argument("--seconds", type=more_than_zero, help=f"of a round ({seconds})")
    parser.add_argument(
        "--settle", type=float, help=f"before the first; 0: from the first batch on ({settle})"
    )


def add_links(parser: argparse.ArgumentParser, usual: str, *, default: str | None = None) -> None:
    """Add the links on which is measured."""
    rates = "here: this machine, cut into nodes; with scripts/bench rates of links of hosts, none: "
    parser.add_argument(
        "--link",
        default=usual if default is None else default,
        help=f"{rates}unshaped; by commas ({usual})",
    )


def _main(chosen: argparse.Namespace, run: Any) -> int:
    may_write(chosen.json, getattr(chosen, "plot", None))
    results: Results = []
    figures: dict[str, dict[str, Any]] = {}
    try:
        with closing(run(chosen)) as measured:
            for result, text, more in measured:
                print(text, flush=True)
                results.append(result)
                figures |= more
                _write(chosen.json, figures, results)  # now: the next link may take long, or fail
    except KeyboardInterrupt:
        notice = f"; {chosen.json} has the results so far" if results and chosen.json else ""
        print(f"daso: interrupted{notice}", file=sys.stderr)
        return 130
    if getattr(chosen, "plot", None):
        from daso.cli import plots

        plots.save(chosen.draw(results), chosen.plot, "a picture of the results")
    return 0


def _write(path: Path | None, figures: Mapping[str, Any], results: Results) -> None:
    if path is not None:
        known = {"versions": results[0]["versions"], "date": date.today().isoformat()}
        text = json_by_rows({"figures": figures, **known, "runs": results})
        write_file(path, text + "\n")
