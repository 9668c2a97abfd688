"""`daso predict`: what a schedule would cost on nodes that are not at hand. Nothing is measured.

With ``--throttle`` a program runs on this machine slowed down, which is measured, and estimated.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from daso.cli.outputs import may_write, write_file
from daso.environment import path_of
from daso.errors import ConfigError
from daso.plan.auto import Auto
from daso.plan.cost_model import LinkCosts
from daso.plan.layout import SMALL_SHARE
from daso.plan.options import BITS, Exchange, Gradients, Settings
from daso.plan.policies import Fixed
from daso.plan.schedule import Policy
from daso.predict.cluster import Cluster, Job
from daso.predict.link_rate import FASTEST_PREDICTED, parse_rate
from daso.predict.network import HEADERS, Link
from daso.predict.run_log import read_run
from daso.predict.simulator import Outcome, simulate

__all__ = ["TYPICAL_DRIFT", "add_parser", "cut"]

LEAST_STEPS = 400  # Auto takes about 250 to find its place
LEAST_RESTORED_STEPS = 1600  # and 100 before that, synchronous, where the optimizer normalizes
MOST_STEPS = 10**8  # of all nodes together: about a minute for each policy
SCALES = {"k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}  # after a number of parameters
SYNCHRONOUS = "synchronous, as DDP"
POLICIES = ("synchronous", "fixed:4:1", "auto")
# Of the training thread, for a number of an exchange. With an H200 `Auto` chose skip 12 to 15 for
# 25.6 M numbers and steps of 46 to 63 ms, for one per cent of these (scripts/figures/gpu.json); a
# CPU that trains takes 2e-9.
TYPICAL_OWN_SECONDS = 3e-10
TYPICAL_SMALL_SECONDS = 1e-3  # of it, for an exchange of small tensors alone
TYPICAL_DRIFT = 1e-5  # of a batch, where no run tells: 16 nodes, Fashion-MNIST, late in training


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``daso predict``."""
    parser.add_argument("--from", dest="run_folder", type=path_of, help="a run of daso train")
    parser.add_argument("--parameters", type=count, help="of the model, e.g. 25.6M or 25.6e6")
    parser.add_argument("--step-ms", type=float, help="of computing a batch, on one node")
    parser.add_argument("--nodes", default="2,8,32,128", help="by commas (2,8,32,128)")
    parser.add_argument("--link", default="10gbit", help="of each node, by commas (10gbit)")
    parser.add_argument("--latency-us", type=float, default=20, help="between nodes (20)")
    parser.add_argument(
        "--policy",
        action="append",
        help="synchronous, fixed:SKIP:WAIT or auto; several (all of these, fixed:4:1)",
    )
    parser.add_argument("--wire", choices=["auto", *BITS], default="auto", help="of exchanges")
    parser.add_argument("--jitter", type=float, help="spread of step times, e.g. 0.02")
    parser.add_argument("--drift", type=float, help=f"of nodes in a batch ({TYPICAL_DRIFT:g})")
    parser.add_argument(
        "--optimizer", choices=("sgd", "adamw"), help="adamw: Adam and its kin (the run's; sgd)"
    )
    parser.add_argument("--cores", type=float, default=2, help="of a rank: 2 or more: one to spare")
    parser.add_argument("--faster-compute", type=float, default=1, help="divides step times")
    parser.add_argument(
        "--steps", type=int, help=f"to go through, {LEAST_STEPS} or more (1000; adamw 2000)"
    )
    parser.add_argument("--json", type=path_of, help="write what is predicted to this file")
    parser.add_argument("--plot", type=path_of, help="draw efficiency over nodes (PNG, PDF or SVG)")
    parser.add_argument(
        "--throttle",
        type=path_of,
        metavar="PLAN",
        help="run the program behind -- on this machine, slowed down as a TOML file says",
    )
    parser.set_defaults(run=_run)


