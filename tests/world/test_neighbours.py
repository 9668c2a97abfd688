"""Copies in the memory of hosts: everything is back where one of two neighbours is left."""

import errno
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import PerRank

from daso.checkpoint import kept_files, neighbours
from daso.checkpoint.files import Entry
from daso.checkpoint.kept_files import Copy, keepers, suppliers
from daso.checkpoint.neighbours import NeighbourCopies
from daso.cli.train.config import CheckpointConfig, Config
from daso.cli.train.resume import Saver
from daso.errors import CheckpointError, ConfigError

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
        assert len(kept) == 1, "the step before is not needed any more"
        assert min(kept).startswith(f"step-{step:08d}-")
        topology.world_comm.Barrier()
        on_rank_0(topology, partial(shutil.rmtree, hosts / f"host-{lost}", ignore_errors=True))
        assert copies.exist()
        assert_is(copies.load(), topology, step)
        topology.world_comm.Barrier()
    copies.remove()
    topology.world_comm.Barrier()
    assert not [*hosts.glob("host-*/run")]
    assert not copies.exist()
    assert copies.load() is None


@pytest.mark.nodes((1, 1, 1))
@pytest.mark.real_mpi
def test_two_hosts_that_follow_each_other_are_one_too_many(topology, hosts, copies):
    copies.save(1, payload(topology, 1))
    on_rank_0(topology, lambda: [shutil.rmtree(hosts / f"host-{one}") for one in (1, 2)])
    assert not copies.exist()
    assert copies.load() is None


@pytest.mark.nodes(*CUTS[:3])
def test_a_first_save_that_was_torn_is_none(topology, hosts, copies):
    copies.save(1, payload(topology, 1))
    topology.world_comm.Barrier()
    # Rank 0 died before anybody had its state.
    on_rank_0(topology, lambda: [one.unlink() for one in hosts.rglob("rank-00000-by-*.json")])
    assert not copies.exist()
    assert copies.load() is None
    topology.world_comm.Barrier()
    copies.save(1, payload(topology, 1))
    assert copies.exist()
    assert_is(copies.load(), topology, 1)


@pytest.mark.nodes(*CUTS[:3])
def test_files_of_two_saves_of_a_step_are_not_mixed(topology, hosts, copies):
    """A node was lost in a save, and another took its place: who is who is not what it was."""
    copies.save(4, payload(topology, 9))
    topology.world_comm.Barrier()
    old = {path: path.read_bytes() for path in hosts.rglob("rank-*") if path.is_file()}
    topology.world_comm.Barrier()
    copies.save(4, payload(topology, 4))
    topology.world_comm.Barrier()
    last = f"rank-{topology.world_size - 1:05d}"  # of whom the first save alone is left

    def mix():
        for path in hosts.rglob(f"{last}-*"):
            path.unlink()
        for path, row in old.items():
            if last in path.name:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(row)

    on_rank_0(topology, mix)
    assert not copies.exist()
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
        for path in on_own.glob("step-00000002-*/rank-00000-by-*.pt"):
            path.write_bytes(path.read_bytes()[:-1])
    topology.world_comm.Barrier()
    loaded = copies.load()
    assert_is(loaded, topology, 1)
    (why,) = loaded.refused
    assert "step 2 in memory: no host has what rank 0 saved (" in why
    assert "bytes, not" in why


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


@pytest.fixture(params=["write_payload", "reserved", "own note", "last note"])
def fill_host_0(request, hosts, monkeypatch):
    """Let there be no room for such files on host 0 while a mark is there."""
    name = "write_whole" if "note" in request.param else request.param
    real, mark = getattr(neighbours, name), hosts / "full"

    def full(path, *rest):
        rank, _, by = path.stem.removeprefix("rank-").partition("-by-")
        its = {"own note": rank == by, "last note": rank != by}.get(request.param, True)
        if mark.exists() and "host-0" in path.parts and its:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *rest)

    monkeypatch.setattr(neighbours, name, full)
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


def test_room_is_there_before_it_is_written_to(tmp_path):
    row = kept_files.reserved(tmp_path / "new" / "file", 1 << 20)
    assert (tmp_path / "new" / "file").stat().st_blocks * 512 >= 1 << 20, "no hole"
    row.fill_(7)
    assert (tmp_path / "new" / "file").read_bytes() == b"\7" * (1 << 20)


