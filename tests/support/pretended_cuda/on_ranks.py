"""Deltas that cross from a device's memory; tests/gpu/test_pretended_cuda.py starts it on ranks.

MPI finds what is "on" a pretended device in the host's memory, as one that takes a device's would.
"""

import pytest
import torch
from compare import compare
from models import Odd, Wide, adamw, mlp, sgd
from ranks import test_device
from world import test_interactions, test_state, test_sync

import daso
from daso.comm.allreduce import ordered as exchange
from daso.comm.device import cuda_aware as aware
from daso.errors import TopologyError
from pretended_cuda import taken_by_mpi

pytestmark = [pytest.mark.mpi, pytest.mark.real_mpi, pytest.mark.nodes((1, 1), (2,), (2, 1))]
device = test_device.device


@pytest.fixture(autouse=True)
def mpi(monkeypatch):
    """Let MPI say that it takes a device's memory, and find out when it comes too early."""
    real = exchange.device_buffer
    taken = []

    def checked(flat):
        taken_by_mpi(flat)
        taken.append(flat.numel())
        return real(flat)

    monkeypatch.setattr(exchange, "device_buffer", checked)
    monkeypatch.setattr(aware, "device_buffer", checked)
    monkeypatch.setattr(aware, "cuda_aware", lambda: True)
    return taken


def direct(topology, taken, *args, **options):
    report = compare(topology, *args, gpu_direct=True, **options)
    # Beside the two rows of the trial.
    assert (len(taken) > 2) == (report["exchanges"] > 0 and topology.rank_info.lane is not None)
    return report


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("skip", "wait", "merge", "fragments"),
    [(4, 1, "daso", 1), (3, 3, "delta", 1), (2, 0, "delta", 1), (2, 2, "eager", 3), (1, 1, 0.5, 2)],
)
def test_skipping_equals_one_process(topology, mpi, skip, wait, merge, fragments, wire):
    options = {"wire": wire, "merge": merge, "fragments": fragments}
    direct(topology, mpi, mlp, sgd, daso.Fixed(skip, wait), **options)


@pytest.mark.parametrize("make", [Odd, Wide])
def test_odd_models_equal_one_process(topology, mpi, make):
    policy = daso.Fixed(3, 1, warmup=2)
    direct(topology, mpi, make, sgd, policy, wire="bf16", merge="delta", steps=7)


@pytest.mark.parametrize(("skip", "wait"), [(4, 2), (2, 0)])
def test_an_outer_optimizer_equals_one_process(topology, mpi, skip, wait):
    options = {"outer": test_sync.nesterov, "wire": "bf16"}
    direct(topology, mpi, mlp, adamw, daso.Fixed(skip, wait), **options)


def test_many_pieces_and_messages_equal_one_process(topology, mpi, monkeypatch):
    monkeypatch.setattr("daso.kernels.torch_kernels.DEVICE_PIECE", 1 << 16)
    monkeypatch.setattr("daso.train.deltas.shard.LEAST", 70_000)

    def wide():
        return torch.nn.Sequential(torch.nn.Linear(6, 30_000), torch.nn.Linear(30_000, 3))

    direct(topology, mpi, wide, sgd, daso.Fixed(2, 1), wire="bf16", steps=4)


class Direct(daso.Exchange):
    """What tests that choose their own exchange are given instead."""

    def __init__(self, **options):
        super().__init__(**{"gpu_direct": True, **options})


@pytest.fixture
def everywhere(monkeypatch, mpi, topology):
    monkeypatch.setattr(daso, "Exchange", Direct)
    monkeypatch.setattr(test_state, "ORDERED", Direct(algorithm="direct", chunk_bytes=512))
    yield
    assert (len(mpi) > 2) == (topology.nodes > 1 and topology.rank_info.lane is not None)


@pytest.mark.usefixtures("everywhere")
class TestElsewhere:
    test_resumed = staticmethod(test_state.test_a_run_resumed_right_after_a_send_may_stop_there)
    test_one_nan = staticmethod(
        test_interactions.test_one_nan_costs_one_exchange_and_no_other_nodes_work
    )


def wrapped(topology, model):
    return daso.DASO(
        sgd(model), module=model, topology=topology, exchange=daso.Exchange(gpu_direct=True)
    )


@pytest.mark.parametrize(
    ("says", "told"), [(False, "reports no support"), (None, "has no such call")]
)
def test_a_library_that_is_not_able_to_is_refused(topology, monkeypatch, says, told):
    monkeypatch.setattr(aware, "cuda_aware", lambda: says)
    if topology.nodes == 1:  # nothing will cross
        wrapped(topology, mlp()).close()
        return
    with pytest.raises(TopologyError, match=f"this one {told}; leave gpu_direct out"):
        wrapped(topology, mlp())


@pytest.mark.nodes((1, 1), (2, 1))
def test_a_library_that_says_more_than_is_true_is_found_out(topology, monkeypatch):
    real, rows = aware.device_buffer, []

    def elsewhere(flat):
        rows.append(torch.empty_like(flat) if not rows else flat)  # first is where it arrives
        torch.cuda.synchronize()
        return real(rows[-1])

    monkeypatch.setattr(aware, "device_buffer", elsewhere)
    with pytest.raises(TopologyError, match="arrived as something else; leave gpu_direct"):
        wrapped(topology, mlp())


@pytest.mark.nodes((1, 1), (2, 1))
def test_models_on_the_host_are_refused(topology):
    with torch.device("cpu"):
        model = mlp()
    with pytest.raises(TopologyError, match="needs parameters on a CUDA device, not on cpu"):
        wrapped(topology, model)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_run_goes_on_from_the_other_memory(topology, wire):
    """What is saved where deltas cross from the host fits where they do not, and back."""
    steps, ended = (3, 4, 4), []
    for directs in [(False,) * 3, (False, True, False)]:
        torch.manual_seed(3)
        model, saved, first = mlp(), None, 0
        for direct, count in zip(directs, steps, strict=True):
            with daso.DASO(
                sgd(model),
                module=model,
                topology=topology,
                policy=daso.Fixed(2, 1),
                wire=wire,
                exchange=daso.Exchange(gpu_direct=direct, chunk_bytes=512),
            ) as optimizer:
                if saved is not None:
                    optimizer.load_state_dict(saved)
                for step in range(first, first + count):
                    optimizer.zero_grad()
                    test_sync.batch_loss(model, topology.rank, step).backward()
                    optimizer.step()
                first += count
                saved = optimizer.state_dict()
        ended.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *ended))
