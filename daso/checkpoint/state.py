"""Checkpoints: a file per rank, and a manifest, written last, which makes them valid.

In a folder that all ranks share::

    step-00000120/rank-00000.pt    rank 0's payload
    step-00000120/manifest.json    the world that saved, and the hash of every rank's file
    latest                         the name of the newest, for people and scripts

A crash at any time leaves the complete checkpoints intact.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from daso.checkpoint.background import BackgroundWrite, staged
from daso.checkpoint.files import (
    MANIFEST,
    Entry,
    Manifest,
    cause,
    read_payload,
    remove,
    unfit,
    unwritable,
    write_payload,
    write_whole,
)
from daso.comm.control import broadcast, gather
from daso.comm.topology import Topology
from daso.errors import CheckpointError, CheckpointWriteError, ConfigError
from daso.plan.options import Exchange

VISIBLE_SECONDS = 30.0  # until other hosts see a written file
MAX_REASONS = 3  # of ranks, in one message
logger = logging.getLogger("daso")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that every rank has read."""

    step: int
    # This rank's payload in the same world; rank 0's payload on all ranks if the world's size or
    # its cut into nodes has changed.
    payload: dict[str, Any]
    world: int  # ranks that saved it
    same_world: bool
    refused: tuple[str, ...]  # newer checkpoints that are invalid, with reasons


