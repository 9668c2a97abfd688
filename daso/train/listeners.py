"""User callbacks after each exchange: for W&B, TensorBoard, Prometheus."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from daso.checks import Rule, check
from daso.plan.schedule import Measurements, State
from daso.train.metrics import Metrics

Listener = Callable[[dict[str, Any]], object]
CALLABLE = Rule("a function of one dict", callable)


class Listeners:
    """Callbacks for each exchange, called in the order of registration."""

    def __init__(self) -> None:
        self.calls: dict[int, Listener] = {}  # by the order in which they were added
        self._added = 0
        self._exposed_seconds, self._bytes_sent = 0.0, 0  # at the last call

    def add(self, call: Listener) -> Callable[[], None]:
        """Add a callback; return a function that removes it."""
        check("on_exchange", call, CALLABLE, "; write optimizer.on_exchange(wandb.log)")
        self._added += 1
        number = self._added
        self.calls[number] = call

        def remove() -> None:
            """Remove the callback; idempotent."""
            self.calls.pop(number, None)

        return remove

    def begin(self, metrics: Metrics, exposed_seconds: float) -> None:
        """Restart the counters of the next record: earlier values belong to another run."""
        self._exposed_seconds, self._bytes_sent = exposed_seconds, metrics.global_bytes_sent

    def notify(
        self, state: State, measurements: Measurements, metrics: Metrics, exposed_seconds: float
    ) -> None:
        """Call all callbacks with the record of an exchange that all nodes agreed on."""
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
        for call in list(self.calls.values()):
            call(dict(record))
