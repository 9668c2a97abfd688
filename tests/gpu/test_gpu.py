"""What only a device can show: the same numbers, no waiting, memory, several ranks on one GPU."""

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from benchmarks import gpu
from models import batch_loss, mlp, sgd
from on_mpi import run_on
from torch import nn
from unit.kernels.test_codecs import check_first_nonfinite

import daso
import daso.memory
from daso.comm.device.cuda import CudaCopies
from daso.comm.device.nccl_library import describe, library
from daso.comm.node.nccl import NcclNode
from daso.kernels.choice import describe_kernels

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
    host = copies.host_memory(row.nbytes).view(row.dtype)
    assert host.is_pinned()
    row.mul_(2)
    arrived = copies.to_host(row, host)
    while not arrived():
        pass
    assert torch.equal(host, 2 * torch.arange(1 << 22, dtype=torch.float32))
    back = torch.zeros_like(row)
    arrived = copies.to_device(host, back, in_order=True)
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
            bucket.mark_ready([(0, 1000)], onward=onward)
            bucket.wait_filled()
            assert bucket.reduce() is not None
            bucket.publish(1)
            bucket.wait()
            assert torch.equal(row.flat.cpu(), torch.arange(1000).to(dtype))
    node.free()
    topology.free()


def test_the_kernels_of_a_gpu_are_those_of_triton():
    """Where there is no GPU, it is said that they fail."""
    line = describe_kernels(DEVICE)
    assert line.startswith("torch's operations (") if PRETENDED else "Triton" in line


@pytest.mark.timeout(900)
@pytest.mark.slow("a whole file of tests in one job")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_that_share_devices(ranks):
    words = ("--with-mpi", "-q", "--timeout=120", *PRETENDED, str(ON_RANKS))
    run = run_on(ranks, "-m", "pytest", *words, timeout=880)
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
            before = before or float(loss.detach())
        assert float(loss.detach()) < before


def test_the_first_number_that_is_not_finite_is_found():
    check_first_nonfinite(DEVICE)


def wide():
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 128), nn.GELU()),
        *(nn.LayerNorm(128), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10)),
    ).to(DEVICE)


@pytest.mark.parametrize("policy", ["all_swap", "all_recompute", "search"])
def test_a_plan_for_less_memory_changes_no_bit(policy):
    inputs = torch.randn(4096, 32).to(DEVICE)
    ended = []
    for budget in (None, "17MiB"):
        model = wide()
        inner = sgd(model)
        within = nullcontext()
        if budget is not None:
            plan = daso.memory.plan(model, inputs, budget=budget, policy=policy)
            assert plan.peak_bytes < plan.plain_bytes
            within = daso.memory.apply(plan)
        torch.manual_seed(5)
        with within:
            for _ in range(4):
                inner.zero_grad()
                model(inputs).square().mean().backward()
                inner.step()
        ended.append([p.detach().cpu() for p in model.parameters()])
    assert all(map(torch.equal, *ended))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_captured_step_changes_no_bit_and_never_waits():
    model, plain = wide(), wide()
    for one in (model, plain):
        one[2].p = 0.0
    inputs, targets = torch.randn(64, 32).to(DEVICE), torch.randint(10, (64,)).to(DEVICE)
    inner, bare, loss = sgd(model), sgd(plain), nn.CrossEntropyLoss()
    step = daso.memory.CapturedStep(model, loss, inputs, targets)
    for turn in range(6):
        inner.zero_grad()
        torch.cuda.set_sync_debug_mode("error" if turn > 2 else "default")
        try:
            step(inputs, targets)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        inner.step()
        bare.zero_grad()
        loss(plain(inputs), targets).backward()
        bare.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_the_bench_runs_on_a_small_model(monkeypatch):
    noise = gpu.Shape(
        lambda: nn.Linear(256, 10),
        lambda: torch.randn(8, 256),
        lambda: torch.randint(10, (8,)),
        lambda params: torch.optim.SGD(params, lr=0.1),
    )
    monkeypatch.setitem(gpu.MODELS, "small", noise)
    topology = daso.Topology()
    found = gpu.measure(gpu.Plan("small", 2, 3), topology)
    topology.free()
    assert found["device"] == torch.cuda.get_device_name(DEVICE)
    assert set(gpu.figures(found)) == {
        f"gpu_{name}_small"
        for name in (
            "overhead_world_1",
            *(
                f"{wire}_{what}_over_copy"
                for wire in ("bf16", "int4")
                for what in ("encode", "accept")
            ),
        )
    }
    assert "small, 0.0 M parameters" in gpu.table(found)
    assert found["parameters"] == 2570


def test_a_model_on_the_cpu_still_trains():
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    with daso.DASO(sgd(model), module=model) as optimizer:
        batch_loss(model, 0, 0).backward()
        optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))
