"""Checkpoints: what is saved comes back, and nothing that is broken does, the same on all ranks."""

import errno
import itertools
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from expected_errors import raises
from jobs import HANG_SECONDS
from local_world import Comm
from worlds import PerRank

from daso import trace
from daso.checkpoint import state
from daso.checkpoint.files import write_payload, write_whole
from daso.checkpoint.rng import rng_state, set_rng_state
from daso.checkpoint.state import Checkpoints
from daso.comm.topology import Topology
from daso.errors import CheckpointError, CheckpointWriteError, ConfigError
from daso.testing.faults import parse, plant


@pytest.fixture
def folder(shared_folder):
    return shared_folder / "deep" / "checkpoints"


@pytest.fixture
def store(folder):
    return PerRank(lambda topology: Checkpoints(folder, topology))


def payload(rank_info, step):
    return {
        "weights": torch.linspace(step, rank_info.rank + 1, 1000),
        "bf16": torch.tensor([step / 3, float("nan")], dtype=torch.bfloat16),
        "plain": {"rank": rank_info.rank, 3: [None, True, 0.1, "text", b"bytes", (1, {2})]},
    }


def assert_is(loaded, rank_info, step):
    wanted = payload(rank_info, step)
    assert (loaded.step, loaded.world, loaded.same_world) == (step, rank_info.world_size, True)
    assert torch.equal(loaded.payload["weights"], wanted["weights"])
    assert loaded.payload["bf16"].view(torch.int16).equal(wanted["bf16"].view(torch.int16))
    assert loaded.payload["plain"] == wanted["plain"]


def test_of_a_disk_that_is_full_the_reason_is_told(tmp_path, monkeypatch):
    remove = plant(parse("full rank 0 at send after 3000 bytes"), rank=0)
    trace.record(trace.SEND, 0.0)
    try:
        with pytest.raises(OSError, match="File too large"):
            write_payload(tmp_path / "file", {"weights": torch.zeros(1000)})
    finally:
        remove()
    assert not [*tmp_path.iterdir()]


both_ways = pytest.mark.parametrize("background", [False, True], ids=["at once", "beside"])


def save(store, step, what, background):
    store.save(step, what, background=background)
    store.wait()


def error_of(topology, do, kind=CheckpointError):
    with pytest.raises(kind) as caught:
        do()
    said = topology.world_comm.allgather(str(caught.value))
    assert len(set(said)) == 1, "the same on every rank"
    return said[0]


def on_rank(topology, rank, do):
    """Do something on one rank, before any goes on."""
    if topology.rank == rank:
        do()
    topology.world_comm.Barrier()


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- what is saved comes back ---------------------------------------------------------------------


def test_every_rank_gets_back_what_it_saved(store, rank_info):
    store.save(7, payload(rank_info, 7))
    loaded = store.load()
    assert_is(loaded, rank_info, 7)
    assert loaded.refused == ()


def test_the_newest_is_loaded_and_so_many_are_kept(folder, topology, rank_info):
    store = Checkpoints(folder, topology, keep=2)
    for step in (1, 20, 300):
        store.save(step, payload(rank_info, step))
    assert store.steps() == [20, 300]
    assert_is(store.load(), rank_info, 300)
    assert (folder / "latest").read_text() == "step-00000300\n"
    ranks = [f"rank-{rank:05d}.pt" for rank in range(rank_info.world_size)]
    for step in ("step-00000020", "step-00000300"):
        assert names(folder / step) == ["manifest.json", *ranks]


def test_where_ranks_may_be_lost_the_last_step_may_be_saved_again(folder, topology, rank_info):
    """One may be lost when it is whole, before all know: the others save it once more."""
    store = Checkpoints(folder, topology, keep=2)
    store.save(3, payload(rank_info, 3))
    with raises("step-not-newest"):
        store.save(3, payload(rank_info, 3))
    topology.is_elastic = True
    try:
        store.save(4, payload(rank_info, 4))
        store.save(4, payload(rank_info, 5))
        if topology.rank == 0:  # it was a spare, and has saved nothing itself
            store = Checkpoints(folder, topology, keep=2)
        if topology.world_size > 1:
            store.save(4, payload(rank_info, 6))
        with raises("step-not-newest"):
            store.save(3, payload(rank_info, 3))
    finally:
        topology.is_elastic = False
    assert store.steps() == [3, 4]


