"""What exchanges hold of a model while they rest: nothing."""

from contextlib import nullcontext

import pytest
import torch
from benchmarks.growth_memory import held

import daso
from daso.comm.emulation import CopyLink, pretend_device
from daso.memory.static import static_bytes

NUMEL = 64 * 32


@pytest.mark.nodes((1, 1))
@pytest.mark.parametrize("on_device", [False, True])
def test_rows_take_memory_only_while_parameters_are_exchanged(topology, on_device):
    with pretend_device(CopyLink(1e9, 1e-6)) if on_device else nullcontext():
        model = torch.nn.Linear(64, 32, bias=False)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        policy = daso.Plateau(3, warmup=1, cooldown=1, max_skip=2)
        optimizer = daso.DASO(inner, module=model, topology=topology, policy=policy, wire="bf16")
        taken, mine = [], list(model.parameters())
        for epoch in range(3):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
            found = held(optimizer, mine, topology.local_rank)
            taken.append({name.split(".")[-1]: nbytes for name, nbytes in found.items()})
            optimizer.end_epoch(1.0 - 0.5 * epoch)
        optimizer.close()
    rows = {"reference": 4 * NUMEL, "_payloads": 2 * NUMEL}
    if on_device:
        rows = {"reference": 4 * NUMEL, "published": 4 * NUMEL, "_pinned": 2 * NUMEL}
    before, exchanged, after = taken
    for name, nbytes in rows.items():
        assert exchanged[name] == nbytes
        assert name not in before
        assert name not in after or name == "_pinned"  # which is kept


@pytest.mark.nodes((1, 1))
@pytest.mark.parametrize(("wire", "payload"), [("bf16", 2), ("fp32", 0)])
def test_a_plan_counts_what_exchanges_will_hold_while_they_rest(topology, wire, payload):
    model = torch.nn.Linear(64, 32, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"wire": wire, "policy": daso.Fixed(2, 1, warmup=2)}
    with daso.DASO(inner, module=model, topology=topology, **options) as optimizer:
        resting = static_bytes(model, optimizer, torch.ones(1, 64)).optimizer
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
        trained = static_bytes(model, optimizer, torch.ones(1, 64)).optimizer
        rows = optimizer._session.runner.deltas._rows_of(None)
        optimizer.synchronize()
    assert resting >= (4 + 4 + payload) * NUMEL  # published row, reference, payload
    assert trained >= resting
    assert [row.unmade_bytes for row in rows] == [0]
