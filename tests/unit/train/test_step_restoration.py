"""Steps made longer, and only they."""

import logging

import pytest
import torch

import daso
from daso.plan.options import Settings
from daso.train.inner.optimizer_probe import OptimizerTraits, probe_optimizer
from daso.train.inner.step_restoration import StepRestoration, make_restorations


def adamw(**options):
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(4))], "lr": 0.1},
        {"params": [torch.nn.Parameter(torch.ones(4))], "lr": 0.2, "weight_decay": 0.5},
    ]
    return torch.optim.AdamW(groups, **{"weight_decay": 0.1, **options})


def settings(restoration="auto", **options):
    return Settings(
        **{
            "wire": "auto",
            "merge": "auto",
            "exchange": daso.Exchange(step_restoration=restoration),
            "gradients": daso.Gradients(),
            **options,
        }
    )


def rates(inner):
    return [(group["lr"], group["weight_decay"]) for group in inner.param_groups]


def test_rates_are_longer_inside_and_what_decay_takes_stays():
    inner = adamw()
    restoration = StepRestoration(inner, probe_optimizer(inner))
    with restoration.scaled(2.0):
        assert rates(inner) == [(0.2, 0.05), (0.4, 0.25)]
    assert rates(inner) == [(0.1, 0.1), (0.2, 0.5)]


def test_a_step_is_the_gain_times_longer_and_decays_as_before():
    moved = []
    for gain in (1.0, 2.0):
        inner = adamw(weight_decay=0.0)
        (first,) = inner.param_groups[0]["params"]
        first.grad = torch.full((4,), 3.0)
        with StepRestoration(inner, probe_optimizer(inner)).scaled(gain):
            inner.step()
        moved.append(1 - first.detach())
    assert torch.allclose(moved[1], 2 * moved[0])


def test_what_decays_through_the_gradient_keeps_its_decay():
    inner = torch.optim.Adam([torch.nn.Parameter(torch.ones(4))], lr=0.1, weight_decay=0.1)
    with StepRestoration(inner, probe_optimizer(inner)).scaled(2.0):
        assert rates(inner) == [(0.2, 0.1)]


def test_a_rate_on_a_device_is_the_same_tensor_afterwards():
    rate = torch.tensor(0.1)
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))], lr=rate)
    with StepRestoration(inner, probe_optimizer(inner)).scaled(2.0):
        assert float(inner.param_groups[0]["lr"]) == pytest.approx(0.2)
    assert inner.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)


def test_a_step_that_raises_leaves_rates_as_they_were():
    inner = adamw()
    restoration = StepRestoration(inner, probe_optimizer(inner))
    with pytest.raises(RuntimeError), restoration.scaled(2.0):
        raise RuntimeError
    assert rates(inner) == [(0.1, 0.1), (0.2, 0.5)]
    restoration.begin(3.0)  # hooks of a step that raised: its end was not called
    restoration.begin(2.0)
    assert rates(inner)[0] == (0.2, 0.05)
    restoration.end()
    restoration.end()
    assert rates(inner) == [(0.1, 0.1), (0.2, 0.5)]


def test_a_group_without_a_rate_and_one_that_is_linear_are_left_alone():
    inner = adamw()
    linear = [OptimizerTraits(), OptimizerTraits(normalizes=True)]
    with StepRestoration(inner, linear).scaled(2.0):
        assert rates(inner) == [(0.1, 0.1), (0.4, 0.5)]
    del inner.param_groups[1]["lr"]
    with StepRestoration(inner, linear).scaled(2.0):
        assert inner.param_groups[0]["lr"] == 0.1


def test_momentum_is_the_mean_over_parameters_that_are_normalized():
    inner = adamw()
    inner.add_param_group({"params": [torch.nn.Parameter(torch.ones(12))], "betas": (0.5, 0.9)})
    kinds = [OptimizerTraits(), *probe_optimizer(inner)[1:]]
    assert StepRestoration(inner, kinds).momentum == pytest.approx((4 * 0.9 + 12 * 0.5) / 16)


@pytest.mark.parametrize(
    ("options", "restores"),
    [
        ({}, True),
        ({"restoration": "on"}, True),
        ({"restoration": "off"}, False),
        ({"outer": True}, False),
        ({"wire": "topk"}, False),
        ({"restoration": "on", "outer": True}, False),
    ],
)
def test_where_steps_are_restored(options, restores):
    found = make_restorations(adamw(), settings(**options), warns=True).always
    assert (found is not None) == restores


def test_a_linear_optimizer_is_left_alone():
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1, momentum=0.9)
    assert make_restorations(sgd, settings(), warns=True).always is None


def test_one_whose_kind_cannot_be_told_is_said_and_can_be_named(caplog):
    lbfgs = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(4))])
    with caplog.at_level(logging.WARNING, "daso"):
        assert make_restorations(lbfgs, settings(), warns=False).always is None
        assert not caplog.records
        assert make_restorations(lbfgs, settings(), warns=True).always is None
    assert "pass exchange=daso.Exchange(step_restoration='on') if it does" in caplog.text
    restoration = make_restorations(lbfgs, settings("on"), warns=True).always
    with restoration.scaled(2.0):
        assert lbfgs.param_groups[0]["lr"] == 2.0
