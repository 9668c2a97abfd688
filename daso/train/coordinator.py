"""Collective operations outside exchanges: checks, waits, and means of other values."""

import logging
import statistics
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from daso import trace
from daso.comm.control import broadcast, gather_in_lane, gather_numbers_in_node, gather_unlike
from daso.comm.engine import Work, WorkHandle
from daso.comm.topology import Topology
from daso.errors import ConfigError, ExchangeError, LayoutError, NonFiniteError
from daso.plan.header import Header, decode_slow_rank, largest_rate
from daso.train.channels import Channels
from daso.train.gradients.ddp import DdpFinder
from daso.train.metrics import Metrics, Slowest
from daso.train.misuse import checksum, first_nonfinite, gradient_checksum, has_batch_norm
from daso.train.model.others import OtherTensors, Ranks
from daso.train.model.params import Trained, broadcast_tensors, check_sharding
from daso.train.model.shards import is_sharded, local_part
from daso.train.model.state_sync import (
    average_tensors,
    coded_state,
    drop_partial_state,
    state_digest,
    state_keys,
    state_tensors,
)

Result = TypeVar("Result")
Value = TypeVar("Value")
logger = logging.getLogger("daso")

NAMED = 3  # ranks in a message
ALIKE = 0.01  # relative difference of equal gradients, by rounding alone


def check_same_options(trained: Trained, topology: Topology, options: str, limit: float) -> None:
    """Raise if options or optimizer state differ between ranks, before any exchange.

    Collective over the world; blocking.
    """
    first = broadcast(topology, options, limit)
    problem = None
    if options != first:
        problem = ConfigError(
            f"every rank must be given the same options, but there are {options} here and {first} "
            f"on rank 0; pass the same keywords everywhere",
            code="options-differ-between-ranks",
        )
    topology.raise_on_all_ranks(problem, limit)
    digest = state_digest(trained.inner, trained.named)
    # Ranks of equal place in their nodes have the same state of shards.
    same = check_sharding(trained, topology, limit) and trained.is_sharded
    same = same and len(set(gather_in_lane(topology, digest, limit))) == 1
    if not topology.equal_on_all_ranks(same or digest, limit):
        raise LayoutError(
            "the inner optimizer's state must be the same on every rank, but it differs; load it "
            "on every rank, or on none, before wrapping",
            code="optimizer-states-differ",
        )


