import time

import numpy as np
import pytest
import torch
from expected_errors import raises
from mpi4py import MPI
from worlds import ANY

from daso.comm.allreduce.direct import (
    ReduceScatterAllGather,
    deterministic_allreduce,
    iallreduce,
)
from daso.comm.allreduce.ordered import DeviceContext, PairwiseExchange, window
from daso.comm.allreduce.runners import SequentialAllReduce
from daso.comm.emulation import CopyLink
from daso.comm.engine import Engine
from daso.comm.health.liveness import LivenessProbe
from daso.comm.health.step_watchdog import ControlChannel
from daso.comm.node import shm
from daso.comm.node.shm import SharedWindow, ShmNode
from daso.comm.reduction import CPU, BufferPool, Row
from daso.errors import ExchangeError, StallError, TopologyError
from daso.kernels.codecs import codec_named, exact_codec
from daso.kernels.rows import NOWHERE, FlatTensors
from daso.plan.allreduce_plan import AllReducePlan, Level, direct_plan
from daso.plan.exchange import ADOPT, KEEP
from daso.plan.layout import Span, chunk_parts, split
from daso.train.deltas.shard import DeltaShard, MergeOptions

pytestmark = pytest.mark.mpi


@pytest.fixture
def engine():
    made = Engine(20.0, str)
    yield made
    made.close()


def rows_of_all_ranks(size, numel, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(size)]


def sequential_mean(rows, weights, total):
    result = rows[0] * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        result = result + row * weight
    return result / total


# --- topology ----------------------------------------------------------------------------------


def test_every_rank_is_on_one_node_and_lanes_reach_every_node(topology, rank_info):
    assert sum(rank_info.node_sizes) == rank_info.world_size
    assert topology.node_comm.Get_size() == rank_info.local_size
    assert topology.node_comm.Get_rank() == rank_info.local_rank
    if rank_info.lane is None:
        assert rank_info.local_rank >= min(rank_info.node_sizes)
    else:
        assert topology.lane_comm.Get_size() == rank_info.nodes
        assert topology.lane_comm.Get_rank() == rank_info.node


def test_a_problem_on_one_rank_is_the_same_error_on_all(topology, rank_info):
    last = rank_info.world_size - 1
    problem = None
    if rank_info.rank == last:
        problem = TopologyError("disk must be there, but is not; mount it", code="no-disk")
    with pytest.raises(TopologyError, match="disk must be there") as caught:
        topology.raise_on_all_ranks(problem)
    assert caught.value.code == "no-disk"
    topology.raise_on_all_ranks(None)


def test_same_is_false_everywhere_when_one_rank_differs(topology, rank_info):
    assert topology.equal_on_all_ranks("x")
    assert topology.equal_on_all_ranks(rank_info.rank) == (rank_info.world_size == 1)


def test_node_sizes_that_do_not_add_up_are_refused_on_all_ranks(rank_info):
    from daso.comm.topology import Topology

    with pytest.raises(TopologyError, match="add up to the ranks of the host"):
        Topology(ranks_per_node=(rank_info.world_size, 1))


# --- exchange ----------------------------------------------------------------------------------


def cut(numel, size, chunk):
    """Cut a row as ranks do that exchange directly."""
    return chunk_parts(numel, direct_plan(size).parts, chunk)


def plans(size):
    """Return plans of all kinds for so many ranks."""
    ways = ("scatter", "whole", "ring")
    levels = [(Level(2, first), Level(2, second)) for first in ways for second in ways]
    several = [AllReducePlan(one) for one in levels] if size == 4 else []
    unequal = AllReducePlan((Level(size),), shares=tuple(range(size)))  # rank 0 adds nothing
    several += [unequal] if size > 2 else []
    return [direct_plan(size), AllReducePlan((Level(size, "ring"),)), *several]


