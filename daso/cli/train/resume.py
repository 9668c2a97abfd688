"""What a checkpoint of `daso train` holds, and how a run goes on from one."""

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from daso.checkpoint.files import cause, write_whole
from daso.checkpoint.neighbours import NeighbourCopies
from daso.checkpoint.rng import rng_state, set_rng_state
from daso.checkpoint.state import Checkpoints, Loaded
from daso.cli.train.config import Config
from daso.cli.train.task import Task
from daso.comm.collectives import first_value
from daso.comm.topology import Topology
from daso.data import ShardedSampler
from daso.environment import path_of
from daso.errors import CheckpointError, ConfigError
from daso.train.optimizer import DASO

__all__ = ["Point", "Run", "Saver"]

# Settings that may differ when a run goes on; any other makes it another run.
FREE = {
    "name",
    "runs",
    "epochs",
    "device",
    "tensorboard",
    "trace",
    "data.folder",
    "exchange.elastic",
    "exchange.gpu_direct",
    "exchange.timeout_seconds",
    "checkpoint.background",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.memory_every",
    "checkpoint.memory_folder",
}


MARK = "memory-mark"  # in a run's folder: how hosts know its copies
JOB = "job"  # whose run it is, a name a line


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run, on this rank."""

    config: Config
    topology: Topology
    task: Task
    sampler: ShardedSampler
    optimizer: DASO
    device: torch.device  # where the model is

    @property
    def batch(self) -> int:
        """Batches done in the epoch."""
        return self.sampler.batches_done

    @property
    def data(self) -> dict[str, Any]:
        """Which data it became, and how much."""
        return {"name": self.task.data, "samples": self.task.train_length}


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run went on, and from what."""

    step: int
    saved_by: int  # ranks
    same_world: bool
    refused: tuple[str, ...]  # newer checkpoints, and why
    in_memory: bool  # of hosts, no checkpoint in a folder


@dataclass(slots=True)
class Point:
    """How far a run is, on this rank."""

    step: int
    epoch: int
    total: torch.Tensor  # of the losses in the epoch
    resumed: Resumed | None = None


