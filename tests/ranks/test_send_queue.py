"""Messages arrive once, whole, in the order of their urgency."""

import random
import time

import pytest
import torch

from daso.comm.p2p.packets import Messages
from daso.comm.p2p.send_queue import Message, SendQueue

pytestmark = pytest.mark.mpi


@pytest.fixture
def open_queue(topology):
    comm = topology.world_comm.Dup()

    def open_with(packet_bytes):
        ranks = others(comm.Get_rank(), comm.Get_size())
        return SendQueue(dict.fromkeys(ranks, Messages(comm)), packet_bytes)

    yield open_with
    comm.Free()


def run(queue, topology, expected, seconds=20):
    """Move until so many messages came and all have left here; return them by source."""
    found = {rank: [] for rank in range(topology.world_size)}
    end = time.monotonic() + seconds
    while sum(map(len, found.values())) < expected or not queue.idle:
        queue.move()
        for source, message in queue.take():
            found[source].append(message)
        assert time.monotonic() < end, (found, queue.backlog_bytes)
    # What others have posted must not wait for this rank.
    everybody = topology.world_comm.Ibarrier()
    while not everybody.Test():
        queue.move()
    return found


def message(source, to, number):
    made = random.Random(f"{source} {to} {number}")
    size = made.choice([0, 1, 7, 100, 1000, 30_000])
    payload = torch.tensor(bytearray(made.randbytes(size)), dtype=torch.uint8)
    return Message((source, to, number), payload, urgency=made.randrange(5))


@pytest.mark.parametrize("packet_bytes", [1, 64, 1 << 18])
def test_messages_arrive_once_and_whole(open_queue, topology, packet_bytes):
    rank, size = topology.rank, topology.world_size
    count = {1: 3, 64: 8}.get(packet_bytes, 20)
    queue = open_queue(packet_bytes)
    if packet_bytes == 1:
        payload = torch.arange(50, dtype=torch.uint8)
        sent = {
            to: [Message((rank, to, n), payload, n) for n in range(count)]
            for to in others(rank, size)
        }
        theirs = {
            s: [Message((s, rank, n), payload, n) for n in range(count)] for s in others(rank, size)
        }
    else:
        sent = {to: [message(rank, to, n) for n in range(count)] for to in others(rank, size)}
        theirs = {s: [message(s, rank, n) for n in range(count)] for s in others(rank, size)}
    for to, messages in sent.items():
        for one in messages:
            queue.enqueue(to, one)
    found = run(queue, topology, count * (size - 1))
    for source, posted in theirs.items():
        expected = sorted(posted, key=lambda one: one.urgency)
        assert [one.notes for one in found[source]] == [one.notes for one in expected]
        assert all(
            torch.equal(a.payload, b.payload) for a, b in zip(found[source], expected, strict=True)
        )


def others(rank, size):
    return [one for one in range(size) if one != rank]


def test_what_is_needed_sooner_overtakes_what_is_on_its_way(open_queue, topology):
    rank, size = topology.rank, topology.world_size
    queue = open_queue(1000)
    large = Message("large", torch.zeros(200_000, dtype=torch.uint8), urgency=5)
    for to in others(rank, size):
        queue.enqueue(to, large)
    queue.move()
    for to in others(rank, size):
        queue.enqueue(to, Message("small", torch.zeros(10, dtype=torch.uint8), urgency=1))
    found = run(queue, topology, 2 * (size - 1))
    for source in others(rank, size):
        assert [one.notes for one in found[source]] == ["small", "large"]


def test_a_newer_message_takes_the_place_of_one_that_has_not_left(open_queue, topology):
    rank, size = topology.rank, topology.world_size
    queue = open_queue(1000)
    row = torch.zeros(10, dtype=torch.uint8)
    for to in others(rank, size):
        queue.enqueue(to, Message("old", row, covers=frozenset({1, 2})))
        queue.enqueue(to, Message("other", row, covers=frozenset({1, 3})))
        queue.enqueue(to, Message("kept", row))
        queue.enqueue(to, Message("new", row, covers=frozenset({1, 2, 4})))
    found = run(queue, topology, 3 * (size - 1))
    for source in others(rank, size):
        assert sorted(one.notes for one in found[source]) == ["kept", "new", "other"]


def test_backlog_is_what_has_not_left(open_queue, topology):
    rank, size = topology.rank, topology.world_size
    queue = open_queue(1000)
    assert queue.idle
    for to in others(rank, size):
        queue.enqueue(to, Message(None, torch.zeros(5000, dtype=torch.uint8)))
    if size > 1:
        assert queue.backlog_bytes >= 5000
        assert not queue.idle
    run(queue, topology, size - 1)
    assert queue.backlog_bytes == 0


def test_a_few_looks_find_all_messages_that_came(topology):
    comm, size = topology.world_comm.Dup(), topology.world_size
    way = Messages(comm)
    if topology.rank > 0:
        sent = [way.start(0, torch.full((64,), n, dtype=torch.uint8)) for n in range(20)]
        while not all(done() for done in sent):
            time.sleep(0.001)
    everybody = comm.Ibarrier()
    looks, came = 0, {rank: [] for rank in range(1, size)}
    time.sleep(0.1)
    while topology.rank == 0 and looks < 4:
        looks += 1
        for source, packet in way.arrived():
            came[source].append(int(packet[0]))
    if topology.rank == 0:
        assert all(numbers == [*range(20)] for numbers in came.values()), came
    everybody.Wait()
    comm.Free()
