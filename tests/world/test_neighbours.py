"""Copies in the memory of hosts: everything is back where one of two neighbours is left."""

import errno
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import PerRank

from daso.checkpoint import kept_files, neighbours
from daso.checkpoint.kept_files import keepers
from daso.checkpoint.neighbours import NeighbourCopies
from daso.errors import CheckpointError

CUTS = [(2, 1), (1, 1), (2, 2), (1, 1, 1), (3, 1), (2,)]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr("daso.comm.collectives.PIECE_BYTES", 1000)


@pytest.fixture
def hosts(shared_folder):
    """The memory of each node's host."""
    return shared_folder


@pytest.fixture
def copies(hosts):
    return PerRank(lambda topology: kept_by(hosts, topology))


def kept_by(hosts, topology, node=None):
    folder = hosts / f"host-{topology.node if node is None else node}" / "run"
    return NeighbourCopies(folder, topology, timeout_seconds=60)


def payload(topology, step):
    return {"weights": torch.linspace(step, topology.rank + 1, 1000), "rank": topology.rank}


def assert_is(loaded, topology, step, *, saved_by=None):
    rank = topology.rank if saved_by is None else saved_by
    assert (loaded.step, loaded.same_world) == (step, saved_by is None)
    assert loaded.payload["rank"] == rank
    assert torch.equal(loaded.payload["weights"], torch.linspace(step, rank + 1, 1000))


def on_rank_0(topology, do):
    if topology.rank == 0:
        do()
    topology.world_comm.Barrier()


@pytest.mark.nodes(*CUTS)
def test_everyones_is_back_where_no_or_any_one_host_is_lost(topology, hosts, copies):
    for step, lost in enumerate((None, *range(topology.nodes)), 1):
        if lost is not None and topology.nodes == 1:
            continue  # whose neighbour is itself
        copies.save(step, payload(topology, step))
        topology.world_comm.Barrier()
        kept = {path.parent.name for path in hosts.rglob("*.pt")}
        assert kept == {f"step-{step:08d}"}, "the step before is not needed any more"
        topology.world_comm.Barrier()
        on_rank_0(topology, partial(shutil.rmtree, hosts / f"host-{lost}", ignore_errors=True))
        assert copies.exist()
        assert_is(copies.load(), topology, step)
        topology.world_comm.Barrier()
    copies.remove()
    topology.world_comm.Barrier()
    assert not copies.exist()
    assert copies.load() is None


@pytest.mark.nodes((1, 1, 1))
@pytest.mark.real_mpi
def test_two_hosts_that_follow_each_other_are_one_too_many(topology, hosts, copies):
    copies.save(1, payload(topology, 1))
    on_rank_0(topology, lambda: [shutil.rmtree(hosts / f"host-{one}") for one in (1, 2)])
    assert copies.exist()
    assert copies.load() is None


@pytest.mark.nodes(*CUTS[:3])
def test_a_damaged_copy_is_taken_from_the_neighbour(topology, hosts, copies):
    copies.save(3, payload(topology, 3))
    (mine,) = (hosts / f"host-{topology.node}").rglob(f"rank-{topology.rank:05d}-by-*.pt")
    with mine.open("r+b") as file:
        file.seek(500)
        file.write(b"\xff\x00\xff")
    topology.world_comm.Barrier()
    assert_is(copies.load(), topology, 3)


@pytest.mark.nodes(*CUTS[:3])
def test_where_both_copies_are_damaged_the_step_before_counts(topology, hosts, copies):
    copies.save(1, payload(topology, 1))
    old = hosts / f"old-{topology.node}"
    on_own = Path(hosts / f"host-{topology.node}" / "run")
    topology.world_comm.Barrier()
    if topology.local_rank == 0:
        shutil.copytree(on_own, old)
    topology.world_comm.Barrier()
    copies.save(2, payload(topology, 2))
    topology.world_comm.Barrier()
    if topology.local_rank == 0:
        shutil.copytree(old, on_own, dirs_exist_ok=True)
        for path in on_own.glob("step-00000002/rank-00000-by-*.pt"):
            path.write_bytes(path.read_bytes()[:-1])
    topology.world_comm.Barrier()
    loaded = copies.load()
    assert_is(loaded, topology, 1)
    (why,) = loaded.refused
    assert "step 2 in memory: no host has what rank 0 saved (" in why
    assert "bytes, not" in why
    copies.forget(but=1)
    topology.world_comm.Barrier()
    assert_is(copies.load(), topology, 1)


@pytest.mark.nodes((2, 1), (2, 2))
def test_a_world_cut_otherwise_takes_up_rank_0s(topology, hosts, copies):
    copies.save(5, payload(topology, 5))
    topology.world_comm.Barrier()
    shape = topology.rank_info
    was, node_of = shape.node_of, tuple(range(shape.world_size))
    try:
        topology.rank_info = type(shape)(shape.rank, shape.world_size, 0, shape.rank, node_of)
        assert_is(kept_by(hosts, topology, node=was[shape.rank]).load(), topology, 5, saved_by=0)
    finally:
        topology.rank_info = shape


@pytest.fixture(params=["write_payload", "reserved"], ids=["own", "neighbour's"])
def fill_host_0(request, hosts, monkeypatch):
    """Let there be no room for such files on host 0 while a mark is there."""
    real, mark = getattr(neighbours, request.param), hosts / "full"

    def full(path, *rest):
        if mark.exists() and "host-0" in path.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *rest)

    monkeypatch.setattr(neighbours, request.param, full)
    return mark


@pytest.mark.nodes(*CUTS[:3])
def test_where_a_host_has_no_room_all_say_so_and_the_step_before_stays(
    topology, copies, fill_host_0
):
    copies.save(1, payload(topology, 1))
    topology.world_comm.Barrier()
    on_rank_0(topology, fill_host_0.touch)
    with pytest.raises(CheckpointError, match="No space left on device; give it more memory"):
        copies.save(2, payload(topology, 2))
    assert_is(copies.load(), topology, 1)
    topology.world_comm.Barrier()
    on_rank_0(topology, fill_host_0.unlink)
    copies.save(2, payload(topology, 2))
    assert_is(copies.load(), topology, 2)


def test_room_that_is_not_there_is_an_error_and_no_signal(tmp_path):
    with pytest.raises(OSError, match=r"too large|No space"):
        kept_files.reserved(tmp_path / "new" / "file", 1 << 60)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_a_rank_is_kept_by_one_of_the_node_after_its_own(sizes):
    node_of = [node for node, size in enumerate(sizes) for _ in range(size)]
    for rank, by in enumerate(keepers(node_of)):
        assert node_of[by] == (node_of[rank] + 1) % len(sizes)
    counts = [keepers(node_of).count(rank) for rank in range(len(node_of))]
    for node, size in enumerate(sizes):
        mine = [count for count, own in zip(counts, node_of, strict=True) if own == node]
        assert max(mine) - min(mine) <= 1, "shared out"
        assert sum(mine) == sizes[node - 1]
        assert len(mine) == size
