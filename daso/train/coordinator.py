"""Where all ranks meet: what they check, wait for and average together, beside parameters."""

import logging
import statistics
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from daso import trace
from daso.comm.collectives import first_value, gather_in_node, gather_unlike
from daso.comm.engine import Work, WorkHandle
from daso.comm.topology import Topology
from daso.errors import ConfigError, ExchangeError, LayoutError, NonFiniteError
from daso.plan.step_restoration import rate_of
from daso.train.channels import Channels
from daso.train.metrics import Metrics, Slowest
from daso.train.misuse import checksum, first_nonfinite, gradient_checksum
from daso.train.model.params import Trained, broadcast, check_sharding
from daso.train.model.shards import is_sharded, local_part
from daso.train.others import OtherTensors, Ranks
from daso.train.reducers import DdpFinder
from daso.train.state_sync import (
    average_tensors,
    coded_state,
    drop_partial_state,
    state_digest,
    state_keys,
    state_tensors,
)

__all__ = ["Coordinator", "check_same_options", "largest_rate"]

Result = TypeVar("Result")
Value = TypeVar("Value")
logger = logging.getLogger("daso")

ALIKE = 0.01  # by how much gradients that are the same may differ, by rounding alone
DROPS_LATELY = 3  # drops, without two good exchanges in a row between, at which all raise


def check_same_options(trained: Trained, topology: Topology, mine: str) -> None:
    """Refuse what must be equal on all ranks and is not, before anything is sent.

    Collective over the world; blocking.
    """
    first = topology.world_comm.bcast(mine)
    problem = None
    if mine != first:
        problem = (
            f"every rank must be given the same options, but there are {mine} here and {first} on "
            f"rank 0; pass the same keywords everywhere"
        )
    topology.raise_on_all_ranks(problem, ConfigError)
    digest = state_digest(trained.inner, trained.named)
    # Ranks of equal place in their nodes have the same state of shards.
    same = check_sharding(trained, topology) and trained.is_sharded
    same = same and len(set(topology.lane_comm.allgather(digest))) == 1
    if not topology.equal_on_all_ranks(same or digest):
        raise LayoutError(
            "the inner optimizer's state must be the same on every rank, but it differs; load it "
            "on every rank, or on none, before wrapping"
        )


