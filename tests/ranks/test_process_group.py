"""`daso.init(torch_backend=)`: torch.distributed beside MPI, over the same ranks."""

import pytest
import torch
import torch.distributed as dist

from daso.comm.process_group import join_process_group, node_mesh
from daso.errors import ConfigError, TopologyError

pytestmark = pytest.mark.mpi


@pytest.fixture
def joined(topology):
    join_process_group(topology, "gloo")
    yield
    topology.world_comm.Barrier()
    dist.destroy_process_group()


@pytest.mark.nodes((1, 1), (2,), (2, 2))
def test_ranks_are_those_of_mpi_and_a_mesh_has_rows_of_nodes(topology, rank_info, joined):
    join_process_group(topology, "gloo")  # it is there
    assert (dist.get_rank(), dist.get_world_size()) == (rank_info.rank, rank_info.world_size)
    mesh = node_mesh(topology, "cpu")
    assert mesh.mesh_dim_names == ("node", "local")
    assert mesh.mesh.shape == (rank_info.nodes, rank_info.local_size)
    assert mesh.get_coordinate() == (rank_info.node, rank_info.local_rank)
    row = torch.ones(1) * rank_info.rank
    dist.all_reduce(row, group=mesh["local"].get_group())
    assert int(row) == sum(topology.node_comm.allgather(rank_info.rank))


@pytest.mark.nodes((2, 1), (3, 1))
def test_unequal_nodes_are_no_mesh(topology, joined):
    with pytest.raises(TopologyError, match=r"same number of ranks to be a mesh, not \(\d, 1\)"):
        node_mesh(topology, "cpu")


@pytest.mark.nodes((1, 1), (2, 2))
def test_a_group_of_other_ranks_is_refused(topology, rank_info, shared_folder):
    size = rank_info.world_size
    store = dist.FileStore(str(shared_folder / "other"), size)
    dist.init_process_group("gloo", store=store, rank=size - 1 - rank_info.rank, world_size=size)
    try:
        with pytest.raises(
            ConfigError, match=r"rank 0: .* rank 0 of \d, but .* leave init_process"
        ):
            join_process_group(topology, "gloo")
    finally:
        topology.world_comm.Barrier()
        dist.destroy_process_group()


@pytest.mark.nodes((1, 1))
def test_a_group_on_some_ranks_is_refused(topology, rank_info, shared_folder):
    if rank_info.rank == 1:
        store = dist.FileStore(str(shared_folder / "alone"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="on every rank or on none, but it is on some"):
            join_process_group(topology, "gloo")
    finally:
        if rank_info.rank == 1:
            dist.destroy_process_group()


@pytest.mark.nodes((1, 1))
def test_a_mesh_needs_a_group(topology):
    with pytest.raises(ConfigError, match=r"call daso.init\(torch_backend='gloo'\) on CPUs"):
        _ = topology.mesh