@pytest.mark.nodes(*ANY)
@pytest.mark.parametrize("numel", [0, 1, 5, 1000, 10_001])
@pytest.mark.parametrize("chunk", [1_000_000, 333, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_ordered_mean_equals_the_sequential_one_bit_for_bit(
    topology, engine, numel, chunk, dtype
):
    if numel > 1000 and chunk == 7:
        chunk = 2048
    rank_info, size = topology.rank_info, topology.world_size
    rows = rows_of_all_ranks(size, numel, dtype)
    weights = [rank + 1 for rank in range(size)]
    exchange = deterministic_allreduce(
        topology.world_comm, exact_codec(dtype), weights, sum(weights)
    )
    mine = rows[rank_info.rank].clone()
    sent = engine.run(exchange.run(Row(mine), cut(numel, size, chunk)))
    assert torch.equal(mine, sequential_mean(rows, weights, sum(weights)))
    assert isinstance(exchange, PairwiseExchange if size == 2 else ReduceScatterAllGather)
    if numel == 1000 and chunk > numel and size in (2, 4):
        assert sent == {2: 1000, 4: 2 * 3 * 250}[size] * dtype.itemsize


class Late(CopyLink):
    """A device that is not done before this rank has been sent the last of a message."""

    def __init__(self, message):
        super().__init__(1e9)
        self.message = message

    def completion(self):
        return lambda: bool(self.message[-1] == 1)


@pytest.mark.nodes(*ANY)
def test_messages_move_while_a_device_adds(topology, engine):
    world, rank_info = topology.world_comm, topology.rank_info
    received, sent = np.zeros(1 << 24, np.uint8), np.ones(1 << 24, np.uint8)
    peers = (rank_info.rank - 1) % rank_info.world_size, (rank_info.rank + 1) % rank_info.world_size
    requests = [world.Irecv(received, peers[0], 99), world.Isend(sent, peers[1], 99)]
    where = DeviceContext(CPU, Late(received))
    exchange = deterministic_allreduce(
        world, codec_named("fp32"), [1] * rank_info.world_size, rank_info.world_size, where=where
    )
    mine = torch.full((1000,), float(rank_info.rank))
    engine.run(exchange.run(Row(mine), cut(1000, rank_info.world_size, 300)))
    for request in requests:
        request.Wait()
    assert torch.equal(mine, torch.full((1000,), (rank_info.world_size - 1) / 2))


@pytest.mark.nodes(*ANY)
@pytest.mark.parametrize("chunk", [1_000_000, 100])
def test_iallreduce_is_near_the_mean_and_the_same_on_all_ranks(topology, engine, chunk):
    rank_info, size = topology.rank_info, topology.world_size
    rows = rows_of_all_ranks(size, 1003)
    weights = [rank + 1 for rank in range(size)]
    mine = rows[rank_info.rank].clone()
    work = iallreduce(
        topology.world_comm,
        Row(mine),
        chunk_parts(1003, 1, chunk),
        weights[rank_info.rank],
        sum(weights),
    )
    engine.run(work)
    torch.testing.assert_close(mine, sequential_mean(rows, weights, sum(weights)))
    assert topology.equal_on_all_ranks(mine.numpy().tobytes())


@pytest.mark.nodes(*ANY)
def test_iallreduce_keeps_more_chunks_apart_than_are_under_way(topology, engine):
    rank_info, size = topology.rank_info, topology.world_size
    kept, chunks = BufferPool(window(size)), chunk_parts(1100, 1, 100)
    assert len(chunks) > kept.window
    part = DeltaShard(torch.zeros(1100), MergeOptions())
    for seed in (1, 2):
        rows = rows_of_all_ranks(size, 1100, seed=seed)
        expected = sequential_mean([row - part.reference for row in rows], [1] * size, size)
        expected += part.reference
        encode(part, codec_named("fp32"), chunks, rows[rank_info.rank], keeps=True)
        engine.run(iallreduce(topology.world_comm, part, chunks, 1, size, kept))
        torch.testing.assert_close(part.reference, expected)
        # What a merge that keeps local work adds.
        torch.testing.assert_close(part.published, part.reference - rows[rank_info.rank])


def encode(part, codec, chunks, x, *, keeps):
    spans = [span for parts in chunks for span in parts]
    part.encode(codec, spans, FlatTensors([x]), keeps=keeps)
    assert int(part._checks[0]) == NOWHERE


@pytest.mark.nodes(*ANY)
@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8", "int4", "topk"])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_small_wire_never_freezes_a_weight(topology, engine, wire, keeps):
    rank_info, size = topology.rank_info, topology.world_size
    part = DeltaShard(torch.ones(37), MergeOptions())
    part.reference.fill_(1.0)
    x, rounded, chunks = torch.ones(37), {}, cut(37, size, 10)
    exchange = deterministic_allreduce(
        topology.world_comm, codec_named(wire), [1] * size, size, rounded
    )
    dense = deterministic_allreduce(
        topology.world_comm, codec_named("fp32"), [1] * size, size, rounded
    )
    for mean in [exchange] * 100 + [dense] * (wire == "topk"):
        if mean is exchange:
            x = x - 0.001 * (1 + rank_info.rank)
        encode(part, mean.codec, chunks, x, keeps=keeps)
        engine.run(mean.run(part, chunks))
        part.finish()
        part.publish(KEEP if keeps else ADOPT)
        x = x + part.published if keeps else part.published.clone()
    # What is held back goes out with an exact exchange over the same parts.
    if wire == "topk":
        assert part.residual is None
        torch.testing.assert_close(x, part.reference)
    # The reference follows the exact sum to within one rounding of the last delta.
    expected = 1 - 100 * 0.001 * (size + 1) / 2
    torch.testing.assert_close(part.reference, torch.full((37,), expected), atol=3e-4, rtol=0)
    assert topology.equal_on_all_ranks(part.reference.numpy().tobytes())


@pytest.mark.nodes(*ANY)
@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16", "int8", "int4", "topk"])
@pytest.mark.parametrize("keeps", [True, False])
def test_many_rows_in_one_process_get_the_same_bits(topology, engine, wire, keeps):
    for plan in plans(topology.world_size):
        look_for_the_same_bits(topology, engine, codec_named(wire), plan, keeps=keeps)


def look_for_the_same_bits(topology, engine, codec, plan, *, keeps):
    rank, size = topology.rank, topology.world_size
    rows = rows_of_all_ranks(size, 20_001, seed=3)
    weights, chunks = [1 + rank % 2 for rank in range(size)], plan.chunks(20_001, 5000)
    parts = [DeltaShard(torch.empty(20_001), MergeOptions()) for _ in rows]
    mine = DeltaShard(torch.empty(20_001), MergeOptions())
    exchange = deterministic_allreduce(topology.world_comm, codec, weights, sum(weights), plan=plan)
    means = SequentialAllReduce(codec, weights, sum(weights), plan, [{} for _ in rows])
    for _ in range(3):
        encode(mine, codec, chunks, rows[rank], keeps=keeps)
        nbytes = engine.run(exchange.run(mine, chunks))
        for part, row in zip(parts, rows, strict=True):
            encode(part, codec, chunks, row, keeps=keeps)
        everybody = means.run(parts, chunks)
        assert sum(topology.world_comm.allgather(nbytes)) == everybody, plan.name
        same = parts[rank]
        for one in (mine, same):
            one.finish()
        assert torch.equal(mine.reference, same.reference), plan.name
        if keeps:
            assert torch.equal(mine.published, same.published), plan.name
        elif not codec.exact:
            assert torch.equal(mine.residual, same.residual), plan.name


def test_two_exchanges_in_flight_do_not_mix(topology, engine):
    size = topology.world_size
    one, two = (rows_of_all_ranks(size, 500, seed=seed) for seed in (1, 2))
    exchange = deterministic_allreduce(topology.world_comm, codec_named("fp32"), [1] * size, size)
    chunks = cut(500, size, 64)
    mine = [rows[topology.rank].clone() for rows in (one, two)]
    handles = [engine.submit(exchange.run(Row(row), chunks)) for row in mine]
    for handle in reversed(handles):
        engine.wait(handle)
    for row, rows in zip(mine, (one, two), strict=True):
        assert torch.equal(row, sequential_mean(rows, [1] * size, size))


def test_an_error_in_the_engine_surfaces_with_its_cause(engine):
    def broken():
        yield []
        raise OSError("cable cut")

    handle = engine.submit(broken())
    with pytest.raises(ExchangeError, match="cable cut") as caught:
        engine.wait(handle)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(ExchangeError, match="cable cut"):
        engine.check()


@pytest.mark.nodes(*ANY)
def test_a_stalled_exchange_names_who_is_missing(topology):
    engine = Engine(0.2, lambda: "world ranks 7, 9 are asleep")
    request = topology.world_comm.Irecv(np.zeros(1), source=topology.rank, tag=5)

    def never():
        yield [request]

    with pytest.raises(StallError, match="did not: world ranks 7, 9 are asleep; look there"):
        engine.wait(engine.submit(never()))
    topology.world_comm.Send(np.zeros(1), dest=topology.rank, tag=5)
    engine.close()


@pytest.mark.nodes(*ANY)
@pytest.mark.parametrize("lost", [False, True])
def test_who_does_not_answer_is_missing_and_who_waits_is_not(
    topology, rank_info, lost, monkeypatch
):
    """Rank 0 asks; the last rank is busy elsewhere; all others wait, and answer.

    MPI may tell whoever looks first that a connection is lost; others still answer then.
    """
    last = rank_info.world_size - 1
    liveness = LivenessProbe(
        topology.world_comm.Dup, [f"host{rank}" for rank in range(rank_info.world_size)]
    )
    if rank_info.rank == 0:
        arrived, told = liveness._notes.arrived, iter([lost and last > 0])

        def look():
            if next(told, False):
                raise MPI.Exception(MPI.ERR_OTHER)
            return arrived()

        monkeypatch.setattr(liveness._notes, "arrived", look)
        said = liveness.missing()
        who = f"{last} on host host{last}"
        missing = f"no answer from world rank {who}, which hangs or is disconnected"
        assert said == missing if last else said.startswith("every rank answers")
    elif rank_info.rank < last:
        end = time.perf_counter() + 4.0
        while time.perf_counter() < end:
            liveness.answer()
            time.sleep(0.001)
    topology.world_comm.Barrier()
    liveness.answer()  # receives what was sent meanwhile
    topology.world_comm.Barrier()
    liveness.free()
    liveness.free()


def test_a_closed_engine_refuses_work(topology):
    engine = Engine(5.0, str)
    engine.close()
    engine.close()
    with raises("engine-is-closed"):
        engine.submit(iter(()))


# --- node --------------------------------------------------------------------------------------


@pytest.fixture
def node(topology):
    made = ShmNode(topology, 20.0)
    yield made
    made.free()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_buckets_average_in_rank_order_bit_for_bit(topology, node, dtype):
    rank_info, sizes = topology.rank_info, [1, 1000, 4097]
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    spans = [Span(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    buckets = node.row(ends[-1], dtype, len(sizes)).cut(spans)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for round_ in range(3):
        for bucket, size in zip(buckets, sizes, strict=True):
            rows = rows_of_all_ranks(rank_info.local_size, size, dtype, seed=round_)
            bucket.flat.copy_(rows[rank_info.local_rank])
            bucket.mark_ready(split(size, rank_info.local_size))
            bucket.wait_filled()
            assert bucket.reduce() is not None
            bucket.publish(rank_info.local_size)
            bucket.wait()
            wide_rows = [row.to(wide) for row in rows]
            expected = sequential_mean(wide_rows, [1] * len(rows), rank_info.local_size).to(dtype)
            assert torch.equal(bucket.flat, expected)


def test_a_row_is_cut_anew_between_rounds(topology, node):
    rank_info, row = topology.rank_info, node.row(12, torch.float32, 3)
    expected = float(sum(range(rank_info.local_size)))
    for cuts in ([(0, 12)], [(0, 4), (4, 8), (8, 12)], [(0, 12)], [(0, 1), (1, 12)]):
        buckets = row.cut(cuts)
        for _ in range(2):
            row.flat.fill_(rank_info.local_rank)
            for bucket in buckets:
                bucket.mark_ready(split(bucket.flat.numel(), rank_info.local_size))
            for bucket in buckets:
                bucket.wait_filled()
                assert bucket.reduce() is not None
                bucket.publish(1)
            for bucket in buckets:
                bucket.wait()
            assert row.flat.tolist() == [expected] * 12
            topology.node_comm.Barrier()  # all have read it


def test_a_bucket_is_not_added_before_all_ranks_have_filled_theirs(topology, node):
    rank_info = topology.rank_info
    (bucket,) = node.row(8, torch.float32, 1).cut([(0, 8)])
    bucket.flat.fill_(rank_info.local_rank)
    if rank_info.local_rank == 0:
        bucket.mark_ready(split(8, rank_info.local_size))
        early = bucket.reduce()
        topology.node_comm.Barrier()
        assert (early is None) == (rank_info.local_size > 1)
    else:
        topology.node_comm.Barrier()
        bucket.mark_ready(split(8, rank_info.local_size))
    bucket.wait_filled()
    bucket.reduce()
    bucket.publish(rank_info.local_size)
    bucket.wait()
    assert bucket.flat.tolist() == [(rank_info.local_size - 1) / 2] * 8


def test_shares_show_each_part_to_the_whole_node(topology, node):
    rank_info = topology.rank_info
    spans = split(Span(0, 11), rank_info.lanes)
    share = node.share(spans, torch.float32)
    for round_ in range(3):
        share.wait_released()
        share.own.fill_(10 * round_ + rank_info.local_rank)
        share.publish()
        share.wait()
        expected = [
            10 * round_ + owner for owner, span in enumerate(spans) for _ in range(span.numel)
        ]
        assert torch.cat(share.parts).tolist() == expected
        share.release()


def test_a_rank_that_does_not_come_is_named(topology):
    rank_info = topology.rank_info
    node = ShmNode(topology, 0.3)
    (bucket,) = node.row(4, torch.float32, 1).cut([(0, 4)])
    if rank_info.local_size > 1 and rank_info.local_rank == 0:
        bucket.mark_ready(split(4, rank_info.local_size))
        late = [rank for rank, node in enumerate(rank_info.node_of) if node == rank_info.node][1:]
        with pytest.raises(StallError, match=", ".join(map(str, late))):
            bucket.wait_filled()
    topology.node_comm.Barrier()
    node.free()
    node.free()


def test_a_note_that_nobody_read_does_not_reach_the_next_communicator(topology, rank_info):
    notes = ControlChannel(topology.world_comm.Dup)
    for rank in notes.others:
        notes.send(rank, 1, rank_info.rank, 7)
        notes.send(rank, 2)
    read = []
    while rank_info.world_size > 1 and not read:  # one or more; the rest stays
        read += [note for note, _ in zip(notes.arrived(), [0], strict=False)]
    assert all(source in notes.others for source, _, _ in read)
    notes.free()
    notes.free()
    following = topology.world_comm.Dup()
    following.Barrier()
    time.sleep(0.05)
    found = following.Iprobe()
    following.Barrier()
    following.Free()
    assert not found


@pytest.mark.parametrize("gpus", [0, 1, 2, 4])
def test_ranks_of_a_host_take_its_gpus_in_turn(topology, rank_info, monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    # All ranks are on one host here, whatever nodes they pretend to be.
    expected = f"cuda:{rank_info.rank % gpus}" if gpus else "cpu"
    assert str(topology.device) == expected


@pytest.mark.nodes((2,), (3,), (4,), (2, 2))
def test_missing_shared_memory_is_refused_before_use(topology, monkeypatch):
    """MPI makes files of any size; who writes beyond what there is dies of SIGBUS."""
    size = topology.local_size
    node = topology.world_comm.Split(topology.node, topology.local_rank)
    monkeypatch.setattr(shm, "free_bytes", lambda: size * 4096 - 1)
    with pytest.raises(TopologyError, match=r"enlarge /dev/shm \(containers: --shm-size\)"):
        SharedWindow(node, 4096)
    monkeypatch.setattr(shm, "free_bytes", lambda: size * 4096)
    SharedWindow(node, 4096).free()
    monkeypatch.undo()
    assert shm.free_bytes() > 4096
    monkeypatch.setattr(shm, "SHM_DIRECTORY", "/nowhere")
    assert shm.free_bytes() is None
    SharedWindow(node, 4096).free()
    node.Free()
