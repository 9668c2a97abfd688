"""Calls that a user wants after each exchange: for W&B, TensorBoard, Prometheus."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from daso.checks import Rule, check
from daso.plan.schedule import Measurements, State
from daso.train.metrics import Metrics

__all__ = ["Listener", "Listeners"]

Listener = Callable[[dict[str, Any]], object]
CALLABLE = Rule("a function of one dict", callable)


class Listeners:
    """Functions that are told of each exchange, in the order in which they came."""

    def __init__(self) -> None:
        self._calls: dict[int, Listener] = {}
        self._added = 0
        self._exposed_seconds, self._bytes_sent = 0.0, 0  # when they were told last

    def add(self, call: Listener) -> Callable[[], None]:
        """Add a function; return what takes it off again."""
        check("on_exchange", call, CALLABLE, "; write optimizer.on_exchange(wandb.log)")
        self._added += 1
        number = self._added
        self._calls[number] = call

        def remove() -> None:
            """Take it off; idempotent."""
            self._calls.pop(number, None)

        return remove

    def begin(self, metrics: Metrics, exposed_seconds: float) -> None:
        """Count from here what is told of: what was before is another run's, or nobody's."""
        self._exposed_seconds, self._bytes_sent = exposed_seconds, metrics.global_bytes_sent

    def tell(
        self, state: State, measurements: Measurements, metrics: Metrics, exposed_seconds: float
    ) -> None:
        """Tell all of an exchange that all nodes agreed on."""
        if not self._calls:
            return
        record = {
            **asdict(measurements),
            "batch": state.batch,
            "epoch": state.epoch,
            "skip": state.skip,
            "wait": state.wait,
            "gain": state.gain,
            "exposed_seconds": exposed_seconds - self._exposed_seconds,
            "bytes_sent": metrics.global_bytes_sent - self._bytes_sent,
            "exchanges": metrics.exchanges,
            "dropped": metrics.dropped,
        }
        self._exposed_seconds, self._bytes_sent = exposed_seconds, metrics.global_bytes_sent
        for call in list(self._calls.values()):
            call(dict(record))
