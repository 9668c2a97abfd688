"""Copies between host and device that take longer: each is followed by more bytes."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CopyDelay"]

TRIAL_BYTES = 16 << 20
TRIES = 20
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class CopyDelay(TorchDispatchMode):
    """Lets the program's own copies between host and device take as many times as long.

    Each is made, and then so many bytes of it once more, into memory that nobody reads, on the same
    stream, in the same way (pinned or not, blocking or not): what is added occupies the link as the
    copy itself does, holds up what is launched on its stream after it, and goes on beside the host
    where the copy does. Also in the backwards that this thread starts.

    Args:
        factor: How many times; 1 at least.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.factor = factor
        self.bytes = [0, 0]  # of the program's copies until now: to devices, to the host
        self._spare: dict[tuple[Any, ...], torch.Tensor] = {}  # where more bytes go
        self._lock = threading.Lock()  # backwards run in threads of devices

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Carry an operation out; where it is a copy, copy more."""
        result = func(*args, **(kwargs or {}))
        if func in COPIES:
            source, target = (args[1], args[0]) if len(args) > 1 else (args[0], result)
            if source.is_cpu != target.is_cpu and source.numel():
                late = args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)
                with self._lock:
                    self.bytes[target.is_cpu] += target.nbytes
                    self._copy_more(source, target, late=bool(late))
        return result

    def _copy_more(self, source: torch.Tensor, target: torch.Tensor, *, late: bool) -> None:
        source = source.detach().reshape(-1)
        there = source.device if target.is_cpu else target.device
        spare = self._spare_like(target, source.is_pinned() or target.is_pinned(), there)
        left = (self.factor - 1) * source.numel()
        while (count := min(round(left), source.numel())) > 0:
            spare[:count].copy_(source[:count], non_blocking=late)
            left -= count

    def _spare_like(self, target: torch.Tensor, pinned: bool, device: torch.device) -> torch.Tensor:
        pinned = pinned and target.is_cpu
        # A stream may still write to what another has left.
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = target.device, target.dtype, pinned, stream
        spare = self._spare.get(key)
        if spare is None or spare.numel() < target.numel():
            spare = torch.empty(
                target.numel(), dtype=target.dtype, device=target.device, pin_memory=pinned
            )
            self._spare[key] = spare
        return spare

    def off(self) -> float:
        """Copy to a device and back; return how far off that is, in parts. It must be acquired."""
        host = torch.empty(TRIAL_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        there = torch.empty(TRIAL_BYTES, dtype=torch.uint8, device="cuda")
        parts = [self._off(*pair) for pair in ((there, host), (host, there))]
        self.bytes = [0, 0]
        return max(parts, key=abs)

    def _off(self, target: torch.Tensor, source: torch.Tensor) -> float:
        factor, least = self.factor, [math.inf, math.inf]  # seconds, plain and slowed down
        for _ in range(TRIES):
            for at, self.factor in enumerate((1.0, factor)):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                # Whatever comes between only adds.
                least[at] = min(least[at], time.perf_counter() - begun)
        return least[1] / least[0] / factor - 1
