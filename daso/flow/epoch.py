"""What happened while instances went through a flow."""

import hashlib
import io
import math
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from daso.comm.dtypes import byte_buffer

__all__ = ["Epoch", "Part", "digest_of", "put_together"]


@dataclass(frozen=True, slots=True)
class Epoch:
    """What happened while instances went through a flow: the same on every rank.

    Args:
        epoch: How many passes trained before.
        trained: Or evaluated.
        instances: How many.
        loss: Mean over instances of the sum of their losses.
        metrics: Means of what losses reported besides.
        seconds: Of the slowest rank.
        in_flight: Instances that were under way at once, at most.
        updates: Optimizer steps of all layers.
        mean_age: Of gradients, in updates of their layer since their forward.
        max_age: Likewise.
        busy: Share of these seconds that each rank computed.
        sent_bytes: Between ranks.
    """

    epoch: int
    trained: bool
    instances: int
    loss: float
    metrics: dict[str, float]
    seconds: float
    in_flight: int
    updates: int
    mean_age: float
    max_age: int
    busy: tuple[float, ...]
    sent_bytes: int

    @property
    def instances_per_second(self) -> float:
        """How fast it went."""
        return self.instances / self.seconds


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank knows of an epoch.

    Args:
        loss: Sum of all.
        metrics: Sum and number of each.
        seconds: From begin to end.
        busy_seconds: Of these, computing.
        in_flight: Instances at once, at most; 0 where they do not come in.
        counts: Updates, gradients, sum of their ages, the highest.
        sent_bytes: To other ranks.
    """

    loss: float
    metrics: dict[str, tuple[float, int]]
    seconds: float
    busy_seconds: float
    in_flight: int
    counts: tuple[int, int, int, int]
    sent_bytes: int


def summed(results: Sequence[tuple[Any, float, Mapping[str, float]]]) -> tuple[float, Any]:
    """Return the sum of losses, and sum and number of each metric: whatever the order, the same."""
    found: dict[str, list[float]] = defaultdict(list)
    for _, _, metrics in results:
        for name, value in metrics.items():
            found[name].append(value)
    loss = math.fsum(loss for _, loss, _ in results)
    return loss, {name: (math.fsum(all_), len(all_)) for name, all_ in found.items()}


def put_together(epoch: int, trained: bool, instances: int, parts: Sequence[Part]) -> Epoch:
    """Return the epoch that these are all ranks' parts of."""
    seconds = max(part.seconds for part in parts)
    names = sorted({name for part in parts for name in part.metrics})
    metrics = {}
    for name in names:
        found = [part.metrics[name] for part in parts if name in part.metrics]
        metrics[name] = math.fsum(total for total, _ in found) / sum(count for _, count in found)
    updates, gradients, ages, _ = map(sum, zip(*(part.counts for part in parts), strict=True))
    return Epoch(
        epoch=epoch,
        trained=trained,
        instances=instances,
        loss=math.fsum(part.loss for part in parts) / instances,
        metrics=metrics,
        seconds=seconds,
        in_flight=max(part.in_flight for part in parts),
        updates=updates,
        mean_age=ages / gradients if gradients else 0.0,
        max_age=max(part.counts[3] for part in parts),
        busy=tuple(part.busy_seconds / seconds for part in parts),
        sent_bytes=sum(part.sent_bytes for part in parts),
    )


class _Told(pickle.Pickler):
    """Pickles what an object holds, whatever parts of it are the same objects."""

    def persistent_id(self, obj: Any) -> Any:
        """Take tensors for their numbers."""
        if isinstance(obj, (set, frozenset)):  # whose order is that of hashes, each process's own
            raise pickle.PicklingError("a set has no order")
        if not isinstance(obj, torch.Tensor):
            return None
        flat = obj.detach().cpu().contiguous().view(-1)
        return str(obj.dtype), tuple(obj.shape), byte_buffer(flat).tobytes()

    def reducer_override(self, obj: Any) -> Any:
        """Leave out what an object has computed since it was asked for it, on some ranks alone."""
        classes = type(obj).__mro__
        lazy = {
            n for one in classes for n, v in vars(one).items() if isinstance(v, cached_property)
        }
        if not lazy:
            return NotImplemented
        make, arguments, state, *rest = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return make, arguments, {n: v for n, v in state.items() if n not in lazy}, *rest


def digest_of(instance: Any) -> str:
    """Return what tells that ranks were given different instances; empty where it cannot."""
    file = io.BytesIO()
    pickler = _Told(file)
    pickler.fast = True
    try:
        pickler.dump(instance)
    except Exception:  # what does not pickle cannot be compared, and need not be
        return ""
    return hashlib.sha256(file.getvalue()).hexdigest()
