"""Checkpoints of `daso train`: their content, and resuming a run."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from daso.checkpoint.files import cause, write_whole
from daso.checkpoint.rng import rng_state, set_rng_state
from daso.checkpoint.state import Checkpoints, Loaded
from daso.cli.train.config import Config
from daso.cli.train.task import Task
from daso.comm.control import broadcast, gather
from daso.comm.topology import Topology
from daso.data import ShardedSampler
from daso.errors import CheckpointError, ConfigError
from daso.train.optimizer import DASO

# Settings that may differ when a run resumes; any other makes it another run.
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
}

JOB = "job"  # file in a run's folder: names of its job, one per line


@dataclass(frozen=True, slots=True)
class Run:
    """Components of a run, on this rank."""

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
        """Name and size of the loaded data set."""
        return {"name": self.task.data, "samples": self.task.train_length}


@dataclass(frozen=True, slots=True)
class Resumed:
    """Checkpoint from which a run resumed."""

    step: int
    saved_by: int  # ranks
    same_world: bool
    refused: tuple[str, ...]  # newer checkpoints, and why


@dataclass(slots=True)
class Point:
    """Progress of a run, on this rank."""

    step: int
    epoch: int
    total: torch.Tensor  # sum of the losses in the epoch
    resumed: Resumed | None = None


class Saver:
    """Saves checkpoints of a run, and resumes it from the newest one.

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

    def open(self, *, resume: bool, restarted: Iterable[str] = ()) -> Point:
        """Return the point from which the run starts.

        Args:
            resume: Resume from the newest checkpoint.
            restarted: Names of a restarted job, as in `job_names`; it resumes from its own
                checkpoints.

        Collective over the world; blocking.
        """
        if self._run.topology.is_spare:  # it gets the point once it is needed
            return Point(0, 0, torch.zeros(()))
        # Each of torchrun's agents counts its restarts separately.
        limit = self._run.config.exchange.timeout_seconds
        named = set().union(*gather(self._run.topology, set(restarted), limit))
        recorded = broadcast(self._run.topology, _read(self._run.config.folder / JOB), limit)
        own = named & set(recorded.split("\n"))
        if resume or (own and self._checkpoints.steps()):
            return self.resume()
        return self.start()

    def note(self, names: Iterable[str]) -> None:
        """Write the names of the job into the run's folder.

        Args:
            names: Names of the job, as in `job_names`.

        Raises:
            ConfigError: The file cannot be written.

        Does not communicate.
        """
        path = self._run.config.folder / JOB
        try:
            write_whole(path, "\n".join(sorted(names)).encode(errors="surrogateescape"))
        except OSError as error:
            raise ConfigError(
                f"a run folder must be writable, but {cause(path, error)}; make room there, or "
                f"choose another --runs=FOLDER",
                code="run-folder-without-room",
            ) from error

    def start(self) -> Point:
        """Return the starting point of a new run.

        Collective over the world; blocking.
        """
        steps = self._checkpoints.steps()
        if steps:
            raise ConfigError(
                f"a new run needs a folder without checkpoints, but {self._folder} has one of step "
                f"{steps[-1]}; go on from it with --resume, choose another --name=NAME, or remove "
                f"that folder",
                code="run-has-checkpoints",
            )
        return Point(0, 0, torch.zeros(()))

    def resume(self) -> Point:
        """Load the newest sound checkpoint into all parts of the run.

        With another number of ranks, or nodes of other sizes, every rank loads rank 0's state, and
        the number of samples done stays the same.

        Collective over the world; blocking.
        """
        run, loaded = self._run, self._checkpoints.load()
        if loaded is None:
            raise CheckpointError(
                f"--resume goes on from a checkpoint, but {self._folder} has none; leave it out to "
                f"start a new run, name it with --name=NAME, and save it with --checkpoint.every=N",
                code="nothing-to-resume",
            )
        saved = loaded.payload
        run.topology.raise_on_all_ranks(_differs(run, saved))
        run.task.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        sampler, total = _place(loaded, run.topology.world_size)
        run.sampler.load_state_dict(sampler)
        set_rng_state(saved["rng"])
        resumed = Resumed(loaded.step, loaded.world, loaded.same_world, loaded.refused)
        return Point(loaded.step, sampler["epoch"], total, resumed)

    def after_step(self, point: Point) -> None:
        """Save at each multiple of ``checkpoint.every`` steps, and at the end.

        Collective over the world; blocking.
        """
        run = self._run
        last = point.epoch + 1 == run.config.epochs and run.batch == len(run.sampler)
        if self._every > 0 and (point.step % self._every == 0 or last):
            self.save(point)

    def save(self, point: Point) -> None:
        """Save, unless this step is saved already.

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
        """Return this rank's part of a checkpoint."""
        run, place = self._run, self._run.sampler.state_dict()
        # If ranks were lost in this epoch, the sampler's count is that of a world without them.
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
        """Wait until the last checkpoint is written. Collective over the world; blocking."""
        self._checkpoints.wait()


def _read(path: Path) -> str:
    """Return the text of a file in a run's folder; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, ValueError):
        return ""


def _differs(run: Run, saved: Mapping[str, Any]) -> ConfigError | None:
    """Return the reason why a checkpoint belongs to another run; None if it fits."""
    now, before = dict(_flat(asdict(run.config))), dict(_flat(saved["config"]))
    pairs = [(key, before[key], now[key]) for key in now if key in before and key not in FREE]
    pairs += [(f"data.{key}", saved["data"][key], value) for key, value in run.data.items()]
    for key, old, new in pairs:
        if old != new:
            return ConfigError(
                f"a run must resume with its original settings, but {key} was {old!r} and is now "
                f"{new!r}; give {key} as it was, or start another run with --name=NAME",
                code="resumed-with-other-settings",
            )
    if run.config.epochs <= saved["sampler"]["epoch"]:
        return ConfigError(
            f"epochs must be above those that are done, {saved['sampler']['epoch']}, not "
            f"{run.config.epochs}; raise it",
            code="no-epoch-left",
        )
    return None


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _place(loaded: Loaded, size: int) -> tuple[dict[str, int], torch.Tensor]:
    """Return the position in the epoch and the sum of its losses, for this number of ranks."""
    sampler, total = loaded.payload["sampler"], loaded.payload["total"]
    if loaded.world == size or sampler["batch"] == 0:
        return sampler, total
    batch = sampler["batch"] * loaded.world // size  # rounded down, to train on every sample
    return {**sampler, "batch": batch}, _rescaled(total, sampler["batch"], batch)


def _rescaled(total: torch.Tensor, before: int, now: int) -> torch.Tensor:
    """Scale a sum over ``before`` batches to ``now`` batches with the same mean."""
    return total * (now / before) if before else total
