"""What several ranks do on GPUs, or on one GPU that they share; tests/gpu/test_gpu.py starts it.

The worlds, and one verdict of all ranks, are those of tests/support/worlds.py.
"""

import time

import pytest
import torch
from models import adamw, batch_loss, mlp, seeded, sgd
from sequential import Sequential

import daso
from daso import trace
from daso.errors import LayoutError, TopologyError

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.real_mpi,
    pytest.mark.nodes((1, 1), (2,), (2, 1), (2, 2)),
    # torch warns where a process's first matrix product is in backward, on autograd's thread.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

ORDERED = daso.Exchange(algorithm="direct", chunk_bytes=512)


@pytest.fixture
def device(topology):
    return topology.device


def loss_on(device, model, rank, step):
    """Return the loss of a batch that was drawn on the CPU."""
    return batch_loss(Moved(model, device), rank, step)


class Moved:
    """A model whose inputs come from the CPU, and its outputs go there."""

    def __init__(self, model, device):
        self.model, self.device = model, device

    def __call__(self, x):
        return self.model(x.to(self.device)).cpu()


@pytest.mark.parametrize("order", ["bucketed", "host"])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("inner", [sgd, adamw])
@pytest.mark.parametrize(
    "policy", [daso.Fixed(1, 0), daso.Fixed(4, 1), daso.Fixed(3, 3), daso.Fixed(2, 0)], ids=repr
)
def test_steps_are_those_of_one_process_on_a_cpu(topology, device, policy, inner, wire, order):
    build, rank_info = seeded(mlp), topology.rank_info
    oracle = Sequential(
        build, inner, batch_loss, rank_info.node_sizes, policy=policy, wire=wire, merge="daso"
    )
    model = build().to(device)
    with daso.DASO(
        inner(model),
        module=model,
        topology=topology,
        policy=policy,
        wire=wire,
        merge="daso",
        exchange=ORDERED,
        gradients=daso.Gradients(reducer=order, bucket_bytes=256),
    ) as optimizer:
        for step in range(9):
            optimizer.zero_grad()
            loss_on(device, model, rank_info.rank, step).backward()
            oracle.gain = optimizer.report()["gain"]
            optimizer.step()
            oracle.run(1)
        optimizer.synchronize()
        oracle.synchronize()
        for mine, theirs in zip(model.parameters(), oracle.params(rank_info.node), strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=2e-4, atol=2e-5)
        rows = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
        assert topology.equal_on_all_ranks(rows)
        assert rank_info.world_size == 1 or str(device) in optimizer.report()["node_transport"]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_waits_for_the_device_while_an_exchange_goes_on(topology, device):
    torch.manual_seed(0)
    model = mlp().to(device)
    inputs = torch.randn(8, 6, device=device)
    with daso.DASO(
        sgd(model), module=model, topology=topology, policy=daso.Fixed(4, 2), wire="bf16"
    ) as optimizer:

        def steps(count):
            for _ in range(count):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()

        steps(5)  # buckets and references are made; the first exchange is on its way
        torch.cuda.synchronize(device)
        alone = max(topology.node_sizes) == 1  # sums inside a node wait for other ranks
        torch.cuda.set_sync_debug_mode("error" if alone else "default")
        try:
            steps(12)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert topology.nodes == 1 or optimizer.report()["exchanges"] >= 3


CYCLES = 100_000_000  # a tenth of a second, or less


@pytest.mark.nodes((1, 1), (2, 1))
def test_times_are_those_of_the_device_which_is_behind_its_host(topology, device):
    """What the host waits for is not exposed while the device has work, nor is what it launches."""
    model, rank_info = mlp().to(device), topology.rank_info
    inputs = torch.randn(8, 6, device=device)
    with daso.DASO(
        sgd(model), module=model, topology=topology, policy=daso.Fixed(4, 2)
    ) as optimizer:

        def steps(count):
            for _ in range(count):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                with torch.cuda.device(device):
                    torch.cuda._sleep(CYCLES)
                optimizer.step()

        steps(5)
        torch.cuda.synchronize(device)
        before, begun = optimizer.report()["exposed_seconds"], time.perf_counter()
        trace.start(recorder := trace.Recorder())
        steps(8)
        torch.cuda.synchronize(device)
        taken = time.perf_counter() - begun
        for _ in range(20):  # a pretended device says not at once what is over
            report = optimizer.report()
        trace.stop()
    step, seen = taken / 8, report["measurements"]
    assert seen["step_seconds"] > 0.6 * step
    if max(rank_info.node_sizes) == 1:  # sums inside a node wait for ranks that share a device
        assert seen["exchange_seconds"] < step
        assert report["exposed_seconds"] - before < 0.2 * taken
        waits = [one for one in recorder.take()[0] if one.kind == trace.WAIT_INTER_NODE]
        assert len(waits) >= 2
        assert sum(one.ends - one.begins for one in waits) < 0.2 * taken


@pytest.mark.nodes((1, 1), (2, 1))
@pytest.mark.parametrize("wire", ["bf16", "int4"])
def test_nan_on_one_rank_drops_an_exchange_and_heals(topology, device, wire):
    rank_info = topology.rank_info
    torch.manual_seed(0)
    model = mlp().to(device)
    with daso.DASO(
        sgd(model), module=model, topology=topology, policy=daso.Fixed(2, 1), wire=wire
    ) as optimizer:
        for step in range(8):
            optimizer.zero_grad()
            loss_on(device, model, rank_info.rank, step).backward()
            optimizer.step()
            if step == 2 and rank_info.rank == rank_info.world_size - 1:
                with torch.no_grad():
                    next(iter(model.parameters()))[0, 0] = float("nan")
        optimizer.synchronize()
        assert optimizer.report()["dropped"] == 1
        assert all(bool(p.isfinite().all()) for p in model.parameters())


def refusal(topology, model):
    """Return what every rank is told when the model is wrapped; the same on all."""
    with pytest.raises((LayoutError, TopologyError)) as refused:
        daso.DASO(sgd(model), module=model, topology=topology)
    assert topology.equal_on_all_ranks(str(refused.value).encode())
    return str(refused.value)


def test_a_model_on_two_devices_is_refused_on_all_ranks(topology, device):
    rank_info, model = topology.rank_info, mlp().to(device)
    others = [torch.device("cuda", at) for at in range(torch.cuda.device_count())]
    others = [other for other in others if other != device] or [torch.device("cpu")]
    if rank_info.rank == rank_info.world_size - 1:
        model[2].to(others[0])
    told = refusal(topology, model)
    assert "0.weight is on cuda:" in told
    assert "2.weight on" in told
    assert "move the whole model to one" in told


def test_a_layer_left_on_the_host_is_refused_on_all_ranks(topology, device):
    model = mlp().to(device)
    model[2].to("cpu")
    assert "2.weight on cpu; move the whole model to one" in refusal(topology, model)


def test_a_model_left_on_the_host_by_one_rank_is_refused_on_all(topology, device):
    rank_info, model = topology.rank_info, mlp()
    told = refusal(
        topology, model.to("cpu" if rank_info.rank == rank_info.world_size - 1 else device)
    )
    assert "on every rank, but they are on cpu here and on cuda on rank 0; move" in told
