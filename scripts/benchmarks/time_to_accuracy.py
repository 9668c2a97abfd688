"""Whole trainings on a link of a known rate, and the seconds of each to an accuracy.

Tests run after a training, on copies of the model that were made during it. So no exchange gains
time from a test. A copy is the mean over ranks, as ``synchronize()`` would make it.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import interpolate
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.learning_curves import is_tested, on_link
from daso.cli.bench import train
from daso.cli.bench.baselines import CONTENDERS, Contender
from daso.cli.bench.models import CASES, SIDE, Batch, Case, loss_of, score, small_cnn
from daso.cli.bench.names import OURS
from daso.cli.bench.rounds import Clock
from daso.comm.process_group import join_process_group
from daso.comm.topology import Topology
from daso.data import ShardedSampler, load_digits, load_fashion, load_text
from daso.environment import data_folder
from daso.errors import ExchangeError

if TYPE_CHECKING:
    from daso.cli.bench.places import RankStarter

__all__ = ["KIND", "TEXT", "Plan", "compare", "measure", "samples_of", "warmed_cosine"]

KIND = "benchmarks.time_to_accuracy"
BATCH = 64  # images of a rank
TEXT = "text"  # the data of the transformer
CONTEXT = 128  # bytes of one of its samples
TEXT_BYTES = 255_000  # of Python's library: 1,792 samples, 448 steps of two ranks
TEXT_TESTS = 128  # samples
MOMENTUM = 0.9
WARMUP = 0.05  # of all steps


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained.

    Args:
        name: A contender.
        data: "fashion", "digits" (few and easy, for trying), or "text" for the transformer.
        seeds: Trainings, with seeds from 0.
        epochs: Of each.
        peak: Highest learning rate.
        every: Steps from one copy of the model to the next.
        level: Percentage of test samples right that is to be reached; of text, the likelihood of
            a byte in percent: 100 exp(-loss), which is smoother.
        link: For people.
    """

    name: str
    data: str
    seeds: int
    epochs: int
    peak: float
    every: int
    level: float
    link: str


def warmed_cosine(done: float) -> float:
    """Return the learning rate over its peak: a linear warm-up, and a cosine to zero.

    Args:
        done: Share of all steps that are over.
    """
    return min(1.0, 0.05 + done / WARMUP) * (1 + math.cos(math.pi * done)) / 2


# --- on the ranks --------------------------------------------------------------------------------


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Train once for each seed.

    Returns:
        Courses for JSON, the same on every rank.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    join_process_group(topology, "gloo")
    samples, tests = (samples_of(plan.data, train=train) for train in (True, False))
    mine = slice(topology.rank, None, topology.world_size)  # of the tests
    share = tests[0][mine], tests[1][mine]
    courses = [_course(plan, seed, samples, share, topology) for seed in range(plan.seeds)]
    dist.destroy_process_group()
    return {
        "plan": asdict(plan),
        "parameters": sum(p.numel() for p in _case(plan, 0).build().parameters()),
        "batch": _case(plan, 0).batch,
        "nodes": list(topology.node_sizes),
        "courses": courses,
    }


def samples_of(data: str, *, train: bool) -> Batch:
    """Return images of 28 x 28 pixels and labels, or bytes of text and the bytes after them."""
    if data == TEXT:
        windows = load_text(train=train, context=CONTEXT, max_bytes=TEXT_BYTES)
        pairs = [windows[at] for at in range(len(windows) if train else TEXT_TESTS)]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    if data == "fashion":
        images, labels = load_fashion(data_folder(), train=train).tensors
        return images, labels
    images, labels = load_digits(train=train).tensors
    return interpolate(images, size=(SIDE, SIDE)), labels


@dataclass(frozen=True, slots=True)
class Copy:
    """A rank's model in the midst of a training."""

    step: int
    seconds: float  # of training until then
    weights: Mapping[str, torch.Tensor]


def _course(
    plan: Plan, seed: int, samples: Batch, share: Batch, topology: Topology
) -> dict[str, Any]:
    """Train once, then test the copies."""
    rank_info, world = topology.rank_info, topology.world_comm
    case = _case(plan, seed)
    contender = CONTENDERS[plan.name](case, topology)
    sampler = ShardedSampler(
        len(samples[0]),
        rank=rank_info.rank,
        size=rank_info.world_size,
        batch_size=case.batch,
        seed=seed,
    )
    copies = _train(plan, contender, samples, sampler, world)
    contender.close()
    if len(set(world.allgather(_digest(copies[-1].weights)))) > 1:
        raise ExchangeError(
            f"all ranks must have the same model at the end, and with {plan.name} they differ; "
            "choose epochs after whose last step it averages"
        )
    return {
        "seed": seed,
        **_test(plan, copies, case.build(), share, world),
        "report": dict(contender.report()),
    }


