"""The files of copies in memory: who keeps whose, what each is, and who supplies it."""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from daso.checkpoint.files import Entry

__all__ = [
    "Copy",
    "Save",
    "folder_of",
    "keepers",
    "mapped",
    "read_note",
    "reserved",
    "suppliers",
    "text_of",
    "words_of",
]


Save = tuple[int, int, tuple[int, ...]]  # a step, its attempt, and the world: as of `Copy.save`


def folder_of(save: Save) -> str:
    """Return the name of a save's folder."""
    step, attempt, _ = save
    return f"step-{step:08d}-{attempt:016x}"


@dataclass(frozen=True, slots=True)
class Copy:
    """A file that a host keeps."""

    step: int
    rank: int  # who saved it
    by: int  # who kept it
    node_of: tuple[int, ...]  # of the world that saved
    attempt: int  # drawn for each save: a step may be saved once more, after a loss in it
    entry: Entry

    @property
    def save(self) -> Save:
        """What all files of one save have in common; newer steps are larger."""
        return self.step, self.attempt, self.node_of

    @property
    def name(self) -> str:
        """Where it is, in the folder of its host."""
        return f"{folder_of(self.save)}/rank-{self.rank:05d}-by-{self.by:05d}.pt"


def keepers(node_of: Sequence[int]) -> list[int]:
    """Return who keeps a copy of each rank's state: a rank of the node after its own.

    Args:
        node_of: Node of each rank.
    """
    members: dict[int, list[int]] = {}
    places = []  # of each rank, in its node
    for rank, node in enumerate(node_of):
        places.append(len(members.setdefault(node, [])))
        members[node].append(rank)
    after = [members[(node + 1) % len(members)] for node in node_of]
    return [ranks[place % len(ranks)] for ranks, place in zip(after, places, strict=True)]


def suppliers(
    kept: Sequence[Collection[Copy]], needed: Mapping[int, int]
) -> dict[int, tuple[int, Copy]] | int:
    """Choose whose file each rank takes: one on its own host where there is one.

    Another host's is read by the rank that kept it, or as its ranks take turns: none reads all.

    Args:
        kept: What each rank's host keeps of a save.
        needed: Whose state each rank is to have.

    Returns:
        For each rank who supplies it, and the file; or the first of which nobody has any.
    """
    holders: dict[Copy, list[int]] = {}
    for holder, copies in enumerate(kept):
        for copy in copies:
            holders.setdefault(copy, []).append(holder)
    of: dict[int, list[Copy]] = {}  # of each rank that saved
    for copy in sorted(holders, key=lambda one: (one.rank, one.by)):
        of.setdefault(copy.rank, []).append(copy)
    chosen = {}
    for taker, saved in needed.items():
        if saved not in of:
            return saved
        own = [copy for copy in of[saved] if copy in kept[taker]]
        copy = (own or of[saved])[0]
        there = holders[copy]
        reader = copy.by if copy.by in there else there[saved % len(there)]
        chosen[taker] = (taker if own else reader, copy)
    return chosen


def read_note(path: Path) -> Copy | None:
    """Return what a file is; None where another rank of the host removes it just now."""
    try:
        known = json.loads(path.read_text())
        rank, by = path.stem.removeprefix("rank-").split("-by-")
        step, attempt = path.parent.name.removeprefix("step-").split("-")
        entry = Entry(str(known["sha256"]), int(known["size"]))
        node_of = tuple(map(int, known["node_of"]))
        return Copy(int(step), int(rank), int(by), node_of, int(attempt, 16), entry)
    except (OSError, LookupError, TypeError, ValueError):
        return None


def reserved(path: Path, nbytes: int) -> torch.Tensor:
    """Return the memory of a new file (nbytes,) uint8: what is written there is in the file.

    Raises:
        OSError: There is no room. Said here, for who writes to memory that is not there is killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # MPI may still write to it, after a loss
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    return mapped(path, nbytes)


def mapped(path: Path, nbytes: int) -> torch.Tensor:
    """Return a file's bytes (nbytes,) uint8, which is shared with it."""
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def words_of(sha256: str) -> list[int]:
    """Return a hash as four numbers of 64 bits."""
    raw = bytes.fromhex(sha256)
    return [int.from_bytes(raw[at : at + 8], "little", signed=True) for at in range(0, 32, 8)]


def text_of(words: Sequence[int]) -> str:
    """Return the hash of which these are the numbers."""
    return b"".join(word.to_bytes(8, "little", signed=True) for word in words).hex()
