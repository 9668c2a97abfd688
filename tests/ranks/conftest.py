"""Process groups of torch on the ranks of a test."""

from contextlib import contextmanager

import pytest
import torch


@contextmanager
def group(topology, folder, name, rank, size):
    """A gloo process group, torch's default one."""
    store = torch.distributed.FileStore(str(folder / name), size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    yield
    topology.world_comm.Barrier()  # a store may be removing its file
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def node_group(topology, rank_info, shared_folder):
    """Over the ranks of this node."""
    name = f"node {rank_info.node}"
    with group(topology, shared_folder, name, rank_info.local_rank, rank_info.local_size):
        yield


@pytest.fixture
def world_group(topology, rank_info, shared_folder):
    with group(topology, shared_folder, "world", rank_info.rank, rank_info.world_size):
        yield
