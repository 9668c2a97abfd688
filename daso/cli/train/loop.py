"""Training loop of `daso train`, in the order of execution."""

import hashlib
import logging
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import DataLoader

from daso.checkpoint.preemption import StopRequest
from daso.cli.trace import FILE
from daso.cli.train.config import Config
from daso.cli.train.report import Progress, RunFolder, closing_table, versions
from daso.cli.train.resume import Point, Run, Saver
from daso.cli.train.task import Task, evaluate, loss_of, make_optimizer, make_outer, make_task
from daso.comm.control import gather
from daso.comm.topology import Regrouped, Topology
from daso.comm.world import init
from daso.data import ShardedSampler
from daso.environment import job_names, restarts, restarts_left, slurm_job
from daso.errors import ConfigError, DasoError
from daso.timeline.recording import Recording
from daso.train.optimizer import DASO

logger = logging.getLogger("daso")


class Stopped(Exception):  # noqa: N818 - no error: a signal ended the run, which is saved
    """Ends the loop after a step, on all ranks."""


def train(config: Config, *, resume: bool = False) -> dict[str, Any] | None:
    """Train one model on all ranks of the world.

    A restarted job resumes from its newest checkpoint automatically.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    run = _prepare(config, init())
    saver = Saver(run)
    point = saver.open(resume=resume, restarted=job_names(restarted=True))
    folder = _open_folder(run, point, saver)
    timeout_seconds = config.exchange.timeout_seconds
    summary, stopped = None, False
    stop = StopRequest(run.topology, signals=_signals(), timeout_seconds=timeout_seconds)
    try:
        with stop, _recorded(run, point) as recording:
            _join(run, point)
            try:
                summary = _train(run, point, saver, folder, stop, recording)
            except Stopped:
                stopped = True
    except DasoError as error:
        if not stopped and summary is None:
            raise
        logger.warning("the recording is not whole: %s", error)
    if not stopped:
        saver.finish()
    run.optimizer.close()
    if folder is not None:
        folder.close()
    return summary


def _join(run: Run, point: Point) -> None:
    """Wait, on a spare rank, until it is needed, and continue at the others' position."""

    def follow(world: Regrouped) -> None:
        epoch, total = world.first((point.epoch, point.total.cpu()))
        if world.is_new:
            point.epoch, point.total = epoch, total

    run.topology.on_regroup(follow)
    if run.topology.is_spare:
        point.step = run.optimizer.join()


def _signals() -> list[signal.Signals]:
    """List the signals that end a run; SLURM sends SIGTERM before it preempts or cancels a job."""
    return [signal.SIGUSR1, signal.SIGTERM] if slurm_job() else [signal.SIGUSR1]


def _recorded(run: Run, point: Point) -> AbstractContextManager[Recording | None]:
    """Return the recording of all ranks, or None without ``trace``; a resume starts another."""
    config, first = run.config, run.topology.rank == 0
    if not config.trace:
        return nullcontext()
    if run.topology.world_size == 1:
        logger.warning(
            "trace=true records several ranks, but this run has one: nothing is recorded"
        )
        return nullcontext()
    name = FILE if point.resumed is None else FILE.replace(".", f"-{point.step}.")
    if first and point.resumed is None:
        for old in config.folder.glob(FILE.replace(".", "-*.")):
            old.unlink()
    timeout_seconds = config.exchange.timeout_seconds
    return Recording(config.folder / name, run.topology, timeout_seconds=timeout_seconds)


def _marked(run: Run, recording: Recording | None) -> Recording | None:
    """Write the recording and return it; return None if that fails."""
    if recording is not None:
        try:
            recording.mark()
        except ConfigError as error:  # on every rank
            if run.topology.rank == 0:
                logger.warning("training continues without its recording: %s", error)
            return None
    return recording


