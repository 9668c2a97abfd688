"""`daso predict`: the cost of a schedule on other nodes, simulated.

With ``--throttle`` a program runs on this machine slowed down, and is estimated from its steps;
with ``--sweep-link`` it runs over links of several rates.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from daso.cli.outputs import may_write, write_file
from daso.errors import ConfigError
from daso.paths import path_of
from daso.plan.auto import Auto
from daso.plan.cost_model import LinkCosts
from daso.plan.layout import SMALL_SHARE
from daso.plan.options import BITS, Exchange, Gradients, Settings
from daso.plan.policies import Fixed
from daso.plan.schedule import Policy
from daso.predict.cluster import Cluster
from daso.predict.jobs import Job, read_run
from daso.predict.links import FASTEST_PREDICTED, HEADERS, Link, parse_rate
from daso.predict.simulator import Outcome, simulate

LEAST_STEPS = 400  # Auto needs about 250 to settle
LEAST_RESTORED_STEPS = 1600  # normalizing optimizers: 100 synchronous steps come first
MOST_STEPS = 10**8  # of all nodes together: about a minute for each policy
SCALES = {"k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}  # after a number of parameters
SYNCHRONOUS = "synchronous, as DDP"
POLICIES = ("synchronous", "fixed:4:1", "auto")
# Seconds of the training thread per number of an exchange. On an H200 `Auto` chose skip 12 to 15
# for 25.6 M numbers and steps of 46 to 63 ms, to spend one per cent of them
# (scripts/figures/gpu.json); training on a CPU takes 2e-9.
TYPICAL_OWN_SECONDS = 3e-10
TYPICAL_SMALL_SECONDS = 1e-3  # of the training thread, per exchange of small tensors only
TYPICAL_DRIFT = 1e-5  # per batch, without a recorded run: 16 nodes, Fashion-MNIST, late in training


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
        "--optimizer", choices=("sgd", "adamw"), help="adamw: Adam and similar (the run's; sgd)"
    )
    parser.add_argument(
        "--cores", type=float, default=2, help="of a rank; 2 or more: one is free for exchanges"
    )
    parser.add_argument("--faster-compute", type=float, default=1, help="divides step times")
    parser.add_argument(
        "--steps", type=int, help=f"to simulate, {LEAST_STEPS} or more (1000; adamw 2000)"
    )
    parser.add_argument("--json", type=path_of, help="write the predictions to this file")
    parser.add_argument("--plot", type=path_of, help="draw efficiency over nodes (PNG, PDF or SVG)")
    parser.add_argument(
        "--throttle",
        type=path_of,
        metavar="PLAN",
        help="run the program after -- on this machine, slowed down by a TOML plan",
    )
    parser.add_argument(
        "--sweep-link",
        metavar="FACTORS",
        help="run the program after -- over links that are slower by each factor, e.g. 1.5,2,3,4",
    )
    parser.set_defaults(run=_run)


def split_words(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split the words behind ``predict`` into options and, behind ``--``, a program."""
    at = words.index("--") if "--" in words else len(words)
    return list(words[:at]), tuple(words[at + 1 :])


def _run(chosen: argparse.Namespace, program: Sequence[str]) -> int:
    if chosen.sweep_link is not None:
        from daso.cli.throttled import sweep_links

        return sweep_links(_factors(chosen.sweep_link), program)
    if chosen.throttle is not None:
        from daso.cli.throttled import run_throttled

        return run_throttled(chosen.throttle, program)
    if program:
        raise ConfigError(
            f"a program is run with --throttle=PLAN or --sweep-link alone, but {program[0]!r} "
            f"comes without; add one",
            code="program-without-throttle",
        )
    return _main(chosen)


def _factors(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--sweep-link must be numbers by commas, not {text!r}; write 1.5,2,3,4",
            code="sweep-not-numbers",
        ) from error


def count(word: str) -> float:
    """Parse a number such as ``25.6M``, ``7B`` or ``25.6e6``."""
    scale = SCALES.get(word[-1:], 1.0)
    try:
        return float(word if scale == 1.0 else word[:-1]) * scale
    except ValueError as error:
        rule = f"must be a number such as 25.6M or 25.6e6, not {word!r}"
        raise argparse.ArgumentTypeError(rule) from error


