"""Survival of lost ranks: detects a loss, and moves a session to a new world."""

import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from daso.comm.health.spares import Reserve, wait_until_needed
from daso.comm.health.survivors import (
    NEW,
    is_loss,
    leave,
    lost,
    problem,
    raise_if_lost,
    regroup,
    revoke,
)
from daso.comm.mpi import die_on_error
from daso.comm.topology import Topology
from daso.errors import ConfigError
from daso.plan.rejoin import Rejoined
from daso.plan.schedule import State
from daso.train.parts import Parts
from daso.train.recovery.regrouping import Regrouping, log_loss
from daso.train.session import Session

logger = logging.getLogger("daso")

_open: "weakref.WeakSet[Survivor]" = weakref.WeakSet()


class Survivor:
    """Moves one session to a world without the lost ranks.

    Args:
        session: The session, not open yet.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._runner = session, session.runner
        self._can_survive: bool | None = None  # whether it can survive a loss; None: not known yet
        self._is_new = False  # a spare that has not received anything yet
        self._regrouping = Regrouping()
        self._rejoined: Rejoined | None = None  # of the last new world
        self._noticed: Exception | None = None  # error of a backward, deferred to the step
        self.meetings = 0  # of all ranks since the last step
        self.averaging: ExitStack | None = None  # restores this rank's parameters

    @property
    def topology(self) -> Topology:
        """Topology of the ranks."""
        return self._runner.topology

    @property
    def is_aside(self) -> bool:
        """True if the next batch is skipped, since this node, or all nodes, had it already."""
        batch = self._runner.schedule.batch
        return self._rejoined is not None and batch < self._rejoined.aside_until

    @property
    def is_behind(self) -> bool:
        """True while this rank catches up on batches, before the next meeting of all ranks."""
        batch = self._runner.schedule.batch
        return self._rejoined is not None and batch < self._rejoined.meets_at

    # --- opening and joining -----------------------------------------------------------------

    def open_spare(self) -> bool:
        """Return whether this rank is a spare, which waits instead of opening its session."""
        topology = self.topology
        if topology.reserve is not None and self._all():
            raise ConfigError(
                "in a job with spare ranks one optimizer may be wrapped, but this is the second; "
                "pass all to one (daso.DASO([one, other])), or leave --spares out",
                code="second-optimizer-with-spares",
            )
        if not topology.is_spare:
            return False
        die_on_error()
        self._is_new = self._can_survive = topology.is_elastic = True
        self._runner.owner.number = len(self._all())
        _open.add(self)
        return True

    def opened(self, parts: Parts) -> None:
        """Survive lost ranks from now on, or log the reason why not."""
        if self._can_survive is not None:
            return
        distributed = torch.distributed
        if parts.coordinator.is_sharded or (
            distributed.is_available() and distributed.is_initialized()
        ):
            raise ConfigError(
                "Exchange(elastic=True) needs ranks that meet through daso alone, but parameters "
                "are sharded, or torch.distributed has a process group, which would wait for lost "
                "ranks; leave elastic out, and start again from a checkpoint",
                code="elastic-needs-daso-alone",
            )
        cause = problem()
        self._can_survive = cause is None
        if cause is None:
            die_on_error()
            _open.add(self)
            self.topology.is_elastic = True
        elif self.topology.rank == 0:
            logger.warning("%s: where a rank is lost, all end", cause)

    def forget(self) -> None:
        """Take no part in later losses, after a construction that failed."""
        _open.discard(self)

    def _all(self) -> list["Survivor"]:
        """Return the survivors of all sessions of these ranks, in the order of their opening."""
        same = [
            survivor
            for survivor in _open
            if survivor.topology is self.topology and not survivor._session.was_closed
        ]
        return sorted(same, key=lambda survivor: survivor._runner.owner.number)

    def join(self) -> None:
        """Wait, on a spare, until it replaces a lost rank; see `Session.join`."""
        while self.topology.is_spare:
            assert self.topology.reserve is not None, "a spare knows of it"
            if not wait_until_needed(self.topology.reserve):
                _end_unneeded(self.topology.reserve)
            _form_world(self._all(), self.topology, [], in_step=False)

    def call_spares(self) -> None:
        """Raise if spares could not join at the last loss, so that they join now."""
        reserve = self.topology.reserve
        if reserve is not None and reserve.due and self.topology.rank == 0:
            revoke(self.topology.communicators)
            raise ConnectionError("spare ranks join")

    def refuse_spare(self) -> None:
        """Raise on a spare rank, which must wait before steps and meetings."""
        if self.topology.is_spare:
            raise ConfigError(
                "a spare rank must wait until it is needed before it trains, but this one did not; "
                "call optimizer.join() on all ranks, before the first step",
                code="spare-trained-too-early",
            )

    # --- noticing a loss ---------------------------------------------------------------------

    def absorbs(self, error: Exception) -> bool:
        """Defer an error of a backward to the next step, if a lost rank caused it."""
        if not self.survives(error):
            return False
        self._noticed = error
        return True

    def survives(self, error: Exception) -> bool:
        """Return whether a lost rank caused an error that this session survives."""
        reserve = self.topology.reserve
        alone = self._runner.parts is None and not (reserve is not None and reserve.due)
        if not self._can_survive or alone:
            return False
        return is_loss(error) or lost(self.topology.world_comm)

    def raise_noticed(self) -> None:
        """Raise the error that a backward deferred to the step."""
        if self._noticed is not None:
            raise self._noticed

    def check_losses(self) -> None:
        """Raise if a rank is lost. Does not block."""
        if self._can_survive and self._runner.parts is not None and lost(self.topology.world_comm):
            raise self._noticed or ConnectionError("a rank is lost")

    def raise_on_all_if_lost(self) -> None:
        """Raise on all ranks if any was lost. Collective over the world; blocking."""
        if self._runner.parts is not None and self._can_survive:
            raise_if_lost(self.topology)

    # --- the next world ----------------------------------------------------------------------

    def pause_aside(self) -> None:
        """Pause the averaging of gradients for a skipped batch."""
        if self.is_aside and self._runner.parts is not None:
            self._runner.parts.gradients.pause()

    @contextmanager
    def within_step(self, *, drops: bool = False) -> Iterator[None]:
        """Mark that a new world is formed within a step."""
        self._regrouping.in_step, self._regrouping.drops = True, drops
        try:
            yield
        finally:
            self._regrouping.in_step = self._regrouping.drops = False

    def go_on(self, error: Exception, after: State) -> None:
        """Form a world of the remaining ranks, or raise the error if no rank was lost.

        Args:
            error: The error of a step or a meeting.
            after: The state of the schedule with which this rank continues.

        Collective over the remaining ranks; blocking.
        """
        if not self.survives(error):
            raise error
        former, hosts = self.topology.rank_info, self.topology.liveness.hosts
        self._regrouping.after = after
        ranks, in_step = list(range(former.world_size)), self._regrouping.in_step
        _form_world(self._all(), self.topology, ranks, in_step=in_step)
        if self.topology.rank == 0:
            log_loss(former, hosts, ranks, self._runner.schedule.batch)

    def lose(self) -> None:
        """Release all resources of the world that lost a rank."""
        self._noticed, self._runner.stale = None, False
        if not self._is_new:
            self._regrouping.after = self._regrouping.after or self._runner.schedule
        if self.averaging is not None:
            self.averaging.close()
        if (parts := self._runner.owner.lose(self._runner)) is not None:
            metrics = parts.metrics
            metrics.recent = metrics.recent.without_drops()  # ranks may have counted differently
            self._regrouping.former = self._regrouping.former or parts

    def rejoin(self, ranks: Sequence[int]) -> None:
        """Resume in step with the ranks of the new world. Collective over them; blocking."""
        self._rejoined = self._regrouping.rejoin(self._runner, ranks)
        self.pause_aside()

    def joined(self) -> None:
        """Clear the mark of a new spare."""
        self._is_new = False


def _form_world(
    survivors: Sequence[Survivor], topology: Topology, ranks: list[int], *, in_step: bool
) -> None:
    """Move sessions to another world; does not return on ranks of broken nodes.

    Args:
        survivors: Survivors of all sessions of these ranks.
        topology: The world; changed in place.
        ranks: Former world ranks, changed in place to the remaining ones; `NEW` for spares.
        in_step: Whether a step is in progress.
    """
    is_new, is_complete = topology.is_spare, False
    while not is_complete:  # another rank may be lost meanwhile
        for survivor in survivors:
            survivor.lose()
        left = regroup(topology, ready=all(survivor.meetings == 0 for survivor in survivors))
        if left is None:
            if topology.is_spare:
                return  # it continues to wait
            leave(topology)
        assert left is not None, "a rank that leaves has ended"
        ranks[:] = [NEW if rank == NEW else ranks[rank] if ranks else rank for rank in left]
        is_complete = _agreed(survivors, topology, ranks, is_new=is_new, in_step=in_step)
    for survivor in survivors:
        survivor.joined()


def _agreed(
    survivors: Sequence[Survivor],
    topology: Topology,
    ranks: list[int],
    *,
    is_new: bool,
    in_step: bool,
) -> bool:
    """Resume sessions in the new world; return False if it lost a rank too."""
    try:
        for survivor in survivors:
            survivor.rejoin(ranks)
        topology.tell_regrouped(is_new=is_new, in_step=in_step)
        raise_if_lost(topology)
    except Exception as error:
        if not (is_loss(error) or lost(topology.world_comm)):
            raise
        return False
    return True


def _end_unneeded(reserve: Reserve) -> None:
    """End this spare process with the job. Does not return."""
    if not reserve.active - reserve.lost():  # no rank reached the end
        os._exit(1)
    raise SystemExit(0)