class Coordinator:
    """Collective operations of all ranks between exchanges, each within the stall limit.

    Args:
        trained: The optimizer and what it trains.
        topology: The ranks and nodes.
        replicas: The replica group: ranks that hold the same parameters.
        channels: The engine that all traffic goes through.
        metrics: Counters of seconds and bytes.
        elsewhere: Returns the ids of parameters that other wrapped optimizers train.
        first_step_checked: Earlier parts of the same training did the checks of the first step.
    """

    def __init__(
        self,
        trained: Trained,
        topology: Topology,
        replicas: Topology,
        channels: Channels,
        metrics: Metrics,
        elsewhere: Callable[[], Container[int]] = frozenset,
        *,
        first_step_checked: bool = False,
    ) -> None:
        self.trained, self.topology, self._replicas = trained, topology, replicas
        self.channels, self.metrics = channels, metrics
        keeps_own = channels.settings.exchange.keeps_own
        average = partial(self._average_over, topology)
        differ = self._differ if replicas is not topology and topology.nodes > 1 else None
        ranks = Ranks(self._unlike, average, self.average, differ, keeps_own, self.leads)
        self.others = OtherTensors(trained, elsewhere, ranks)
        self.ddps = DdpFinder(param for _, param in trained.named)
        self.first_step_checked = first_step_checked
        self._compares_batches = not first_step_checked  # once, before a gradient is averaged
        self._warned_of_rates = False

    def agree_on_slowest(self) -> None:
        """Agree on the rank with the longest steps. Collective over the world; blocking."""
        seconds = self.metrics.watch.steps()
        medians = self.gather(statistics.median(seconds) if seconds else 0.0)
        slowest, rank = max((median, rank) for rank, median in enumerate(medians))
        if min(medians) > 0:
            self._keep_slowest(rank, slowest, min(medians))

    def note_slowest(self, agreed: Header) -> None:
        """Record the rank with the longest steps, from a header of all ranks, for the report."""
        if agreed.slowest:
            seconds, rank = decode_slow_rank(agreed.slowest, self.topology.rank_info.world_size)
            self._keep_slowest(rank, seconds, agreed.step_seconds)

    def _keep_slowest(self, rank: int, seconds: float, fastest_seconds: float) -> None:
        host = self.topology.liveness.hosts[rank]
        self.metrics.slowest = Slowest(host, rank, seconds, fastest_seconds)

    def wait(self, handle: WorkHandle[Result], *, of_step: bool = True) -> Result:
        """Block until work is done and return its result; the wait counts as exposed time.

        Args:
            handle: The work.
            of_step: Whether a step needs the result; False outside steps.
        """
        with self.metrics.watch.waiting(trace.WAIT_INTER_NODE, handle.key, of_step=of_step):
            return self.channels.engine.wait(handle)

    def run(self, work: Work[Result], *, of_step: bool = False) -> Result:
        """Run work to its end; see `wait`."""
        return self.wait(self.channels.engine.submit(work), of_step=of_step)

    def gather(self, number: float, *, of_step: bool = False) -> list[float]:
        """Return every rank's number, in rank order. Collective over the world; blocking."""
        return self.run(self.channels.gather(number), of_step=of_step)

    def extremes(self, number: float, *, of_step: bool = False) -> tuple[float, float]:
        """Return the lowest and highest of all ranks' numbers.

        Collective over the world; blocking.
        """
        return self.run(self.channels.extremes(number), of_step=of_step)

    def first(self, number: float) -> float:
        """Return world rank 0's number. Collective over the world; blocking."""
        return self.run(self.channels.first(number))

    @property
    def is_sharded(self) -> bool:
        """True if ranks of a node hold shards of parameters."""
        return self._replicas is not self.topology

    def _differ(self, number: float) -> bool:
        """Return whether the number differs within the replica group, on any lane.

        Collective over the world; blocking.
        """
        if self.is_sharded:
            number -= self.run(self.channels.first_of_lane(number))
        lowest, highest = self.extremes(number)
        return lowest != highest

    def same_order(self, order: list[int]) -> list[int]:
        """Return world rank 0's order. Collective over the world; blocking."""
        self.warn_of_same_batches(order)
        return broadcast(self.topology, order, self._timeout_seconds)

    @property
    def _timeout_seconds(self) -> float:
        return self.channels.settings.exchange.timeout_seconds

    def _unlike(self, value: Value) -> list[Value]:
        """Return every rank's value, or a single one if all are equal. Collective; blocking."""
        return gather_unlike(self.topology, value, self._timeout_seconds)

    def warn_of_same_batches(self, order: Sequence[int]) -> None:
        """Warn once if all ranks have the same gradients: they train on the same batches.

        Collective over the world; blocking.
        """
        if not self._compares_batches:
            return
        self._compares_batches = False
        alike = self.is_sharded or self.ddps.around()  # in a node: FSDP or DDP averages there
        own_checksum = 0.0 if alike else gradient_checksum(self.trained.local, order)
        differ = self._differ(own_checksum)  # the watchdog is polled there
        if self.leads and own_checksum and not differ:
            logger.warning(
                "every rank must train on different batches, but the first gradients of all %d "
                "ranks are the same bits; give each rank its part of the data "
                "(torch.utils.data.DistributedSampler, or seed + rank)",
                self.topology.world_size,
            )

    def equalize(self, *, expected: bool = False) -> bool:
        """Replace parameters that differ between ranks by their mean; return whether none did.

        Collective over the world; blocking.
        """
        plain = [param for _, param in self.trained.named if not is_sharded(param)]
        shards = [local_part(param) for _, param in self.trained.named if is_sharded(param)]
        lowest, highest = self.extremes(checksum(plain))
        if lowest == highest and not (shards and self._differ(checksum(shards))):
            return True
        self._refuse_nonfinite()
        named = self._name_differing(checksum(plain))
        self._average_over(self.topology, plain)
        if self.is_sharded:
            self.average(shards)
        self.metrics.event("equalized")
        if self.leads and not expected:
            logger.warning(
                "parameters must change only by the steps of daso's optimizer, and alike on every "
                "rank, but they differed between ranks%s; all ranks have their mean now",
                named,
            )
        lowest, highest = self.extremes(largest_rate(self.trained.inner.param_groups))
        if lowest != highest:
            self.warn_of_rates(lowest, highest)
        return False

    def _name_differing(self, number: float) -> str:
        """Return the ranks whose number differs from most; empty if most differ.

        Collective over the world; blocking.
        """
        numbers, hosts = self.gather(number), self.topology.liveness.hosts
        usual, count = Counter(numbers).most_common(1)[0]
        ranks = [rank for rank, other in enumerate(numbers) if other != usual]
        if not ranks or 2 * count <= len(numbers):
            return ""
        names = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks[:NAMED])
        return f" ({names}{', ...' if ranks[NAMED:] else ''} from the others)"

    def warn_of_rates(self, lowest: float, highest: float) -> None:
        """Warn once that learning rates differ between ranks."""
        if self.leads and not self._warned_of_rates:
            self._warned_of_rates = True
            logger.warning(
                "the learning rate must be the same on every rank, but it is %g to %g; let "
                "schedulers follow the mean loss, which optimizer.end_epoch(loss) returns",
                lowest,
                highest,
            )

    def _refuse_nonfinite(self) -> None:
        """Raise on all ranks if parameters are not finite on any rank."""
        named = self.trained.local
        index = float(first_nonfinite(named))
        if self.extremes(index)[1] < 0:
            return
        slots = self.gather(index)
        rank, slot = next((rank, int(slot)) for rank, slot in enumerate(slots) if slot >= 0)
        raise NonFiniteError(
            f"parameters must be finite, but {named[slot][0]} on rank {rank} is not; lower the "
            f"learning rate, clip gradients, or look at that rank's data",
            code="parameter-not-finite",
        )

    @property
    def leads(self) -> bool:
        """True on the rank that logs messages for all ranks."""
        return self.topology.rank == 0

    def check_same_in_node(self) -> None:
        """Raise if gradients of plain parameters differ in a node whose other ones are sharded.

        They are not averaged inside the node, so its ranks must train them on the same batches.
        Collective over the world; blocking.
        """
        plain = [param for _, param in self.trained.named if not is_sharded(param)]
        grads = [param.grad for param in plain if param.grad is not None]
        norm = sum(float(grad.detach().double().norm()) for grad in grads)
        norms = gather_numbers_in_node(self.topology, norm, self._timeout_seconds)
        apart = max(norms) - min(norms) > ALIKE * max(norms)
        if self.extremes(float(apart))[1] > 0:
            raise ConfigError(
                "where parameters are sharded, those that are not must get the same gradients on "
                "all ranks of a node, but they get others; shard the whole model too, by "
                "fully_shard(model, mesh=...), or give ranks of a node the same batches, as tensor "
                "parallelism wants",
                code="unsharded-gradients-differ",
            )

    def skip_first_step_checks(self) -> None:
        """Skip the checks of the first step, which the former world passed."""
        self.first_step_checked = True

    def check_first_step(self, *, averages: bool) -> None:
        """Check at the first step for DDP and BatchNorm modules, even if newer than the optimizer.

        Args:
            averages: Gradients of this step are averaged, which compares them too.

        Collective over the world; blocking.
        """
        self.first_step_checked = True
        if self.topology.nodes > 1:
            self.ddps.refuse_wide(self.topology.local_size)
        if self.is_sharded:
            self.check_same_in_node()
        if not averages:
            self.warn_of_same_batches(range(len(self.trained.named)))
        if self.trained.module is None and self.leads and has_batch_norm(self.trained.named):
            logger.warning(
                "the statistics of BatchNorm must be averaged too, but daso was not given the "
                "model that has them, so that they differ between ranks; pass module=model"
            )

    def check_same_batch(self, batch: int) -> None:
        """Raise on all ranks unless all have taken the same number of steps.

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
                f"and end_epoch() after the same step",
                code="steps-differ-between-ranks",
            )

    def mean(self, value: float, *, of_step: bool = False) -> float:
        """Return the mean of a number over all ranks, bit-identical everywhere; blocking."""
        values = self.gather(value, of_step=of_step)
        return sum(values) / len(values)

    def join(self) -> None:
        """Average the inner optimizer's state, so that all nodes take the same steps from here.

        Quantized moments become those of the first node.

        Collective over the world; blocking.
        """
        self.gather(0.0)
        inner, named = self.trained.inner, self.trained.named
        drop_partial_state(inner, named, self._unlike(state_keys(inner, named)))
        tensors, coded = [*state_tensors(inner, named).values()], coded_state(inner, named)
        codes = {id(tensor) for tensor in coded}
        self.average([tensor for tensor in tensors if id(tensor) not in codes])
        broadcast_tensors(coded, self._replicas, self._timeout_seconds)
        self.metrics.event("join", tensors=len(tensors))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Average parameters, frozen ones too, and buffers over all ranks inside the context.

        Collective over the world; blocking, at its beginning.
        """
        others = self.others.apart()
        params = [tensor.detach() for _, tensor in self.trained.local]
        tensors = (*params, *others.buffers, *others.frozen, *others.shards)
        saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
        try:
            self.average(params)
            self.others.average(others)
            yield
        finally:
            with torch.no_grad():
                for tensor, values in saved:
                    tensor.copy_(values)

    def count_drop(self, what: str) -> None:
        """Count a dropped exchange; raise on all ranks after too many drops."""
        recent = self.metrics.drop()
        self.metrics.event("dropped", why=what)
        if self.leads:
            logger.warning(what)
        tolerated = self.channels.settings.exchange.nonfinite != "raise"
        if recent.too_many_drops(tolerated=tolerated):
            raise NonFiniteError(
                f"values must be finite, but {what} (drop number {recent.drops} within a few "
                f"exchanges); lower the learning rate, clip gradients, or look at that rank's data",
                code="exchange-not-finite",
            )

    def average(self, tensors: list[torch.Tensor]) -> None:
        """Average tensors of parameters over their replica group.

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
                timeout_seconds=self._timeout_seconds,
            )