class Coordinator:
    """What all ranks do together between exchanges; each waits no longer than the stall limit.

    Args:
        trained: The optimizer and what it trains.
        topology: Whose world.
        replicas: The replica group: ranks that hold the same parameters.
        channels: The engine that all traffic goes through.
        metrics: Where seconds and bytes are counted.
        elsewhere: Returns the ids of parameters that other wrapped optimizers train.
    """

    def __init__(
        self,
        trained: Trained,
        topology: Topology,
        replicas: Topology,
        channels: Channels,
        metrics: Metrics,
        elsewhere: Callable[[], Container[int]] = frozenset,
    ) -> None:
        self.trained, self.topology, self._replicas = trained, topology, replicas
        self.channels, self.metrics = channels, metrics
        keeps_own = channels.settings.exchange.keeps_own
        average = partial(self._average_over, topology)
        differ = self._differ if replicas is not topology and topology.nodes > 1 else None
        ranks = Ranks(self._unlike, average, self.average, differ, keeps_own, self.leads)
        self.others = OtherTensors(trained, elsewhere, ranks)
        self.ddps = DdpFinder(param for _, param in trained.named)
        self.compares_batches = True  # once, before any gradient is averaged
        self._rates_told = False

    def look_for_slowest(self) -> None:
        """Agree on the rank with the longest steps. Collective over the world; blocking."""
        seconds = self.metrics.watch.steps()
        everyones = self.gather(statistics.median(seconds) if seconds else 0.0)
        slowest, rank = max((one, rank) for rank, one in enumerate(everyones))
        if min(everyones) > 0:
            self.note_slowest(rank, slowest, fastest_seconds=min(everyones))

    def note_slowest(self, rank: int, seconds: float, *, fastest_seconds: float) -> None:
        """Keep the rank with the longest steps for the report."""
        host = self.topology.liveness.hosts[rank]
        self.metrics.slowest = Slowest(host, rank, seconds, fastest_seconds)

    def wait(self, handle: WorkHandle[Result], *, of_step: bool = True) -> Result:
        """Block until work is over and return its result; standing still is exposed time.

        Args:
            handle: Of the work.
            of_step: A step needs it; False: ranks meet beside steps.
        """
        with self.metrics.watch.waiting(trace.WAIT_INTER_NODE, handle.key, of_step=of_step):
            return self.channels.engine.wait(handle)

    def _meet(self, work: Work[Result], *, of_step: bool = False) -> Result:
        return self.wait(self.channels.engine.submit(work), of_step=of_step)

    def gather(self, number: float, *, of_step: bool = False) -> list[float]:
        """Return every rank's number, in rank order. Collective over the world; blocking."""
        return self._meet(self.channels.gather(number), of_step=of_step)

    def extremes(self, number: float, *, of_step: bool = False) -> tuple[float, float]:
        """Return the lowest and highest of all ranks' numbers.

        Collective over the world; blocking.
        """
        return self._meet(self.channels.extremes(number), of_step=of_step)

    def first(self, number: float) -> float:
        """Return world rank 0's number. Collective over the world; blocking."""
        return self._meet(self.channels.first(number))

    @property
    def is_sharded(self) -> bool:
        """Whether ranks of a node hold parts of parameters."""
        return self._replicas is not self.topology

    def _differ(self, number: float) -> bool:
        """Return whether ranks that hold the same parameters have other numbers, on any lane.

        Collective over the world; blocking.
        """
        if self.is_sharded:
            number -= self._meet(self.channels.first_of_lane(number))
        lowest, highest = self.extremes(number)
        return lowest != highest

    def same_order(self, order: list[int]) -> list[int]:
        """Return world rank 0's order. Collective over the world; blocking."""
        self.look_for_same_batches(order)
        return first_value(self.topology, order, self._timeout_seconds)

    @property
    def _timeout_seconds(self) -> float:
        return self.channels.settings.exchange.timeout_seconds

    def _unlike(self, value: Value) -> list[Value]:
        """Return every rank's value, or one where all are alike. Collective; blocking."""
        return gather_unlike(self.topology, value, self._timeout_seconds)

    def look_for_same_batches(self, order: Sequence[int]) -> None:
        """Say it once where all ranks have the same gradients: they train on the same batches.

        Collective over the world; blocking.
        """
        if not self.compares_batches:
            return
        self.compares_batches = False
        alike = self.is_sharded or self.ddps.around()  # in a node, by what averages there
        mine = 0.0 if alike else gradient_checksum(self.trained.local, order)
        differ = self._differ(mine)  # the watchdog is polled there
        if self.leads and mine and not differ:
            logger.warning(
                "every rank must train on batches of its own, but the first gradients of all %d "
                "ranks are the same bits; give each rank its part of the data "
                "(torch.utils.data.DistributedSampler, or seed + rank)",
                self.topology.world_size,
            )

    def equalize(self, *, expected: bool = False) -> bool:
        """Make parameters bit-identical where they are not: their mean; return whether they were.

        Collective over the world; blocking.
        """
        plain = [one for _, one in self.trained.named if not is_sharded(one)]
        shards = [local_part(one) for _, one in self.trained.named if is_sharded(one)]
        lowest, highest = self.extremes(checksum(plain))
        if lowest == highest and not (shards and self._differ(checksum(shards))):
            return True
        self._refuse_nonfinite()
        self._average_over(self.topology, plain)
        if self.is_sharded:
            self.average(shards)
        self.metrics.event("equalized")
        if self.leads and not expected:
            logger.warning(
                "parameters must change only by the steps of daso's optimizer, and alike on every "
                "rank, but they differed between ranks; all ranks have their mean now"
            )
        lowest, highest = self.extremes(largest_rate(self.trained.inner))
        if lowest != highest:
            self.tell_of_rates(lowest, highest)
        return False

    def tell_of_rates(self, lowest: float, highest: float) -> None:
        """Say once that learning rates differ between ranks."""
        if self.leads and not self._rates_told:
            self._rates_told = True
            logger.warning(
                "the learning rate must be the same on every rank, but it is %g to %g; let "
                "schedulers follow the mean loss, which optimizer.end_epoch(loss) returns",
                lowest,
                highest,
            )

    def _refuse_nonfinite(self) -> None:
        """Raise, on every rank alike, where parameters are not finite on some rank."""
        named = self.trained.local
        mine = float(first_nonfinite(named))
        if self.extremes(mine)[1] < 0:
            return
        slots = [int(slot) for slot in self.gather(mine)]
        if bad := [(rank, slot) for rank, slot in enumerate(slots) if slot >= 0]:
            rank, slot = bad[0]
            raise NonFiniteError(
                f"parameters must be finite, but {named[slot][0]} on rank {rank} is not; lower the "
                f"learning rate, clip gradients, or look at that rank's data"
            )

    @property
    def leads(self) -> bool:
        """Whether this rank says what all ranks know."""
        return self.topology.rank == 0

    def check_same_in_node(self) -> None:
        """Refuse gradients of plain parameters that differ in a node, beside sharded ones.

        Nobody averages them there: ranks of a node train them on the same batches, or not at all.
        Collective over the world; blocking.
        """
        plain = [one for _, one in self.trained.named if not is_sharded(one)]
        grads = [one.grad for one in plain if one.grad is not None]
        mine = sum(float(grad.detach().double().norm()) for grad in grads)
        everyones = gather_in_node(self.topology, mine, self._timeout_seconds)
        apart = max(everyones) - min(everyones) > ALIKE * max(everyones)
        if self.extremes(float(apart))[1] > 0:
            raise ConfigError(
                "where parameters are sharded, those that are not must get the same gradients on "
                "all ranks of a node, but they get others; shard the whole model too, by "
                "fully_shard(model, mesh=...), or give ranks of a node the same batches, as tensor "
                "parallelism wants"
            )

    def check_same_batch(self, batch: int) -> None:
        """Raise on every rank alike unless all have taken the same number of steps.

        Collective over the world; blocking.
        """
        with self.channels.watchdog.meeting(batch):
            fewest, most = self.extremes(float(batch))
        if fewest != most:
            steps = self.gather(float(batch))
            raise ExchangeError(
                f"every rank must take the same number of steps, but rank {steps.index(fewest)} "
                f"took {fewest:.0f} and rank {steps.index(most)} took {most:.0f}; give every rank "
                f"the same number of batches, and let every rank call synchronize(), averaged() "
                f"and end_epoch() behind the same step"
            )

    def mean(self, value: float, *, of_step: bool = False) -> float:
        """Return the mean of a number over all ranks, the same bits everywhere; blocking."""
        values = self.gather(value, of_step=of_step)
        return sum(values) / len(values)

    def join(self) -> None:
        """Average the inner optimizer's state: from here all nodes take the same steps.

        Moments that are kept as codes become those of the first node.

        Collective over the world; blocking.
        """
        self.gather(0.0)
        inner, named = self.trained.inner, self.trained.named
        drop_partial_state(inner, named, self._unlike(state_keys(inner, named)))
        tensors, coded = [*state_tensors(inner, named).values()], coded_state(inner, named)
        codes = {id(tensor) for tensor in coded}
        self.average([tensor for tensor in tensors if id(tensor) not in codes])
        broadcast(coded, self._replicas)
        self.metrics.event("join", tensors=len(tensors))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let parameters and buffers, frozen parameters too, be the mean of all ranks inside.

        Collective over the world; blocking, at its beginning.
        """
        others = self.others.apart()
        params = [tensor.detach() for _, tensor in self.trained.local]
        tensors = (*params, *others.buffers, *others.frozen, *others.shards)
        kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
        try:
            self.average(params)
            self.others.average(others)
            yield
        finally:
            with torch.no_grad():
                for tensor, mine in kept:
                    tensor.copy_(mine)

    def count_drop(self, what: str) -> None:
        """Note a drop; raise, on every rank alike, when there were too many."""
        lately = self.metrics.drop()
        self.metrics.event("dropped", why=what)
        if self.leads:
            logger.warning(what)
        limit = 1 if self.channels.settings.exchange.nonfinite == "raise" else DROPS_LATELY
        if lately >= limit:
            raise NonFiniteError(
                f"values must be finite, but {what} (drop number {lately} within a few exchanges); "
                f"lower the learning rate, clip gradients, or look at that rank's data"
            )

    def average(self, tensors: list[torch.Tensor]) -> None:
        """Set tensors of parameters to their means over the ranks that hold the same.

        Collective over the world; blocking.
        """
        self._average_over(self._replicas, tensors)

    def _average_over(self, ranks: Topology, tensors: list[torch.Tensor]) -> None:
        with self.metrics.watch.waiting(trace.WAIT_INTER_NODE, of_step=False):
            self.metrics.global_bytes_sent += average_tensors(
                tensors,
                ranks,
                self.channels.engine.run,
                self.channels.settings.exchange.chunk_bytes,
            )


def largest_rate(inner: torch.optim.Optimizer) -> float:
    """Return the largest learning rate of an optimizer's groups; 0 where they have none."""
    return max(rate_of(group, 0.0) for group in inner.param_groups)
