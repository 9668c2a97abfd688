"""A node over NCCL, on a NCCL and a CUDA that keep books: orders, streams and bits."""

import ctypes

import numpy as np
import pytest
import torch
from compare import compare
from fake_cuda import Copies, Cuda
from models import adamw, batch_loss, mlp, sgd

import daso
from daso.comm.node import nccl as node_nccl
from daso.comm.node import select as choose
from daso.comm.node.nccl import NcclNode
from daso.train import build

pytestmark = pytest.mark.mpi

DEVICE = torch.device("cpu")
TYPES = {"NCCL_FLOAT32": np.float32, "NCCL_FLOAT64": np.float64}


class Nccl:
    """cupy's NCCL over MPI: what is launched happens at once, in rank order."""

    NCCL_FLOAT32, NCCL_FLOAT64 = TYPES
    NCCL_SUM = "sum"

    def __init__(self, comm, cuda):
        self.comm, self.cuda = comm, cuda
        self.log, self.grouped, self.alive = [], False, False

    def get_unique_id(self):
        assert self.comm.Get_rank() == 0
        return ("some", "numbers")

    def NcclCommunicator(self, size, name, rank):  # noqa: N802 - cupy's name
        assert (size, name, rank) == (
            self.comm.Get_size(),
            ("some", "numbers"),
            self.comm.Get_rank(),
        )
        self.alive = True
        return self

    def groupStart(self):  # noqa: N802 - cupy's name
        assert not self.grouped
        self.grouped = True

    def groupEnd(self):  # noqa: N802 - cupy's name
        self.grouped = False

    def check_async_error(self):
        assert self.alive

    def destroy(self):
        self.alive = False

    def _row(self, address, count, kind, stream, what):
        current = self.cuda.current_stream(DEVICE)
        assert stream == current.cuda_stream
        current.launch()
        self.log.append((what, count, kind, current.knows(self.cuda.compute)))
        memory = (ctypes.c_byte * (count * np.dtype(TYPES[kind]).itemsize)).from_address(address)
        return np.frombuffer(memory, TYPES[kind])

    def allReduce(self, there, here, count, kind, operation, stream):  # noqa: N802 - cupy's name
        assert there == here
        assert operation == self.NCCL_SUM
        row = self._row(here, count, kind, stream, "add")
        first, *others = self.comm.allgather(row.copy())
        row[:] = first
        for other in others:
            row += other

    def broadcast(self, there, here, count, kind, root, stream):
        assert there == here
        assert self.grouped
        row = self._row(here, count, kind, stream, f"show {root}")
        self.comm.Bcast(row, root)


@pytest.fixture
def nccl(topology, monkeypatch):
    """Let nodes average over the fake; return it, where there is one."""
    made = []
    monkeypatch.setattr(node_nccl, "CudaCopies", Copies)

    def choose(topology, device, order, timeout_seconds, late, _):
        assert order == "bucketed"
        cuda = Cuda()
        made.append(Nccl(topology.node_comm, cuda))
        return NcclNode(topology, device, timeout_seconds, late, nccl=made[-1], cuda=cuda)

    monkeypatch.setattr(build, "choose_node", choose)
    return made


@pytest.mark.parametrize(
    ("policy", "wire", "merge"),
    [
        (daso.Fixed(1, 0), "bf16", "daso"),
        (daso.Fixed(4, 1), "bf16", "daso"),
        (daso.Fixed(4, 1), "fp32", "delta"),
        (daso.Fixed(2, 0), "bf16", "delta"),
        (daso.Fixed(3, 3), "bf16", "eager"),
    ],
    ids=str,
)
def test_every_step_equals_one_process(topology, nccl, policy, wire, merge):
    report = compare(topology, mlp, sgd, policy, wire=wire, merge=merge, steps=7)
    if topology.world_size > 1:
        assert report["node_transport"] == "NCCL, cpu"
        assert not nccl[-1].alive  # it was destroyed


@pytest.mark.nodes((2,), (3,))
def test_in_one_node_gradients_equal_one_process(topology, nccl):
    report = compare(topology, mlp, sgd, daso.Fixed(1, 0), steps=4)
    assert report["node_transport"] == "NCCL, cpu"


