"""`scripts/bench`: `daso bench`, and the benchmarks that the project's own figures come from."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import growth_axes
from benchmarks.hosts import hosts
from benchmarks.runs import GPU_MODELS, RUNS, train
from daso.cli.bench.command import MODELS, Add, add_links, add_parser, add_steps, adder
from daso.cli.bench.options import at_least_one, more_than_zero
from daso.cli.main import carry_out
from daso.cli.outputs import exit_on_broken_pipe
from daso.cli.parser import Parser

__all__ = ["PROGRAMS", "main", "make_parser"]

DEVICES = ("device", "device-early", "device-even")  # layers that take a known time and no core

PROGRAMS = {
    "accuracy": "what seldom exchanges cost, on simulated nodes",
    "recovery": "how long a killed rank holds training up, beside torchft",
    "kernels": "nanoseconds a number of encode, reduce and accept, in C and in torch",
    "start": "seconds and memory of the start of many ranks here",
    "age": "how much of the code that figures measure has changed since they were taken",
    "repeat": "train rows of an accuracy file again, and compare what they end with",
    "take": "take files of scripts/figures anew, as they were taken",
    "overview": "draw the README's picture from what was measured",
    "tables": "write the tables of README and docs/ from what was measured",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; exit codes are those of ``daso``."""
    words = list(sys.argv[1:] if words is None else words)
    if words[:1] and words[0] in PROGRAMS:
        program = import_module(f"benchmarks.{words[0]}")
        return exit_on_broken_pipe(lambda: program.main(words[1:]))
    return carry_out(make_parser(), words)


def make_parser() -> Parser:
    """Return the parser of benchmarks that start ranks; programs of their own have theirs."""
    parser = Parser(prog="scripts/bench", description=__doc__, allow_abbrev=False)
    kinds = add_parser(parser, hosts, {"train": train})
    for name, text in PROGRAMS.items():
        kinds.add_parser(name, help=text)
    _add_benchmarks(adder(kinds, RUNS, hosts))
    return parser


def _add_benchmarks(add: Add) -> None:
    _add_synchronous(add)
    gpu = add("gpu", "a GPU: overhead, kernels, exposed time, memory")
    gpu.add_argument("--model", choices=(*GPU_MODELS, "tiny"), help="one alone; tiny: no GPU")
    gpu.add_argument("--ranks", default="1,2", help="that share the GPU, by commas (1,2)")
    _add_to_accuracy(add("time-to-accuracy", "whole trainings beside DDP's"))
    push = add("push", "all nodes send to all, in the same order and in slots")
    add_links(push, "1gbit")
    push.add_argument("--nodes", default="4", help="hosts, separated by commas (4)")
    push.add_argument("--mebibytes", type=more_than_zero, default=4, help="of a message (4)")
    _add_predict(add("predict", "what is predicted, beside what is then measured"))
    throttle = add("throttle", "what throttled runs estimate, beside the target itself")
    throttle.add_argument("--steps", type=at_least_one, help="of a run (60)")
    _add_server(add("server", "time to a loss where one rank is slower than the others"))
    _add_flow(add("flow", "instances of any shape, many at once, beside plain programs"))
    _add_memory(add("memory", "training in less memory: time against budget, beside torch's ways"))
    _add_trace(add("trace", "what recording costs, and how well clocks are compared"))
    guard = add("guard", "a short run of all, its ratios beside the recorded ones")
    guard.add_argument(
        "--recorded",
        type=Path,
        default=Path("scripts/figures"),
        help="folder of train.json, exchange.json and node.json (scripts/figures)",
    )
    growth = add("growth", "overhead and memory as all of it grows")
    growth_axes.add_options(growth)
    growth.set_defaults(draw=_plot("draw_growth"))


def _plot(name: str) -> Callable[[list[dict[str, Any]]], Any]:
    """Return what draws a benchmark's runs; matplotlib is imported when it does."""

    def draw(runs: list[dict[str, Any]]) -> Any:
        from benchmarks import plots

        return getattr(plots, name)(runs)

    return draw


def _add_synchronous(add: Add) -> None:
    """Add benches of gradients that are averaged at every step."""
    order = add("gradient-order", "what crosses first when steps are synchronous")
    add_links(order, "500mbit,1gbit,2gbit")
    order.add_argument("--model", choices=(*MODELS, *DEVICES), default="cnn")
    order.add_argument("--only", action="append", help="an order; may be given several times")
    add_steps(order, "4; quick 2", "4; quick 2")
    order.add_argument("--plot", type=Path, help="draw step times to this PNG")
    sharded = add("sharded", "FSDP2 inside nodes: who averages between them")
    add_links(sharded, "1gbit")
    sharded.add_argument("--model", choices=MODELS, default="gpt")
    add_steps(sharded, "8; quick 3", "20; quick 4")
    sharded.set_defaults(ranks_per_node=2)  # a node of one rank has nothing to shard over
    checkpoint = add("checkpoint", "how long one holds training up, at once and beside it")
    checkpoint.add_argument("--model", choices=MODELS, default="resnet18")
    checkpoint.add_argument("--ranks", type=at_least_one, default=2, help="each a node (2)")
    checkpoint.add_argument("--steps", type=at_least_one, help="of a round (60; quick 20)")
    checkpoint.add_argument("--folder", default="", help="where they are written (temporary)")
    host = add("host", "gradients inside a node: who adds them, and when")
    host.add_argument("--model", choices=(*MODELS, *DEVICES), default="cnn")
    host.add_argument("--ranks", type=at_least_one, default=2, help="of the node (2)")
    host.add_argument("--only", action="append", help="a way; may be given several times")
    host.add_argument("--seconds", type=more_than_zero, help="of a round (4; quick 2)")
    chunks = add("chunks", "sizes of chunks that go to the host and back, and a model")
    chunks.add_argument("--ranks", type=at_least_one, default=2, help="of the node (2)")
    chunks.add_argument("--steps", type=at_least_one, help="of a round (20; quick 10)")
    chunks.add_argument("--rate", type=more_than_zero, default=0.5, help="of copies, in GB/s (0.5)")
    chunks.add_argument("--latency", type=float, default=1.0, help="of a copy, in ms (1)")


