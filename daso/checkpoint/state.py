"""Checkpoints: a file per rank, and a manifest, written last, without which they do not count.

In a folder that all ranks share::

    step-00000120/rank-00000.pt    what rank 0 gave
    step-00000120/manifest.json    of which world, and the hash of every rank's file
    latest                         the name of the newest, for people and scripts

A crash at any moment leaves the checkpoints that were complete before it.
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
from daso.comm.topology import Topology
from daso.errors import CheckpointError, CheckpointWriteError, ConfigError
from daso.plan.options import Exchange

__all__ = ["Checkpoints", "Loaded", "joined"]

SEEN_SECONDS = 30.0  # until a file that was written is seen from another host
ENOUGH = 3  # ranks' reasons in one message
logger = logging.getLogger("daso")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that every rank has read.

    In the same world each rank has what it saved itself. In another one, of another size or cut
    into other nodes, all ranks have what rank 0 saved.
    """

    step: int
    payload: dict[str, Any]
    world: int  # ranks that saved it
    same_world: bool
    refused: tuple[str, ...]  # newer ones, and why


class Checkpoints:
    """The checkpoints in one folder.

    Args:
        folder: Where; made with its parents by the first `save`. All ranks must share it.
        topology: The ranks that save and load together.
        keep: How many to keep; older ones are removed once a newer one is complete and, written in
            the background, at the next `wait`, `save` or `load`.
        timeout_seconds: How long ranks wait for each other before they save or load.

    Raises:
        ConfigError: `keep` is below 1.
    """

    def __init__(
        self,
        folder: Path,
        topology: Topology,
        *,
        keep: int = 3,
        timeout_seconds: float = Exchange().timeout_seconds,
    ) -> None:
        if keep < 1:
            raise ConfigError(f"the checkpoints to keep must be at least 1, not {keep}")
        self._folder = folder
        self._topology = topology
        self._keep = keep
        self._timeout_seconds = timeout_seconds
        self._saved: set[int] = set()  # the step saved last, where it may be saved once more
        self._writing: BackgroundWrite | None = None  # the same on every rank: one, or none
        self._refused: set[int] = set()  # steps that `load` found not to be sound

    # --- saving ----------------------------------------------------------------------------

    def save(self, step: int, payload: Mapping[str, Any], *, background: bool = False) -> None:
        """Write a checkpoint and remove those that are too many.

        Args:
            step: The same on every rank, and above the steps saved before.
            payload: What this rank wants back: tensors and plain values in dicts, lists, tuples.
            background: Only copy tensors to memory of the host here; a thread writes them while
                training goes on. The checkpoint counts once all ranks' are written; `wait`, or the
                next `save` or `load`, waits for that, and raises what went wrong.

        Raises:
            CheckpointError: It cannot be written; the same on every rank, with the rank, the path
                and the cause. Earlier checkpoints stay.

        Collective over the world; blocking: until it is written, or copied.
        """
        rank = self._topology.rank
        self.wait()
        self._topology.rendezvous("save a checkpoint", self._timeout_seconds)
        self._let_once_more(step)
        self._agree(unfit(payload) or self._unready(step))
        self._refused.add(step)  # until all ranks know of it: it may be saved again before
        if background:
            try:
                copies, problem = staged(payload), None
            except Exception as error:  # no memory: other ranks wait for this one's vote
                copies, problem = {}, unwritable(self._rank_file(step, rank), error)
            self._agree(problem, clear=step)
            write = partial(self._write_in_background, step, copies)
            complete = partial(self._complete_in_background, step) if rank == 0 else None
            self._writing = BackgroundWrite(step, write, complete)
            return
        path, entry, problem = self._rank_file(step, rank), None, None
        try:
            entry = write_payload(path, dict(payload))
        except Exception as error:  # whatever it is, the other ranks wait for this one's vote
            problem = unwritable(path, error)
        self._agree(problem, clear=step)
        entries = self._topology.world_comm.gather(entry)
        problem = None if entries is None else self._complete(step, entries)
        self._agree(problem, clear=step)
        self._refused.discard(step)
        self._saved = {step}
        if rank == 0:
            self._prune(step)

    def wait(self) -> None:
        """Block until a checkpoint that is written in the background counts; else do nothing.

        Raises:
            CheckpointError: It could not be written; the same on every rank.

        Collective over the world; blocking.
        """
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
        done, problem = writing.join(SEEN_SECONDS)
        if not done and problem is None:  # all ranks have written
            problem = self._unseen(writing.step)
        self._agree(problem, clear=writing.step)
        self._refused.discard(writing.step)
        if self._topology.rank == 0:  # not before: a late error removes this one
            self._prune(writing.step)

    def _let_once_more(self, step: int) -> None:
        """Let a step be saved again that was saved, where a rank was lost before all knew it."""
        if self._topology.is_elastic:
            known = (self._refused | self._saved) & {step}
            self._refused.update(*self._topology.world_comm.allgather(known))

    def _write_in_background(self, step: int, payload: dict[str, Any]) -> str | None:
        """Write this rank's file, and beside it what it is; return what went wrong."""
        path = self._rank_file(step, self._topology.rank)
        try:
            entry = write_payload(path, payload)
            write_whole(_entry_of(path), json.dumps(asdict(entry)).encode())
        except Exception as error:
            return unwritable(path, error)
        return None

    def _complete_in_background(self, step: int) -> tuple[bool, str | None]:
        """Complete a step where all ranks' files are there; return whether, and what went wrong."""
        paths = [self._rank_file(step, rank) for rank in range(self._topology.world_size)]
        if not all(_entry_of(path).exists() for path in paths):
            return False, None
        entries = [Entry(**json.loads(_entry_of(path).read_text())) for path in paths]
        problem = self._complete(step, entries)
        if problem is None:
            for path in paths:
                _entry_of(path).unlink(missing_ok=True)
        return True, problem

    def _agree(self, problem: str | None, *, clear: int | None = None) -> None:
        """Raise on every rank when any has a problem, and remove the step that it was met in."""
        try:
            # Of a step that is being written: it may go well another time.
            kind = CheckpointError if clear is None else CheckpointWriteError
            self._topology.raise_on_all_ranks(problem, kind)
        except CheckpointError:
            if clear is not None:
                self._refused.discard(clear)
                if self._topology.rank == 0:
                    remove(self._step_folder(clear))
            raise

    def _unready(self, step: int) -> str | None:
        """Make room for a step; return what speaks against saving it."""
        if self._topology.rank > 0:
            return None
        try:
            newer = [
                one
                for one, whole in self._list()
                if whole and one >= step and one not in self._refused
            ]
            if newer:
                return (
                    f"a step to save must be above those in {self._folder}, but {step} is not "
                    f"above {newer[-1]}: load that one first, or choose an empty folder"
                )
            remove(self._step_folder(step))  # torn or refused: nothing of it may stay
            self._step_folder(step).mkdir(parents=True)
        except OSError as error:
            return unwritable(self._step_folder(step), error)
        return None

    def _complete(self, step: int, entries: list[Entry]) -> str | None:
        """Write the manifest, from where on the checkpoint counts; return what went wrong."""
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

    def _unseen(self, step: int) -> str:
        """Say which rank's file of a step is not seen from here."""
        paths = [self._rank_file(step, rank) for rank in range(self._topology.world_size)]
        lost = (rank for rank, path in enumerate(paths) if not _entry_of(path).exists())
        rank = next(lost, self._topology.rank)
        return self._not_shared(paths[rank], rank)

    def _not_shared(self, path: Path, rank: int) -> str:
        return (
            f"all ranks must share {self._folder}, but {path}, which rank {rank} wrote, is not "
            f"seen from here: choose a folder on a shared file system"
        )

    def _prune(self, newest: int) -> None:
        """Remove old checkpoints, and what crashes left."""
        try:
            listed = self._list()
        except OSError as error:
            logger.warning("old checkpoints stay: %s", cause(self._folder, error))
            return
        # The newest counts before all ranks know of it.
        known = [s for s, whole in listed if whole and s <= newest]
        sound = [s for s in known if s == newest or s not in self._refused]
        for step, whole in listed:
            # A newer one was refused by `load`; it stays for people to look at.
            if not whole or (step < newest and step not in sound[-self._keep :]):
                remove(self._step_folder(step))

    # --- loading ---------------------------------------------------------------------------

    def load(self) -> Loaded | None:
        """Read the newest checkpoint that is sound on every rank.

        Others that are newer are refused, and world rank 0 logs why.

        Returns:
            The checkpoint; None where none was ever completed.

        Raises:
            CheckpointError: There are checkpoints and none is sound; the same on every rank.

        Collective over the world; blocking.
        """
        reasons: list[str] = []
        self.wait()
        self._topology.rendezvous("load a checkpoint", self._timeout_seconds)
        listed = self._listed()
        for step, whole in reversed(listed):
            found = self._load(step) if whole else "it was not finished"
            if isinstance(found, Loaded):
                return replace(found, refused=tuple(reasons))
            self._refused.add(step)
            reasons.append(f"step {step}: {found}")
            if self._topology.rank == 0:
                logger.warning("checkpoint refused: %s", reasons[-1])
        if any(whole for _, whole in listed):
            raise CheckpointError(
                f"one of the checkpoints in {self._folder} must be sound, but none is ("
                f"{'; '.join(reasons)}): restore one from a copy, or start in an empty folder"
            )
        return None

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first.

        Collective over the world; blocking.
        """
        self.wait()
        return [step for step, whole in self._listed() if whole]

    def _load(self, step: int) -> Loaded | str:
        """Read a checkpoint on every rank, or return why not."""
        rank_info, world = self._topology.rank_info, self._topology.world_comm
        manifest: Manifest | str | None = None
        if rank_info.rank == 0:
            try:
                manifest = Manifest.read(self._step_folder(step) / MANIFEST, step)
            except CheckpointError as error:
                manifest = str(error)
        manifest = world.bcast(manifest)
        if not isinstance(manifest, Manifest):
            return str(manifest)
        same = manifest.node_of == rank_info.node_of
        rank = rank_info.rank if same else 0
        payload, problem = read_payload(self._rank_file(step, rank), manifest.files[rank])
        problems = world.allgather(problem)
        if any(problems):
            return joined(problems)
        return Loaded(step, payload, len(manifest.files), same, ())

    def _listed(self) -> list[tuple[int, bool]]:
        listed, problem = None, None
        if self._topology.rank == 0:
            try:
                listed = self._list()
            except OSError as error:
                problem = f"checkpoints must be readable, but {cause(self._folder, error)}"
        self._agree(problem)
        return list(self._topology.world_comm.bcast(listed))

    # --- the folder ------------------------------------------------------------------------

    def _list(self) -> list[tuple[int, bool]]:
        """List all steps, oldest first, and whether they are complete."""
        if not self._folder.exists():
            return []
        found = [(re.fullmatch(r"step-(\d{8,})", one.name), one) for one in self._folder.iterdir()]
        return sorted((int(match[1]), (one / MANIFEST).exists()) for match, one in found if match)

    def _step_folder(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _rank_file(self, step: int, rank: int) -> Path:
        return self._step_folder(step) / f"rank-{rank:05d}.pt"


def _entry_of(path: Path) -> Path:
    """Return the file that says that a rank's is whole, where a thread wrote it."""
    return path.with_suffix(".json")


def joined(problems: Sequence[str | None]) -> str:
    """Return the ranks' reasons as one text; once where all have the same."""
    if len(set(problems)) == 1:
        return str(problems[0])
    found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
    more = f", and {len(found) - ENOUGH} more ranks" if len(found) > ENOUGH else ""
    return ", ".join(found[:ENOUGH]) + more
