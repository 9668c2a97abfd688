"""DDP's buckets averaged in few bits by `daso.ddp_hook`, against one process that does the same."""

import math

import pytest
import torch
from expected_errors import raises
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import daso
from daso.errors import ConfigError
from daso.integrations import ddp_hook as module
from daso.kernels import torch_kernels
from daso.kernels.codecs import codec_named
from daso.kernels.rows import EncodeRows, FlatTensors, Mean
from daso.plan.layout import split

pytestmark = [pytest.mark.mpi, pytest.mark.nodes((2,), (3,), (4,))]
STEPS = 4


def network(width=300):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 2)
    )


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 4, generator=generator)


def hooked(model, wire="int4", **options):
    under = DistributedDataParallel(model, **options)
    state = daso.ddp_hook_state(wire=wire)
    under.register_comm_hook(state, daso.ddp_hook)
    return under, state


def grads_of(under, step, rank):
    under.zero_grad()
    under(batch(step, rank)).square().mean().backward()
    return [param.grad.clone() for param in under.parameters()]


class OneProcess:
    """The mean of all ranks' rows as the hook takes it, with the reference's kernels."""

    def __init__(self, wire, ranks, numel):
        self.codec = codec_named(wire)
        self.parts = split(numel, ranks if ranks > 2 else 1, module.EVEN)
        self.residuals = [torch.zeros(numel) for _ in range(ranks)]
        self.carries = [torch.zeros(b - a) for a, b in self.parts]

    def mean(self, rows):
        ranks, codec = len(rows), self.codec
        payloads = []
        for row, residual in zip(rows, self.residuals, strict=True):
            sizes = [codec.nbytes(b - a) for a, b in self.parts]
            payload = torch.zeros(sum(sizes), dtype=torch.uint8)
            kept = EncodeRows(residual=residual, gradients=True)
            torch_kernels.encode(codec, FlatTensors([row.clone()]), self.parts, payload, kept)
            payloads.append(payload.split(sizes))
        out = torch.empty_like(rows[0])
        for index, (a, b) in enumerate(self.parts):
            mean = Mean(codec, [one[index] for one in payloads], (1,) * ranks, ranks)
            if len(self.parts) > 1:
                payload = torch.zeros(codec.nbytes(b - a), dtype=torch.uint8)
                carry = self.carries[index]
                torch_kernels.reduce(mean, b - a, payload=payload, carry=carry, gradients=True)
                mean = Mean(codec, [payload])
            torch_kernels.reduce(mean, b - a, row=out[a:b])
        return out


