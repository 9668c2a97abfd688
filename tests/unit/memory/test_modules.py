"""Modules that are called, changed or replaced in ways that plans must follow, or refuse."""

import copy
from dataclasses import replace
from types import MethodType

import pytest
import torch
from plans import loss_of, made, mixed, planned, same, taken_bytes, train, with_ways
from torch import nn

import daso
from daso.memory.course import RECOMPUTE


class Block(nn.Module):
    """A block that is given an activation which all blocks share."""

    def __init__(self, activation):
        super().__init__()
        self.first, self.second = nn.Linear(32, 128), nn.Linear(128, 32)
        self.activation = activation

    def forward(self, x):
        return x + self.second(self.activation(self.first(x)))


class SharedActivation(nn.Module):
    def __init__(self):
        super().__init__()
        self.activation = nn.GELU()
        self.stem = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block(self.activation) for _ in range(8))
        self.out = nn.Linear(32, 10)

    def forward(self, x):
        x = self.activation(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def test_a_module_inside_a_unit_belongs_to_it():
    torch.manual_seed(0)
    model, batch = SharedActivation(), torch.randn(8, 16)
    plain, _ = train(copy.deepcopy(model), batch, steps=4)
    for plan in (planned(model, batch), planned(model, batch, units=("activation", "blocks.0"))):
        other = mixed(plan, model=copy.deepcopy(model))
        found, report = train(other.model, batch, other, steps=4)
        assert same(found, plain)
        assert report.diverged == 0
        assert len(plan.ways) == len(plan.profile.units)


def test_batchnorm_statistics_update_once_with_a_plan_made_in_evaluation_mode():
    model, batch = made("residual")
    plan = with_ways(planned(model.eval(), batch), RECOMPUTE)
    plain, _ = train(copy.deepcopy(model).train(), batch, steps=4)
    other = replace(plan, model=copy.deepcopy(model).train())
    found, report = train(other.model, batch, other, steps=4)
    assert report.recomputed > 0
    assert same(found, plain)


def test_weights_that_each_step_casts_are_measured():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 10))
    batch = torch.randn(8, 256)

    def around():
        return torch.autocast("cpu", torch.bfloat16)

    with around():
        plan = planned(model, batch)
    for _ in range(2):
        taken = taken_bytes(model, batch, plan, around)
        assert taken == pytest.approx(plan.measured_bytes, rel=0.01)


def test_a_forward_that_was_set_on_a_sequential_is_called():
    torch.manual_seed(0)
    model, batch = (
        nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10)),
        torch.randn(8, 16),
    )
    plain = type(model).forward
    model.forward = MethodType(lambda self, x: 2 * plain(self, x), model)
    expected = model(batch)
    with daso.memory.apply(planned(model, batch)):
        assert torch.equal(model(batch), expected)


def test_parameters_replaced_before_backward_are_refused():
    model, batch = made("residual")
    plan = with_ways(planned(model, batch), RECOMPUTE)
    fast = {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}
    with daso.memory.apply(plan):
        output = torch.func.functional_call(model, fast, (batch,))
        with pytest.raises(RuntimeError, match="must have the same parameters in backward"):
            loss_of(output).backward()
