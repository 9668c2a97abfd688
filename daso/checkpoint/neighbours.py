"""Copies of a run in the memory of its hosts: each node keeps its own and those of the node before.

Processes may end, and one node of two that follow each other may be gone: what all ranks had is
still somewhere. In a folder of each host's memory::

    step-00000120-ATTEMPT/rank-00003-by-00001.pt      what rank 3 gave, kept by rank 1
    step-00000120-ATTEMPT/rank-00003-by-00001.json    of which world, and its hash

A step counts where what every rank gave is kept by somebody. Source: partner copies of SCR (Moody
et al., SC 2010), and checkpoints in the memory of other hosts of Gemini (Wang et al., SOSP 2023).
"""

import errno
import io
import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from daso.checkpoint.files import (
    Entry,
    cause,
    damage,
    decode_payload,
    unfit,
    write_payload,
    write_whole,
)
from daso.checkpoint.kept_files import (
    Copy,
    Save,
    folder_of,
    keepers,
    mapped,
    read_note,
    reserved,
    suppliers,
    text_of,
    words_of,
)
from daso.checkpoint.state import Loaded, joined
from daso.comm.collectives import (
    broadcast_row,
    exchange_rows,
    first_value,
    gather,
    gather_unlike,
)
from daso.comm.topology import Topology
from daso.errors import CheckpointWriteError

__all__ = ["NeighbourCopies"]

logger = logging.getLogger("daso")