def _main(chosen: argparse.Namespace) -> int:
    job, notes = _job(chosen)
    nodes = list(dict.fromkeys(_whole(word, "--nodes") for word in chosen.nodes.split(",")))
    links = {word.strip(): _link(word, chosen.latency_us) for word in chosen.link.split(",")}
    policies = dict(_policy(word) for word in chosen.policy or POLICIES)
    settings = Settings(wire=chosen.wire, merge="auto", exchange=Exchange(), gradients=Gradients())
    if chosen.steps is None:
        chosen.steps = 2000 if job.normalizes else 1000
    least = LEAST_RESTORED_STEPS if job.normalizes else LEAST_STEPS
    if chosen.steps < least:
        raise ConfigError(
            f"--steps must be at least {least}, not {chosen.steps}", code="too-few-steps"
        )
    if chosen.steps * max(nodes) > MOST_STEPS:
        raise ConfigError(
            f"--steps times --nodes must be at most {MOST_STEPS} (each step of each node is "
            f"simulated), not {chosen.steps} times {max(nodes)}; lower either",
            code="too-many-steps",
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
    assumptions = [*notes, *_assumptions(chosen, job)]
    print("Predicted, not measured. Assumptions:")
    print("\n".join(f"- {line}" for line in assumptions))
    if chosen.json is not None:
        values = {"job": asdict(job), "rows": rows, "assumptions": assumptions}
        write_file(chosen.json, json.dumps(values, indent=1) + "\n")
    if chosen.plot is not None:
        from daso.cli import plots

        plots.save(plots.draw_efficiency(rows), chosen.plot, "a picture of the efficiency")
    return 0


def _predict(
    job: Job,
    clusters: Mapping[str, Sequence[Cluster]],
    policies: Mapping[str, Policy],
    settings: Settings,
    steps: int,
) -> list[dict[str, Any]]:
    """Simulate all policies on all clusters; print a table for every link."""
    rows = []
    for link, clusters_of_link in clusters.items():
        rows_of_link = [
            {"link": link, "nodes": cluster.nodes, "policy": name}
            | _row(simulate(job, cluster, policy, settings, steps=steps), job)
            for cluster in clusters_of_link
            for name, policy in policies.items()
        ]
        print(table(job, link, rows_of_link), end="\n\n", flush=True)
        rows += rows_of_link
    return rows


def _job(chosen: argparse.Namespace) -> tuple[Job, tuple[str, ...]]:
    """Return the job from a run, from options, or from both, and notes on its assumptions."""
    if chosen.run_folder is not None:
        job, notes = read_run(chosen.run_folder)
        if job.normalizes and not job.drift:  # the run made no exchanges
            job = replace(job, own_seconds=TYPICAL_OWN_SECONDS, drift=TYPICAL_DRIFT)
    elif chosen.parameters is None or chosen.step_ms is None:
        raise ConfigError(
            "--from=RUN, or --parameters and --step-ms, must describe the job",
            code="job-not-described",
        )
    else:
        job, notes = _typical_job(chosen)
    if not chosen.faster_compute > 0:
        raise ConfigError(
            f"--faster-compute must be above 0, not {chosen.faster_compute}",
            code="compute-factor-not-positive",
        )
    options = {"jitter": chosen.jitter, "drift": chosen.drift, "parameters": chosen.parameters}
    known = {name: value for name, value in options.items() if value is not None}
    if chosen.parameters is not None:  # a run's model may be larger
        known["small_parameters"] = chosen.parameters * job.small_parameters / job.parameters
    if chosen.optimizer is not None:
        known["normalizes"] = chosen.optimizer == "adamw"
    step_seconds = job.step_seconds if chosen.step_ms is None else chosen.step_ms / 1e3
    known["step_seconds"] = step_seconds / chosen.faster_compute
    return replace(job, message_seconds=LinkCosts().message_seconds, **known), notes


def _typical_job(chosen: argparse.Namespace) -> tuple[Job, tuple[str, ...]]:
    """Return a job from the model's size and the step time, with typical values for the rest."""
    job = Job(
        chosen.parameters,
        chosen.step_ms / 1e3,
        own_seconds=TYPICAL_OWN_SECONDS,
        small_parameters=chosen.parameters / SMALL_SHARE,
        small_seconds=TYPICAL_SMALL_SECONDS,
        jitter=0.02,
        drift=TYPICAL_DRIFT,
    )
    notes = (
        "the host's own work on an exchange is assumed to take less than the transfer; "
        "--from=RUN reads it from a run",
        f"Auto also exchanges small tensors alone, at most a 16th of the numbers, "
        f"and the training thread takes {1e3 * TYPICAL_SMALL_SECONDS:g} ms each time",
    )
    return job, notes[:1] if chosen.optimizer == "adamw" else notes


def _whole(word: str, flag: str) -> int:
    if not word.strip().isdecimal() or int(word) < 1:
        raise ConfigError(
            f"{flag} must be whole numbers from 1 up, by commas, not {word!r}",
            code="counts-not-whole",
        )
    return int(word)


def _link(word: str, latency_us: float) -> Link:
    if not 0 <= latency_us < math.inf:
        raise ConfigError(
            f"--latency-us must be at least 0, not {latency_us}", code="latency-below-zero"
        )
    bits = parse_rate(word.strip(), FASTEST_PREDICTED)
    return Link(math.inf if bits is None else bits / 8, latency_us / 1e6)


def _policy(word: str) -> tuple[str, Policy]:
    """Return a policy and its name in tables."""
    if word == "auto":
        return "Auto", Auto()
    if word == "synchronous":
        return SYNCHRONOUS, Fixed(1, 0)
    kind, *numbers = word.split(":")
    if kind == "fixed" and len(numbers) == 2 and all(number.isdecimal() for number in numbers):
        policy = Fixed(int(numbers[0]), int(numbers[1]))
        if policy.start().synchronous:
            return SYNCHRONOUS, policy
        return f"Fixed({policy.skip}, {policy.wait})", policy
    raise ConfigError(
        f"--policy must be synchronous, auto or fixed:SKIP:WAIT, not {word!r}",
        code="policy-not-predictable",
    )


def _row(outcome: Outcome, job: Job) -> dict[str, Any]:
    return {
        "step_ms": 1e3 * outcome.step_seconds,
        "efficiency": outcome.efficiency(job),
        "exposed_ms": 1e3 * outcome.exposed_seconds,
        "mbytes": outcome.bytes_per_step / 1e6,
        "skip": outcome.skip,
        "wait": outcome.wait,
        "wire": outcome.wire,
        "plan": outcome.plan,
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
    return "\n".join([*lines, _advice(rows)])


def _advice(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the recommended policy on the most nodes: the most frequent of the fastest ones."""
    most = max(row["nodes"] for row in rows)
    largest = [row for row in rows if row["nodes"] == most]
    best = max(row["efficiency"] for row in largest)
    good = [row for row in largest if row["efficiency"] >= 0.99 * best]
    policy = min(good, key=lambda row: row["skip"])["policy"]
    return f"  on {most} nodes: {policy} (within 1 % of the fastest, exchanges most often)"


def _assumptions(chosen: argparse.Namespace, job: Job) -> list[str]:
    """Return the assumptions of the prediction, and its omissions."""
    return [
        f"every node has one full-duplex link, {HEADERS - 1:.1%} of headers, "
        f"{chosen.latency_us:g} us of latency; the switch is never full",
        f"an exchange begins when the last node has sent; all ranks vote, then payloads go as "
        f"`daso doctor --nodes` shows, while hosts process them, "
        f"{1e6 * job.message_seconds:g} us for each message",
        f"packing and merging occupy the training thread for "
        f"{1e3 * job.own_seconds * job.parameters:.3g} ms an exchange",
        "synchronous steps average fp32 gradients during backward: the bytes of a ring, the "
        "latency of a tree",
        f"nodes drift apart by {job.drift:g} of the parameters' mean square in a batch, and the "
        f"learning rate is constant: Auto exchanges by drift; give your run's (--from, --drift)",
        f"step times of nodes are independent and log-normal, {job.jitter:.1%} apart; no node "
        f"fails, and no other jobs run",
        f"of {chosen.steps} steps the first quarter does not count; epochs do not end",
        f"a rank has {chosen.cores:g} cores; an exchange's own work uses those beyond the first, "
        f"and with fewer than 2 takes time from computing",
        "the inner optimizer normalizes gradients, as Adam does: Auto averages them in 4 or 8 bits "
        "for the first 100 to 200 steps, fewer if these are expensive, and as long as it costs at "
        "most 10 % of a step"
        if job.normalizes and chosen.wire != "topk"
        else "the inner optimizer is SGD or similar; with Adam Auto begins synchronously: "
        "--optimizer=adamw",
        "not modelled: contention inside nodes and in the switch, accuracy",
    ]
