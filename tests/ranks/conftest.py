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
    topology.world.Barrier()  # a store may be removing its file
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def node_group(topology, place, shared_folder):
    """Over the ranks of this node."""
    name = f"node {place.node}"
    with group(topology, shared_folder, name, place.local_rank, place.local_size):
        yield


@pytest.fixture
def world_group(topology, place, shared_folder):
    with group(topology, shared_folder, "world", place.rank, place.size):
        yield