class NeighbourCopies:
    """The copies of one run.

    Args:
        folder: Of this host's memory, as `/dev/shm/RUN`: the ranks of a node share it, and no other
            run does.
        topology: The ranks that save and load together.
        timeout_seconds: How long ranks wait for each other at most.
    """

    def __init__(self, folder: Path, topology: Topology, *, timeout_seconds: float) -> None:
        self.folder, self._topology = folder, topology
        self._timeout_seconds = timeout_seconds

    # --- saving ----------------------------------------------------------------------------

    def save(self, step: int, payload: Mapping[str, Any]) -> None:
        """Keep a state here and on the next node, and forget those before.

        Args:
            step: The same on every rank, and above the steps saved before.
            payload: What this rank wants back: tensors and plain values in dicts, lists, tuples.

        Raises:
            CheckpointError: A host has no room; the same on every rank. The step before is kept.

        Collective over the world; blocking: until the copies are where they are kept.
        """
        topology, rank = self._topology, self._topology.rank
        topology.rendezvous("save a checkpoint", self._timeout_seconds)
        attempt = first_value(topology, secrets.randbits(62), self._timeout_seconds)
        node_of = topology.rank_info.node_of
        mine, problem = Copy(step, rank, rank, node_of, attempt, Entry("", 0)), unfit(payload)
        if problem is None:
            with self._told() as problems:
                self._own()
                entry = write_payload(self.folder / mine.name, dict(payload))
                mine = replace(mine, entry=entry)
                self._note(mine)
            problem = problems[0] if problems else None
        self._agree(problem, mine.save)
        theirs, rows = self._announce(mine), dict[Copy, torch.Tensor]()
        with self._told() as problems:
            rows = {copy: reserved(self.folder / copy.name, copy.entry.size) for copy in theirs}
            own = mapped(self.folder / mine.name, mine.entry.size)
        self._agree(problems[0] if problems else None, mine.save)
        self._move(rank, own, rows)
        with self._told() as problems:
            for copy in rows:
                self._note(copy)
        # Only where all are kept may older ones go.
        self._agree(problems[0] if problems else None, mine.save)
        self._forget(mine.save)

    @contextmanager
    def _told(self) -> Iterator[list[str]]:
        """Put what goes wrong into words for the vote that follows: other ranks wait for it."""
        problems: list[str] = []
        try:
            yield problems
        except Exception as error:
            problems.append(self._why(error))

    def _announce(self, mine: Copy) -> list[Copy]:
        """Tell who keeps this rank's copy of it; return those that this rank is to keep."""
        rank, by = self._topology.rank, keepers(mine.node_of)
        heads = {
            source: torch.empty(5, dtype=torch.int64, device="cpu")
            for source, keeper in enumerate(by)
            if keeper == rank != source
        }
        head = torch.tensor([mine.entry.size, *words_of(mine.entry.sha256)], device="cpu")
        self._exchange([(by[rank], head)] if by[rank] != rank else [], [*heads.items()])
        entries = {
            source: Entry(text_of(words), size)
            for source, (size, *words) in ((s, one.tolist()) for s, one in heads.items())
        }
        return [replace(mine, rank=one, by=rank, entry=entry) for one, entry in entries.items()]

    def _move(self, rank: int, own: torch.Tensor, rows: Mapping[Copy, torch.Tensor]) -> None:
        """Send this rank's state to its keeper, and receive those that are kept here."""
        keeper = keepers(self._topology.rank_info.node_of)[rank]
        sent = [(keeper, own)] if keeper != rank else []
        self._exchange(sent, [(copy.rank, row) for copy, row in rows.items()])

    def _exchange(
        self,
        sent: Sequence[tuple[int, torch.Tensor]],
        received: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        exchange_rows(self._topology, sent, received, self._timeout_seconds)

    def _own(self) -> None:
        """Make the folder, for nobody else to see or to have made."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._is_own():
            raise PermissionError(errno.EPERM, "it is another user's")

    def _is_own(self) -> bool:
        """Return whether the folder is there, and was made by this user: links are not followed."""
        try:
            found = self.folder.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()

    def _note(self, copy: Copy) -> None:
        """Write down what a file is: it is whole."""
        known = {"node_of": copy.node_of, **asdict(copy.entry)}
        path = (self.folder / copy.name).with_suffix(".json")
        write_whole(path, json.dumps(known).encode())

    def _agree(self, problem: str | None, save: Save) -> None:
        """Raise on every rank when any has a problem, and forget the save that it was met in."""
        problems = gather_unlike(self._topology, problem, self._timeout_seconds)
        found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
        if found:
            shutil.rmtree(self.folder / folder_of(save), ignore_errors=True)
            raise CheckpointWriteError(str(problem) if len(problems) == 1 else found[0])

    def _why(self, error: Exception) -> str:
        """Return the message for a state that cannot be kept."""
        what = cause(self.folder, error)
        if isinstance(error, PermissionError):
            return (
                f"copies in memory must be in a folder of one's own, but {what}; choose another "
                f"checkpoint.memory_folder"
            )
        return (
            f"a host must have room for its states and for those of another node, twice, but "
            f"{what}; give it more memory there, choose another checkpoint.memory_folder, or leave "
            f"checkpoint.memory_every out"
        )

    def _forget(self, but: Save) -> None:
        """Remove all saves but one."""
        for folder in self.folder.glob("step-*"):
            if folder.name != folder_of(but):
                shutil.rmtree(folder, ignore_errors=True)  # another rank of the host does it too

    def remove(self) -> None:
        """Remove what hosts keep of the run, once no rank needs it.

        Collective over the world; blocking.
        """
        self._topology.rendezvous("save a checkpoint", self._timeout_seconds)
        if self._is_own():
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- loading ---------------------------------------------------------------------------

    def exist(self) -> bool:
        """Return whether hosts keep a state that is whole. Collective over the world; blocking."""
        kept = gather(self._topology, self._list(), self._timeout_seconds)
        lacking = None
        for save in _saves(kept):
            found = suppliers(_of(kept, save), self._needed(save))
            if not isinstance(found, int):
                return True
            lacking = lacking or (save[0], found)
        if lacking is not None and self._topology.rank == 0:
            logger.warning("of step %d in memory no host has what rank %d saved", *lacking)
        return False

    def _needed(self, save: Save) -> dict[int, int]:
        """Return whose state ranks are to have: each its own, or all that of rank 0."""
        ours = self._topology.rank_info.node_of
        return {rank: rank for rank in range(len(ours))} if save[2] == ours else {0: 0}

    def load(self) -> Loaded | None:
        """Take up the newest state that is whole: each rank its own, from wherever it is kept.

        In a world of another size, or cut into other nodes, every rank takes up rank 0's.

        Returns:
            The state; None where none is whole.

        Collective over the world; blocking.
        """
        self._topology.rendezvous("load a checkpoint", self._timeout_seconds)
        kept = gather(self._topology, self._list(), self._timeout_seconds)
        reasons: list[str] = []
        for save in _saves(kept):
            found = self._load(_of(kept, save), self._needed(save))
            if isinstance(found, Loaded):
                return replace(found, refused=tuple(reasons))
            reasons.append(f"step {save[0]} in memory: {found}")
            if self._topology.rank == 0:
                logger.warning("checkpoint refused: %s", reasons[-1])
        return None

    def _load(self, kept: list[set[Copy]], needed: Mapping[int, int]) -> Loaded | str:
        """Take up a save, or return why not."""
        why = ""
        while not isinstance(chosen := suppliers(kept, needed), int):
            mine = {copy for holder, copy in chosen.values() if holder == self._topology.rank}
            found = {copy: damage(self.folder / copy.name, copy.entry) for copy in mine}
            problems = {copy: problem for copy, problem in found.items() if problem}
            everyones = gather(self._topology, problems, self._timeout_seconds)
            if not any(everyones):
                return self._take(chosen)
            why = f" ({joined(['; '.join(one.values()) or None for one in everyones])})"
            kept = [copies - set().union(*everyones) for copies in kept]
        return f"no host has what rank {chosen} saved{why}"

    def _take(self, chosen: Mapping[int, tuple[int, Copy]]) -> Loaded | str:
        """Give others what they need of this host's files, and take up what this rank needs."""
        rank = self._topology.rank
        same = len(chosen) > 1 or self._topology.world_size == 1
        holder, mine = chosen[rank if same else 0]
        path = self.folder / mine.name
        if holder == rank:
            row = mapped(path, mine.entry.size)
        else:
            row = torch.empty(mine.entry.size, dtype=torch.uint8, device="cpu")
        if same:
            given = [
                (to, mapped(self.folder / copy.name, copy.entry.size))
                for to, (who, copy) in chosen.items()
                if who == rank != to
            ]
            self._exchange(given, [(holder, row)] if holder != rank else [])
        else:
            broadcast_row(self._topology, row, holder, self._timeout_seconds)
        payload, problem = decode_payload(io.BytesIO(row.numpy().data), path)
        problems = gather(self._topology, problem, self._timeout_seconds)
        if any(problems):
            return joined(problems)
        same = mine.node_of == self._topology.rank_info.node_of
        return Loaded(mine.step, payload, len(mine.node_of), same, ())

    # --- the folder ------------------------------------------------------------------------

    def _list(self) -> list[Copy]:
        """List what this host keeps: files that were noted as whole."""
        if not self._is_own():
            return []
        return [copy for copy in map(read_note, self.folder.glob("step-*/rank-*.json")) if copy]


def _saves(kept: Sequence[Collection[Copy]]) -> list[Save]:
    """List what hosts keep, newest first."""
    return sorted({copy.save for copies in kept for copy in copies}, reverse=True)


def _of(kept: Sequence[Collection[Copy]], save: Save) -> list[set[Copy]]:
    return [{copy for copy in copies if copy.save == save} for copies in kept]