class Saver:
    """Saves a run as it goes, and takes it up from where it was saved.

    Args:
        run: The run; `resume` changes its parts.
    """

    def __init__(self, run: Run) -> None:
        checkpoint = run.config.checkpoint
        self._run = run
        self._every, self._saved = checkpoint.every, 0
        self._folder = run.config.folder / "checkpoints"
        self._checkpoints = Checkpoints(
            self._folder,
            run.topology,
            keep=checkpoint.keep,
            timeout_seconds=run.config.exchange.timeout_seconds,
        )
        self.mark = ""  # of the run's copies in memory; none where it has none
        self._copies: NeighbourCopies | None = None

    def open(self, *, resume: bool, restarted: Iterable[str] = ()) -> Point:
        """Return where the run begins.

        Args:
            resume: Go on from the newest checkpoint.
            restarted: Names of the job where it was started again, as `job_names` has them: it
                goes on from what it saved itself.

        Collective over the world; blocking.
        """
        if self._run.topology.is_spare:  # it is told, once it is needed
            return Point(0, 0, torch.zeros(()))
        # Each of torchrun's agents counts its own.
        named = set().union(*self._run.topology.world_comm.allgather(set(restarted)))
        own = named & set(self._told_by_rank_0(_read(self._run.config.folder / JOB)).split("\n"))
        keeps = self._run.config.checkpoint.memory_every > 0
        if keeps and (mark := self._told_by_rank_0(_read(self._run.config.folder / MARK))):
            self.know(mark)
        again = bool(own) and (bool(self._checkpoints.steps()) or self._has_copies())
        begins = not (resume or again)
        point = self.start() if begins else self.resume()
        if keeps and (begins or not self.mark):
            self.know(self._told_by_rank_0(secrets.token_hex(6)))
        return point

    def _told_by_rank_0(self, text: str) -> str:
        return first_value(self._run.topology, text, self._run.config.exchange.timeout_seconds)

    def note(self, names: Iterable[str]) -> None:
        """Write down, in the run's folder, whose it is, and how hosts know its copies.

        Args:
            names: Of the job, as `job_names` has them.

        Raises:
            ConfigError: It cannot be written.

        Does not communicate.
        """
        path = self._run.config.folder / JOB
        try:
            write_whole(path, "\n".join(sorted(names)).encode(errors="surrogateescape"))
            if self.mark:
                path = self._run.config.folder / MARK
                write_whole(path, self.mark.encode())
        except OSError as error:
            raise ConfigError(
                f"a run folder must be writable, but {cause(path, error)}; make room there, or "
                f"choose another --runs=FOLDER"
            ) from error

    def know(self, mark: str) -> None:
        """Keep copies in memory under a mark, as all ranks do. Does not communicate."""
        config = self._run.config
        folder = path_of(config.checkpoint.memory_folder) / f"daso-{os.getuid()}-{mark}"
        timeout_seconds = config.exchange.timeout_seconds
        self.mark = mark
        self._copies = NeighbourCopies(folder, self._run.topology, timeout_seconds=timeout_seconds)

    def _has_copies(self) -> bool:
        return self._copies is not None and self._copies.exist()

    def start(self) -> Point:
        """Return the point where nothing is done.

        Collective over the world; blocking.
        """
        steps = self._checkpoints.steps()
        if steps:
            raise ConfigError(
                f"a new run needs a folder without checkpoints, but {self._folder} has one of step "
                f"{steps[-1]}; go on from it with --resume, choose another --name=NAME, or remove "
                f"that folder"
            )
        if self._has_copies():
            assert self._copies is not None, "they exist"
            raise ConfigError(
                f"a new run needs a name of its own, but hosts keep {self._folder.parent} in "
                f"memory; go on from there with --resume, choose another --name=NAME, or remove "
                f"{self._copies.folder} on them"
            )
        return Point(0, 0, torch.zeros(()))

    def resume(self) -> Point:
        """Put all parts of the run back to where the newest sound checkpoint has them.

        Copies in the memory of hosts count as one. On another number of ranks, or on nodes of other
        sizes, every rank takes up what rank 0 had, and as many samples count as seen.

        Collective over the world; blocking.
        """
        run, (loaded, in_memory) = self._run, self._newest()
        if loaded is None:
            raise CheckpointError(
                f"--resume goes on from a checkpoint, but {self._folder} has none, and hosts keep "
                f"none that is whole in memory; leave it out to start anew, name the run with "
                f"--name=NAME, and save it with --checkpoint.every=N or --checkpoint.memory_every=N"
            )
        saved = loaded.payload
        run.topology.raise_on_all_ranks(_differs(run, saved), ConfigError)
        run.task.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        sampler, total = _place(loaded, run.topology.world_size)
        run.sampler.load_state_dict(sampler)
        set_rng_state(saved["rng"])
        resumed = Resumed(loaded.step, loaded.world, loaded.same_world, loaded.refused, in_memory)
        return Point(loaded.step, sampler["epoch"], total, resumed)

    def _newest(self) -> tuple[Loaded | None, bool]:
        """Return the newest state that is sound, and whether it was in memory."""
        kept = None if self._copies is None else self._copies.load()
        if kept is not None and kept.step > max(self._checkpoints.steps(), default=-1):
            return kept, True
        try:
            saved = self._checkpoints.load()
        except CheckpointError:  # alike on all ranks
            if kept is None:
                raise
            saved = None
        if kept is None or (saved is not None and saved.step >= kept.step):
            return saved, False
        return kept, True

    def after_step(self, point: Point) -> None:
        """Save when it is time to: every so many steps, and at the end.

        Collective over the world; blocking.
        """
        run = self._run
        last = point.epoch + 1 == run.config.epochs and run.batch == len(run.sampler)
        if self._every > 0 and (point.step % self._every == 0 or last):
            self.save(point)
        elif self._copies is not None and point.step % run.config.checkpoint.memory_every == 0:
            copies = self._copies
            run.optimizer.together(lambda: copies.save(point.step, self._state(point)))

    def save(self, point: Point) -> None:
        """Save, unless this step is saved.

        Collective over the world; blocking.
        """
        if self._saved == point.step:
            return
        self._run.optimizer.together(lambda: self._save(point))
        self._saved = point.step

    def _save(self, point: Point) -> None:
        background = self._run.config.checkpoint.background
        self._checkpoints.save(point.step, self._state(point), background=background)

    def _state(self, point: Point) -> dict[str, Any]:
        """Return what this rank wants back."""
        run, place = self._run, self._run.sampler.state_dict()
        # Where ranks were lost in this epoch the sampler counts as if they had never been.
        return {
            "config": asdict(run.config),
            "data": run.data,
            "model": run.task.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "sampler": place,
            "total": _rescaled(point.total, run.batch, place["batch"]),
            "rng": rng_state(),
        }

    def finish(self) -> None:
        """Wait until what was saved last is written. Collective over the world; blocking."""
        self._checkpoints.wait()
        if self._copies is not None:
            self._run.optimizer.together(self._copies.remove)


def _read(path: Path) -> str:
    """Return what is written in a run's folder; nothing where nothing is."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, ValueError):
        return ""


def _differs(run: Run, saved: Mapping[str, Any]) -> str | None:
    """Return why a checkpoint is of another run."""
    now, before = dict(_flat(asdict(run.config))), dict(_flat(saved["config"]))
    pairs = [(key, before[key], now[key]) for key in now if key in before and key not in FREE]
    pairs += [(f"data.{key}", saved["data"][key], value) for key, value in run.data.items()]
    for key, old, new in pairs:
        if old != new:
            return (
                f"a run goes on with the settings it began with, but {key} was {old!r} and is now "
                f"{new!r}; give {key} as it was, or start another run with --name=NAME"
            )
    if run.config.epochs <= saved["sampler"]["epoch"]:
        return (
            f"epochs must be above those that are done, {saved['sampler']['epoch']}, not "
            f"{run.config.epochs}; raise it"
        )
    return None


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _place(loaded: Loaded, size: int) -> tuple[dict[str, int], torch.Tensor]:
    """Return the place in the epoch and the sum of its losses, for this number of ranks."""
    sampler, total = loaded.payload["sampler"], loaded.payload["total"]
    if loaded.world == size or sampler["batch"] == 0:
        return sampler, total
    batch = sampler["batch"] * loaded.world // size  # rounded down: no sample is left out
    return {**sampler, "batch": batch}, _rescaled(total, sampler["batch"], batch)


def _rescaled(total: torch.Tensor, before: int, now: int) -> torch.Tensor:
    """Return a sum over so many batches as one over others of the same mean."""
    return total * (now / before) if before else total
