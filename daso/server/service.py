"""The training thread's side of the thread that serves one rank's rows.

The thread runs as work of an `Engine`, from the first forward after a meeting of all ranks to the
next meeting.
"""

import time
from collections.abc import Callable

from daso import trace
from daso.comm.collectives import gather
from daso.comm.device.staging import DeviceStaging
from daso.comm.engine import Engine, Work, WorkHandle
from daso.comm.health.patience import Patience
from daso.comm.mpi import load
from daso.comm.p2p.packets import routes
from daso.comm.p2p.send_queue import HEAD_BYTES, SendQueue
from daso.comm.topology import Topology
from daso.errors import ExchangeError, StallError
from daso.server.partition import HOST, Partition
from daso.server.plan import Plan, is_fresh
from daso.server.shard import ParameterShard, Rows
from daso.server.shard_server import ShardServer, uneven

__all__ = ["STEPS_WAITING", "ServerThread"]

STEPS_WAITING = 2  # whose gradients may wait here to be taken in
AHEAD = 1  # steps whose gradients need not have been taken in where nobody waits for others
LOOK_SECONDS = 0.1  # how often who waits looks whether something failed


class ServerThread:
    """The thread of one rank's side of the server.

    Args:
        topology: Who is where.
        shares: Which rows are whose.
        plan: How gradients are taken in.
        shard: This rank's rows.
        copies: Between the device of the model and its host; None: gradients are packed on the
            host, and who packs them waits for a device.

    Collective over the world; blocking.
    """

    def __init__(
        self,
        topology: Topology,
        shares: Partition,
        plan: Plan,
        shard: ParameterShard,
        copies: DeviceStaging | None = None,
    ) -> None:
        self.plan, self.rank, self._topology = plan, topology.rank, topology
        self.device = HOST if copies is None else shares.named[0][1].device  # of packed gradients
        self.world, self._message_comm = topology.world_comm.Dup(), topology.world_comm.Dup()
        most = plan.exchange.chunk_bytes + HEAD_BYTES
        ways, self._ways = routes(topology, self._message_comm, plan.transport, most)
        queue = SendQueue(ways, plan.exchange.chunk_bytes)
        self.service = ShardServer(topology.rank, shares, plan, shard, queue, copies)
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

    def go_on(self) -> None:
        """Serve, if that is not done already. Does not block."""
        if self._handle is None:
            self._handle = self.engine.submit(self.service.serve())

    @property
    def serves(self) -> bool:
        """Whether the thread is at work: this rank's rows may change."""
        return self._handle is not None

    def wait_for(self, layer: int, step: int) -> dict[int, Rows]:
        """Return a layer's rows by owner, fresh enough for a step.

        Blocks as far as the bound on staleness says.
        """
        bound = self.plan.staleness

        def late() -> list[int]:
            rows = self.service.rows.newest(layer)
            found = [one.behind for one in rows.values() if not is_fresh(one.clock, step, bound)]
            if self.plan.answered:
                found += [owner for owner, one in rows.items() if one.taken_in < step - AHEAD]
            if self.plan.whole and rows[self.rank].clock < step:
                # Its next gradient starts from what it computes with: with its last one in it.
                found.append(self.rank)
            return found

        def who() -> str:
            ranks = ", ".join(map(str, sorted(set(late()))))
            return f"what world rank {ranks} makes of step {step}"

        if late():
            self._wait(lambda: not late(), who, step)
        return self.service.rows.take(layer, step)

    def wait_for_room(self, most_bytes: int) -> None:
        """Block until no more bytes than these wait to leave, and gradients here to be taken in."""
        service = self.service

        def is_room() -> bool:
            most = STEPS_WAITING * len(service.shares.layers)
            return service.backlog_bytes <= most_bytes and len(service.given) <= most

        if not is_room():
            self._wait(is_room, lambda: "a free link")

    def meet(self, steps: int) -> None:
        """Let all gradients be taken in and all rows come; nobody serves afterwards.

        Collective over the world; blocking.
        """
        self.go_on()
        handle = self._handle
        assert handle is not None
        self.service.round.pausing = steps
        self._wait(lambda: self.service.is_over() or handle.done(), lambda: "all ranks' last rows")
        self.engine.wait(handle)
        self.engine.run(self._barrier())  # before anybody begins anew
        self.service.shard.begin()
        self.service.rows.begin()
        self.service.begin()
        self._handle = None

    def _barrier(self) -> Work[None]:
        yield [self.world.Ibarrier()]

    def _wait(self, arrived: Callable[[], bool], what: Callable[[], str], step: int = 0) -> None:
        start, patience, heard_at = time.perf_counter(), Patience(), self.service.heard_at
        try:
            with self.engine.poll_eagerly(self._handle), self.service.news:
                while not self.service.news.wait_for(arrived, LOOK_SECONDS):
                    if self.service.heard_at != heard_at:
                        patience, heard_at = Patience(), self.service.heard_at
                    self._look(patience.seconds(), what, step)
        finally:
            self.exposed_seconds += time.perf_counter() - start
            trace.record(trace.WAIT_INTER_NODE, start)
        self.engine.check()

    def _look(self, silent_seconds: float, what: Callable[[], str], step: int) -> None:
        """Raise where waiting is in vain."""
        self.engine.check()
        if self.plan.together and self.service.round.pausing is None:
            gone = {
                rank: steps
                for rank, steps in dict(self.service.round.last_steps).items()
                if steps <= step
            }
            if gone:
                rank, steps = next(iter(gone.items()))
                raise ExchangeError(uneven(rank, steps, self.rank, step + 1))
        limit = self.plan.exchange.timeout_seconds
        if silent_seconds > limit:
            raise StallError(
                f"something must be heard of other ranks within {limit:g} s, but nothing was while "
                f"rank {self.rank} waited for {what()}: {self._late()}; look there, or raise "
                f"Exchange.timeout_seconds"
            )

    def _late(self) -> str:
        """Return who is late: for an error."""
        meets = self.service.round.pausing is not None  # and the others' threads answer for them
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

    def close(self) -> None:
        """Stop the thread and give communicators back. Collective over the world; idempotent."""
        sound, served = self.engine.sound, self.serves
        if served:  # some rank trained, or evaluated, since all met: what is under way ends here
            self.engine.give_up()
        self.engine.close()
        if not (sound and self.engine.stopped) or self.world == load().COMM_NULL:
            return
        timeout_seconds = self.plan.exchange.timeout_seconds
        self._topology.rendezvous("close a daso.ParameterServer", timeout_seconds)
        # Where something is under way still, communicators stay.
        if not any(gather(self._topology, served, timeout_seconds)):
            for way in self._ways:
                way.free()
            for comm in (self.world, self._message_comm):
                if comm != load().COMM_NULL:
                    comm.Free()
