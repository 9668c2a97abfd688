"""The training loop of `daso train`, in the order things happen."""

import hashlib
import time
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import DataLoader

from daso.comm.topology import Topology, init
from daso.data import ShardedSampler
from daso.errors import DasoError, DataError
from daso.run.config import Config
from daso.run.report import Progress, RunFolder, closing_table, versions
from daso.run.task import Task, evaluate, loss_of, make_optimizer, make_task
from daso.train.optimizer import DASO

__all__ = ["digest", "train"]


def train(config: Config) -> dict[str, Any]:
    """Train one model on all ranks of the world.

    Args:
        config: What to train and how.

    Returns:
        The summary, the same on every rank; world rank 0 writes it to the run folder.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    topology = init()
    place = topology.place
    task = _load(config, topology)
    sampler = ShardedSampler(
        task.train_length,
        rank=place.rank,
        size=place.size,
        batch_size=config.data.batch_size,
        seed=config.seed,
    )
    settings = config.settings()
    optimizer = DASO(
        make_optimizer(config.optimizer, task.model),
        module=task.model,
        topology=topology,
        policy=config.policy(),
        wire=settings.wire,
        merge=settings.merge,
        exchange=settings.exchange,
        gradients=settings.gradients,
    )
    folder = _open_folder(config, topology)
    steps = config.epochs * len(sampler)
    start = time.perf_counter()
    with Progress(steps, shown=folder is not None) as progress:
        progress.line(
            f"{task.data}: {task.train_length} samples, {place.size} ranks on {place.nodes} "
            f"nodes, batch {config.data.batch_size} per rank"
        )
        if folder is not None:
            folder.event("start", data=task.data, world=place.size, config=asdict(config))
        score = 0.0
        for epoch in range(config.epochs):
            loss = _epoch(task, sampler, optimizer, epoch, progress)
            score = _score(task, topology)
            _tell(epoch, loss, score, optimizer, folder, progress)
        seconds = time.perf_counter() - start
        summary = _summary(config, task, topology, optimizer, steps, seconds, score)
    optimizer.close()
    if folder is not None:
        folder.summary(summary)
        folder.event("end", seconds=seconds, test_accuracy=score, identical=summary["identical"])
        folder.close()
        print(closing_table(summary) + f"\n  {'written to':<18}  {folder.path}/", flush=True)
    return summary


def _load(config: Config, topology: Topology) -> Task:
    """Load the data on every rank, or fail on all with the same error."""
    task, problem = None, None
    try:
        task = make_task(config.data)
    except DasoError as error:
        problem = str(error)
    topology.agree(problem, DataError)
    assert task is not None
    return task


def _open_folder(config: Config, topology: Topology) -> RunFolder | None:
    folder, problem = None, None
    if topology.place.rank == 0:
        try:
            folder = RunFolder(config.folder, tensorboard=config.tensorboard)
        except DasoError as error:
            problem = str(error)
    topology.agree(problem, DasoError)
    return folder


def _epoch(
    task: Task, sampler: ShardedSampler, optimizer: DASO, epoch: int, progress: Progress
) -> float:
    """Train one epoch; return the mean loss over all ranks."""
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for inputs, targets in DataLoader(task.train, batch_sampler=sampler):
        optimizer.zero_grad()
        loss = loss_of(task.model, inputs, targets)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        progress.step()
    mean = optimizer.end_epoch(total / len(sampler))
    optimizer.synchronize()
    return mean


def _score(task: Task, topology: Topology) -> float:
    """Return the share of right answers on the test data, counted by all ranks together."""
    place = topology.place
    counts = topology.world.allgather(
        evaluate(task.model, task.test, rank=place.rank, size=place.size)
    )
    return float(sum(right for right, _ in counts) / sum(total for _, total in counts))


def _tell(
    epoch: int,
    loss: float,
    score: float,
    optimizer: DASO,
    folder: RunFolder | None,
    progress: Progress,
) -> None:
    if folder is None:
        return
    report = optimizer.report()
    progress.line(
        f"epoch {epoch + 1}: loss {loss:.4f}, test accuracy {score:.4f}, "
        f"{report['exchanges']} exchanges"
    )
    for event in report["events"]:
        if event["epoch"] == epoch:
            folder.event(**event)
    folder.event(
        "epoch",
        step=report["batches"],
        epoch=epoch + 1,
        loss=loss,
        test_accuracy=score,
        exchanges=report["exchanges"],
        exposed_seconds=report["exposed_seconds"],
    )


def digest(model: torch.nn.Module) -> str:
    """Return a hash of all parameters and buffers, bit for bit."""
    hasher = hashlib.sha256()
    for tensor in model.state_dict().values():
        hasher.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _summary(
    config: Config,
    task: Task,
    topology: Topology,
    optimizer: DASO,
    steps: int,
    seconds: float,
    score: float,
) -> dict[str, Any]:
    report = optimizer.report()
    reports = topology.world.allgather((report["global_bytes_sent"], report["exposed_seconds"]))
    samples = steps * config.data.batch_size * topology.place.size
    return {
        "data": task.data,
        "world": topology.place.size,
        "nodes": topology.place.nodes,
        "node_sizes": list(topology.place.node_sizes),
        "epochs": config.epochs,
        "steps": steps,
        "seconds": seconds,
        "samples_per_second": samples / seconds,
        "test_accuracy": score,
        "exchanges": report["exchanges"],
        "dropped": report["dropped"],
        "global_bytes_sent": sum(nbytes for nbytes, _ in reports),
        "exposed_seconds": max(exposed for _, exposed in reports),
        "skip_history": report["skip_history"],
        "identical": topology.same(digest(task.model)),
        "wire": report["wire"],
        "merge": report["merge"],
        "policy": report["policy"],
        "versions": versions(report["mpi"]),
    }
