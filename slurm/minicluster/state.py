"""The state folder: a record of the cluster, and the files that it is started from."""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from daso.errors import ConfigError
from minicluster.processes import ClusterError, check_root
from minicluster.text import CONTROL, Minicluster

__all__ = ["locked", "read_record", "remove", "running", "write_files", "write_record"]

RECORD = "record.json"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other commands on the same cluster waiting.

    Raises:
        ClusterError: Another one is at work, or this is not root.
    """
    check_root()
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ClusterError(
                f"one command at a time may change the cluster in {folder}, and another is at "
                f"work; wait for it or end it"
            ) from error
        yield
    finally:
        os.close(descriptor)


def read_record(folder: Path) -> Minicluster | None:
    """Return the cluster whose state is in a folder; None if there is none.

    Raises:
        ConfigError: The folder holds something else.
    """
    try:
        _check_trusted(folder)
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        cluster = Minicluster(**{**found, "share": tuple(found["share"])})
        _check_folder(cluster, folder)
        return cluster  # noqa: TRY300 - there is none where it is not found
    except FileNotFoundError:
        pass
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / RECORD} must be minicluster's own, but {error!r}; set DASO_MINICLUSTER to "
            f"another folder"
        ) from error
    if folder.exists() and {path.name for path in folder.iterdir()} - {f"{RECORD}.new"}:
        raise ConfigError(
            f"the state folder must be empty or minicluster's own, but {folder} holds other files; "
            f"set DASO_MINICLUSTER to another folder"
        )
    return None


def _check_folder(cluster: Minicluster, folder: Path) -> None:
    """Refuse a record that names another folder than its own: root removes what it names."""
    if cluster.folder != str(folder):
        raise ConfigError(
            f"{folder / RECORD} must be of the cluster in its own folder, but names "
            f"{cluster.folder}; set DASO_MINICLUSTER to another folder"
        )


def _check_trusted(folder: Path) -> None:
    """Refuse a state folder in which another than root may have written: root acts by it.

    Raises:
        ConfigError: Naming what others own, or can write to.
    """
    if os.geteuid() != 0:
        return
    for path in (folder, folder / RECORD):
        about = path.lstat()
        if about.st_uid != 0 or about.st_mode & 0o022 or stat.S_ISLNK(about.st_mode):
            raise ConfigError(
                f"what root acts by must belong to root, and nobody else may write to it, but "
                f"{path} has owner {about.st_uid} and mode {stat.S_IMODE(about.st_mode):o}; set "
                f"DASO_MINICLUSTER to another folder"
            )


def write_record(folder: Path, cluster: Minicluster) -> None:
    """Write the record, whole or not at all."""
    new = folder / f"{RECORD}.new"
    new.unlink(missing_ok=True)
    new.touch(mode=0o644, exist_ok=False)  # `status` and `env` are for all to ask
    new.write_text(json.dumps(asdict(cluster)), encoding="utf-8")
    new.replace(folder / RECORD)


def write_files(cluster: Minicluster) -> None:
    """Write the files of the state folder, and make the folders of the hosts."""
    folder = Path(cluster.folder)
    for name in (*cluster.names, CONTROL):
        (folder / name).mkdir()
        (folder / name / "spool").mkdir()
        (folder / name / "tmp").mkdir()
    for name, text in cluster.files().items():
        (folder / name).write_text(text)
    key = folder / CONTROL / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))


def remove(folder: Path) -> None:
    """Remove the state folder; the record last, so that a `down` that is killed can be repeated."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != RECORD:
            path.unlink()
    shutil.rmtree(folder)


def running(folder: Path) -> Minicluster:
    """Return the cluster of a folder.

    Raises:
        ConfigError: None is up.
    """
    cluster = read_record(folder)
    if cluster is None:
        raise ConfigError(f"a cluster must be up in {folder}, but none is; run `up 4` first")
    return cluster
