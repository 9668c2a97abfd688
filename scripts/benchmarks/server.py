"""Time to a loss where one rank is slower than the others: all in step, or nobody waiting.

Layers take a known time and no core, so that four hosts fit on a machine with two; the last rank's
take some times as long. A GPT computes instead, and the last rank's core is shared with processes
that are always busy. What is tested are copies of world rank 0's model from the midst of a
training, after it is over: nothing stands still for a test.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.contenders import SERVERS, UNBOUNDED
from benchmarks.time_to_accuracy import CONTEXT, TEXT, samples_of, warmed_cosine
from benchmarks.timed_models import Paced, shared_core
from daso.cli.bench.baselines import Contender
from daso.cli.bench.models import Batch, Case, loss_of, score
from daso.cli.bench.names import DDP
from daso.comm.process_group import join_process_group
from daso.comm.topology import Topology
from daso.data import ShardedSampler
from daso.examples.transformer import ByteTransformer

__all__ = ["GAPS", "Plan", "figures", "measure", "ratio_to", "table"]

BATCH, TEXT_BATCH = 64, 8  # samples of a rank
TESTS = 2000  # samples on which the loss is measured
WIDTH, LAYERS = 512, 2
FORWARD_SECONDS, BACKWARD_SECONDS = 0.008, 0.012  # of a layer, and no core
GAPS = {"accuracy_gap": f"eager, {UNBOUNDED}", "accuracy_gap_1_apart": "eager, 1 step apart"}
TRIED = 8  # steps by which contenders that go in step find out how many fit into their time


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Args:
        data: "fashion", "digits" (few and easy, for trying), or "text": a GPT with AdamW.
        names: Of contenders; DDP's is the first.
        slow: How many times as long the last rank's layers take; 0: layers take no time of their
            own. Of text: processes on the last rank's core, itself included; 0: as 1.
        seeds: Trainings of each, with seeds from 0.
        seconds: Of a training that is to reach a loss.
        epochs: Of a training for accuracy; 0: it is one for a loss.
        every: Seconds from one copy of the model to the next.
        loss: That is to be reached.
        lr: Learning rate; of trainings for accuracy the highest.
        momentum: Of SGD.
        link: For people.
    """

    data: str
    names: Sequence[str]
    slow: float
    seeds: int
    seconds: float
    epochs: int
    every: float
    loss: float
    lr: float
    momentum: float
    link: str

    @property
    def batch(self) -> int:
        """Return the samples of a rank."""
        return TEXT_BATCH if self.data == TEXT else BATCH


def _model(data: str, slow: float) -> nn.Module:
    """Return a perceptron for 28 x 28 pixels, whose layers take their time; for text a GPT."""
    if data == TEXT:
        return ByteTransformer(context=CONTEXT, width=128, layers=4, heads=4)
    layers: list[nn.Module] = [nn.Flatten()]
    width = 28 * 28
    for _ in range(LAYERS):
        layers += [nn.Linear(width, WIDTH), nn.ReLU()]
        if slow:
            layers.append(Paced(1, slow * FORWARD_SECONDS, slow * BACKWARD_SECONDS))
        width = WIDTH
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _case(plan: Plan, slow: float, seed: int) -> Case:
    def build() -> nn.Module:
        torch.manual_seed(seed)
        return _model(plan.data, slow)

    def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=plan.lr, momentum=plan.momentum)

    def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=plan.lr)

    is_text = plan.data == TEXT
    return Case(build, plan.batch, text=is_text, optimizer=adamw if is_text else sgd)


# --- on the ranks --------------------------------------------------------------------------------


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Train with every contender once for each seed.

    Returns:
        Rows for JSON, the same on every rank.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    join_process_group(topology, "gloo")
    samples, tests = (samples_of(plan.data, train=train) for train in (True, False))
    rows: list[dict[str, Any]] = [{"name": name, "courses": []} for name in plan.names]
    is_last = topology.rank == topology.world_size - 1
    busy = max(0, round(plan.slow) - 1) if is_last else 0
    with shared_core(topology.rank, busy) if plan.data == TEXT else nullcontext():
        for seed in range(plan.seeds):
            for row in rows:
                course = _epochs if plan.epochs else _course
                row["courses"].append(course(plan, row["name"], seed, samples, tests, topology))
    dist.destroy_process_group()
    numel = sum(p.numel() for p in _model(plan.data, 0).parameters())
    sizes = list(topology.node_sizes)
    return {"plan": asdict(plan), "parameters": numel, "nodes": sizes, "rows": rows}


def _contender(plan: Plan, name: str, seed: int, topology: Topology) -> Contender:
    rank_info = topology.rank_info
    last = rank_info.rank == rank_info.world_size - 1
    slow = plan.slow if last else min(plan.slow, 1.0)
    return SERVERS[name](_case(plan, slow, seed), topology)


