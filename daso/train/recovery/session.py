"""Training that goes on without the nodes that are lost, or with spare ones in their place.

Whoever learns that a rank was lost, in a step, between two, or in a meeting of all ranks, drops
what is under way and tells the others, who do the same. The ranks of whole nodes make a smaller
world. All of them go on from the mean of their parameters, so that no work of theirs is lost, and
with their own count of batches: those that were behind catch up before anything is exchanged
(`daso.plan.schedule.rejoin`). Spare nodes, where there are any, take the place of lost ones: they
begin with rank 0's optimizer state and that mean, from the batch on from which all meet.

What is gone: the work of the lost node since the last exchange, the gradients of the batch in which
a rank learned of it, what wires had left over for later, and an outer optimizer's state.
"""

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from daso.comm.collectives import first_value, gather, gather_unlike
from daso.comm.engine import NestedWork, Work
from daso.comm.health.spares import Reserve, wait_until_needed
from daso.comm.health.survivors import (
    NEW,
    is_loss,
    leave,
    lost,
    problem,
    raise_where_lost,
    regroup,
    revoke,
)
from daso.comm.mpi import die_on_error
from daso.comm.node.base import wait_until
from daso.comm.reclaim import forget
from daso.comm.topology import RankInfo, Topology
from daso.errors import ConfigError
from daso.plan.schedule import Action, Progress, Rejoined, State, after_batch, rejoin
from daso.train import registry
from daso.train.inner.grad_scaler import Scaling
from daso.train.metrics import Metrics
from daso.train.model.params import Trained
from daso.train.model.shared import common_tensors
from daso.train.recovery.hand_over import hand_over, share_settings
from daso.train.session import Closure, Session
from daso.train.setup import Setup
from daso.train.state_sync import average_tensors
from daso.train.synchronizer import Synchronizer

__all__ = ["ElasticSession", "session_class"]

Result = TypeVar("Result")
logger = logging.getLogger("daso")

_open: "weakref.WeakSet[ElasticSession]" = weakref.WeakSet()


def session_class(setup: Setup) -> type[Session]:
    """Return how a model is kept in step: as a whole world, or as what is left of it."""
    return ElasticSession if setup.settings.exchange.elastic else Session


@dataclass(slots=True)
class Regrouping:
    """What a session takes along while a world is made anew."""

    after: State | None = None  # where this rank goes on from
    former: Synchronizer | None = None  # whose node's memory is to be given back
    in_step: bool = False
    drops: bool = False  # the batch of this step