def test_phases_and_many_buckets_equal_one_process(topology, nccl):
    policy = daso.Plateau(6, warmup=1, cooldown=1, max_skip=4)
    gradients = daso.Gradients(bucket_bytes=64)
    compare(topology, mlp, adamw, policy, steps=5, epochs=6, wire="bf16", gradients=gradients)
    assert topology.world_size == 1 or nccl


@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(2, 1)], ids=repr)
def test_all_ranks_launch_the_same_after_what_they_need(topology, nccl, policy):
    rank_info = topology.rank_info
    torch.manual_seed(0)
    model = torch.nn.Sequential(mlp(), torch.nn.Linear(3, 3))
    exchange = daso.Exchange(algorithm="direct", chunk_bytes=64)
    with daso.DASO(
        sgd(model),
        module=model,
        topology=topology,
        policy=policy,
        exchange=exchange,
        gradients=daso.Gradients(bucket_bytes=100),
    ) as optimizer:
        cuda = nccl[-1].cuda
        for tensor in model.parameters():  # every gradient is something that was launched
            tensor.register_hook(lambda _: cuda.compute.launch())
        for step in range(5):
            optimizer.zero_grad()
            batch_loss(model, rank_info.rank, step).backward()
            sums = [one for one in nccl[-1].log if one[0] == "add"]
            if sums:  # who launches from here on comes after them
                stream = optimizer._session.runner.parts.node._stream
                assert cuda.compute.knows(stream)
            optimizer.step()
    log = nccl[-1].log
    assert topology.node_comm.allgather(log) == [log] * rank_info.local_size
    adds = [one for one in log if one[0] == "add"]
    if max(rank_info.node_sizes) > 1 or policy == daso.Fixed(1, 0):
        assert len(adds) == 5 * 2  # steps, buckets
        assert all(knows for *_, knows in adds)


class Broken:
    """NCCL that does not start somewhere."""

    def __init__(self, where):
        self.where, self.aborted = where, False

    def fail(self, *where, of=True):
        if self.where in where and of:
            raise RuntimeError("no route")

    def get_unique_id(self):
        self.fail("name")
        return ()

    def NcclCommunicator(self, size, name, rank):  # noqa: N802 - cupy's name
        self.fail("all")
        self.fail("one", of=rank == size - 1)
        return self

    def abort(self):
        self.aborted = True


@pytest.mark.parametrize("where", ["name", "streams", "one", "all"])
def test_a_failure_to_start_is_the_same_error_everywhere(topology, monkeypatch, where):
    rank_info, broken = topology.rank_info, Broken(where)
    wanted = rank_info.local_size > 1
    if max(rank_info.node_sizes) == 1:
        return  # nobody wants it

    def copies(device, cuda):
        broken.fail("streams", of=rank_info.local_rank == 0)
        return Copies(device, cuda)

    monkeypatch.setattr(choose.nccl, "describe", lambda: {"available": True})
    monkeypatch.setattr(choose.nccl, "library", lambda: broken)
    monkeypatch.setattr(node_nccl, "CudaCopies", copies)
    told = r"does not start: (RuntimeError: )?no route; .*NCCL_DEBUG=WARN.*reducer='host'"
    with pytest.raises(daso.errors.TopologyError, match=told):
        choose._nccl_node(topology, DEVICE, 1.0, lambda: None, uses_nccl=wanted, cuda=Cuda())
    started = wanted and where == "one" and rank_info.local_rank < rank_info.local_size - 1
    assert broken.aborted == started


def test_a_missing_library_is_the_same_error_everywhere(topology, monkeypatch):
    missing = {"available": False, "why": "no cupy", "remedy": "get it"}
    monkeypatch.setattr(choose.nccl, "describe", lambda: missing)
    if not any(size > 1 for size in topology.node_sizes):
        return
    with pytest.raises(
        daso.errors.TopologyError, match=r"NCCL, but no cupy; get it, .*reducer='host'"
    ):
        choose._nccl_node(topology, DEVICE, 1.0, lambda: None, uses_nccl=topology.local_size > 1)
