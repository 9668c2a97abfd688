"""Copies of a run in the memory of its hosts: each node keeps its own and those of the node before.

Processes may end, and one node of two that follow each other may be gone: what all ranks had is
still somewhere. In a folder of each host's memory::

    step-00000120/rank-00003-by-00001.pt      what rank 3 gave, kept by rank 1
    step-00000120/rank-00003-by-00001.json    of which world, and its hash

A step counts where what every rank gave is kept by somebody. Source: partner copies of SCR (Moody
et al., SC 2010), and checkpoints in the memory of other hosts of Gemini (Wang et al., SOSP 2023).
"""

import errno
import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from daso.checkpoint.files import (
    Entry,
    cause,
    decode_payload,
    read_whole,
    unfit,
    write_payload,
    write_whole,
)
from daso.checkpoint.kept_files import (
    Copy,
    keepers,
    mapped,
    read_note,
    reserved,
    suppliers,
    text_of,
    words_of,
)
from daso.checkpoint.state import Loaded, joined
from daso.comm.collectives import broadcast_row, exchange_rows, gather
from daso.comm.topology import Topology
from daso.errors import CheckpointError

__all__ = ["NeighbourCopies"]


class NeighbourCopies:
    """The copies of one run.

    Args:
        folder: Of this host's memory, as `/dev/shm/RUN`: the ranks of a node share it, and no other
            run does.
        topology: The ranks that save and load together.
        timeout_seconds: How long ranks wait for each other at most.
    """

    def __init__(self, folder: Path, topology: Topology, *, timeout_seconds: float) -> None:
        self._folder, self._topology = folder, topology
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
        one = Copy(step, rank, rank, topology.rank_info.node_of, Entry("", 0))
        mine, problem = one, unfit(payload)
        try:
            if problem is None:
                self._own()
                mine = replace(one, entry=write_payload(self._folder / one.name, dict(payload)))
                self._note(mine)
        except Exception as error:  # whatever it is, the other ranks wait for this one's vote
            problem = self._no_room(error)
        self._agree(problem, step)
        theirs = self._announce(mine)
        rows, problem = {}, None
        try:
            rows = {copy: reserved(self._folder / copy.name, copy.entry.size) for copy in theirs}
        except OSError as error:
            problem = self._no_room(error)
        self._agree(problem, step)
        self._move(mine, rows)
        for copy in rows:
            self._note(copy)
        self._agree(None, step)  # all are kept: only then may older ones go
        self.forget(but=step)

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

    def _move(self, mine: Copy, rows: Mapping[Copy, torch.Tensor]) -> None:
        """Send this rank's state to its keeper, and receive those that are kept here."""
        keeper, sent = keepers(mine.node_of)[mine.rank], []
        if keeper != mine.rank:
            sent.append((keeper, mapped(self._folder / mine.name, mine.entry.size)))
        self._exchange(sent, [(copy.rank, row) for copy, row in rows.items()])

    def _exchange(
        self,
        sent: Sequence[tuple[int, torch.Tensor]],
        received: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        exchange_rows(self._topology, sent, received, self._timeout_seconds)

    def _own(self) -> None:
        """Make the folder, for nobody else to see or to have made."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it is another user's")

    def _note(self, copy: Copy) -> None:
        """Write down what a file is: it is whole."""
        known = {"node_of": copy.node_of, **asdict(copy.entry)}
        path = (self._folder / copy.name).with_suffix(".json")
        write_whole(path, json.dumps(known).encode())

    def _agree(self, problem: str | None, step: int) -> None:
        """Raise on every rank when any has a problem, and forget the step that it was met in."""
        try:
            self._topology.raise_on_all_ranks(problem, CheckpointError)
        except CheckpointError:
            shutil.rmtree(self._step_folder(step), ignore_errors=True)
            raise

    def _no_room(self, error: Exception) -> str:
        return (
            f"a host must have room for its states and for those of another node, twice, but "
            f"{cause(self._folder, error)}; give it more memory there, choose another "
            f"checkpoint.memory_folder, or leave checkpoint.memory_every out"
        )

    def forget(self, *, but: int) -> None:
        """Remove what this host keeps of all steps but one. Does not communicate."""
        for folder in self._folder.glob("step-*"):
            if folder != self._step_folder(but):
                shutil.rmtree(folder, ignore_errors=True)  # another rank of the host does it too

    def remove(self) -> None:
        """Remove what this host keeps of the run. Does not communicate."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- loading ---------------------------------------------------------------------------

    def exist(self) -> bool:
        """Return whether any host keeps something. Collective over the world; blocking."""
        return any(gather(self._topology, bool(self._list()), self._timeout_seconds))

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
        # A step twice where a node was lost while it was kept, and the others kept it again.
        for step, node_of in sorted(
            {(c.step, c.node_of) for one in kept for c in one}, reverse=True
        ):
            which = [{c for c in one if (c.step, c.node_of) == (step, node_of)} for one in kept]
            found = self._load(which, node_of)
            if isinstance(found, Loaded):
                return replace(found, refused=tuple(reasons))
            reasons.append(f"step {step} in memory: {found}")
        return None

    def _load(self, kept: list[set[Copy]], node_of: tuple[int, ...]) -> Loaded | str:
        """Take up a step that a world saved, or return why not."""
        ours = self._topology.rank_info.node_of
        needed = {rank: rank if node_of == ours else 0 for rank in range(len(ours))}
        why = ""
        while not isinstance(chosen := suppliers(kept, needed), int):
            mine = {copy for holder, copy in chosen.values() if holder == self._topology.rank}
            read = {copy: read_whole(self._folder / copy.name, copy.entry) for copy in mine}
            problems = {copy: problem for copy, (_, problem) in read.items() if problem}
            everyones = gather(self._topology, problems, self._timeout_seconds)
            if not any(everyones):
                rows = {copy: row for copy, (row, _) in read.items()}
                return self._take(chosen, rows, same=node_of == ours)
            why = f" ({joined(['; '.join(one.values()) or None for one in everyones])})"
            kept = [copies - set().union(*everyones) for copies in kept]
        return f"no host has what rank {chosen} saved{why}"

    def _take(
        self, chosen: Mapping[int, tuple[int, Copy]], rows: Mapping[Copy, bytes], *, same: bool
    ) -> Loaded | str:
        """Give others what they need of this rank's files, and take up what this one needs."""
        rank = self._topology.rank
        out = {
            copy: torch.frombuffer(bytearray(row), dtype=torch.uint8) for copy, row in rows.items()
        }
        holder, mine = chosen[rank if same else 0]
        empty = torch.empty(mine.entry.size * (holder != rank), dtype=torch.uint8, device="cpu")
        row = out.get(mine, empty)
        if same:
            given = [(to, out[copy]) for to, (who, copy) in chosen.items() if who == rank != to]
            self._exchange(given, [(holder, row)] if holder != rank else [])
        else:
            broadcast_row(self._topology, row, holder, self._timeout_seconds)
        path = self._folder / mine.name
        payload, problem = decode_payload(io.BytesIO(row.numpy().tobytes()), path)
        problems = gather(self._topology, problem, self._timeout_seconds)
        if any(problems):
            return joined(problems)
        return Loaded(mine.step, payload, len(mine.node_of), same, ())

    # --- the folder ------------------------------------------------------------------------

    def _list(self) -> list[Copy]:
        """List what this host keeps: files that were noted as whole."""
        if not self._folder.exists() or self._folder.stat().st_uid != os.getuid():
            return []
        return [copy for copy in map(read_note, self._folder.glob("step-*/rank-*.json")) if copy]

    def _step_folder(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"
