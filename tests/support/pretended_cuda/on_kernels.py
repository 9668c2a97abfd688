"""Exchanges by Triton's kernels; tests/gpu/test_pretended_cuda.py starts it on ranks.

Triton interprets them, in the books of the pretended device: who uses which memory on which stream.
"""

import ctypes
import inspect
from collections import Counter

import pytest
import torch
from compare import compare
from models import Odd, adamw, mlp, sgd
from ranks import test_device
from world import test_interactions, test_sync

import daso
from daso.kernels import choice
from daso.train.deltas.shard import DeltaShard
from pretended_cuda import LIBRARY

pytestmark = [pytest.mark.mpi, pytest.mark.real_mpi, pytest.mark.nodes((1, 1), (2,), (2, 1))]
device = test_device.device
READS = {"tensors", "spans", "versions", "rows", "sent"}  # of a kernel; it may write the others
FIRST_BYTES = 4  # of a tensor that a table names


def host(tensor):
    """Return memory that only pretends to be on a device."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


class Books:
    """Launches kernels that the device keeps books of, and counts them by name."""

    def __init__(self):
        self.launches = Counter()

    def launch(self, kernel, tiles, device, *arguments, **constants):
        name = kernel.fn.__name__
        self.launches[name] += 1
        stream, index = torch.cuda.current_stream(device), device.index
        LIBRARY.pretended_launch(stream.stream_id, index)

        def use(address, nbytes, what, writes):
            told = f"{name}: {what}".encode()
            LIBRARY.pretended_use(stream.stream_id, index, address, nbytes, int(writes), told)

        names = list(inspect.signature(kernel.fn).parameters)
        reads = READS | ({"row"} if name == "merge_row" else set())
        for what, one in zip(names, arguments, strict=False):
            if isinstance(one, torch.Tensor):
                assert one.device == device, "launched on another device"
                use(one.data_ptr(), one.nbytes, what, what not in reads)
            if what in ("tensors", "versions"):
                count = arguments[names.index(what) + 1]
                for address in host(one).tolist()[:count]:
                    use(address, FIRST_BYTES, f"one of {what}", name == "merge_row")
        mine = [host(one) if isinstance(one, torch.Tensor) else one for one in arguments]
        kernel[(tiles,)](*mine, **constants, enable_fp_fusion=False)


@pytest.fixture
def books(monkeypatch):
    from daso.kernels import triton_kernels

    assert triton_kernels.interpreted()
    made, real = Books(), choice._choose
    monkeypatch.setattr(triton_kernels, "_launch", made.launch)
    known = choice.Choice(triton_kernels, triton_kernels.NAME)
    monkeypatch.setattr(choice, "_choose", lambda name: known if name == "cuda" else real(name))
    warm_up = DeltaShard.warm_up

    def uncounted(part, *words):
        before = made.launches.copy()
        warm_up(part, *words)
        made.launches = before

    monkeypatch.setattr(DeltaShard, "warm_up", uncounted)
    return made


@pytest.fixture(autouse=True)
def everywhere(books):
    """Take Triton's kernels wherever rows lie on a device."""


@pytest.mark.nodes((1, 1), (2, 1))
@pytest.mark.parametrize(("fragments", "merge"), [(1, "delta"), (2, "eager")])
def test_one_nan(topology, rank_info, fragments, merge):
    test_interactions.test_one_nan_costs_one_exchange_and_no_other_nodes_work(
        topology, rank_info, daso.Fixed(2, 1), fragments, merge
    )


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("skip", "wait", "merge", "fragments"),
    [(4, 1, "daso", 1), (3, 3, "delta", 1), (2, 2, "eager", 3)],
)
def test_skipping_equals_one_process(topology, books, skip, wait, merge, fragments, wire):
    options = {"wire": wire, "merge": merge, "fragments": fragments}
    report = compare(topology, mlp, sgd, daso.Fixed(skip, wait), **options)
    if topology.nodes > 1:
        assert report["kernels"].startswith("Triton kernels")
        assert books.launches["merge_row"] > 0
    if topology.nodes > 1 and topology.rank_info.lane is not None:
        assert books.launches["encode_row"] > 0
        assert books.launches["accept_row"] > 0


def test_an_odd_model_equals_one_process(topology):
    policy = daso.Fixed(3, 1, warmup=2)
    compare(topology, Odd, sgd, policy, wire="bf16", merge="delta", steps=7)


def test_an_outer_optimizer_equals_one_process(topology):
    options = {"outer": test_sync.nesterov, "wire": "bf16"}
    compare(topology, mlp, adamw, daso.Fixed(4, 2), **options)


def test_many_tiles_and_messages_equal_one_process(topology, books, monkeypatch):
    monkeypatch.setattr("daso.train.deltas.shard.LEAST", 3000)

    def wide():
        return torch.nn.Sequential(torch.nn.Linear(6, 1000), torch.nn.Linear(1000, 3))

    compare(topology, wide, sgd, daso.Fixed(2, 1), wire="bf16", steps=4)
    if topology.nodes > 1 and topology.rank_info.lane is not None:
        assert books.launches["accept_row"] > books.launches["encode_row"]
