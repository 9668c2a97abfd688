"""A signal on one rank ends the loop on all of them after the same batch."""

import os
import signal
import sys
import time

import pytest
import torch
from worlds import ANY

from daso.checkpoint.preemption import CHECKPOINTED, StopRequest
from daso.comm.control import AsyncMaxReduce, gather
from daso.errors import StallError
from daso.slurm.rank_entry import Remember

pytestmark = pytest.mark.mpi


def steps_until_told(stop, *, signal_at, mine, most=2000):
    for step in range(1, most):
        if mine and step == signal_at:
            os.kill(os.getpid(), signal.SIGUSR1)
        if number := stop.after_step():
            return step, number
    return None


@pytest.mark.parametrize("signal_at", [1, 2, 3, 100])
def test_all_ranks_hear_after_the_same_batch_what_one_was_told(topology, rank_info, signal_at):
    with StopRequest(topology) as stop:
        told = steps_until_told(
            stop, signal_at=signal_at, mine=rank_info.rank == rank_info.world_size - 1
        )
    assert told is not None
    assert told[1] is signal.SIGUSR1
    assert signal_at < told[0] <= signal_at + 2 * 64
    assert topology.equal_on_all_ranks(told[0])


def test_ranks_of_any_pace_stop_together_and_soon(topology, rank_info):
    with StopRequest(topology) as stop:
        for step in range(1, 400):
            time.sleep(0.002 * (rank_info.rank + 1))
            if rank_info.rank == 0 and step == 5:
                os.kill(os.getpid(), signal.SIGUSR1)
            if stop.after_step():
                break
    assert step <= 5 + 2 * 64
    assert topology.equal_on_all_ranks(step)


def test_without_a_signal_nothing_stops_and_the_handlers_come_back(topology):
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopRequest(topology)
    assert signal.getsignal(signal.SIGUSR1) != before
    assert steps_until_told(stop, signal_at=0, mine=False, most=300) is None
    stop.close()
    stop.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_signal_that_nobody_can_listen_to_leaves_the_others_as_they_were(topology):
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(OSError, match="Invalid argument"):
        StopRequest(topology, signals=(signal.SIGUSR1, signal.SIGKILL))
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_signal_that_came_before_anybody_listened_counts(topology, rank_info):
    before = signal.signal(signal.SIGUSR1, Remember())
    try:
        if rank_info.rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        with StopRequest(topology) as stop:
            assert steps_until_told(stop, signal_at=0, mine=False) == (1, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_handlers_come_back_after_an_error_too(topology):
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopRequest(topology)
    with pytest.raises(ZeroDivisionError), stop:
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGUSR1) == before
    stop.close()


@pytest.mark.nodes(*ANY)
def test_a_vote_gives_the_largest_numbers_and_waits_no_longer_than_told(topology, rank_info):
    vote = AsyncMaxReduce(topology, timeout_seconds=0.3)
    for number in range(3):
        vote.start([rank_info.rank + number, -rank_info.rank])
        assert vote.result() == [rank_info.world_size - 1 + number, 0]
    if rank_info.world_size > 1 and rank_info.rank > 0:
        vote.start([0.0])
        with pytest.raises(StallError, match="no answer from world rank 0 on host"):
            vote.result()
    topology.world_comm.Barrier()
    if rank_info.world_size > 1:
        if rank_info.rank == 0:  # the others have given up
            vote.start([0.0])
        vote.result()
    vote.free()


@pytest.mark.nodes(*ANY)
def test_everyones_values_or_who_did_not_come(topology, rank_info):
    for length in (0, 1, 1000):  # values of all sizes
        mine = (rank_info.rank, "x" * length * rank_info.rank)
        everyones = [(rank, "x" * length * rank) for rank in range(rank_info.world_size)]
        assert gather(topology, mine, 5.0) == everyones
    if rank_info.rank > 0:
        with pytest.raises(StallError, match="no answer from world rank 0 on host"):
            gather(topology, rank_info.rank, 0.3)
    topology.world_comm.Barrier()
    if rank_info.rank == 0:  # the others have given up; what they began ends here
        others = torch.empty(rank_info.world_size, dtype=torch.int64)
        topology.world_comm.Iallgather(torch.tensor([1]).numpy(), others.numpy()).Wait()


def test_who_saved_first_waits_for_the_others_to_leave(topology, rank_info):
    """Under `-m mpi4py` an exit code ends all ranks at once, those that still save as well."""
    saved = 0.0
    with pytest.raises(SystemExit) as caught, StopRequest(topology) as stop:
        while True:
            if rank_info.rank == 0:
                os.kill(os.getpid(), signal.SIGUSR1)
            if stop.after_step():
                time.sleep(0.3 * rank_info.rank)
                saved = time.time()
                sys.exit(CHECKPOINTED)
    left = time.time()
    assert caught.value.code == CHECKPOINTED
    assert left >= max(gather(topology, saved, 60.0))


@pytest.mark.parametrize("error", [SystemExit(1), SystemExit(), KeyboardInterrupt()])
def test_who_leaves_for_another_reason_waits_for_nobody(topology, rank_info, error):
    if rank_info.rank == 0:
        with pytest.raises(type(error)), StopRequest(topology) as stop:
            raise error
    else:
        stop = StopRequest(topology)
    stop.close()
