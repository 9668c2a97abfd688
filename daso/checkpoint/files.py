"""The files of a checkpoint: written atomically, and verified before use."""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch

from daso.comm.topology import RankInfo
from daso.errors import CheckpointError, CheckpointWriteError, summarize
from daso.version import __version__

SCHEMA = 2  # of the manifest; incremented when a field changes its meaning
MANIFEST = "manifest.json"
logger = logging.getLogger("daso")


@dataclass(frozen=True, slots=True)
class Entry:
    """The hash and size of a rank's file when it was written."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest, which makes the files of a step a checkpoint."""

    step: int
    node_of: tuple[int, ...]  # node of each rank that saved
    files: tuple[Entry, ...]  # of each rank

    def text(self, rank_info: RankInfo) -> str:
        """Return the manifest's JSON text."""
        lines = {
            "schema": SCHEMA,
            "step": self.step,
            "world": rank_info.world_size,
            "node_sizes": rank_info.node_sizes,
            "node_of": self.node_of,
            "files": [asdict(entry) for entry in self.files],
            "versions": {"daso": __version__, "torch": str(torch.__version__)},
        }
        return json.dumps(lines, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path, step: int) -> "Manifest":
        """Read a manifest."""
        try:
            lines = json.loads(path.read_text(encoding="utf-8"))
            if lines["schema"] != SCHEMA:
                raise CheckpointError(
                    f"{path} must have schema {SCHEMA}, not {lines['schema']!r}: another version "
                    f"of daso wrote it",
                    code="manifest-of-other-version",
                )
            files = tuple(
                Entry(str(entry["sha256"]), int(entry["size"])) for entry in lines["files"]
            )
            manifest = cls(int(lines["step"]), tuple(map(int, lines["node_of"])), files)
        except OSError as error:
            raise CheckpointError(cause(path, error), code="manifest-not-readable") from error
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} must be a manifest, but: {error!r}", code="manifest-not-valid"
            ) from error
        if manifest.step != step or not files or len(files) != len(manifest.node_of):
            raise CheckpointError(
                f"{path} must be of step {step} and list each rank's file and node, but is "
                f"of step {manifest.step}, {len(files)} files and {len(manifest.node_of)} nodes' "
                f"ranks",
                code="manifest-does-not-match",
            )
        return manifest


def remove(folder: Path) -> None:
    """Remove a step, its manifest first, so that a crash leaves no complete-looking checkpoint."""
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        logger.warning("a checkpoint could not be removed: %s", cause(folder, error))


def write_payload(path: Path, payload: dict[str, Any]) -> Entry:
    """Write a rank's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_whole(path, lambda file: torch.save(payload, file))
    except RuntimeError as error:  # torch's zip writer raises it when the disk is full
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Entry(digest, os.fstat(file.fileno()).st_size)


def read_payload(path: Path, entry: Entry) -> tuple[dict[str, Any], str | None]:
    """Return the payload of a rank's file, or an error message."""
    try:
        if path.exists() and not (
            path.is_file() or path.is_dir()
        ):  # reading a pipe may block forever
            return {}, f"{path} must be a file"
        with path.open("rb") as file:
            if problem := _damage(path, file, entry):
                return {}, problem
            return _decode_payload(file, path)
    except OSError as error:
        return {}, cause(path, error)


def _decode_payload(file: BinaryIO, path: Path) -> tuple[dict[str, Any], str | None]:
    """Return a decoded payload, or an error message."""
    try:
        payload: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of any kind: the other ranks wait for this rank's vote
        return {}, f"{path} must be readable by torch {torch.__version__}, but: {summarize(error)}"
    if isinstance(payload, dict):
        return payload, None
    return {}, f"{path} must hold a dict, not a {type(payload).__name__}"


def _damage(path: Path, file: BufferedReader, entry: Entry) -> str | None:
    """Return how a file differs from its entry, or None; rewind it."""
    size = os.fstat(file.fileno()).st_size
    if size != entry.size:
        return f"{path} must have {entry.size} bytes, not {size}"
    if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
        return f"{path} must hold the saved bytes, but its hash differs"
    file.seek(0)
    return None


def write_whole(path: Path, what: bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file atomically; its data is on disk on return."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(what) if isinstance(what, bytes) else what(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the rename durable
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # unsupported by some file systems
            raise
    finally:
        os.close(folder)


# --- error messages -------------------------------------------------------------------------

LEAVES = {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}
TENSORS = {torch.Tensor, torch.nn.Parameter}


def unfit(payload: Mapping[str, Any]) -> CheckpointError | None:
    """Return the error for a payload that `weights_only` would refuse to load, or None."""
    for where, value in _leaves(dict(payload), "payload"):
        if type(value) not in LEAVES | TENSORS:
            return CheckpointError(
                f"a checkpoint holds tensors and plain values, but {where} is a "
                f"{type(value).__name__}; convert it, for example with .item() or "
                f"torch.as_tensor()",
                code="value-not-loadable",
            )
    return None


def _leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            yield from _leaves(key, f"a key of {where}")
            yield from _leaves(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple, set):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{where}[{index}]")
    else:
        yield where, value


def cause(path: Path, error: Exception) -> str:
    """Return the path and the reason of an error."""
    named = error.strerror if isinstance(error, OSError) else None
    return f"{path}: {named or error}"


def unwritable(path: Path, error: Exception) -> CheckpointWriteError:
    """Return the error for a checkpoint that cannot be written."""
    return CheckpointWriteError(
        f"a checkpoint must be written, but {cause(path, error)}; make room or choose another "
        f"folder; earlier checkpoints are untouched",
        code="checkpoint-not-written",
    )
