"""Moves a session to a smaller world, or one with spare ranks, from the mean of all parameters."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from daso.comm.control import broadcast, gather, gather_unlike
from daso.comm.engine import NestedWork, Work
from daso.comm.health.survivors import NEW
from daso.comm.rank_info import RankInfo
from daso.comm.step_timer import wait_until
from daso.comm.topology import Topology
from daso.plan.rejoin import Progress, Rejoined, rejoin
from daso.plan.schedule import State
from daso.train.metrics import Metrics
from daso.train.model.params import Trained, common_tensors
from daso.train.model.state_sync import average_tensors
from daso.train.parts import Parts
from daso.train.recovery.hand_over import hand_over, share_settings
from daso.train.runner import ScheduleRunner

logger = logging.getLogger("daso")


@dataclass(slots=True)
class Regrouping:
    """State of a session while a new world is formed."""

    after: State | None = None  # schedule from which this rank continues
    former: Parts | None = None  # parts whose node memory is freed later
    in_step: bool = False
    drops: bool = False  # the batch of this step

    def rejoin(self, runner: ScheduleRunner, ranks: Sequence[int]) -> Rejoined:
        """Continue from the mean of all parameters; return the batches to catch up.

        Args:
            runner: The schedule, whose parts are built again.
            ranks: Former world ranks of the remaining ranks.

        Collective over the world; blocking.
        """
        topology, exchange = runner.topology, runner.setup.settings.exchange
        limit = exchange.timeout_seconds
        progress = gather(topology, Progress(topology.node, self.after), limit)
        ours = rejoin(progress, topology.rank)
        new = [rank for rank, entry in enumerate(progress) if entry.state is None]
        if new:
            _hand_over(runner, new)
        trained = Trained.by(runner.inner, runner.setup.module)
        buffers = common_tensors(
            [(name, buffer) for name, buffer in trained.buffers() if not exchange.keeps_own(name)],
            lambda value: gather_unlike(topology, value, limit),
            set(),
            warns=False,
        )
        average_tensors(
            [*(tensor.detach() for _, tensor in trained.local), *buffers],
            topology,
            partial(_run, topology, limit),
            exchange.chunk_bytes,
            len(progress) - len(new),
            limit,
        )
        runner.take(ours.state)
        metrics = runner.owner.metrics or Metrics()
        metrics.slowest = None  # a rank of the former world
        metrics.note(scales_apart=True)  # GradScalers, if any, may have counted differently
        former = self.former
        history = None if former is None else former.writes.history
        history = broadcast(topology, history, limit)
        runner.open(metrics)
        parts = runner.parts
        if parts is not None:
            if history is not None:
                parts.writes.history = history
            if ours.state.synchronous:
                parts.coordinator.join()
            parts.go_on_from(self.former)
        metrics.event(
            "regrouped",
            batch=ours.state.batch,
            dropped=self.drops,
            meets_at=ours.meets_at,
            ranks=tuple(ranks),
        )
        self.after = self.former = None
        return ours


def _hand_over(runner: ScheduleRunner, new: Sequence[int]) -> None:
    """Copy all of rank 0's state to new ranks. Collective over the world; blocking."""
    topology, limit = runner.topology, runner.setup.settings.exchange.timeout_seconds
    known = runner.owner.number, runner.history, runner.joined
    known = broadcast(topology, known, limit)
    if topology.rank in new:
        runner.take_over(*known)
    share_settings(topology, runner.inner, new, limit)
    trained = Trained.by(runner.inner, runner.setup.module)
    tensors = [tensor for _, tensor in (*trained.local, *trained.buffers())]
    hand_over(topology, runner.inner, tensors, new, limit)


def _run(topology: Topology, limit: float, work: Work[int]) -> int:
    """Run engine work to its end on this thread."""
    nested, liveness = NestedWork(work), topology.liveness
    wait_until(nested.advance, liveness.missing, limit, liveness.answer)
    assert nested.result is not None, "it is over"
    return nested.result


def log_loss(former: RankInfo, hosts: Sequence[str], ranks: Sequence[int], batch: int) -> None:
    """Log the lost nodes, by the former numbers of their ranks, and the new ranks."""
    nodes = {node for rank, node in enumerate(former.node_of) if rank not in ranks}
    if not nodes:
        logger.warning("%d spare ranks joined after %d steps", ranks.count(NEW), batch)
        return
    names = sorted({hosts[rank] for rank, node in enumerate(former.node_of) if node in nodes})
    spares = ranks.count(NEW)
    logger.warning(
        "node %s (%s) lost a rank: after %d steps training continues with %d of %d ranks%s",
        ", ".join(map(str, sorted(nodes))),
        ", ".join(names),
        batch,
        len(ranks) - spares,
        former.world_size,
        f", and {spares} that were spare" if spares else "",
    )