def test_a_lost_hosts_states_are_read_by_many():
    """Of nodes of four ranks, one that is lost: each of the next node reads what it kept."""
    entry, node_of = Entry("", 0), (0,) * 4 + (1,) * 4
    own = {Copy(1, rank, rank, node_of, 0, entry) for rank in range(4, 8)}
    kept = own | {Copy(1, rank, rank + 4, node_of, 0, entry) for rank in range(4)}
    chosen = suppliers([set()] * 4 + [kept] * 4, {rank: rank for rank in range(8)})
    assert {taker: holder for taker, (holder, _) in chosen.items()} == {
        **{rank: rank + 4 for rank in range(4)},
        **{rank: rank for rank in range(4, 8)},
    }
    assert suppliers([kept] + [own] * 7, {0: 0}) == {0: (0, Copy(1, 0, 4, node_of, 0, entry))}
    assert suppliers([own] * 8, {rank: rank for rank in range(8)}) == 0


def test_another_users_folder_and_a_link_are_not_used(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path)
    assert not NeighbourCopies(tmp_path / "link", None, timeout_seconds=1)._is_own()
    assert NeighbourCopies(tmp_path, None, timeout_seconds=1)._is_own()
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    others = NeighbourCopies(tmp_path, None, timeout_seconds=1)
    assert not others._is_own()
    assert others._list() == []
    with others._told() as problems:
        others._own()
    assert "in a folder of one's own, but" in problems[0]
    assert "it is another user's; choose another checkpoint.memory_folder" in problems[0]


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


@pytest.fixture
def run(hosts):
    """A run that is saved to a disk and, more often, to memory."""

    def of(topology):
        memory = str(hosts / f"memory-{topology.node}")
        checkpoint = CheckpointConfig(every=10, memory_every=4, memory_folder=memory)
        return SimpleNamespace(
            topology=topology,
            config=Config(runs=str(hosts), name="x", checkpoint=checkpoint),
            optimizer=SimpleNamespace(together=lambda do: do()),
        )

    return PerRank(of)


@pytest.mark.nodes(*CUTS[:2])
def test_a_run_goes_on_from_the_newest_that_is_sound_in_memory_or_on_disk(topology, hosts, run):
    saver = Saver(run)
    assert saver.open(resume=False).step == 0
    saver._copies.save(8, payload(topology, 8))
    with pytest.raises(ConfigError, match=r"hosts keep .*/x in memory; go on from there with --re"):
        saver.start()
    assert_is(saver._newest()[0], topology, 8)
    saver._checkpoints.save(10, payload(topology, 10))
    found, in_memory = saver._newest()
    assert not in_memory
    assert_is(found, topology, 10)
    topology.world_comm.Barrier()
    on_rank_0(topology, (hosts / "x/checkpoints/step-00000010/rank-00000.pt").unlink)
    found, in_memory = saver._newest()
    assert in_memory, "what is on the disk is damaged"
    assert_is(found, topology, 8)
    saver._copies.save(12, payload(topology, 12))
    assert_is(saver._newest()[0], topology, 12)
    saver.finish()
    topology.world_comm.Barrier()
    assert not [*hosts.glob("memory-*/daso-*")]


@pytest.mark.nodes(*CUTS[:2])
def test_a_run_knows_its_own_copies_by_a_mark_in_its_folder(topology, hosts, run):
    saver, again, new = Saver(run), Saver(run), Saver(run)
    saver.open(resume=False)
    assert topology.equal_on_all_ranks(saver.mark)
    on_rank_0(topology, lambda: [(hosts / "x").mkdir(), saver.note({"JOB=7"})])
    assert (hosts / "x" / "memory-mark").read_text() == saver.mark
    saver._copies.save(4, payload(topology, 4))
    again.resume = lambda: again._newest()[0]
    assert_is(again.open(resume=False, restarted={"JOB=7"}), topology, 4)
    assert again.mark == saver.mark
    topology.world_comm.Barrier()
    on_rank_0(topology, lambda: shutil.rmtree(hosts / "x"))
    assert new.open(resume=False, restarted={"JOB=7"}).step == 0
    assert new.mark != saver.mark, "another run does not go on from what this one left"