def test_a_folder_without_checkpoints_gives_none(store, folder, topology):
    assert store.load() is None
    on_rank(topology, 0, lambda: (folder / "step-00000005").mkdir(parents=True))
    assert store.load() is None, "one that never was complete"
    assert store.steps() == []


def test_the_manifest_tells_of_what_and_where(store, folder, rank_info):
    store.save(7, payload(rank_info, 7))
    manifest = json.loads((folder / "step-00000007" / "manifest.json").read_text())
    assert (manifest["schema"], manifest["step"], manifest["world"]) == (2, 7, rank_info.world_size)
    assert manifest["node_sizes"] == list(rank_info.node_sizes)
    assert manifest["versions"]["torch"] == torch.__version__
    sizes = [
        (folder / f"step-00000007/rank-{r:05d}.pt").stat().st_size
        for r in range(rank_info.world_size)
    ]
    assert [entry["size"] for entry in manifest["files"]] == sizes


@pytest.mark.real_mpi
def test_random_numbers_go_on_where_they_were(store, rank_info):
    def draw():
        return torch.rand(3).tolist(), random.gauss(0, 1), np.random.normal(size=3).tolist()

    draw()
    store.save(1, {"rng": rng_state()})
    wanted = draw()
    assert draw() != wanted
    set_rng_state(store.load().payload["rng"])
    assert draw() == wanted


# --- another world --------------------------------------------------------------------------------


def test_other_nodes_load_what_rank_0_saved(store, folder, rank_info):
    store.save(7, payload(rank_info, 7))
    cut = [rank_info.world_size] if rank_info.nodes > 1 else [1] * rank_info.world_size
    other = Topology(ranks_per_node=cut)
    loaded = Checkpoints(folder, other).load()
    same = rank_info.world_size == 1
    assert (loaded.world, loaded.same_world) == (rank_info.world_size, same)
    assert loaded.payload["plain"]["rank"] == 0
    other.free()


def test_fewer_ranks_load_what_rank_0_saved(store, folder, topology, rank_info):
    store.save(7, payload(rank_info, 7))
    path = folder / "step-00000007" / "manifest.json"

    def one_more_rank():
        lines = json.loads(path.read_text())
        lines["node_of"].append(lines["node_of"][-1])
        lines["files"].append(lines["files"][-1])
        path.write_text(json.dumps(lines))

    on_rank(topology, 0, one_more_rank)
    loaded = store.load()
    assert (loaded.step, loaded.world, loaded.same_world) == (7, rank_info.world_size + 1, False)
    assert loaded.payload["plain"]["rank"] == 0


# --- damage ---------------------------------------------------------------------------------------


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(path):
    torch.save({"foreign": 1}, path)


def another_schema(path):
    path.write_text(path.read_text().replace('"schema": 2', '"schema": 3'))


def another_step(path):
    path.write_text(path.read_text().replace('"step": 20', '"step": 10'))


def fewer_files(path):
    lines = json.loads(path.read_text())
    path.write_text(json.dumps({**lines, "files": lines["files"][:-1]}))