class ElasticSession(Session):
    """A session that goes on without the nodes that are lost; see `Session`.

    Where the launcher or the MPI library cannot, it says so, and is as any other. A spare rank does
    nothing before `join`.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, setup: Setup, topology: Topology | None
    ) -> None:
        super().__init__(inner, setup, topology)
        self._can: bool | None = None  # go on; None: not looked at yet
        self._is_new = False  # a spare that has not been given anything
        self._noticed: Exception | None = None  # in a backward, left to the step
        self._ended = False  # this step: the world was made anew as it began
        self._regrouping = Regrouping()
        self._rejoined: Rejoined | None = None  # when the world was made anew last
        self._metrics: Metrics | None = None  # of the world before
        self._meetings = 0  # of all ranks since the last step
        self._depth = 0  # of calls that are made again as a whole
        self._averaging: ExitStack | None = None  # puts this rank's own parameters back

    def _open(self, metrics: Metrics, *acts: Action, looked: bool = False) -> None:
        super()._open(metrics, *acts, looked=looked)
        if self._can is None and self._sync is not None:
            try:
                self._begin_to_survive(self._sync)
            except ConfigError:
                self._sync.unhook()
                raise

    @classmethod
    def opened(
        cls, inner: torch.optim.Optimizer, setup: Setup, topology: Topology | None
    ) -> "Session":
        """Return a session that has agreed with all ranks; see `Session.opened`."""
        session = cls(inner, setup, topology)
        if session.topology.reserve is not None and session._elastic_sessions():
            raise ConfigError(
                "in a job with spare ranks one optimizer may be wrapped, but this is the second; "
                "pass all to one (daso.DASO([one, other])), or leave --spares out"
            )
        if not session.topology.is_spare:
            return super().opened(inner, setup, topology)
        die_on_error()
        session._is_new = session._can = session.topology.is_elastic = True
        session._number = len(session._elastic_sessions())
        _open.add(session)
        return session

    def _begin_to_survive(self, sync: Synchronizer) -> None:
        """Go on from now on, where that is possible; say so where it is not."""
        distributed = torch.distributed
        if sync.coordinator.is_sharded or (
            distributed.is_available() and distributed.is_initialized()
        ):
            raise ConfigError(
                "Exchange(elastic=True) needs ranks that meet through daso alone, but parameters "
                "are sharded, or torch.distributed has a process group, which would wait for lost "
                "ranks; leave elastic out, and start again from a checkpoint"
            )
        cause = problem()
        self._can = cause is None
        if cause is None:
            die_on_error()
            _open.add(self)
            self.topology.is_elastic = True
        elif self.topology.rank == 0:
            logger.warning("%s: where a rank is lost, all end", cause)

    def _elastic_sessions(self) -> list["ElasticSession"]:
        """Return all sessions of these ranks, in the order in which they were opened."""
        ours = [one for one in _open if one.topology is self.topology and not one._over]
        return sorted(ours, key=lambda one: one._number)

    # --- spares ------------------------------------------------------------------------------

    def join(self) -> int:
        """Wait, on a spare, until it takes the place of a lost rank; see `Session.join`."""
        while self.topology.is_spare:
            assert self.topology.reserve is not None, "a spare knows of it"
            if not wait_until_needed(self.topology.reserve):
                _end_unneeded(self.topology.reserve)
            _go_on_together(self._elastic_sessions(), self.topology, [], in_step=False)
        return self.schedule.batch

    def _call_spares(self) -> None:
        """Have a world made with spares that could not come when a rank was lost."""
        reserve = self.topology.reserve
        if reserve is not None and reserve.due and self.topology.rank == 0:
            revoke(self.topology.communicators)
            raise ConnectionError("spare ranks join")

    def _check_open(self) -> None:
        super()._check_open()
        if self.topology.is_spare:
            raise ConfigError(
                "a spare rank must wait until it is needed before it trains, but this one goes on; "
                "call optimizer.join() on all ranks, before the first step"
            )

    # --- one step ----------------------------------------------------------------------------

    def begin(self, closure: Closure | None, scaling: Scaling) -> tuple[bool, Closure | None]:
        """Get ready for the inner optimizer's step; see `Session.begin`.

        Returns:
            Whether to take it: not where a rank was lost, or where others had this batch before.
        """
        if self._is_aside():
            self._probing = False
            return False, None
        self._meetings = 0
        try:
            self._raise_noticed()
            self._call_spares()
            with self._inside():
                return super().begin(closure, scaling)
        except Exception as error:
            with self._within_step(drops=True):
                self._go_on(error, after_batch(self.setup.policy, self.schedule)[1])
            self._ended = True
            return False, None

    def _is_aside(self) -> bool:
        """Return whether the batch to come passes: this node, or all, had it already."""
        return self._rejoined is not None and self.schedule.batch < self._rejoined.aside_until

    @contextmanager
    def _within_step(self, *, drops: bool = False) -> Iterator[None]:
        """Make a world anew in the midst of a step."""
        self._regrouping.in_step, self._regrouping.drops = True, drops
        try:
            yield
        finally:
            self._regrouping.in_step = self._regrouping.drops = False

    def _averaged(self, closure: Closure) -> Closure:
        loss: Any = None

        def mine() -> Any:
            nonlocal loss
            loss = closure()
            return loss

        averaged = super()._averaged(mine)

        def absorbing() -> Any:
            """Return this rank's own loss where a rank is lost: the next step sees to it."""
            try:
                return averaged()
            except Exception as error:
                if not self._absorbs(error):
                    raise
                return loss

        return absorbing

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Leave errors of meetings inside to what is called here, which is made again whole."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def end(self) -> None:
        """Count a step, and start or finish an exchange when one is due; see `Session.end`."""
        if self._ended:
            self._ended = False
            return
        meets_at = 0 if self._rejoined is None else self._rejoined.meets_at
        if self.schedule.batch < meets_at and not self._probing:
            self._pass_batch()
            return
        try:
            super().end()
            self._look()
        except Exception as error:
            with self._within_step():
                self._go_on(error, self.schedule)

    def _pass_batch(self) -> None:
        """Count a batch that others had before: nothing is exchanged."""
        self._take(replace(self.schedule, batch=self.schedule.batch + 1))
        if self._sync is not None:
            self._sync.pass_batch(self.schedule, aside=self._is_aside())

    def _raise_noticed(self) -> None:
        """Raise what a backward met and left to the step."""
        if self._noticed is not None:
            raise self._noticed

    def _absorbs(self, error: Exception) -> bool:
        if not self._is_survived(error):
            return False
        self._noticed = error
        return True

    def zero_grad(self, set_to_none: bool) -> None:
        """Reset gradients; see `Session.zero_grad`."""
        try:
            super().zero_grad(set_to_none)
        except Exception as error:
            if not self._absorbs(error):
                raise
            self.inner.zero_grad(set_to_none)

    def _counted(self) -> Metrics | None:
        """Return what was counted; see `Session._counted`."""
        return self._metrics if self._sync is None else self._sync.metrics  # alone is left

    # --- meetings of all ranks ---------------------------------------------------------------

    def end_epoch(self, loss: float | torch.Tensor) -> float:
        """Tell the schedule that an epoch is over; see `Session.end_epoch`."""
        return self._together(lambda: super(ElasticSession, self).end_epoch(loss))

    def synchronize(self, *, optimizer_state: bool = False) -> None:
        """Finish what is in flight; see `Session.synchronize`."""
        call = super().synchronize
        self._together(lambda: call(optimizer_state=optimizer_state))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model be the mean of all ranks for a while; see `Session.averaged`."""
        with ExitStack() as stack:
            call = super().averaged
            self._together(lambda: stack.enter_context(call()), undo=stack.close)
            self._averaging = stack
            try:
                yield
            finally:
                self._averaging = None

    def together(self, call: Callable[[], Result]) -> Result:
        """Do what all ranks do at this place; see `Session.together`."""
        return self._together(call)

    def state(self) -> dict[str, Any]:
        """Return what this rank needs to go on to the same bits; see `Session.state`."""
        call = super().state
        return self._together(call, meets=False)

    def close(self) -> None:
        """Stop communicating and give memory back; see `Session.close`."""
        try:
            super().close()
        except Exception as error:
            if not self._is_survived(error):
                raise
            self._lose()

    def _together(
        self,
        call: Callable[[], Result],
        *,
        meets: bool = True,
        undo: Callable[[], None] = lambda: None,
    ) -> Result:
        """Do what all ranks do at the same place, again where a rank was lost meanwhile."""
        if self._depth:
            return call()
        while True:
            before = self.schedule
            try:
                self._look()
                with self._inside():
                    result = call()
                if meets and self._sync is not None and self._can:
                    raise_where_lost(self.topology)
                self._meetings += meets
                return result  # noqa: TRY300 - again otherwise
            except Exception as error:
                undo()
                self._go_on(error, before)

    # --- when a rank is lost -----------------------------------------------------------------

    def _is_survived(self, error: Exception) -> bool:
        """Return whether an error comes of a lost rank, and others go on."""
        reserve = self.topology.reserve
        alone = self._sync is None and not (reserve is not None and reserve.due)
        if not self._can or alone:
            return False
        return is_loss(error) or lost(self.topology.world_comm)

    def _look(self) -> None:
        """Raise where a rank is lost. Does not block."""
        if self._can and self._sync is not None and lost(self.topology.world_comm):
            raise self._noticed or ConnectionError("a rank is lost")

    def _go_on(self, error: Exception, after: State) -> None:
        """Make a world of the ranks that are left, or raise the error where none was lost.

        Args:
            error: What went wrong.
            after: Where this rank goes on from.

        Collective over the ranks that are left; blocking.
        """
        if not self._is_survived(error):
            raise error
        former, hosts = self.topology.rank_info, self.topology.liveness.hosts
        self._regrouping.after = after
        ranks, in_step = list(range(former.world_size)), self._regrouping.in_step
        _go_on_together(self._elastic_sessions(), self.topology, ranks, in_step=in_step)
        if self.topology.rank == 0:
            _tell(former, hosts, ranks, self.schedule.batch)

    def _lose(self) -> None:
        """Let go of what lost a rank."""
        self._noticed, self._stale = None, False
        if not self._is_new:
            self._regrouping.after = self._regrouping.after or self.schedule
        if self._averaging is not None:
            self._averaging.close()
        if self._sync is not None:
            metrics = self._metrics = self._sync.metrics
            metrics.exposed_before += self._sync.buckets.node.idle_seconds
            metrics.drops_lately = metrics.good_in_a_row = 0  # ranks may have counted otherwise
            self._sync.lose()
            registry.forget(self._sync)
            forget(self)
            self._regrouping.former = self._regrouping.former or self._sync
            self._sync = None

    def _rejoin(self, ranks: list[int]) -> None:
        """Go on from the mean of all parameters.

        Args:
            ranks: The former world ranks of those that go on.

        Collective over the world; blocking.
        """
        limit = self.setup.settings.exchange.timeout_seconds
        moving = self._regrouping
        progress = gather(self.topology, Progress(self.topology.node, moving.after), limit)
        ours = self._rejoined = rejoin(progress, self.topology.rank)
        new = [rank for rank, one in enumerate(progress) if one.state is None]
        if new:
            self._hand_over(new, limit)
        trained = Trained.by(self.inner, self.setup.module)
        keeps_own = self.setup.settings.exchange.keeps_own
        buffers = common_tensors(
            [(name, one) for name, one in trained.buffers() if not keeps_own(name)],
            lambda value: gather_unlike(self.topology, value, limit),
            set(),
            says=False,
        )
        average_tensors(
            [*(tensor.detach() for _, tensor in trained.local), *buffers],
            self.topology,
            self._run,
            self.setup.settings.exchange.chunk_bytes,
            len(progress) - len(new),
        )
        self._take(ours.state)
        metrics = self._metrics or Metrics()
        metrics.slowest = None  # a rank of the former world
        metrics.scales_apart = True  # should there be GradScalers: they may have counted otherwise
        former = moving.former
        history = None if former is None else former.writes.history
        history = first_value(self.topology, history, limit)
        self._open(metrics)
        if self._sync is not None:
            if history is not None:
                self._sync.writes.history = history
            if ours.state.synchronous:
                self._sync.coordinator.join()
            self._sync.go_on_from(moving.former)
            if self._is_aside():
                self._sync.stand_aside()
        metrics.event(
            "regrouped",
            batch=ours.state.batch,
            dropped=moving.drops,
            meets_at=ours.meets_at,
            ranks=tuple(ranks),
        )
        moving.after = moving.former = None

    def _hand_over(self, new: Sequence[int], limit: float) -> None:
        """Give ranks that are new all that rank 0 has. Collective over the world; blocking."""
        told = first_value(self.topology, (self._number, self._history, self._joined), limit)
        if self.topology.rank in new:
            self._number, self._history, self._joined = told
        share_settings(self.topology, self.inner, new, limit)
        trained = Trained.by(self.inner, self.setup.module)
        tensors = [tensor for _, tensor in (*trained.local, *trained.buffers())]
        hand_over(self.topology, self.inner, tensors, new, limit)

    def _run(self, work: Work[int]) -> int:
        """Carry out work on this thread."""
        nested, liveness = NestedWork(work), self.topology.liveness
        limit = self.setup.settings.exchange.timeout_seconds
        wait_until(nested.go_on, liveness.missing, limit, liveness.answer)
        assert nested.result is not None, "it is over"
        return nested.result


def _go_on_together(
    sessions: Sequence[ElasticSession], topology: Topology, ranks: list[int], *, in_step: bool
) -> None:
    """Let sessions go on in another world; does not return on ranks of broken nodes.

    Args:
        sessions: Of these ranks.
        topology: Whose world.
        ranks: The ranks that were in it; becomes those that still are, `NEW` for spares.
        in_step: A step is under way.
    """
    is_new, made = topology.is_spare, False
    while not made:  # one more may be lost meanwhile
        for one in sessions:
            one._lose()
        left = regroup(topology, ready=all(one._meetings == 0 for one in sessions))
        if left is None:
            if topology.is_spare:
                return  # it waits on
            leave(topology)
        assert left is not None, "who leaves is gone"
        ranks[:] = [NEW if rank == NEW else ranks[rank] if ranks else rank for rank in left]
        made = _rejoined(sessions, topology, ranks, is_new=is_new, in_step=in_step)
    for one in sessions:
        one._is_new = False


def _rejoined(
    sessions: Sequence[ElasticSession],
    topology: Topology,
    ranks: list[int],
    *,
    is_new: bool,
    in_step: bool,
) -> bool:
    """Let sessions agree in a world that was made anew; return False where that lost a rank too."""
    try:
        for one in sessions:
            one._rejoin(ranks)
        topology.tell_regrouped(is_new=is_new, in_step=in_step)
        raise_where_lost(topology)
    except Exception as error:
        if not (is_loss(error) or lost(topology.world_comm)):
            raise
        return False
    return True


def _tell(former: RankInfo, hosts: Sequence[str], ranks: list[int], batch: int) -> None:
    """Say who is gone, by the numbers that ranks had, and who came."""
    nodes = {node for rank, node in enumerate(former.node_of) if rank not in ranks}
    if not nodes:
        logger.warning("%d spare ranks joined after %d steps", ranks.count(NEW), batch)
        return
    names = sorted({hosts[rank] for rank, node in enumerate(former.node_of) if node in nodes})
    spares = ranks.count(NEW)
    logger.warning(
        "node %s (%s) lost a rank: after %d steps training goes on with %d of %d ranks%s",
        ", ".join(map(str, sorted(nodes))),
        ", ".join(names),
        batch,
        len(ranks) - spares,
        former.world_size,
        f", and {spares} that were spare" if spares else "",
    )


def _end_unneeded(reserve: Reserve) -> None:
    """End this process, a spare, as the job is over. Does not return."""
    if not reserve.active - reserve.lost():  # nobody came to the end
        os._exit(1)
    raise SystemExit(0)
