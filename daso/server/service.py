"""The thread that serves one rank's rows, as seen by the training thread.

It runs as work of an `Engine`, from the first forward after a synchronization to the next one.
"""

import atexit
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from daso import trace
from daso.comm.control import gather
from daso.comm.engine import Engine, Work, WorkHandle
from daso.comm.mpi import load
from daso.comm.node.select import staging_of
from daso.comm.p2p.routes import routes
from daso.comm.p2p.send_queue import SendQueue
from daso.comm.step_timer import RunningClock
from daso.comm.topology import Topology
from daso.errors import CheckpointError, StallError
from daso.server.partition import HOST, Partition
from daso.server.plan import Plan, is_fresh
from daso.server.rows import Rows
from daso.server.shard import ParameterShard, Values
from daso.server.shard_server import ShardServer, unequal_steps

STEPS_WAITING = 2  # steps whose gradients may wait here to be applied
AHEAD = 1  # steps whose gradients need not be applied yet without a bound on staleness
CHECK_SECONDS = 0.1  # between checks for failures during a wait


class ServerThread:
    """Serves one rank's rows on a thread. Collective over the world; blocking."""

    def __init__(
        self, topology: Topology, partition: Partition, plan: Plan, shard: ParameterShard
    ) -> None:
        self.plan, self.rank, self._topology = plan, topology.rank, topology
        devices = {tensor.device for _, tensor in partition.named}
        # Gradients are packed on `device`; with several devices on the host, and packing blocks.
        copies = staging_of(next(iter(devices))) if len(devices) == 1 else None
        self.device = HOST if copies is None else partition.named[0][1].device
        self.world, self._message_comm = topology.world_comm.Dup(), topology.world_comm.Dup()
        queue = SendQueue(routes(topology, self._message_comm), plan.exchange.chunk_bytes)
        self.service = ShardServer(topology.rank, partition, plan, shard, queue, copies)
        liveness = topology.liveness
        self.engine = Engine(
            plan.exchange.timeout_seconds,
            liveness.missing,
            liveness.answer,
            name="daso-server",
            kind=None,
        )
        self.exposed_seconds = 0.0
        self._handle: WorkHandle[None] | None = None
        _open.add(self)

    def ensure_serving(self) -> None:
        """Start serving, unless the thread already serves. Does not block."""
        if self._handle is None:
            self._handle = self.engine.submit(self.service.serve())

    @property
    def serves(self) -> bool:
        """Return whether the thread serves, so that this rank's rows may change."""
        return self._handle is not None

    def wait_for(self, layer: int, step: int) -> dict[int, Rows]:
        """Return a layer's rows by owner; block until they are fresh enough for a step."""
        bound = self.plan.staleness

        def late() -> list[int]:
            rows = self.service.rows.newest(layer)
            stale = [row.behind for row in rows.values() if not is_fresh(row.clock, step, bound)]
            if self.plan.waits_for_replies:
                stale += [owner for owner, row in rows.items() if row.taken_in < step - AHEAD]
            return stale

        def who() -> str:
            ranks = ", ".join(map(str, sorted(set(late()))))
            return f"world rank {ranks}'s rows of step {step}"

        if late():
            self._wait(lambda: not late(), who, step)
        return self.service.rows.take(layer, step)

    def wait_for_norm(self, step: int) -> None:
        """Block until the norm of the mean gradient of the step before is known, if it clips."""

        def is_known() -> bool:
            return self.service.norm.steps >= step

        if self.plan.clips_mean_norm and not is_known():
            self._wait(is_known, lambda: f"the gradient's norm of step {step - 1}", step)

    def wait_for_room(self, most_bytes: int) -> None:
        """Block until few bytes wait to be sent, and few own gradients to be applied."""
        service = self.service

        def is_room() -> bool:
            most = STEPS_WAITING * len(service.partition.layers)
            return service.backlog_bytes <= most_bytes and len(service.own_contributions) <= most

        if not is_room():
            self._wait(is_room, lambda: "a free link")

    def meet(self, steps: int) -> None:
        """Apply all gradients, load all rows, and stop serving. Collective; blocking."""
        self.ensure_serving()
        handle = self._handle
        assert handle is not None
        self.service.round.pausing = steps
        self._wait(lambda: self.service.is_over() or handle.done(), lambda: "all ranks' last rows")
        self.engine.wait(handle)
        self.engine.run(self._barrier())  # before any rank starts the next round
        self.service.shard.begin()
        self.service.rows.begin()
        self.service.begin()
        self._handle = None

    def _barrier(self) -> Work[None]:
        yield [self.world.Ibarrier()]

    def _wait(self, arrived: Callable[[], bool], what: Callable[[], str], step: int = 0) -> None:
        start, patience, last_message_at = (
            time.perf_counter(),
            RunningClock(),
            self.service.last_message_at,
        )
        try:
            with self.engine.poll_eagerly(self._handle), self.service.progress:
                while not self.service.progress.wait_for(arrived, CHECK_SECONDS):
                    if self.service.last_message_at != last_message_at:
                        patience, last_message_at = RunningClock(), self.service.last_message_at
                    self._raise_if_stuck(patience.seconds(), what, step)
        finally:
            self.exposed_seconds += time.perf_counter() - start
            trace.record(trace.WAIT_INTER_NODE, start)
        self.engine.check()

    def _raise_if_stuck(self, silent_seconds: float, what: Callable[[], str], step: int) -> None:
        """Raise if the wait cannot end."""
        self.engine.check()
        if self.plan.is_synchronous and self.service.round.pausing is None:
            ended = {
                rank: steps
                for rank, steps in dict(self.service.round.last_steps).items()
                if steps <= step
            }
            if ended:
                rank, steps = next(iter(ended.items()))
                raise unequal_steps(rank, steps, self.rank, step + 1)
        limit = self.plan.exchange.timeout_seconds
        if silent_seconds > limit:
            raise StallError(
                f"other ranks must send a message within {limit:g} s, but none did while rank "
                f"{self.rank} waited for {what()}: {self._late()}; look there, or raise "
                f"Exchange.timeout_seconds",
                code="server-timed-out",
            )

    def _late(self) -> str:
        """Return the late ranks, for an error message."""
        # In a synchronization the other ranks' threads answer by themselves.
        meets = self.service.round.pausing is not None
        absent = (
            [
                rank
                for rank in range(self._topology.world_size)
                if rank not in self.service.round.last_steps
            ]
            if meets
            else []
        )
        return self._topology.liveness.missing(absent)

    def state(self, groups: Values, steps: int) -> dict[str, Any]:
        """Return the state of the served rows, with these values of groups."""
        if self.serves:
            raise CheckpointError(
                "state must be saved while no rank trains, but steps were taken, or the model was "
                "evaluated, since ranks synchronized; call synchronize() on all ranks first",
                code="state-saved-in-training",
            )
        shard = self.service.shard
        return {
            "inner": shard.inner_states(groups),
            "residuals": self.service.compressor.residuals(),
            "norm": self.service.norm.last,
            "share": shard.share(),
            "steps": steps,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the served rows. Collective over the world; blocking."""
        problem, share = None, self.service.shard.share()
        if self.serves:
            problem = CheckpointError(
                "state must be loaded while no rank trains; call synchronize() first",
                code="state-loaded-in-training",
            )
        elif state.get("share") != share:
            problem = CheckpointError(
                f"state must be that of the same rows, {share}, not {state.get('share')}; "
                f"load each rank's own, in a world of the same size",
                code="state-of-other-rows",
            )
        timeout_seconds = self.plan.exchange.timeout_seconds
        self._topology.raise_on_all_ranks(problem, timeout_seconds)
        counts = gather(self._topology, int(state["steps"]), timeout_seconds)
        if self.plan.is_synchronous and min(counts) != max(counts):
            raise CheckpointError(
                f"with staleness=0 all ranks must have taken the same number of steps, but these "
                f"states are of {min(counts)} to {max(counts)}; give the staleness they had",
                code="server-states-differ",
            )
        for source, inner in self.service.shard.optimizers.items():
            inner.load_state_dict(dict(state["inner"][source]))
        self.service.compressor.load_residuals(state.get("residuals", {}))
        self.service.norm.last = state.get("norm")

    def close(self) -> None:
        """Stop the thread and free communicators. Collective over the world; idempotent."""
        sound, served = self.engine.sound, self.serves
        if served:  # ranks trained or evaluated since the last synchronization: drop their messages
            self.engine.give_up()
        self.engine.close()
        _open.discard(self)
        if not (sound and self.engine.stopped) or self.world == load().COMM_NULL:
            return
        timeout_seconds = self.plan.exchange.timeout_seconds
        self._topology.rendezvous("close a daso.ParameterServer", timeout_seconds)
        # With messages in flight, communicators stay open.
        if not any(gather(self._topology, served, timeout_seconds)):
            for comm in (self.world, self._message_comm):
                if comm != load().COMM_NULL:
                    comm.Free()


_open: "weakref.WeakSet[ServerThread]" = weakref.WeakSet()


@atexit.register
def _stop_threads() -> None:
    """Stop the threads before MPI is finalized; not collective: ranks may be missing."""
    for serving in list(_open):
        serving.engine.abandon()