def _case(plan: Plan, seed: int) -> Case:
    gpt = CASES["gpt"]

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return gpt.build() if plan.data == TEXT else small_cnn()

    def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=plan.peak, momentum=MOMENTUM)

    def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=plan.peak)

    if plan.data == TEXT:
        return Case(build, gpt.batch, text=True, optimizer=adamw)
    return Case(build, BATCH, text=False, optimizer=sgd)


def _train(
    plan: Plan, contender: Contender, samples: Batch, sampler: ShardedSampler, world: Any
) -> list[Copy]:
    """Train to the end. Collective over the world in the sense of the contender."""
    inputs, targets = samples
    total = plan.epochs * len(sampler)
    scheduler = LambdaLR(contender.optimizer, lambda step: warmed_cosine(step / total))
    copies = []
    world.Barrier()
    clock, step = Clock(), 0
    for epoch in range(plan.epochs):
        sampler.set_epoch(epoch)
        for chosen in sampler:
            contender.step((inputs[chosen], targets[chosen]))
            scheduler.step()
            step += 1
            if step % plan.every == 0 and step < total:
                copies.append(_copy(step, clock, contender))
    contender.finish()
    return [*copies, _copy(step, clock, contender)]


def _copy(step: int, clock: Clock, contender: Contender) -> Copy:
    seconds, _ = clock.read()
    weights = _bare(contender.model).state_dict()
    return Copy(step, seconds, {name: tensor.clone() for name, tensor in weights.items()})


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    digest = sha256()
    for tensor in weights.values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _mean(weights: Mapping[str, torch.Tensor], world: Any) -> dict[str, torch.Tensor]:
    """Return the mean over ranks of what is not counted, rank 0's of the rest."""
    everyones = [world.bcast(weights, root) for root in range(world.Get_size())]
    return {
        name: torch.stack([one[name] for one in everyones]).mean(0)
        if tensor.is_floating_point()
        else everyones[0][name]
        for name, tensor in weights.items()
    }


def _test(
    plan: Plan, copies: Sequence[Copy], model: nn.Module, share: Batch, world: Any
) -> dict[str, list[Any]]:
    """Return how good copies are, each rank's on its share of the tests."""
    tested: list[Copy] = []
    accuracy: list[float] = []
    for index, one in enumerate(copies):
        had_level = any(percent >= plan.level for percent in accuracy)
        if is_tested(index, len(copies), had_level=had_level):
            model.load_state_dict(_mean(one.weights, world))
            accuracy.append(_quality(plan, model, share, world))
            tested.append(one)
    return {
        "steps": [one.step for one in tested],
        "seconds": [max(world.allgather(one.seconds)) for one in tested],
        "accuracy": accuracy,
    }


def _quality(plan: Plan, model: nn.Module, share: Batch, world: Any) -> float:
    """Return the percentage that `Plan.level` is compared with. Collective over the world."""
    size = world.allreduce(share[1].numel())
    if plan.data == TEXT:
        with torch.no_grad():
            parts = zip(share[0].split(16), share[1].split(16), strict=True)
            losses = [float(loss_of(model, x, y)) * y.numel() for x, y in parts]
        return 100 * math.exp(-world.allreduce(sum(losses)) / size)
    right = round(score(model, *share) * share[1].numel() / 100)
    return float(100 * world.allreduce(right) / size)


# --- where the bench was started -----------------------------------------------------------------


def compare(
    place: "RankStarter",
    links: Sequence[str],
    plan: Plan,
    steps: train.Plan,
    *,
    nodes: int,
    ranks: int,
) -> Iterator[dict[str, Any]]:
    """Train with the rivals once, and with ours on every link; blocking.

    A rival's schedule does not depend on times, so its losses do not depend on a link.

    Args:
        place: Where.
        links: Of this place.
        plan: What is trained; name and link are filled in.
        steps: How step times are measured; its names are the contenders. The link is filled in.
        nodes: Number of nodes.
        ranks: On each.

    Yields:
        What was found on each link, for JSON.
    """
    size = {"nodes": nodes, "ranks": ranks}

    def trained(name: str, link: str) -> Any:
        say(f"{name} trains on link {link}, seeds 0 to {plan.seeds - 1}")
        return place.run(KIND, asdict(replace(plan, name=name, link=link)), link=link, **size)

    def timed(link: str) -> Any:
        say(f"step times on link {link}")
        return place.run(train.__name__, asdict(replace(steps, link=link)), link=link, **size)

    ours = [name for name in steps.names if name.startswith(OURS)]
    rivals = [trained(name, place.fastest) for name in steps.names if name not in ours]
    for link in links:
        times = timed(link)
        yield on_link(rivals, times, [trained(name, link) for name in ours])


def say(text: str) -> None:
    """Tell a person who waits what is done now."""
    print(text, file=sys.stderr, flush=True)