DAMAGE = {
    "truncated": ("last", truncate, "bytes, not"),
    "flipped": ("last", flip, "its hash differs"),
    "foreign": ("last", swap, "bytes, not"),
    "missing": ("last", Path.unlink, "No such file"),
    "a folder": ("last", lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    "schema": ("manifest", another_schema, "must have schema 2, not 3"),
    "step": ("manifest", another_step, "must be of step 20"),
    "half a manifest": ("manifest", truncate, "must be a manifest"),
    "a list": ("manifest", lambda path: path.write_text("[]"), "must be a manifest"),
    "fewer files": ("manifest", fewer_files, "each rank's file"),
    "no manifest": ("manifest", Path.unlink, "not finished"),
}


def damage(topology, folder, step, how):
    where, do, _ = DAMAGE[how]
    name = "manifest.json" if where == "manifest" else f"rank-{topology.world_size - 1:05d}.pt"
    on_rank(topology, 0, lambda: do(folder / f"step-{step:08d}" / name))
    return name


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_one_is_refused_and_the_one_before_is_taken(
    store, folder, topology, rank_info, how, caplog
):
    store.save(10, payload(rank_info, 10))
    store.save(20, payload(rank_info, 20))
    name = damage(topology, folder, 20, how)
    loaded = store.load()
    assert_is(loaded, rank_info, 10)
    (reason,) = loaded.refused
    assert reason.startswith("step 20: ")
    assert DAMAGE[how][2] in reason
    if how != "no manifest":
        assert name in reason
    if DAMAGE[how][0] == "last" and rank_info.world_size > 1:
        assert f"rank {rank_info.world_size - 1}: " in reason
    assert topology.equal_on_all_ranks(loaded.refused)
    said = [record.message for record in caplog.records if record.name == "daso"]
    if rank_info.rank == 0 or not isinstance(topology.world_comm, Comm):  # threads share their log
        assert said == ([f"checkpoint refused: {reason}"] if rank_info.rank == 0 else [])


@pytest.mark.parametrize("how", ["flipped", "schema", "no manifest"])
def test_after_a_refusal_the_same_step_is_saved_anew(store, folder, topology, rank_info, how):
    store.save(10, payload(rank_info, 10))
    store.save(20, payload(rank_info, 20))
    damage(topology, folder, 20, how)
    store.load()
    store.save(15, payload(rank_info, 15))
    assert_is(store.load(), rank_info, 15)
    store.save(20, payload(rank_info, 20))
    loaded = Checkpoints(folder, topology).load()
    assert_is(loaded, rank_info, 20)
    assert loaded.refused == ()
    assert store.steps() == [10, 15, 20]


def test_a_refused_one_does_not_push_out_a_sound_one(folder, topology, rank_info):
    store = Checkpoints(folder, topology, keep=1)
    store.save(10, payload(rank_info, 10))
    on_rank(
        topology, 0, lambda: shutil.copytree(folder / "step-00000010", folder / "step-00000030")
    )
    assert_is(store.load(), rank_info, 10)
    store.save(20, payload(rank_info, 20))
    assert_is(Checkpoints(folder, topology, keep=1).load(), rank_info, 20)


def test_none_that_is_sound_is_an_error_with_every_reason(store, folder, topology, rank_info):
    store.save(10, payload(rank_info, 10))
    store.save(20, payload(rank_info, 20))
    damage(topology, folder, 10, "flipped")
    damage(topology, folder, 20, "truncated")
    said = error_of(topology, store.load)
    assert str(folder) in said
    assert "step 20: " in said
    assert "step 10: " in said
    assert "restore one" in said


def test_what_other_files_lie_there_is_left_alone(store, folder, topology, rank_info):
    store.save(10, payload(rank_info, 10))
    on_rank(topology, 0, lambda: (folder / "step-notes.txt").write_text("mine"))
    store.save(20, payload(rank_info, 20))
    assert_is(store.load(), rank_info, 20)
    assert (folder / "step-notes.txt").read_text() == "mine"


# --- saving fails ---------------------------------------------------------------------------------


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.real_mpi
@both_ways
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_on_one_rank_is_the_same_error_on_all(
    store, folder, topology, rank_info, monkeypatch, call, background
):
    store.save(10, payload(rank_info, 10))
    before = topology.world_comm.bcast(names(folder))
    with monkeypatch.context() as patch:
        if rank_info.rank == rank_info.world_size - 1:
            patch.setattr(os, call, full)
        said = error_of(topology, lambda: save(store, 20, payload(rank_info, 20), background))
    path = folder / "step-00000020" / f"rank-{rank_info.world_size - 1:05d}.pt"
    assert f"{path}: No space left on device; make room" in said
    assert said.startswith(f"rank {rank_info.world_size - 1}: ") or rank_info.world_size == 1
    topology.world_comm.Barrier()
    assert names(folder) == before
    assert_is(store.load(), rank_info, 10)
    store.save(20, payload(rank_info, 20))
    assert_is(store.load(), rank_info, 20)


@pytest.mark.real_mpi
def test_torchs_own_writer_meets_a_full_disk(store, folder, topology, rank_info, monkeypatch):
    def write_half(what, file):
        file.write(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc] unexpected pos")

    store.save(10, payload(rank_info, 10))
    with monkeypatch.context() as patch:
        if rank_info.rank == 0:
            patch.setattr(torch, "save", write_half)
        said = error_of(topology, lambda: store.save(20, payload(rank_info, 20)))
    assert "unexpected pos" in said
    assert_is(store.load(), rank_info, 10)


@pytest.mark.real_mpi
def test_a_manifest_that_cannot_be_written(store, folder, topology, rank_info, monkeypatch):
    store.save(10, payload(rank_info, 10))
    calls = itertools.count()
    real = os.fsync
    with monkeypatch.context() as patch:
        # Rank 0's file and its folder; then the manifest.
        patch.setattr(os, "fsync", lambda fd: real(fd) if next(calls) < 2 else full())
        said = error_of(topology, lambda: store.save(20, payload(rank_info, 20)))
    assert "step-00000020: No space left on device" in said
    assert_is(store.load(), rank_info, 10)


def test_a_file_in_place_of_the_folder(store, folder, topology, rank_info):
    on_rank(topology, 0, lambda: (folder.parent.mkdir(), folder.write_text("")))
    for do in (store.load, store.steps, lambda: store.save(1, payload(rank_info, 1))):
        assert f"{folder}" in (said := error_of(topology, do))
        assert "Not a directory" in said


@both_ways
def test_a_folder_that_not_all_ranks_share(folder, topology, rank_info, background, monkeypatch):
    monkeypatch.setattr(state, "VISIBLE_SECONDS", 0.2)
    mine = Checkpoints(folder / str(rank_info.rank), topology)
    said = error_of(topology, lambda: save(mine, 1, payload(rank_info, 1), background))
    assert "which rank 1 wrote" in said
    assert "shared file system" in said


def test_what_could_not_be_loaded_again_is_not_saved(store, topology, rank_info):
    class Odd:
        pass

    mine = payload(rank_info, 1)
    if rank_info.rank == rank_info.world_size - 1:
        mine["plain"]["odd"] = [0, Odd()]
    said = error_of(topology, lambda: store.save(1, mine))
    assert "payload['plain']['odd'][1] is a Odd" in said
    assert store.load() is None
    for value in (np.float64(1.0), np.zeros(1), {np.int64(1): 1}, {(1, Odd): 2}):
        assert "payload['x']" in error_of(topology, lambda value=value: store.save(1, {"x": value}))


def test_steps_go_up(store, topology, rank_info):
    store.save(10, payload(rank_info, 10))
    for step in (9, 10):
        said = error_of(topology, lambda step=step: store.save(step, payload(rank_info, step)))
        assert f"{step} is not above 10" in said
    assert_is(store.load(), rank_info, 10)


def test_keeping_none_is_refused(folder, topology):
    assert "at least 1, not 0" in error_of(
        topology, lambda: Checkpoints(folder, topology, keep=0), ConfigError
    )


def test_a_crash_in_the_middle_of_the_first_manifest_leaves_no_checkpoint(
    folder, topology, shared_folder
):
    manifest, crashed = folder / "step-00000007" / "manifest.json", shared_folder / "crashed"

    def write_half(file):
        file.write(b'{"schema": 2')
        file.flush()
        shutil.copytree(folder, crashed)

    def write():
        manifest.parent.mkdir(parents=True)
        write_whole(manifest, write_half)

    on_rank(topology, 0, write)
    assert Checkpoints(crashed, topology).load() is None


@pytest.mark.real_mpi
@both_ways
def test_at_every_moment_of_saving_there_is_one_to_load(
    folder, topology, rank_info, monkeypatch, tmp_path, background
):
    """Copy the folder before each change that rank 0 makes to it; each copy must load."""
    store = Checkpoints(folder, topology, keep=1)
    store.save(10, payload(rank_info, 10))
    topology.world_comm.Barrier()
    count = itertools.count()
    copies = Path(topology.world_comm.bcast(str(tmp_path))) / "copies"

    inside = []

    def copying(real):
        def call(*args, **kwargs):
            if not inside:
                inside.append("a copy")
                # Files that other ranks are writing come and go.
                parts = shutil.ignore_patterns("*.part")
                shutil.copytree(folder, copies / str(next(count)), ignore=parts)
                inside.clear()
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        if rank_info.rank == 0:
            for name in ("fsync", "replace", "unlink", "rmdir", "mkdir"):
                patch.setattr(os, name, copying(getattr(os, name)))
        save(store, 20, payload(rank_info, 20), background)
    moments = topology.world_comm.bcast(next(count))
    assert moments > 10
    steps = [Checkpoints(copies / str(at), topology).load().step for at in range(moments)]
    assert set(steps) == {10, 20}
    assert steps == sorted(steps)


# --- beside training ------------------------------------------------------------------------------


def test_what_is_written_beside_is_what_was_there_when_it_was_saved(store, topology, rank_info):
    live = payload(rank_info, 10)
    store.save(10, live, background=True)
    live["weights"].zero_()
    live["plain"]["rank"] = -1
    store.save(20, payload(rank_info, 20), background=True)  # waits for the one before
    assert store.steps() == [10, 20]
    assert_is(store.load(), rank_info, 20)
    on_rank(topology, 0, lambda: damage_manifest(store, 20))
    assert_is(store.load(), rank_info, 10)


def damage_manifest(store, step):
    (store._step_folder(step) / "manifest.json").unlink()


def test_tied_tensors_stay_one_and_modules_keep_what_they_say(store, rank_info):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    state = model.state_dict()
    store.save(10, {"model": state, "again": [state["0.weight"]]}, background=True)
    loaded = store.load().payload
    first, second = loaded["model"]["0.weight"], loaded["model"]["1.weight"]
    assert first.data_ptr() == second.data_ptr() == loaded["again"][0].data_ptr()
    assert loaded["model"]._metadata == state._metadata


def test_a_rank_that_is_late_holds_nobody_up(folder, topology, rank_info, monkeypatch):
    """The step does not count before the last rank's file is there, and then it does."""
    store, last = Checkpoints(folder, topology), rank_info.world_size - 1
    may_go, real = threading.Event(), Checkpoints._write_in_background
    with monkeypatch.context() as patch:

        def write(self, step, what):
            if self._topology.rank == last:
                may_go.wait(20)
            return real(self, step, what)

        if rank_info.rank == 0 or topology.world_comm.Get_size() > 1:
            patch.setattr(Checkpoints, "_write_in_background", write)
        store.save(10, payload(rank_info, 10), background=True)
        topology.world_comm.Barrier()
        assert not (folder / "step-00000010" / "manifest.json").exists()
        topology.world_comm.Barrier()
        may_go.set()
        store.wait()
    assert (folder / "step-00000010" / "manifest.json").exists()
    assert_is(store.load(), rank_info, 10)
    topology.world_comm.Barrier()
    assert not list(folder.glob("step-*/rank-*.json"))


ENDS_AT_ONCE = """
import sys, pathlib, torch
from daso.checkpoint.state import Checkpoints
from daso.comm.topology import Topology
store = Checkpoints(pathlib.Path(sys.argv[1]), Topology())
store.save(7, {"weights": torch.arange(1_000_000)}, background=True)
"""


@pytest.mark.nodes((1,))
def test_a_program_that_ends_at_once_has_its_checkpoint(topology, folder):
    subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE, str(folder)], check=True, timeout=HANG_SECONDS
    )
    assert torch.equal(
        Checkpoints(folder, topology).load().payload["weights"], torch.arange(1_000_000)
    )


