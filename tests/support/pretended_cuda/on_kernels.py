"""Rows packed by kernels of our own; tests/gpu/test_pretended_cuda.py starts it on ranks.

Triton interprets them, in the books of the pretended device: who uses which memory on which stream.
"""

import ctypes
import inspect

import pytest
import torch
from compare import compare
from daso.train.deltas.kernel_choice import Choice
from models import Odd, adamw, mlp, sgd
from ranks import test_device
from world import test_odd_moments, test_sync

import daso
from daso.train.deltas import buffer as rows
from daso.train.deltas.shard import DeltaShard
from pretended_cuda import LIBRARY

pytestmark = [pytest.mark.mpi, pytest.mark.real_mpi, pytest.mark.nodes((1, 1), (2,), (2, 1))]
device = test_device.device
# What a kernel writes, and which constant says whether it uses what it is given at all.
WRITES = {"wire", "first", "lost", "reference", "shown", "sums"}
ASKED = {"residual": "RESIDUAL", "lost": "LOST", "shown": "SHOWN"}


def host(tensor):
    """Return memory that only pretends to be on a device."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


class Interpreted:
    """A kernel that the device keeps books of."""

    def __init__(self, kernel, *, packs):
        self.kernel, self.launches = kernel, 0
        self.jobs = {True: 0, False: 0}  # aligned, and not
        self.names = list(inspect.signature(kernel.fn).parameters)
        self.writes = WRITES - {"reference"} if packs else WRITES

    def __getitem__(self, grid):
        def launch(*given, **constants):
            self.launches += 1
            self.jobs[constants.get("ALIGNED", True)] += grid[0]
            stream, index = torch.cuda.current_stream(), torch.cuda.current_device()
            LIBRARY.pretended_launch(stream.stream_id, index)

            def use(address, nbytes, name):
                told = f"kernel: {name}".encode()
                writes = int(name in self.writes)
                LIBRARY.pretended_use(stream.stream_id, index, address, nbytes, writes, told)

            for name, one in zip(self.names, given, strict=False):
                if isinstance(one, torch.Tensor) and constants.get(ASKED.get(name), True):
                    assert one.device.index == index, "launched on another device"
                    use(one.data_ptr(), one.nbytes, name)
                if name == "jobs":
                    for address, _, _, numel in host(one).tolist():
                        use(address, numel, "a parameter")  # its first bytes
            mine = [host(one) if isinstance(one, torch.Tensor) else one for one in given]
            self.kernel[grid](*mine, **constants)

        return launch


@pytest.fixture(scope="session")
def kernels():
    from daso.comm.device import triton_kernels as kernels

    assert kernels.interpreted()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_pack", "_take"):
            patch.setattr(kernels, name, Interpreted(getattr(kernels, name), packs=name == "_pack"))
        yield kernels


@pytest.fixture(autouse=True)
def everywhere(kernels, monkeypatch):
    """Pack by kernels where there are any: not for int4, nor for fp64."""
    monkeypatch.setattr(rows, "choose", lambda *_: Choice(kernels, "kernels, interpreted"))
    real = DeltaShard.warm_up

    def uncounted(part, *given):
        before = kernels._pack.launches, kernels._take.launches
        real(part, *given)
        kernels._pack.launches, kernels._take.launches = before

    monkeypatch.setattr(DeltaShard, "warm_up", uncounted)


test_one_nan = test_odd_moments.test_one_nan_costs_one_exchange_and_no_other_nodes_work


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("skip", "wait", "merge", "fragments"),
    [(4, 1, "daso", 1), (3, 3, "delta", 1), (2, 2, "eager", 3)],
)
def test_skipping_equals_one_process(topology, kernels, skip, wait, merge, fragments, wire):
    options = {"wire": wire, "merge": merge, "fragments": fragments}
    packed, before = kernels._pack.launches, kernels._take.launches
    report = compare(topology, mlp, sgd, daso.Fixed(skip, wait), **options)
    if topology.nodes > 1:
        assert report["packing"] == "kernels, interpreted"
    if topology.nodes > 1 and topology.rank_info.lane is not None:
        assert kernels._pack.launches > packed
        taken = kernels._take.launches > before
        # Where parameters are not kept, what the wire lost is in a residual: torch takes it in.
        assert taken == (merge != "eager" and (wire == "fp32" or (merge == "delta" and wait > 0)))


def test_an_odd_model_equals_one_process(topology):
    policy = daso.Fixed(3, 1, warmup=2)
    compare(topology, Odd, sgd, policy, wire="bf16", merge="delta", steps=7)


def test_an_outer_optimizer_equals_one_process(topology):
    options = {"outer": test_sync.nesterov, "wire": "bf16"}
    compare(topology, mlp, adamw, daso.Fixed(4, 2), **options)


def test_many_pieces_and_messages_equal_one_process(topology, kernels, monkeypatch):
    monkeypatch.setattr("daso.train.deltas.shard.DEVICE_PIECE", 1 << 16)
    monkeypatch.setattr("daso.train.deltas.shard.LEAST", 70_000)

    def wide():
        return torch.nn.Sequential(torch.nn.Linear(6, 30_000), torch.nn.Linear(30_000, 3))

    kernels._pack.jobs = {True: 0, False: 0}
    compare(topology, wide, sgd, daso.Fixed(2, 1), wire="bf16", steps=4)
    jobs = kernels._pack.jobs
    if topology.nodes > 1 and topology.rank_info.lane is not None:
        assert jobs[True] > 20 * jobs[False], "lanes and messages begin evenly"