def cut(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Part the words behind ``predict`` into options and, behind ``--``, a program."""
    at = words.index("--") if "--" in words else len(words)
    return list(words[:at]), tuple(words[at + 1 :])


def _run(chosen: argparse.Namespace, program: Sequence[str]) -> int:
    if chosen.throttle is not None:
        from daso.cli.throttled import run_throttled

        return run_throttled(chosen.throttle, program)
    if program:
        raise ConfigError(
            f"a program is run with --throttle=PLAN alone, but {program[0]!r} comes without; add it"
        )
    return _main(chosen)


def count(word: str) -> float:
    """Return how many a word says: ``25.6M``, ``7B`` or ``25.6e6``."""
    scale = SCALES.get(word[-1:], 1.0)
    try:
        return float(word if scale == 1.0 else word[:-1]) * scale
    except ValueError as error:
        rule = f"must be a number such as 25.6M or 25.6e6, not {word!r}"
        raise argparse.ArgumentTypeError(rule) from error


def _main(chosen: argparse.Namespace) -> int:
    job, said = _job(chosen)
    nodes = list(dict.fromkeys(_whole(word, "--nodes") for word in chosen.nodes.split(",")))
    links = {word.strip(): _link(word, chosen.latency_us) for word in chosen.link.split(",")}
    policies = dict(_policy(word) for word in chosen.policy or POLICIES)
    settings = Settings(wire=chosen.wire, merge="auto", exchange=Exchange(), gradients=Gradients())
    if chosen.steps is None:
        chosen.steps = 2000 if job.normalizes else 1000
    least = LEAST_RESTORED_STEPS if job.normalizes else LEAST_STEPS
    if chosen.steps < least:
        raise ConfigError(f"--steps must be at least {least}, not {chosen.steps}")
    if chosen.steps * max(nodes) > MOST_STEPS:
        raise ConfigError(
            f"--steps times --nodes must be at most {MOST_STEPS} (each step of each node is gone "
            f"through), not {chosen.steps} times {max(nodes)}"
        )
    may_write(chosen.json, chosen.plot)
    try:
        clusters = {
            name: [Cluster(count, link, cores=chosen.cores) for count in nodes]
            for name, link in links.items()
        }
        rows = _predict(job, clusters, policies, settings, chosen.steps)
    except KeyboardInterrupt:
        print("daso: interrupted", file=sys.stderr)
        return 130
    assumptions = [*said, *_assumptions(chosen, job)]
    print("Predicted, not measured. What stands behind it:")
    print("\n".join(f"- {line}" for line in assumptions))
    if chosen.json is not None:
        found = {"job": asdict(job), "rows": rows, "assumptions": assumptions}
        write_file(chosen.json, json.dumps(found, indent=1) + "\n")
    if chosen.plot is not None:
        from daso.cli import plots

        plots.save(plots.draw_efficiency(rows), chosen.plot)
    return 0


def _predict(
    job: Job,
    clusters: Mapping[str, Sequence[Cluster]],
    policies: Mapping[str, Policy],
    settings: Settings,
    steps: int,
) -> list[dict[str, Any]]:
    """Go through all of it, and print a table for every link."""
    rows = []
    for name, of_rate in clusters.items():
        of_link = []
        for cluster in of_rate:
            for policy, chooses in policies.items():
                outcome = simulate(job, cluster, chooses, settings, steps=steps)
                told = {"link": name, "nodes": cluster.nodes, "policy": policy}
                of_link.append({**told, **_row(outcome, job)})
        print(table(job, name, of_link), end="\n\n", flush=True)
        rows += of_link
    return rows


def _job(chosen: argparse.Namespace) -> tuple[Job, tuple[str, ...]]:
    """Return what is trained, from a run, from options, or from both."""
    if chosen.run_folder is not None:
        job, said = _recorded_job(chosen.run_folder)
    elif chosen.parameters is None or chosen.step_ms is None:
        raise ConfigError("--from=RUN, or --parameters and --step-ms, must say what is trained")
    else:
        job, said = _typical_job(chosen)
    given = {"jitter": chosen.jitter, "drift": chosen.drift, "parameters": chosen.parameters}
    if chosen.step_ms is not None:
        given["step_seconds"] = chosen.step_ms / 1e3
    known = {name: value for name, value in given.items() if value is not None}
    if chosen.parameters is not None:  # a run's model may be larger
        known["small_parameters"] = chosen.parameters * job.small_parameters / job.parameters
    if chosen.optimizer is not None:
        known["normalizes"] = chosen.optimizer == "adamw"
    job = replace(job, **known)
    job = replace(job, message_seconds=LinkCosts().message_seconds)
    if not chosen.faster_compute > 0:
        raise ConfigError(f"--faster-compute must be above 0, not {chosen.faster_compute}")
    return replace(job, step_seconds=job.step_seconds / chosen.faster_compute), said


def _recorded_job(run_folder: Path) -> tuple[Job, tuple[str, ...]]:
    """Return what a run tells, and what is usual of what it does not."""
    recorded = read_run(run_folder)
    job = recorded.job
    if job.normalizes and not job.drift:  # it made no exchanges
        job = replace(job, own_seconds=TYPICAL_OWN_SECONDS, drift=TYPICAL_DRIFT)
    return job, recorded.said


def _typical_job(chosen: argparse.Namespace) -> tuple[Job, tuple[str, ...]]:
    """Return a model that only its size and the time of a step are known of."""
    job = Job(
        chosen.parameters,
        chosen.step_ms / 1e3,
        own_seconds=TYPICAL_OWN_SECONDS,
        small_parameters=chosen.parameters / SMALL_SHARE,
        small_seconds=TYPICAL_SMALL_SECONDS,
        jitter=0.02,
        drift=TYPICAL_DRIFT,
    )
    said = (
        "the host's own work on an exchange is taken for less than the transfer; "
        "--from=RUN takes it from a run",
        f"small tensors, a 16th of the numbers at most, are what Auto exchanges alone, too, "
        f"and the training thread takes {1e3 * TYPICAL_SMALL_SECONDS:g} ms each time",
    )
    return job, said[:1] if chosen.optimizer == "adamw" else said


def _whole(word: str, flag: str) -> int:
    if not word.strip().isdecimal() or int(word) < 1:
        raise ConfigError(f"{flag} must be whole numbers from 1 up, by commas, not {word!r}")
    return int(word)


def _link(word: str, latency_us: float) -> Link:
    if not 0 <= latency_us < math.inf:
        raise ConfigError(f"--latency-us must be at least 0, not {latency_us}")
    bits = parse_rate(word.strip(), FASTEST_PREDICTED)
    return Link(math.inf if bits is None else bits / 8, latency_us / 1e6)


def _policy(word: str) -> tuple[str, Policy]:
    """Return a policy and its name in tables."""
    if word == "auto":
        return "Auto", Auto()
    if word == "synchronous":
        return SYNCHRONOUS, Fixed(1, 0)
    kind, *numbers = word.split(":")
    if kind == "fixed" and len(numbers) == 2 and all(one.isdecimal() for one in numbers):
        policy = Fixed(int(numbers[0]), int(numbers[1]))
        if policy.start().synchronous:
            return SYNCHRONOUS, policy
        return f"Fixed({policy.skip}, {policy.wait})", policy
    raise ConfigError(f"--policy must be synchronous, auto or fixed:SKIP:WAIT, not {word!r}")


def _row(found: Outcome, job: Job) -> dict[str, Any]:
    return {
        "step_ms": 1e3 * found.step_seconds,
        "efficiency": found.efficiency(job),
        "exposed_ms": 1e3 * found.exposed_seconds,
        "mbytes": found.bytes_per_step / 1e6,
        "skip": found.skip,
        "wait": found.wait,
        "wire": found.wire,
        "plan": found.plan,
    }


def table(job: Job, link: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of a link as aligned lines."""
    lines = [
        f"{job.parameters / 1e6:.1f} M parameters, {1e3 * job.step_seconds:.1f} ms of computing a "
        f"step (spread {job.jitter:.1%}), link {link}",
        f"{'nodes':>6}  {'':<21}{'ms/step':>10}{'efficiency':>12}{'wait ms':>9}{'MB/step':>10}"
        f"  skip, wait, wire, exchange",
    ]
    for row in rows:
        alone = row["nodes"] == 1
        chosen = "-" if alone else f"{row['skip']}, {row['wait']}"
        wire = "" if alone or row["policy"] == SYNCHRONOUS else f", {row['wire']}, {row['plan']}"
        if (row["skip"], row["wait"]) == (1, 0) and wire:  # as Auto may be
            wire = f", gradients in {row['wire']}"
        lines.append(
            f"{row['nodes']:>6}  {row['policy']:<21}{row['step_ms']:>10.2f}"
            f"{row['efficiency']:>12.1%}{row['exposed_ms']:>9.2f}{row['mbytes']:>10.3f}"
            f"  {chosen}{wire}"
        )
    best = _advice(rows)
    return "\n".join([*lines, *best])


def _advice(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say for the largest cluster which policy pays: the fastest, or as good and more often."""
    most = max(row["nodes"] for row in rows)
    known = [row for row in rows if row["nodes"] == most]
    best = max(row["efficiency"] for row in known)
    good = [row for row in known if row["efficiency"] >= 0.99 * best]
    chosen = min(good, key=lambda row: row["skip"])
    yield f"  on {most} nodes: {chosen['policy']} (within 1 % of the fastest, exchanges most often)"


def _assumptions(chosen: argparse.Namespace, job: Job) -> list[str]:
    """Say what is modelled, and what is not."""
    return [
        f"every node has one link of its rate both ways, {HEADERS - 1:.1%} of headers, "
        f"{chosen.latency_us:g} us of latency; the switch between is never full",
        f"an exchange begins when the last node has sent; all ranks vote, then payloads cross as "
        f"`daso doctor --nodes` shows, while hosts work on them, "
        f"{1e6 * job.message_seconds:g} us for each message",
        f"packing and merging keep the training thread for "
        f"{1e3 * job.own_seconds * job.parameters:.3g} ms an exchange",
        "synchronous steps average fp32 gradients while backward goes on: the bytes of a ring, the "
        "latency of a tree",
        f"nodes drift apart by {job.drift:g} of the parameters' mean square in a batch, and the "
        f"learning rate stays: Auto exchanges by that, so give it your run's (--from, --drift)",
        f"step times of nodes are independent and log-normal, {job.jitter:.1%} apart; nobody "
        f"fails, no other job is there",
        f"of {chosen.steps} steps the first quarter does not count; epochs do not end",
        f"a rank has {chosen.cores:g} cores; an exchange's own work takes what is over 1 of them, "
        f"and of computing what is missing to 2",
        "the inner optimizer normalizes gradients, as Adam does: Auto averages them in 4 or 8 bits "
        "for the first 100 to 200 steps, fewer where these cost as much, and while it costs 10 % "
        "of one"
        if job.normalizes and chosen.wire != "topk"
        else "the inner optimizer is such as SGD; with Adam and its kin Auto trains synchronously "
        "first: --optimizer=adamw",
        "not modelled: contention inside nodes and in the switch, accuracy",
    ]
