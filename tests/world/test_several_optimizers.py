"""Several optimizers over one model: `daso.DASO([muon, adamw])`."""

import copy
import itertools

import pytest
import torch
from doors import bits
from expected_errors import raises
from models import MuonOrLion
from torch import nn
from training import batch, train

import daso
from daso.errors import ConfigError
from daso.train.inner.optimizer_probe import probe_optimizer

POLICIES = [daso.Fixed(1, 0), daso.Fixed(3, 1), daso.Fixed(4, 2, warmup=2)]


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def matrices(model):
    return [p for p in model.parameters() if p.ndim == 2], [
        p for p in model.parameters() if p.ndim != 2
    ]


def muon_and_adamw(model):
    first, rest = matrices(model)
    return [MuonOrLion(first, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def trained(topology, model, inner, steps=9, **keywords):
    optimizer = daso.DASO(inner, module=model, topology=topology, **keywords)
    train(optimizer, model, topology.rank, steps)
    optimizer.synchronize(optimizer_state=True)
    report = optimizer.report()
    state = bits(optimizer.state_dict()["state"])
    optimizer.close()
    return bits(model), state, report


@pytest.mark.nodes((2, 1), (1, 1), (2, 2))
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_two_optimizers_train_as_one_with_two_groups(topology, policy, wire):
    found = []
    for two in (False, True):
        model = network()
        groups = [{"params": params} for params in matrices(model)]
        settings = {"lr": 0.05, "momentum": 0.9}
        inner = [torch.optim.SGD([group], **settings) for group in groups]
        if not two:
            inner = torch.optim.SGD(groups, **settings)
        found.append(trained(topology, model, inner, policy=policy, wire=wire)[:2])
    assert found[0] == found[1]


@pytest.mark.nodes((2, 1), (1, 1))
def test_muon_and_adamw_end_alike_on_all_ranks(topology):
    model = network(seed=topology.rank)
    policy = daso.Fixed(3, 1)
    params, state, report = trained(topology, model, muon_and_adamw(model), policy=policy)
    assert topology.equal_on_all_ranks((params, state))
    assert report["exchanges"] >= 3
    assert report["step_restoration"] == "a measured gain on the learning rate"


@pytest.mark.nodes((1, 1))
def test_a_training_goes_on_to_the_same_bits(topology):
    def make(seed):
        model = network(seed)
        inner = muon_and_adamw(model)
        policy = daso.Fixed(4, 2)
        return model, daso.DASO(inner, module=model, topology=topology, policy=policy, wire="bf16")

    model, optimizer = make(0)
    train(optimizer, model, topology.rank, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(optimizer, model, topology.rank, 4, first=5)
    optimizer.synchronize()
    expected = bits(model)
    optimizer.close()
    again, optimizer = make(1)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(optimizer, again, topology.rank, 4, first=5)
    optimizer.synchronize()
    assert bits(again) == expected
    optimizer.close()


@pytest.mark.nodes((1,))
def test_on_one_rank_it_is_the_optimizers_themselves(topology):
    plain, wrapped = network(), network()
    theirs, inner = muon_and_adamw(plain), muon_and_adamw(wrapped)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (*theirs, *inner)]
    optimizer = daso.DASO(inner, module=wrapped, topology=topology)
    for step, model in itertools.product(range(5), (plain, wrapped)):
        optimizer.zero_grad()
        plain.zero_grad()
        model(batch(step, 0)).square().mean().backward()
        for one in theirs if model is plain else [optimizer]:
            one.step()
        for scheduler in schedulers[:2] if model is plain else schedulers[2:]:
            scheduler.step()
    assert bits(wrapped) == bits(plain)
    assert [g["lr"] for g in optimizer.param_groups] == [0.005, 0.0025]
    optimizer.close()


@pytest.mark.nodes((1, 1))
def test_what_does_not_fit_together_is_refused(topology):
    model = network()
    first, rest = muon_and_adamw(model)
    with pytest.raises(ConfigError, match=r"one optimizer, but optimizer 2 \(SGD\) has some"):
        daso.DASO(
            [first, rest, torch.optim.SGD(model[0].parameters())], module=model, topology=topology
        )
    with pytest.raises(ConfigError, match=r"inner\[1\] must be an optimizer of torch's kind"):
        daso.DASO([first, "adamw"], module=model, topology=topology)
    with raises("no-inner-optimizer"):
        daso.DASO([], module=model, topology=topology)
    with pytest.raises(ConfigError, match="several optimizers must step as a whole"):
        daso.DASO(
            [first, rest],
            module=model,
            topology=topology,
            gradients=daso.Gradients(reducer="prioritized"),
        )
    optimizer = daso.DASO([first, rest], module=model, topology=topology)
    with pytest.raises(ConfigError, match=r"optimizer.inner.optimizers\[NUMBER\].add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    optimizer.close()


def test_each_group_is_probed_by_its_own_optimizer():
    model = network()
    first, rest = matrices(model)
    both = daso.train.inner.combined.CombinedOptimizer(
        [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.AdamW(rest)]
    )
    assert [trait.normalizes for trait in probe_optimizer(both)] == [False, True]
