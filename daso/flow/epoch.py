"""Reports of one pass over instances: per rank, and merged over all ranks."""

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

from daso.comm.reduction import byte_buffer


@dataclass(frozen=True, slots=True)
class Epoch:
    """Report of one pass of instances through a flow, the same on every rank.

    Args:
        epoch: Number of training passes before this one.
        trained: True for a training pass, False for an evaluation.
        instances: Number of instances.
        loss: Mean over instances of the sum of their losses.
        metrics: Means of the other numbers that losses reported.
        seconds: Duration on the slowest rank.
        in_flight: Highest number of instances under way at once.
        updates: Optimizer steps of all layers.
        mean_age: Mean age of gradients, in updates of their layer since their forward.
        max_age: Highest age of a gradient.
        busy: Fraction of these seconds that each rank spent computing.
        sent_bytes: Bytes sent between ranks.
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
        """Instances per second."""
        return self.instances / self.seconds


@dataclass(frozen=True, slots=True)
class Part:
    """Report of one rank on an epoch."""

    loss: float  # sum
    metrics: dict[str, tuple[float, int]]  # sum and count
    seconds: float
    busy_seconds: float  # of computing
    in_flight: int  # instances at once, at most; 0 on ranks without the controller
    counts: tuple[int, int, int, int]  # updates, gradients, sum of their ages, highest age
    sent_bytes: int  # to other ranks


def sum_results(results: Sequence[tuple[Any, float, Mapping[str, float]]]) -> tuple[float, Any]:
    """Return the sum of losses, and each metric's sum and count; the order does not matter."""
    values: dict[str, list[float]] = defaultdict(list)
    for _, _, metrics in results:
        for name, value in metrics.items():
            values[name].append(value)
    loss = math.fsum(loss for _, loss, _ in results)
    return loss, {name: (math.fsum(all_), len(all_)) for name, all_ in values.items()}


def merge_parts(epoch: int, trained: bool, instances: int, parts: Sequence[Part]) -> Epoch:
    """Merge the reports of all ranks."""
    seconds = max(part.seconds for part in parts)
    names = sorted({name for part in parts for name in part.metrics})
    metrics = {}
    for name in names:
        sums = [part.metrics[name] for part in parts if name in part.metrics]
        metrics[name] = math.fsum(total for total, _ in sums) / sum(count for _, count in sums)
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


class _ContentPickler(pickle.Pickler):
    """Pickles the contents of an object, regardless of which parts are shared."""

    def persistent_id(self, obj: Any) -> Any:
        """Pickle tensors by their values."""
        if isinstance(obj, (set, frozenset)):  # ordered by hashes, which differ between processes
            raise pickle.PicklingError("a set has no order")
        if not isinstance(obj, torch.Tensor):
            return None
        flat = obj.detach().cpu().contiguous().view(-1)
        return str(obj.dtype), tuple(obj.shape), byte_buffer(flat).tobytes()

    def reducer_override(self, obj: Any) -> Any:
        """Skip cached properties, which only some ranks may have computed."""
        classes = type(obj).__mro__
        lazy = {
            n for cls in classes for n, v in vars(cls).items() if isinstance(v, cached_property)
        }
        if not lazy:
            return NotImplemented
        make, arguments, state, *rest = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return make, arguments, {n: v for n, v in state.items() if n not in lazy}, *rest


def digest_of(instance: Any) -> str:
    """Return a hash of an instance, to compare ranks; empty if it cannot be pickled."""
    file = io.BytesIO()
    pickler = _ContentPickler(file)
    pickler.fast = True
    try:
        pickler.dump(instance)
    except Exception:  # not comparable; the check is optional
        return ""
    return hashlib.sha256(file.getvalue()).hexdigest()