@pytest.mark.parametrize("wire", module.WIRES)
def test_means_have_the_bits_of_one_process(rank_info, world_group, wire):
    """In one bucket, whose order DDP changes behind the first step."""
    under, state = hooked(network(), wire, bucket_cap_mb=100)
    plain = [network() for _ in range(rank_info.world_size)]
    orders = []
    state_of = state._errors_of
    state._errors_of = lambda bucket: orders.append(list(bucket.parameters())) or state_of(bucket)
    names = {id(param): at for at, param in enumerate(under.module.parameters())}
    oracle = None
    for step in range(STEPS):
        mine = grads_of(under, step, rank_info.rank)
        order = [names[id(param)] for param in orders[-1]]
        rows = []
        for rank, model in enumerate(plain):
            grads = grads_of(model, step, rank)
            rows.append(torch.cat([grads[at].flatten() for at in order]))
        if oracle is None or order != oracle[0]:
            oracle = order, OneProcess(wire, len(rows), rows[0].numel())
        mean = oracle[1].mean(rows)
        assert torch.equal(mean, torch.cat([mine[at].flatten() for at in order]))
    state.close()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_training_in_few_bits_is_near_ddp_and_alike_on_all_ranks(
    topology, rank_info, world_group, options
):
    ends, losses = [], []
    for wire in (None, "int4"):
        model = network()
        if wire is None:
            under, state = DistributedDataParallel(model), None
        else:
            under, state = hooked(model, wire, bucket_cap_mb=0.05, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for step in range(30):
            optimizer.zero_grad()
            loss = under(batch(step % 3, rank_info.rank)).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        ends.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
        if state is not None:
            state.close()
    assert topology.equal_on_all_ranks(ends[1].numpy().tobytes())
    start = torch.cat([param.detach().flatten() for param in network().parameters()])
    assert (ends[1] - ends[0]).norm() < 0.2 * (ends[0] - start).norm()
    assert losses[1] < 1.05 * losses[0]


def test_what_is_rounded_away_comes_with_later_gradients(rank_info, world_group):
    """The same gradients again and again: their mean over steps becomes the exact one."""
    under, state = hooked(network(), "int2", bucket_cap_mb=0.05)
    exact = [
        torch.stack(grads).mean(0)
        for grads in zip(
            *(grads_of(network(), 0, rank) for rank in range(rank_info.world_size)), strict=True
        )
    ]
    grads_of(under, 0, rank_info.rank)  # DDP builds its buckets again behind it
    total, mean = 0.0, torch.cat([one.flatten() for one in exact])
    apart = {}
    for step in range(1, 65):
        grads = grads_of(under, 0, rank_info.rank)
        total = total + torch.cat([grad.flatten() for grad in grads])
        apart[step] = float((total / step - mean).norm())
    assert apart[64] < apart[1] / 20
    state.close()


def test_nonfinite_gradient_is_nonfinite_on_all_ranks_once(topology, rank_info, world_group):
    under, state = hooked(network())
    for step in range(3):
        under.zero_grad()
        loss = under(batch(step, rank_info.rank)).square().mean()
        if step == 1 and rank_info.rank == 0:
            loss = loss * math.nan
        loss.backward()
        finite = all(bool(param.grad.isfinite().all()) for param in under.parameters())
        assert finite == (step != 1)
    state.close()


def test_in_hosts_of_two_gradients_are_summed_inside_first(
    topology, rank_info, world_group, monkeypatch
):
    if rank_info.world_size != 4:
        return
    monkeypatch.setattr(module, "_host", lambda: f"host {rank_info.rank % 2}")
    model = network()
    under, state = hooked(model, "int8")
    assert state.nodes == 2
    exact = [
        torch.stack(grads).mean(0)
        for grads in zip(*(grads_of(network(), 0, rank) for rank in range(4)), strict=True)
    ]
    mine = torch.cat([grad.flatten() for grad in grads_of(under, 0, rank_info.rank)])
    mean = torch.cat([one.flatten() for one in exact])
    assert 0 < (mine - mean).norm() < 0.01 * mean.norm()
    assert topology.equal_on_all_ranks(mine.numpy().tobytes())
    state.close()


def test_many_small_tensors_halves_and_unused_ones(topology, rank_info, world_group):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3) for _ in range(200)]).to(torch.bfloat16)
    under, state = hooked(model, find_unused_parameters=True, bucket_cap_mb=0.001)
    model.forward = lambda x: sum(
        layer(x).square().mean() for layer in model[: 150 + rank_info.rank]
    )
    for step in range(3):
        under.zero_grad()
        under(batch(step, rank_info.rank)[:, :3].to(torch.bfloat16)).backward()
    grads = [param.grad for layer in model[:150] for param in layer.parameters()]
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert any(bool(grad.any()) for grad in grads)
    flat = torch.cat([grad.float().flatten() for grad in grads])
    assert topology.equal_on_all_ranks(flat.numpy().tobytes())
    state.close()


def test_one_state_for_two_models_is_refused(rank_info, world_group):
    under, state = hooked(network())
    other = DistributedDataParallel(network())
    other.register_comm_hook(state, daso.ddp_hook)
    with pytest.raises(ConfigError, match="must belong to one model"):
        for step in range(9):
            grads_of(under, step, rank_info.rank)
            grads_of(other, step, rank_info.rank)
    state.close()


def test_a_wire_that_is_not_known_is_refused(world_group):
    with pytest.raises(ConfigError, match="wire must be one of bf16, int8, int4, int2, not 'int3'"):
        daso.ddp_hook_state(wire="int3")


def test_without_a_process_group_the_remedy_is_said():
    with raises("hook-without-group"):
        daso.ddp_hook_state()