def _train(
    run: Run,
    point: Point,
    saver: Saver,
    folder: RunFolder | None,
    stop: StopRequest,
    recording: Recording | None,
) -> dict[str, Any]:
    first, start = point.step, time.perf_counter()
    with Progress(point.step + _steps_left(run, point), shown=folder is not None) as progress:
        _greet(run, point, folder, progress)
        while point.epoch < run.config.epochs:
            for _ in _steps(run, point, saver, progress):
                if number := stop.after_step():
                    _leave(point, saver, folder, progress, number)
            figures = {"loss": _end_epoch(run, point), "test_accuracy": _score(run)}
            folder = folder or _inherited(run)
            progress.shown = folder is not None
            _tell(run, point, figures, folder, progress)
            recording = _marked(run, recording)
            point.epoch, point.total = point.epoch + 1, torch.zeros(())
            run.sampler.set_epoch(point.epoch)
            progress.until(point.step + _steps_left(run, point))
        seconds = time.perf_counter() - start
        samples = (point.step - first) * run.config.data.batch_size * run.topology.world_size
        pace = {"seconds": seconds, "samples_per_second": samples / seconds}
        figures |= pace
        summary: dict[str, Any] = run.optimizer.together(lambda: _summary(run, point, figures))
        folder = folder or _inherited(run)
    if folder is not None:
        folder.summary(summary)
        folder.event(
            "end", **{key: summary[key] for key in ("seconds", "test_accuracy", "identical")}
        )
        print(closing_table(summary, folder.path), flush=True)
    return summary


def _prepare(config: Config, topology: Topology) -> Run:
    """Load the data, build the model, wrap its optimizer."""
    device = _device(config, topology)
    task, settings = _load(config, topology), config.settings()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    task.model.to(device)
    sampler = ShardedSampler(
        task.train_length,
        rank=topology.rank,
        size=topology.world_size,
        batch_size=config.data.batch_size,
        seed=config.seed,
    )
    topology.on_regroup(sampler.regroup)
    optimizer = DASO(
        make_optimizer(config.optimizer, task.model),
        module=task.model,
        topology=topology,
        policy=config.policy(),
        wire=settings.wire,
        merge=settings.merge,
        outer=make_outer(config),
        exchange=settings.exchange,
        gradients=settings.gradients,
    )
    return Run(config, topology, task, sampler, optimizer, device)


def _device(config: Config, topology: Topology) -> torch.device:
    """Return this rank's device; raise on all ranks if any lacks it."""
    device = torch.device("cpu") if config.device == "cpu" else topology.device
    problem = None
    if config.device == "cuda" and device.type != "cuda":
        problem = ConfigError(
            "device=cuda needs a GPU that torch sees, but there is none; set --device=cpu",
            code="no-gpu-to-train",
        )
    topology.raise_on_all_ranks(problem)
    return device


def _load(config: Config, topology: Topology) -> Task:
    """Load the data on every rank; raise the same error on all ranks if any fails."""
    task: Task | None = None
    problem: DasoError | None = None
    try:
        task = make_task(config.data)
    except DasoError as error:
        problem = error
    topology.raise_on_all_ranks(problem)
    assert task is not None
    return task


def _open_folder(run: Run, point: Point, saver: Saver) -> RunFolder | None:
    folder: RunFolder | None = None
    problem: DasoError | None = None
    config = run.config
    if run.topology.rank == 0:
        try:
            folder = RunFolder(
                config.folder, tensorboard=config.tensorboard, resume=point.resumed is not None
            )
            saver.note(job_names())
        except DasoError as error:
            problem = error
    run.topology.raise_on_all_ranks(problem)
    return folder


def _inherited(run: Run) -> RunFolder | None:
    """Return the run folder if this rank replaces a lost rank 0; else None."""
    if run.topology.rank > 0:
        return None
    try:
        return RunFolder(run.config.folder, tensorboard=run.config.tensorboard, resume=True)
    except ConfigError as error:  # training continues, as on the other ranks
        logger.warning("nothing more is written: %s", error)
        return None


def _steps_left(run: Run, point: Point) -> int:
    return (run.config.epochs - point.epoch) * len(run.sampler) - run.batch


def _greet(run: Run, point: Point, folder: RunFolder | None, progress: Progress) -> None:
    if folder is None:
        return
    task, rank_info = run.task, run.topology.rank_info
    progress.line(
        f"{task.data}: {task.train_length} samples, {rank_info.world_size} ranks on "
        f"{rank_info.nodes} nodes, batch {run.config.data.batch_size} per rank"
    )
    parameters = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    what = {
        "data": task.data,
        "world": rank_info.world_size,
        "nodes": rank_info.nodes,
        "parameters": parameters,
        "config": asdict(run.config),
    }
    if times := restarts():
        what["restarts"] = times
        start = f"SLURM restarted job {slurm_job()}" if slurm_job() else "the job was restarted"
        progress.line(f"{start}: restart {times}")
    if point.resumed is None:
        folder.event("start", **what)
        return
    folder.event("resume", epoch=point.epoch + 1, **asdict(point.resumed), **what)
    progress.line(f"resumed at step {point.step}, in epoch {point.epoch + 1}")
    progress.step(point.step)