def _batches(samples: Batch, batch: int, rank: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    images, labels = samples
    while True:
        chosen = torch.randint(len(images), (batch,), generator=generator)
        yield images[chosen], labels[chosen]


def _course(
    plan: Plan, name: str, seed: int, samples: Batch, tests: Batch, topology: Topology
) -> dict[str, Any]:
    """Train for some seconds, then test the copies."""
    world, rank_info = topology.world_comm, topology.rank_info
    contender = _contender(plan, name, seed, topology)
    batches = _batches(samples, plan.batch, rank_info.rank, seed)
    free = _is_free(name)
    world.Barrier()
    start, steps = time.perf_counter(), 0
    most = 0  # steps, where all take the same number
    copies: list[tuple[float, int, Mapping[str, torch.Tensor]]] = []

    def seconds() -> float:
        return time.perf_counter() - start

    while seconds() < plan.seconds if free or not most else steps < most:
        contender.step(next(batches))
        steps += 1
        if steps == TRIED and not free:
            most = round(plan.seconds / max(world.allgather(seconds() / steps)))
        if rank_info.rank == 0 and seconds() >= plan.every * (len(copies) + 1):
            weights = contender.model.state_dict()
            copies.append((seconds(), steps, {key: one.clone() for key, one in weights.items()}))
    taken = world.allgather(steps)
    length = seconds()
    contender.finish()
    contender.close()
    losses = _test(plan.data, copies, tests) if rank_info.rank == 0 else []
    losses = world.bcast(losses)
    report = dict(contender.report())
    return {
        "seed": seed,
        "seconds": [at for at, *_ in copies],
        "steps": [at for _, at, _ in copies],
        "losses": losses,
        "steps_of_ranks": taken,
        "lasted": length,
        "report": {key: report[key] for key in sorted(report) if key in REPORTED},
    }


REPORTED = ("exposed_seconds", "push_every", "updates", "bytes_sent", "gradient_age")


@torch.no_grad()
def _test(
    data: str, copies: Sequence[tuple[float, int, Mapping[str, torch.Tensor]]], tests: Batch
) -> list[float]:
    """Return the loss of copies of a model; pauses are left out."""
    bare = _model(data, 0)
    losses = []
    for *_, weights in copies:
        # Layers that only take time hold one number that says nothing.
        chosen = [value for key, value in weights.items() if value.numel() > 1]
        bare.load_state_dict(dict(zip(bare.state_dict(), chosen, strict=True)))
        losses.append(float(loss_of(bare, tests[0][:TESTS], tests[1][:TESTS])))
    return losses


def _epochs(
    plan: Plan, name: str, seed: int, samples: Batch, tests: Batch, topology: Topology
) -> dict[str, Any]:
    """Train for some epochs, and count right answers.

    Who waits for nobody takes as many steps of the total as its speed is of all ranks'.
    """
    rank_info = topology.rank_info
    contender = _contender(plan, name, seed, topology)
    sampler = ShardedSampler(
        len(samples[0]),
        rank=rank_info.rank,
        size=rank_info.world_size,
        batch_size=plan.batch,
        seed=seed,
    )
    total, steps = plan.epochs * len(sampler), 0
    if plan.slow and _is_free(name):
        speeds = [1.0] * (rank_info.world_size - 1) + [1 / plan.slow]
        total = round(total * len(speeds) * speeds[rank_info.rank] / sum(speeds))
    topology.world_comm.Barrier()
    start = time.perf_counter()
    for chosen in islice(_endless(sampler), total):
        for group in contender.optimizer.param_groups:
            group["lr"] = plan.lr * warmed_cosine(steps / total)
        contender.step((samples[0][chosen], samples[1][chosen]))
        steps += 1
    trained = time.perf_counter() - start
    contender.finish()
    lasted = time.perf_counter() - start
    contender.close()
    report = dict(contender.report())
    percent = score(contender.model, *tests) if rank_info.rank == 0 else 0.0
    return {
        "seed": seed,
        "steps": steps,
        "trained": topology.world_comm.allgather(trained),
        "lasted": lasted,
        "report": {key: report[key] for key in sorted(report) if key in REPORTED},
        "accuracy": topology.world_comm.bcast(percent),
    }


def _endless(sampler: ShardedSampler) -> Iterator[list[int]]:
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from sampler


def _is_free(name: str) -> bool:
    """Return whether a contender's ranks take different numbers of steps."""
    return name.startswith("eager") and UNBOUNDED in name


# --- where the bench was started -----------------------------------------------------------------


def _seconds_to(course: Mapping[str, Any], level: float) -> float | None:
    """Return the seconds after which a copy had the loss; None where none had."""
    pairs = zip(course["seconds"], course["losses"], strict=True)
    return next((at for at, loss in pairs if loss <= level), None)


def ratio_to(found: Mapping[str, Any], name: str) -> float | None:
    """Return seconds to the loss over DDP's, mean over seeds; None where one never had it."""
    return _mean(_ratios(found, name))


def _ratios(found: Mapping[str, Any], name: str) -> list[float | None]:
    courses = {row["name"]: row["courses"] for row in found["rows"]}
    level = found["plan"]["loss"]
    pairs = zip(courses[name], courses[DDP], strict=True)
    both = [(_seconds_to(mine, level), _seconds_to(other, level)) for mine, other in pairs]
    return [None if mine is None or other is None else mine / other for mine, other in both]


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.mean(there) if len(there) == len(values) else None


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    plan = found["plan"]
    if plan["epochs"]:
        lines = [_head(found), f"{'':<24}{'accuracy %':>12}{'+-':>7}{'seconds':>10}"]
        for row in found["rows"]:
            finals = [course["accuracy"] for course in row["courses"]]
            spread = f"{statistics.stdev(finals):.2f}" if len(finals) > 1 else "-"
            took = statistics.mean(course["lasted"] for course in row["courses"])
            mean = statistics.mean(finals)
            lines.append(f"{row['name']:<24}{mean:>12.2f}{spread:>7}{took:>10.1f}")
        return "\n".join(lines)
    titles = ("s to loss", "x DDP", "steps/s", "slowest", "last loss")
    lines = [_head(found), f"{'':<24}" + "".join(f"{title:>11}" for title in titles)]
    for row in found["rows"]:
        courses = row["courses"]
        lasted = [course["lasted"] for course in courses]
        rates = [
            statistics.mean(
                pick(course["steps_of_ranks"]) / took
                for course, took in zip(courses, lasted, strict=True)
            )
            for pick in (max, min)
        ]
        cells = (
            _text(_mean([_seconds_to(course, plan["loss"]) for course in courses]), 2),
            _text(ratio_to(found, row["name"]), 3),
            *(f"{rate:.1f}" for rate in rates),
            _text(statistics.mean(course["losses"][-1] for course in courses), 3),
        )
        lines.append(f"{row['name']:<24}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _head(found: Mapping[str, Any]) -> str:
    plan = found["plan"]
    is_text = plan["data"] == TEXT
    kind = "GPT" if is_text else "perceptron"
    what = f"{plan['data']}, {kind} of {found['parameters'] / 1e6:.2f} M parameters"
    sgd = f"batch {BATCH}, SGD at {plan['lr']:g} with momentum {plan['momentum']:g}"
    adamw = f"batch {TEXT_BATCH}, AdamW at {plan['lr']:g}"
    where = f"{len(found['nodes'])} nodes, link {plan['link']}, {adamw if is_text else sgd}"
    if plan["epochs"] and not plan["slow"]:
        return f"{what}, {where}, {plan['epochs']:g} epochs, mean of {plan['seeds']} seeds"
    pause = 1e3 * LAYERS * (FORWARD_SECONDS + BACKWARD_SECONDS)
    wanted = (
        f"{plan['epochs']:g} epochs of all ranks together"
        if plan["epochs"]
        else f"loss {plan['loss']:g} on {TESTS} test samples at most"
    )
    slow = (
        f"one core a rank, the last one's for {plan['slow']:g} processes that are always busy"
        if is_text
        else f"layers that take {pause:.0f} ms and no core beside computing, on the last rank "
        f"{plan['slow']:g} times as long"
    )
    return f"{what}, {slow}, {where}, {wanted}, mean of {plan['seeds']} seeds"


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures, named as everywhere; a loss never reached has none."""
    plan = found["plan"]
    courses = {row["name"]: row["courses"] for row in found["rows"]}
    suffix = "_momentum" if plan["momentum"] else "_gpt" if plan["data"] == TEXT else ""
    if plan["epochs"]:
        if plan["slow"]:
            suffix = f"_slow{plan['slow']:g}".replace(".", "_") + suffix
        finals = {
            name: statistics.mean(course["accuracy"] for course in mine)
            for name, mine in courses.items()
        }
        return {
            name + suffix: {
                "value": finals[DDP] - finals[ours],
                "unit": "points of final test accuracy below DDP",
                "conditions": f"{ours} against {DDP}: {_head(found)}",
            }
            for name, ours in GAPS.items()
        }
    ours = f"eager, {UNBOUNDED}"
    if ours not in courses:
        return {}
    conditions = f"{ours} against {DDP}: {_head(found)}"
    ratio = ratio_to(found, ours)
    if ratio is None:
        return {}
    kind = "homogeneous" if plan["slow"] == 1 else f"slow{plan['slow']:g}".replace(".", "_")
    unit = f"ratio of seconds to a loss of {plan['loss']:g}, over DDP's"
    return {
        f"time_to_loss_ratio_{kind}{suffix}": {
            "value": ratio,
            "unit": unit,
            "conditions": conditions,
        }
    }