def _add_predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--seconds", type=more_than_zero, help="of a round (4; quick 2)")
    parser.add_argument("--settle", type=float, help="before the first (15; quick 5)")


def _add_server(parser: argparse.ArgumentParser) -> None:
    add_links(parser, "1gbit")
    parser.add_argument("--nodes", default="4", help="hosts, separated by commas (4)")
    words = "text: a GPT with AdamW, the last rank's core shared with --slow less one busy programs"
    kinds = ("fashion", "digits", "text")
    parser.add_argument("--data", choices=kinds, default="fashion", help=words)
    parser.add_argument("--slow", default="", help="times the last rank takes (3,1.5,1; quick 3)")
    parser.add_argument("--only", action="append", help="a contender beside DDP, gloo; several")
    parser.add_argument("--seeds", type=at_least_one, help="trainings of each (3; quick 1)")
    parser.add_argument("--seconds", type=more_than_zero, help="of each training (16; quick 12)")
    parser.add_argument("--epochs", type=at_least_one, help="where accuracy counts (3; quick 1)")
    parser.add_argument(
        "--every", type=more_than_zero, default=0.25, help="seconds between tests (0.25)"
    )
    parser.add_argument(
        "--loss", type=more_than_zero, default=0.65, help="that is to be reached (0.65)"
    )
    parser.add_argument("--lr", type=more_than_zero, default=0.1, help="learning rate of SGD (0.1)")
    parser.add_argument("--momentum", type=float, default=0.0, help="of SGD (0)")
    parser.add_argument("--plot", type=Path, help="draw losses to this PNG")
    parser.set_defaults(draw=_plot("draw_losses"))


def _add_flow(parser: argparse.ArgumentParser) -> None:
    tasks = ("lists", "trees", "deductions", "molecules")
    parser.add_argument("--task", choices=tasks, action="append", help="several (all)")
    parser.add_argument("--ranks", type=at_least_one, default=2, help="of this machine (2)")
    parser.add_argument("--width", type=at_least_one, default=128, help="of states (128)")
    usual = "1,2,4,8,16,32"
    parser.add_argument("--at-once", default=usual, help=f"instances under way ({usual})")
    parser.add_argument(
        "--interval", type=at_least_one, default=16, help="instances of an update (16)"
    )
    parser.add_argument("--count", type=at_least_one, help="instances a round (400; quick 200)")
    parser.add_argument("--learn", action="store_true", help="whole trainings, too: minutes")
    parser.add_argument("--seeds", type=at_least_one, help="trainings of each (3; quick 1)")
    parser.add_argument("--epochs", type=at_least_one, help="of a training (6; quick 2)")
    parser.add_argument(
        "--samples", type=at_least_one, default=8000, help="lists to learn from (8000)"
    )
    parser.add_argument(
        "--every", type=at_least_one, default=1000, help="instances between tests (1000)"
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    models = ("resnet18", "gpt", "tiny")
    parser.add_argument("--model", choices=models, action="append", help="several (resnet18, gpt)")
    parser.add_argument(
        "--budget",
        default="5,30,60",
        help="parts of the way from the least to all, in %%, by commas (5,30,60)",
    )
    parser.add_argument(
        "--rate", default="0,1,0.25", help="of the second memory, in GB/s; 0: as it is (0,1,0.25)"
    )
    parser.add_argument("--steps", type=at_least_one, default=2, help="of a round (2)")
    parser.add_argument("--folder", default="", help="for a file, to see the process's memory with")


def _add_trace(parser: argparse.ArgumentParser) -> None:
    add_links(parser, "1gbit")
    parser.add_argument("--nodes", type=at_least_one, default=2, help="hosts (2)")
    parser.add_argument("--model", choices=MODELS, action="append", help="several (cnn, tiny)")
    parser.add_argument("--seconds", type=more_than_zero, help="of a round (4; quick 1)")


def _add_to_accuracy(parser: argparse.ArgumentParser) -> None:
    add_links(parser, "1gbit,100mbit; quick 1gbit", default="")
    add_steps(parser, "3; quick 2", "6; quick 3")
    parser.add_argument("--only", action="append", help="a contender beside DDP, gloo; several")
    parser.add_argument(
        "--data",
        choices=("fashion", "digits", "text"),
        default="fashion",
        help="text: the transformer with AdamW (fashion)",
    )
    parser.add_argument(
        "--level", type=more_than_zero, default=90, help="percentage to be reached (90)"
    )
    parser.add_argument("--seeds", type=at_least_one, help="trainings of each (3; quick 1)")
    parser.add_argument("--epochs", type=at_least_one, help="of each training (3; quick 2)")
    parser.add_argument("--every", type=at_least_one, default=26, help="steps between tests (26)")
    parser.add_argument(
        "--lr", type=more_than_zero, default=0.1, help="highest learning rate (0.1)"
    )
    parser.add_argument("--plot", type=Path, help="draw accuracy over seconds to this PNG")
    parser.set_defaults(draw=_plot("draw_courses"))