class Checkpoints:
    """Saves and loads the checkpoints in one folder, which all ranks share."""

    def __init__(
        self,
        folder: Path,  # created, with its parents, by the first `save`
        topology: Topology,
        *,
        keep: int = 3,  # older ones are removed after a newer one is complete
        timeout_seconds: float = Exchange().timeout_seconds,  # limit on waiting for other ranks
    ) -> None:
        if keep < 1:
            raise ConfigError(
                f"the checkpoints to keep must be at least 1, not {keep}",
                code="no-checkpoint-to-keep",
            )
        self._folder = folder
        self._topology = topology
        self._keep = keep
        self._timeout_seconds = timeout_seconds
        self._saved: set[int] = set()  # the last saved step, if it may be saved again
        self._writing: BackgroundWrite | None = None  # set on all ranks or none
        self._refused: set[int] = set()  # steps that `load` found invalid

    # --- saving ----------------------------------------------------------------------------

    def save(self, step: int, payload: Mapping[str, Any], *, background: bool = False) -> None:
        """Write a checkpoint above all earlier steps. Collective over the world; blocking."""
        # In the background: it blocks until tensors are copied to host memory, and a thread writes
        # them. The checkpoint is valid once all ranks' files are written; `wait`, or the next
        # `save` or `load`, waits for that, and raises any error.
        rank = self._topology.rank
        self.wait()
        self._topology.rendezvous("save a checkpoint", self._timeout_seconds)
        self._allow_repeat(step)
        self._agree(unfit(payload) or self._unready(step))
        # Until all ranks know that it is valid, the step may be saved again.
        self._refused.add(step)
        if background:
            self._save_in_background(step, payload)
            return
        path, entry = self._rank_file(step, rank), None
        problem: CheckpointError | None = None
        try:
            entry = write_payload(path, dict(payload))
        except Exception as error:  # of any kind: the other ranks wait for this rank's vote
            problem = unwritable(path, error)
        self._agree(problem, clear=step)
        gathered = gather(self._topology, entry, self._timeout_seconds)
        # None of them is None: `_agree` would have raised.
        entries = [entry_of_rank for entry_of_rank in gathered if entry_of_rank is not None]
        problem = self._complete(step, entries) if rank == 0 else None
        self._agree(problem, clear=step)
        self._refused.discard(step)
        self._saved = {step}
        if rank == 0:
            self._prune(step)

    def _save_in_background(self, step: int, payload: Mapping[str, Any]) -> None:
        """Copy tensors to host memory, and start a thread that writes them."""
        rank = self._topology.rank
        copies: dict[str, Any] = {}
        problem = None
        try:
            copies = staged(payload)
        except Exception as error:  # such as no memory: the other ranks wait for this rank's vote
            problem = unwritable(self._rank_file(step, rank), error)
        self._agree(problem, clear=step)
        write = partial(self._write_in_background, step, copies)
        complete = partial(self._complete_in_background, step) if rank == 0 else None
        self._writing = BackgroundWrite(step, write, complete)

    def wait(self) -> None:
        """Wait until the background checkpoint is valid. Collective over the world; blocking."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        problem = writing.wait_written()
        try:
            self._topology.rendezvous("save a checkpoint", self._timeout_seconds)
            self._agree(problem, clear=writing.step)
        except Exception:
            writing.give_up()
            raise
        done, problem = writing.join(VISIBLE_SECONDS)
        if not done and problem is None:  # all ranks have written
            problem = self._unseen(writing.step)
        self._agree(problem, clear=writing.step)
        self._refused.discard(writing.step)
        if self._topology.rank == 0:  # only now: a late error removes this checkpoint
            self._prune(writing.step)

    def _allow_repeat(self, step: int) -> None:
        """Allow a step to be saved again if a rank was lost before all ranks knew of it."""
        if self._topology.is_elastic:
            known = (self._refused | self._saved) & {step}
            self._refused.update(*gather(self._topology, known, self._timeout_seconds))

    def _write_in_background(self, step: int, payload: dict[str, Any]) -> CheckpointError | None:
        """Write this rank's file and its entry; return the error."""
        path = self._rank_file(step, self._topology.rank)
        try:
            entry = write_payload(path, payload)
            write_whole(_entry_of(path), json.dumps(asdict(entry)).encode())
        except Exception as error:
            return unwritable(path, error)
        return None

    def _complete_in_background(self, step: int) -> tuple[bool, CheckpointError | None]:
        """Complete a step if all ranks' files exist; return whether, and the error."""
        paths = [self._rank_file(step, rank) for rank in range(self._topology.world_size)]
        if not all(_entry_of(path).exists() for path in paths):
            return False, None
        entries = [Entry(**json.loads(_entry_of(path).read_text())) for path in paths]
        problem = self._complete(step, entries)
        if problem is None:
            for path in paths:
                _entry_of(path).unlink(missing_ok=True)
        return True, problem

    def _agree(self, problem: CheckpointError | None, *, clear: int | None = None) -> None:
        """Raise on all ranks if any rank has a problem, after removing the step `clear`."""
        try:
            self._topology.raise_on_all_ranks(problem, self._timeout_seconds)
        except CheckpointError:
            if clear is not None:
                self._refused.discard(clear)
                if self._topology.rank == 0:
                    remove(self._step_folder(clear))
            raise

    def _unready(self, step: int) -> CheckpointError | None:
        """Create the folder of a step; return the error if the step may not be saved."""
        if self._topology.rank > 0:
            return None
        try:
            newer = [
                saved
                for saved, whole in self._list()
                if whole and saved >= step and saved not in self._refused
            ]
            if newer:
                return CheckpointError(
                    f"a step to save must be above those in {self._folder}, but {step} is not "
                    f"above {newer[-1]}: load that one first, or choose an empty folder",
                    code="step-not-newest",
                )
            remove(self._step_folder(step))  # incomplete or refused: remove all of it
            self._step_folder(step).mkdir(parents=True)
        except OSError as error:
            problem = unwritable(self._step_folder(step), error)
            # A folder may be wrong on every attempt, which a failed write of a file may not be.
            return CheckpointError(str(problem), code="folder-not-writable")
        return None

    def _complete(self, step: int, entries: list[Entry]) -> CheckpointError | None:
        """Write the manifest, which makes the checkpoint valid; return the error."""
        for rank, entry in enumerate(entries):
            path = self._rank_file(step, rank)
            if not path.exists() or path.stat().st_size != entry.size:
                return self._not_shared(path, rank)
        folder = self._step_folder(step)
        manifest = Manifest(step, self._topology.rank_info.node_of, tuple(entries))
        try:
            write_whole(folder / MANIFEST, manifest.text(self._topology.rank_info).encode())
            write_whole(self._folder / "latest", f"{folder.name}\n".encode())
        except OSError as error:
            return unwritable(folder, error)
        return None

    def _unseen(self, step: int) -> CheckpointError:
        """Return the error for a rank's file that is not visible here."""
        paths = [self._rank_file(step, rank) for rank in range(self._topology.world_size)]
        lost = (rank for rank, path in enumerate(paths) if not _entry_of(path).exists())
        rank = next(lost, self._topology.rank)
        return self._not_shared(paths[rank], rank)

    def _not_shared(self, path: Path, rank: int) -> CheckpointError:
        return CheckpointWriteError(
            f"all ranks must share {self._folder}, but {path}, which rank {rank} wrote, is not "
            f"visible here: choose a folder on a shared file system",
            code="folder-not-shared",
        )

    def _prune(self, newest: int) -> None:
        """Remove old checkpoints and incomplete ones."""
        try:
            listed = self._list()
        except OSError as error:
            logger.warning("old checkpoints stay: %s", cause(self._folder, error))
            return
        # The newest is valid before all ranks know of it.
        known = [s for s, whole in listed if whole and s <= newest]
        sound = [s for s in known if s == newest or s not in self._refused]
        for step, whole in listed:
            # A newer one, refused by `load`, stays for inspection.
            if not whole or (step < newest and step not in sound[-self._keep :]):
                remove(self._step_folder(step))

    # --- loading ---------------------------------------------------------------------------

    def load(self) -> Loaded | None:
        """Read the newest valid checkpoint; None without any. Collective; blocking."""
        reasons: list[str] = []
        self.wait()
        self._topology.rendezvous("load a checkpoint", self._timeout_seconds)
        listed = self._listed()
        for step, whole in reversed(listed):
            loaded = self._load(step) if whole else "it was not finished"
            if isinstance(loaded, Loaded):
                return replace(loaded, refused=tuple(reasons))
            self._refused.add(step)
            reasons.append(f"step {step}: {loaded}")
            if self._topology.rank == 0:
                logger.warning("checkpoint refused: %s", reasons[-1])
        if any(whole for _, whole in listed):
            raise CheckpointError(
                f"one of the checkpoints in {self._folder} must be sound, but none is ("
                f"{'; '.join(reasons)}); restore one from a copy, or start in an empty folder",
                code="no-sound-checkpoint",
            )
        return None

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints. Collective over the world; blocking."""
        self.wait()
        return [step for step, whole in self._listed() if whole]

    def _load(self, step: int) -> Loaded | str:
        """Read a checkpoint on every rank, or return the reason of the failure."""
        rank_info = self._topology.rank_info
        manifest: Manifest | str | None = None
        if rank_info.rank == 0:
            try:
                manifest = Manifest.read(self._step_folder(step) / MANIFEST, step)
            except CheckpointError as error:
                manifest = str(error)
        manifest = broadcast(self._topology, manifest, self._timeout_seconds)
        if not isinstance(manifest, Manifest):
            return str(manifest)
        same = manifest.node_of == rank_info.node_of
        rank = rank_info.rank if same else 0
        payload, problem = read_payload(self._rank_file(step, rank), manifest.files[rank])
        problems = gather(self._topology, problem, self._timeout_seconds)
        if any(problems):
            return _joined(problems)
        return Loaded(step, payload, len(manifest.files), same, ())

    def _listed(self) -> list[tuple[int, bool]]:
        listed, problem = None, None
        if self._topology.rank == 0:
            try:
                listed = self._list()
            except OSError as error:
                problem = CheckpointError(
                    f"checkpoints must be readable, but {cause(self._folder, error)}",
                    code="checkpoints-not-readable",
                )
        self._agree(problem)
        return list(broadcast(self._topology, listed, self._timeout_seconds) or ())

    # --- the folder ------------------------------------------------------------------------

    def _list(self) -> list[tuple[int, bool]]:
        """Return all steps, oldest first, each with whether it is complete."""
        if not self._folder.exists():
            return []
        entries = [
            (re.fullmatch(r"step-(\d{8,})", path.name), path) for path in self._folder.iterdir()
        ]
        return sorted(
            (int(match[1]), (path / MANIFEST).exists()) for match, path in entries if match
        )

    def _step_folder(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _rank_file(self, step: int, rank: int) -> Path:
        return self._step_folder(step) / f"rank-{rank:05d}.pt"


def _entry_of(path: Path) -> Path:
    """Return the file of a rank file's entry, which the background thread writes."""
    return path.with_suffix(".json")


def _joined(problems: Sequence[str | None]) -> str:
    """Return the ranks' reasons as one text, or their common reason."""
    if len(set(problems)) == 1:
        return str(problems[0])
    reasons = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
    more = f", and {len(reasons) - MAX_REASONS} more ranks" if len(reasons) > MAX_REASONS else ""
    return ", ".join(reasons[:MAX_REASONS]) + more
