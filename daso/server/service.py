"""The thread that serves one rank's rows: takes in gradients, publishes rows, receives others'.

It runs as work of an `Engine`, from the first forward after a meeting of all ranks to the next
meeting, and never touches live parameters: what it receives waits beside them until the
training thread takes it up.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from daso import trace
from daso.comm.device.staging import DeviceStaging
from daso.comm.engine import Engine, Work, WorkHandle
from daso.comm.mpi import load
from daso.comm.p2p.packets import routes
from daso.comm.p2p.send_queue import HEAD_BYTES, Message, SendQueue
from daso.comm.topology import Topology
from daso.errors import ExchangeError, StallError
from daso.server.compression import PushCompressor
from daso.server.partition import HOST, Partition
from daso.server.plan import Plan, is_fresh
from daso.server.shard import Contribution, ParameterShard, Rows, first_rows, rows_in
from daso.server.staging import Staging, sound

__all__ = ["STEPS_WAITING", "ServerThread"]

GRADIENTS, ROWS, LAST_STEP, LAST_ROWS = range(4)  # what messages are about
STEPS_WAITING = 2  # whose gradients may wait here to be taken in
AHEAD = 1  # steps whose gradients need not have been taken in where nobody waits for others
LATEST = sys.maxsize  # urgency of what is to leave after everything else
NO_UPDATE = Rows(0, 0.0, 0, 0.0, ())  # of others, from whom nothing came
LOOK_SECONDS = 0.1  # how often who waits looks whether something failed


@dataclass(slots=True)
class _Round:
    """What happened since all ranks met."""

    clocks: list[float]  # of this rank's rows, as all were told
    step: int = 0  # that this rank takes
    last_steps: dict[int, int] = field(default_factory=dict)  # of ranks that take no more
    pausing: int | None = None  # this rank's last step, before it is told to all
    over: set[int] = field(default_factory=set)  # ranks whose last rows came


class ServerThread:
    """One rank's side of the server.

    Args:
        topology: Who is where.
        shares: Which rows are whose.
        plan: How gradients are taken in.
        server: This rank's rows.
        copies: Between the device of the model and its host; None: gradients are packed on the
            host, and who packs them waits for a device.

    Collective over the world; blocking.
    """

    def __init__(
        self,
        topology: Topology,
        shares: Partition,
        plan: Plan,
        server: ParameterShard,
        copies: DeviceStaging | None = None,
    ) -> None:
        self.plan, self.server, self.shares = plan, server, shares
        self.copies = copies
        self.device = HOST if copies is None else shares.named[0][1].device  # of packed gradients
        self._staging = None if copies is None else Staging(copies)
        self.compressor = PushCompressor(shares, plan.wire)
        self.rank, self.ranks = topology.rank, topology.world_size
        self._owned = shares.owned(self.rank)
        self._topology = topology
        self.world, self._message_comm = topology.world_comm.Dup(), topology.world_comm.Dup()
        most = plan.exchange.chunk_bytes + HEAD_BYTES
        ways, self._ways = routes(topology, self._message_comm, plan.transport, most)
        self.mailbox = SendQueue(ways, plan.exchange.chunk_bytes)
        liveness = topology.liveness
        self.engine = Engine(
            plan.exchange.timeout_seconds,
            liveness.missing,
            liveness.answer,
            name="daso-server",
            kind=None,
        )
        # Of each layer, by owner: the version that was taken up last, and what came since; of
        # owners that do not wait for this rank more than one may have come. All start alike.
        first = first_rows(server)
        self._rows = [
            {owner: deque([first.get(layer, NO_UPDATE)]) for owner in owners}
            for layer, owners in enumerate(shares.owners)
        ]
        self.exposed_seconds = 0.0
        self._news = threading.Condition()
        self._sign_at = time.perf_counter()  # when somebody was heard of last
        self._given: deque[Contribution] = deque()  # by the training thread
        self._handle: WorkHandle[None] | None = None
        self.round = _Round([0.0] * len(shares.layers))

    # --- by the training thread --------------------------------------------------------------

    def go_on(self) -> None:
        """Serve, if that is not done already. Does not block."""
        if self._handle is None:
            self._handle = self.engine.submit(self._serve())

    @property
    def serves(self) -> bool:
        """Whether the thread is at work: this rank's rows may change."""
        return self._handle is not None

    def give(self, owner: int, contribution: Contribution, finite: torch.Tensor) -> None:
        """Hand over gradients; does not block.

        Args:
            owner: To whom.
            contribution: Its row and base lie on `device`; nobody else writes to them.
            finite: Of each of its layers, whether its gradient is (layers,), there.
        """
        urgency = self._urgency(self.round.step + 1, contribution.layers)
        if self._staging is None:
            self._post(owner, urgency, contribution, finite)
        else:
            self._staging.begin(owner, urgency, contribution, finite)

    def _post(
        self, owner: int, urgency: int, contribution: Contribution, finite: torch.Tensor
    ) -> None:
        """Let gradients leave that are on the host; those of this rank's rows stay."""
        one = sound(self.shares, owner, contribution, finite)
        payload = self.compressor.encode(owner, one.layers, one.has, one.row)
        if owner == self.rank:
            # As others' are: what the wire loses is part of the next.
            row = self.compressor.decode(owner, one.layers, payload)
            self._given.append(replace(one, row=row))
            return
        notes = (GRADIENTS, one.step, one.layers, one.has, one.read, one.values)
        self.mailbox.post(owner, Message(notes, payload, urgency))

    @property
    def backlog_bytes(self) -> int:
        """Bytes that were given and have not left, to the rank to which there are most."""
        staged = 0 if self._staging is None else self._staging.backlog_bytes()
        return staged + self.mailbox.backlog_bytes

    def pinned(self, row: torch.Tensor) -> torch.Tensor:
        """Return what holds a row's values, and is copied to the device while others go on."""
        if self.copies is None:
            return row
        copy = self.copies.memory(row.nbytes).view(row.dtype).view(row.shape)
        return copy.copy_(row)

    def wait_for(self, layer: int, step: int) -> dict[int, Rows]:
        """Return a layer's rows by owner, fresh enough for a step.

        Blocks as far as the bound on staleness says.
        """
        bound = self.plan.staleness

        def late() -> list[int]:
            rows = self.last_rows(layer)
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
        return {owner: self._take(rows, step) for owner, rows in self._rows[layer].items()}

    def _take(self, versions: deque[Rows], step: int) -> Rows:
        """Return the newest version, or where all go together that of the step."""
        if not self.plan.together:
            return versions[-1]
        while versions[0].clock < step:
            versions.popleft()
        return versions[0]

    def skip(self, layer: int, step: int) -> None:
        """Forget versions of a layer that a step had no use for; the newest stays."""
        if self.plan.together:
            for versions in self._rows[layer].values():
                while len(versions) > 1 and versions[0].clock < step:
                    versions.popleft()

    def last_rows(self, layer: int) -> dict[int, Rows]:
        """Return a layer's newest rows by owner."""
        return {owner: versions[-1] for owner, versions in self._rows[layer].items()}

    def wait_for_room(self, most_bytes: int) -> None:
        """Block until no more bytes than these wait to leave, and gradients here to be taken in."""

        def is_room() -> bool:
            most = STEPS_WAITING * len(self.shares.layers)
            return self.backlog_bytes <= most_bytes and len(self._given) <= most

        if not is_room():
            self._wait(is_room, lambda: "a free link")

    def meet(self, steps: int) -> None:
        """Let all gradients be taken in and all rows come; nobody serves afterwards.

        Collective over the world; blocking.
        """
        self.go_on()
        handle = self._handle
        assert handle is not None
        self.round.pausing = steps
        self._wait(lambda: self._is_over() or handle.done(), lambda: "all ranks' last rows")
        self.engine.wait(handle)
        self.engine.run(self._barrier())  # before anybody begins anew
        self.server.begin()
        for rows in chain.from_iterable(layer.values() for layer in self._rows):
            last = rows[-1]
            rows.clear()
            rows.append(replace(last, clock=0.0, taken_in=0.0))
        self._handle, self.round = None, _Round([0.0] * len(self.shares.layers))

    def _barrier(self) -> Work[None]:
        yield [self.world.Ibarrier()]

    def _wait(self, arrived: Callable[[], bool], what: Callable[[], str], step: int = 0) -> None:
        start = time.perf_counter()
        try:
            with self.engine.poll_eagerly(self._handle), self._news:
                while not self._news.wait_for(arrived, LOOK_SECONDS):
                    self._look(start, what, step)
        finally:
            self.exposed_seconds += time.perf_counter() - start
            trace.record(trace.WAIT_INTER_NODE, start)
        self.engine.check()

    def _look(self, start: float, what: Callable[[], str], step: int) -> None:
        """Raise where waiting is in vain."""
        self.engine.check()
        if self.plan.together and self.round.pausing is None:
            gone = {
                rank: steps for rank, steps in dict(self.round.last_steps).items() if steps <= step
            }
            if gone:
                rank, steps = next(iter(gone.items()))
                raise ExchangeError(_uneven(rank, steps, self.rank, step + 1))
        limit = self.plan.exchange.timeout_seconds
        if time.perf_counter() - max(start, self._sign_at) > limit:
            raise StallError(
                f"something must be heard of other ranks within {limit:g} s, but nothing was while "
                f"rank {self.rank} waited for {what()}: {self._late()}; look there, or raise "
                f"Exchange.timeout_seconds"
            )

    def _late(self) -> str:
        """Return who is late: for an error."""
        meets = self.round.pausing is not None  # and the others' threads answer for them
        absent = (
            [rank for rank in range(self.ranks) if rank not in self.round.last_steps]
            if meets
            else []
        )
        return self._topology.liveness.missing(absent)

    def close(self) -> None:
        """Stop the thread and give communicators back. Collective over the world; idempotent."""
        if self.serves:  # ranks did not meet: what is under way ends here
            self.engine.give_up()
        if self.engine.close() and self.world != load().COMM_NULL:
            self._topology.rendezvous(
                "close a daso.ParameterServer", self.plan.exchange.timeout_seconds
            )
            for way in self._ways:
                way.free()
            for comm in (self.world, self._message_comm):
                if comm != load().COMM_NULL:
                    comm.Free()

    # --- by the thread that serves -----------------------------------------------------------

    def _serve(self) -> Work[None]:
        while not self._is_over():
            yield self._stirs
            changed = []
            for staged in () if self._staging is None else self._staging.take():
                self._post(staged.owner, staged.urgency, staged.contribution, staged.finite)
            for source, message in self.mailbox.take():
                changed.append((source, self._open(source, message)))
                self._sign_at = time.perf_counter()
            for _ in range(len(self._given)):  # no more: others wait too
                mine = self.server.contribute(self._given.popleft())
                changed.append((self.rank, mine))
            self._publish_changes(changed)
            self._go_towards_the_end()
            with self._news:
                self._news.notify_all()

    def _stirs(self) -> bool:
        return (
            self.mailbox.move()
            or bool(self._given)
            or (self._staging is not None and self._staging.came())
            or self._last_step() is not None
            or self._is_over()
            or (self._is_uneven() and self.mailbox.idle)
        )

    def _last_step(self) -> int | None:
        """Return this rank's last step, if it is to be told: all before it was taken in."""
        pausing = self.round.pausing  # read first: what was given was given before the pause
        if self._given or self._staging or self.rank in self.round.last_steps:
            return None
        return pausing

    def _is_uneven(self) -> bool:
        """Return whether all ranks are told to have taken their last step, and not the same."""
        steps = self.round.last_steps.values()
        return self.plan.together and len(steps) == self.ranks and len(set(steps)) > 1

    def _open(self, source: int, message: Message) -> Sequence[int]:
        """Take in a message; return layers of this rank that have a new version."""
        about, *notes = message.notes
        if about == GRADIENTS:
            step, layers, has, read, values = notes
            start = time.perf_counter()
            row = self.compressor.decode(self.rank, layers, message.payload)
            contribution = Contribution(source, step, layers, has, read, values, row)
            changed = self.server.contribute(contribution)
            trace.record(trace.SUMS, start, key=step)
            return changed
        if about == ROWS:
            layers, versions = notes
            row = self.pinned(message.payload)
            self._keep(source, rows_in(self.shares, source, layers, versions, row))
        elif about == LAST_STEP:
            return self._note_last(source, *notes)
        else:
            self.round.over.add(source)
        return ()

    def _keep(self, owner: int, rows: dict[int, Rows]) -> None:
        for layer, one in rows.items():
            versions = self._rows[layer][owner]
            if self.plan.together:
                versions.append(one)  # in their order, as they were sent
            elif (one.version, one.clock) >= (versions[-1].version, versions[-1].clock):
                versions.append(one)
                versions.popleft()

    def _note_last(self, rank: int, steps: int) -> Sequence[int]:
        """Note that a rank takes no more steps; return layers whose clock this changes."""
        self.round.last_steps[rank] = steps
        if self.plan.together or rank not in self.server.contributors:
            return ()
        self.server.finish(rank)
        # Where nobody waits for a clock, the last rows bring all.
        return () if self.plan.staleness is None else self._owned

    def _publish_changes(self, changed: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Send new versions to those who need them: who brought the gradient, or all.

        A rank takes up a layer once in a step. Where nobody waits, the answer to its gradient is
        what it takes up in its next step; what comes between would only fill the link.
        """
        to: dict[int, set[int]] = {}
        for source, layers in changed:
            for layer in layers:
                for rank in (self.rank, *self._in_need(source, layer)):
                    to.setdefault(rank, set()).add(layer)
        alike: dict[frozenset[int], list[int]] = {}
        for rank, mine in to.items():
            alike.setdefault(frozenset(mine), []).append(rank)
        for which, ranks in alike.items():
            self._publish(sorted(which), ranks)

    def _in_need(self, source: int, layer: int) -> Iterable[int]:
        """Return the ranks that need a version which a rank's gradient has made."""
        everybody, bound = range(self.ranks), self.plan.staleness
        if self.plan.together or self.server.contributors == (self.rank,):
            return everybody
        if bound is None:
            return (source,)
        before, self.round.clocks[layer] = self.round.clocks[layer], self.server.clock(layer)
        if self.round.clocks[layer] > before:
            return everybody  # somebody may be waiting for that
        # Where the others are close behind, theirs will bring it.
        return (source,) if self.server.ahead(source, layer) > 1 else ()

    def _publish(self, layers: Sequence[int], ranks: Sequence[int]) -> None:
        """Let some ranks have this rank's rows of layers."""
        if not self.plan.together:
            self._send_rows(layers, ranks, self.round.step + 1)
            return
        steps: dict[int, list[int]] = {}  # each version is taken up, in its order
        for layer in layers:
            steps.setdefault(int(self.server.clock(layer)), []).append(layer)
        for step, mine in sorted(steps.items()):
            self._send_rows(mine, ranks, step)

    def _send_rows(self, layers: Sequence[int], ranks: Sequence[int], step: int) -> None:
        row, urgency = self.server.packed(layers), self._urgency(step, layers)
        # Where nobody goes in step the newest is as good as all.
        covers = frozenset(() if self.plan.together else layers)
        for rank in ranks:
            about = [self.server.about(layer, rank) for layer in layers]
            if rank == self.rank:
                self._keep(rank, rows_in(self.shares, rank, layers, about, self.pinned(row)))
            else:
                notes = (ROWS, tuple(layers), about)
                self.mailbox.post(rank, Message(notes, row, urgency, covers))

    def _urgency(self, step: int, layers: Sequence[int]) -> int:
        """Return how soon layers are needed that a step begins with: those of an earlier first."""
        return step * len(self.shares.layers) + min(layers)

    def _go_towards_the_end(self) -> None:
        if (last := self._last_step()) is not None:
            self._tell_all((LAST_STEP, last), LATEST - 1)
            self._publish_changes([(self.rank, self._note_last(self.rank, last))])
        if self._is_uneven():
            if self.mailbox.idle:  # all others know it too
                fewest, most = (
                    find(self.round.last_steps, key=self.round.last_steps.__getitem__)
                    for find in (min, max)
                )
                raise ExchangeError(
                    _uneven(
                        fewest, self.round.last_steps[fewest], most, self.round.last_steps[most]
                    )
                )
        elif len(self.round.last_steps) == self.ranks and self.rank not in self.round.over:
            if self._owned and not self.plan.together:  # where everybody has every version
                self._publish(self._owned, range(self.ranks))
            self._tell_all((LAST_ROWS,), LATEST)
            self.round.over.add(self.rank)

    def _tell_all(self, notes: tuple[int, ...], urgency: int) -> None:
        for rank in range(self.ranks):
            if rank != self.rank:
                self.mailbox.post(
                    rank, Message(notes, torch.empty(0, dtype=torch.uint8, device="cpu"), urgency)
                )

    def _is_over(self) -> bool:
        return len(self.round.over) == self.ranks and self.mailbox.idle


def _uneven(rank: int, steps: int, other: int, others_steps: int) -> str:
    return (
        f"every rank must take the same number of steps with staleness=0, but rank {rank} took "
        f"{steps} and rank {other} is in number {others_steps}; give every rank the same number of "
        f"batches, or allow staleness"
    )
