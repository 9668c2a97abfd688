"""Writes a checkpoint on a background thread, after a copy to host memory."""

import copy
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from daso.errors import CheckpointError, CheckpointWriteError, summarize

POLL_SECONDS = 0.02
GRACE_SECONDS = 60.0  # for other ranks' files, while this process ends


class BackgroundWrite:
    """Writes one rank's part of a checkpoint on a thread."""

    def __init__(
        self,
        step: int,
        write: Callable[[], CheckpointError | None],  # writes this rank's file; returns the error
        # Completes the checkpoint if all ranks' files exist; returns whether they do, and the
        # error. None on ranks that do not complete checkpoints.
        complete: Callable[[], tuple[bool, CheckpointError | None]] | None,
    ) -> None:
        self.step = step
        self._write, self._complete = write, complete
        self._problem: CheckpointError | None = None
        self._is_done = complete is None  # completed, or another rank does it
        self._is_written, self._stop = threading.Event(), threading.Event()
        # Not a daemon: a program that ends still writes its last checkpoint.
        self._thread = threading.Thread(target=self._run, name="daso checkpoint", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._problem = self._write()
        except Exception as error:  # of any kind: other ranks wait for this rank's vote
            self._problem = _unforeseen(error)
        self._is_written.set()
        if self._complete is None or self._problem is not None:
            return
        try:
            self._problem = self._completed()
        except Exception as error:
            self._problem = _unforeseen(error)

    def _completed(self) -> CheckpointError | None:
        """Complete the checkpoint once all files exist; return the error."""
        assert self._complete is not None
        ends_at: float | None = None
        while not self._stop.is_set():
            self._is_done, problem = self._complete()
            if self._is_done:
                return problem
            if ends_at is None and not threading.main_thread().is_alive():
                ends_at = time.monotonic() + GRACE_SECONDS
            if ends_at is not None and time.monotonic() > ends_at:
                return None  # without a manifest the checkpoint is invalid
            self._stop.wait(POLL_SECONDS)
        return None

    def wait_written(self) -> CheckpointError | None:
        """Block until this rank's file is written; return its error."""
        self._is_written.wait()
        return self._problem

    def join(self, seconds: float) -> tuple[bool, CheckpointError | None]:
        """Wait up to `seconds` for completion; return whether it completed, and the error."""
        self._thread.join(seconds)
        self.give_up()
        return self._is_done, self._problem

    def give_up(self) -> None:
        """End the thread, and leave an incomplete checkpoint incomplete."""
        self._stop.set()
        self._thread.join()


def _unforeseen(error: Exception) -> CheckpointWriteError:
    """Return the error for a failure of the thread itself."""
    return CheckpointWriteError(summarize(error), code="background-write-failed")


def staged(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a payload whose tensors are copies on the host; shared tensors stay shared."""
    copies: dict[Any, torch.Tensor] = {}
    return {key: _staged(value, copies) for key, value in payload.items()}


def _staged(value: Any, copies: dict[Any, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        place = value.untyped_storage().data_ptr(), value.storage_offset(), value.dtype
        key = (*place, value.shape, value.stride())
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(value, dict):
        duplicate = copy.copy(value)  # keeps a state_dict's metadata
        duplicate.update({name: _staged(item, copies) for name, item in value.items()})
        return duplicate
    if type(value) in (list, tuple):
        return type(value)(_staged(item, copies) for item in value)
    return value
