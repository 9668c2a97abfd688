"""Writes a checkpoint in the background: copied to host memory first, then by a thread."""

import copy
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from daso.errors import told

__all__ = ["BackgroundWrite", "staged"]

POLL_SECONDS = 0.02
GRACE_SECONDS = 60.0  # for other ranks' files, once this process is about to end


class BackgroundWrite:
    """One rank's part of a checkpoint, on a thread.

    Args:
        step: Of the checkpoint.
        write: Writes this rank's file; returns what is wrong.
        complete: Completes the checkpoint where all ranks' files are there; returns whether they
            are, and what went wrong. None on ranks that leave it to another.
    """

    def __init__(
        self,
        step: int,
        write: Callable[[], str | None],
        complete: Callable[[], tuple[bool, str | None]] | None,
    ) -> None:
        self.step = step
        self._write, self._complete = write, complete
        self._problem: str | None = None
        self._is_done = complete is None  # nothing to complete here, or it is
        self._is_written, self._stop = threading.Event(), threading.Event()
        # Not a daemon: a program that ends has its last checkpoint.
        self._thread = threading.Thread(target=self._run, name="daso checkpoint", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._problem = self._write()
        except Exception as error:  # whatever it is, other ranks wait for this one's vote
            self._problem = told(error)
        self._is_written.set()
        if self._complete is None or self._problem is not None:
            return
        try:
            self._problem = self._completed()
        except Exception as error:
            self._problem = told(error)

    def _completed(self) -> str | None:
        """Complete the checkpoint once all files are there; return what is wrong."""
        assert self._complete is not None
        ends_at: float | None = None
        while not self._stop.is_set():
            self._is_done, problem = self._complete()
            if self._is_done:
                return problem
            if ends_at is None and not threading.main_thread().is_alive():
                ends_at = time.monotonic() + GRACE_SECONDS
            if ends_at is not None and time.monotonic() > ends_at:
                return None  # nobody asks any more; without a manifest it does not count
            self._stop.wait(POLL_SECONDS)
        return None

    def wait_written(self) -> str | None:
        """Block until this rank's file is written; return what is wrong with it."""
        self._is_written.wait()
        return self._problem

    def join(self, seconds: float) -> tuple[bool, str | None]:
        """Block until all is done; return whether it is, and what is wrong.

        Other ranks' files are looked for so long, and no longer.
        """
        self._thread.join(seconds)
        self.give_up()
        return self._is_done, self._problem

    def give_up(self) -> None:
        """Complete nothing any more, and end the thread."""
        self._stop.set()
        self._thread.join()


def staged(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a payload whose tensors are copies on the host; what is one tensor stays one."""
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
        made = copy.copy(value)  # with what a state_dict says of its modules
        made.update({name: _staged(one, copies) for name, one in value.items()})
        return made
    if type(value) in (list, tuple):
        return type(value)(_staged(one, copies) for one in value)
    return value