def test_background_saving_keeps_the_wanted_number(topology, rank_info, folder):
    store = Checkpoints(folder, topology, keep=1)
    for step in (10, 20, 30):
        store.save(step, payload(rank_info, step), background=True)
    store.wait()
    assert store.steps() == [30]


@pytest.mark.nodes((1, 1))
def test_an_error_that_comes_late_leaves_the_checkpoint_before(
    topology, rank_info, folder, monkeypatch
):
    """A rank's file is there, but its folder could not be synced: all files look whole."""
    store, real = Checkpoints(folder, topology, keep=1), Checkpoints._write_in_background
    store.save(10, payload(rank_info, 10), background=True)
    store.wait()
    topology.world_comm.Barrier()
    manifest = store._step_folder(20) / "manifest.json"
    with monkeypatch.context() as patch:

        def write(self, step, what):
            problem = real(self, step, what)
            if self._topology.rank == 0:
                return problem
            end = time.monotonic() + 20
            while not manifest.exists() and time.monotonic() < end:
                time.sleep(0.01)
            return CheckpointWriteError("it cannot be synced", code="not-synced")

        if rank_info.rank == 0 or topology.world_comm.Get_size() > 1:
            patch.setattr(Checkpoints, "_write_in_background", write)
        topology.world_comm.Barrier()
        store.save(20, payload(rank_info, 20), background=True)
        with pytest.raises(CheckpointWriteError, match="synced"):
            store.wait()
        topology.world_comm.Barrier()
    assert store.steps() == [10]
    assert_is(store.load(), rank_info, 10)


@pytest.mark.nodes((1,))
def test_a_file_system_may_be_unable_to_sync_folders(folder, topology, rank_info, monkeypatch):
    sync = os.fsync

    def without_folders(number):
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(number)

    monkeypatch.setattr(os, "fsync", without_folders)
    Checkpoints(folder, topology).save(3, payload(rank_info, 3))
    assert_is(Checkpoints(folder, topology).load(), rank_info, 3)