def _steps(run: Run, point: Point, saver: Saver, progress: Progress) -> Iterator[None]:
    """Train the rest of an epoch, step by step."""
    run.sampler.set_epoch(point.epoch)
    # A separate generator: a loader draws a number at its start, again in a resumed epoch.
    own = torch.Generator()
    pinned = run.device.type == "cuda"
    loader = DataLoader(run.task.train, batch_sampler=run.sampler, generator=own, pin_memory=pinned)
    for batch in loader:
        inputs, targets = (tensor.to(run.device, non_blocking=True) for tensor in batch)
        run.optimizer.zero_grad()
        loss = loss_of(run.task.model, inputs, targets)
        loss.backward()
        run.optimizer.step()
        point.total = point.total.to(run.device) + loss.detach()
        point.step += 1
        progress.step()
        yield  # the step is counted; also on a rank that joins while others save
        saver.after_step(point)


def _end_epoch(run: Run, point: Point) -> float:
    """Return the mean loss over all batches of the epoch and all ranks."""
    mean = run.optimizer.end_epoch(point.total / len(run.sampler))
    run.optimizer.synchronize()
    return mean


def _leave(
    point: Point,
    saver: Saver,
    folder: RunFolder | None,
    progress: Progress,
    number: signal.Signals,
) -> None:
    """Save, and end the loop."""
    saver.save(point)
    saver.finish()
    if folder is not None:
        folder.event("stopped", step=point.step, signal=number.name)
        continues = "the job is queued again and continues by itself"
        then = continues if restarts_left() else "continue with --resume"
        progress.line(f"{number.name}: saved at step {point.step}; {then}")
    raise Stopped


def _score(run: Run) -> float:
    """Return the accuracy on the test data, over all ranks."""
    counts = run.optimizer.together(lambda: _counts(run))
    return float(sum(right for right, _ in counts) / sum(total for _, total in counts))


def _counts(run: Run) -> list[tuple[int, int]]:
    """Return (correct, total) counts of each rank's share of the test data."""
    rank_info = run.topology.rank_info
    share = evaluate(run.task.model, run.task.test, rank=rank_info.rank, size=rank_info.world_size)
    return gather(run.topology, share, run.config.exchange.timeout_seconds)


def _tell(
    run: Run,
    point: Point,
    figures: dict[str, float],
    folder: RunFolder | None,
    progress: Progress,
) -> None:
    if folder is None:
        return
    report = run.optimizer.report()
    progress.line(
        f"epoch {point.epoch + 1}: loss {figures['loss']:.4f}, test accuracy "
        f"{figures['test_accuracy']:.4f}, {report['exchanges']} exchanges"
    )
    for event in report["events"]:
        if event["epoch"] == point.epoch:
            folder.event(**event)
    counted = {key: report[key] for key in ("exchanges", "exposed_seconds")}
    folder.event("epoch", step=point.step, epoch=point.epoch + 1, **figures, **counted)


def digest(model: torch.nn.Module) -> str:
    """Return a hash of the bits of all parameters and buffers."""
    hasher = hashlib.sha256()
    for tensor in model.state_dict().values():
        hasher.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _summary(run: Run, point: Point, figures: dict[str, float]) -> dict[str, Any]:
    report: Mapping[str, Any] = run.optimizer.report()
    rank_info = run.topology.rank_info
    own = (report["global_bytes_sent"], report["exposed_seconds"])
    reports = gather(run.topology, own, run.config.exchange.timeout_seconds)
    model = digest(run.task.model)
    chosen = ("exchanges", "dropped", "skip_history", "skip_because", "wire", "merge", "policy")
    return {
        "data": run.task.data,
        "world": rank_info.world_size,
        "nodes": rank_info.nodes,
        "node_sizes": list(rank_info.node_sizes),
        "epochs": run.config.epochs,
        "steps": point.step,
        "resumed_at": None if point.resumed is None else point.resumed.step,
        **figures,
        "global_bytes_sent": sum(nbytes for nbytes, _ in reports),
        "exposed_seconds": max(exposed for _, exposed in reports),
        "identical": run.topology.equal_on_all_ranks(model),
        "model": model,
        **{key: report[key] for key in chosen},
        "step_restoration": report.get("step_restoration", "none"),
        "gain": report["gain"],
        "versions": versions(report["mpi"]),
    }
