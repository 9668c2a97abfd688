"""What only a device can show: the same numbers, no waiting, memory, several ranks on one GPU."""

import copy
from pathlib import Path

import pytest
import torch
from ranks.test_sync import batch_loss, mlp, sgd
from test_ranks import run_on

import daso
from daso.comm.cuda import CudaCopies
from daso.comm.nccl import describe, library
from daso.comm.node_nccl import NcclNode

DEVICE = torch.device("cuda", 0)
PRETENDED = () if torch.version.cuda else ("-p", "pretended_cuda")
ON_RANKS = Path(__file__).parent / "on_ranks.py"


def test_one_rank_takes_the_steps_of_the_bare_optimizer():
    model = mlp().to(DEVICE)
    bare = copy.deepcopy(model)
    inputs = torch.randn(5, 6, device=DEVICE)
    inner = sgd(bare)
    with daso.DASO(sgd(model), module=model) as optimizer:
        for _ in range(5):
            for one, of in ((optimizer, model), (inner, bare)):
                one.zero_grad()
                of(inputs).square().mean().backward()
                one.step()
    assert all(map(torch.equal, model.parameters(), bare.parameters()))


def test_copies_arrive_and_leave_the_other_streams_alone():
    copies = CudaCopies(DEVICE)
    row = torch.arange(1 << 22, dtype=torch.float32, device=DEVICE)
    host = copies.memory(row.nbytes).view(row.dtype)
    assert host.is_pinned()
    row.mul_(2)
    arrived = copies.out(row, host)
    while not arrived():
        pass
    assert torch.equal(host, 2 * torch.arange(1 << 22, dtype=torch.float32))
    back = torch.zeros_like(row)
    arrived = copies.back(host, back, in_turn=True)
    while not arrived():
        pass
    assert torch.equal(back, row)
    plain = torch.zeros(1 << 16)
    copies.pin([plain])
    assert plain.is_pinned()
    copies.unpin()
    assert not plain.is_pinned()


def test_nccl_on_one_rank_gives_back_what_it_got():
    if not describe()["available"]:
        pytest.skip(f"no NCCL: {describe()['why']}")
    topology = daso.Topology()
    node = NcclNode(topology, DEVICE, 10.0, lambda: None, nccl=library())
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        row = node.row(1000, dtype, 2)
        row.flat.copy_(torch.arange(1000, device=DEVICE))
        for onward in (False, True):
            (bucket,) = row.cut([(0, 1000)])
            bucket.start([(0, 1000)], onward=onward)
            bucket.wait_filled()
            assert bucket.add() is not None
            bucket.deliver(1)
            bucket.wait()
            assert torch.equal(row.flat.cpu(), torch.arange(1000).to(dtype))
    node.free()
    topology.free()


@pytest.mark.timeout(620)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_that_share_devices(ranks):
    words = ("--with-mpi", "-q", "--timeout=120", *PRETENDED, "-p", "ranks.conftest", str(ON_RANKS))
    run = run_on(ranks, "-m", "pytest", *words, timeout=600)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]


def test_a_cuda_graph_of_forward_and_backward_can_be_replayed():
    """Steps are taken outside the graph, which keeps gradients where they are."""
    if PRETENDED:
        pytest.skip("a pretended device captures nothing")
    model = mlp().to(DEVICE)
    inputs = torch.randn(5, 6, device=DEVICE)
    inner = sgd(model)
    with daso.DASO(inner, module=model) as optimizer:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.zero_grad(set_to_none=True)
                model(inputs).square().mean().backward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = model(inputs).square().mean()
            loss.backward()
        before = None
        for _ in range(20):
            graph.replay()
            optimizer.step()
            before = before or float(loss)
        assert float(loss) < before


def test_a_model_on_the_cpu_still_trains():
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    with daso.DASO(sgd(model), module=model) as optimizer:
        batch_loss(model, 0, 0).backward()
        optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))
