"""How much a program shortens gradients, measured by one of them."""

import pytest
import torch

from daso.train.model.changes import GradientScaleMeter


def meter(*sizes):
    named = [(f"p{at}", torch.zeros(size, requires_grad=True)) for at, size in enumerate(sizes)]
    return GradientScaleMeter(named), named


def factors(numbers):
    """Return what is told after steps whose gradients were multiplied by these."""
    one, named = meter(100)
    tensor = named[0][1]
    for number in numbers:
        tensor.grad = torch.randn(100)
        one.note()
        tensor.grad.mul_(number)
        one.measure()
    return one.take()


def test_it_looks_at_the_smallest_gradient_that_says_something():
    assert meter(1000, 64, 10)[0].index == 1
    assert meter(5, 10, 3)[0].index == 1


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ([], 0.0),
        ([0.5, 0.25], 2 / 0.75),
        ([1.0, 1.0, 1.0], 1.0),
        ([0.5, 0.5, 0.5, 0.5], 4 / 3.5),  # after the first it counts as a unit
        ([2.0, 3.0], 1.0),
        ([0.5, 1.0, 0.25, 1.0], 4 / 2.75),
    ],
)
def test_the_mean_factor_is_told(numbers, told):
    assert factors(numbers) == pytest.approx(told, rel=1e-5)


@pytest.mark.parametrize("odd", [0.0, float("nan"), float("inf")])
def test_gradients_that_say_nothing_count_as_left_alone(odd):
    one, named = meter(100)
    named[0][1].grad = torch.full((100,), odd)
    one.note()
    named[0][1].grad.mul_(0.5)
    one.measure()
    assert one.take() == 1.0


def test_nothing_is_told_twice_and_a_program_that_stops_is_noticed():
    one, named = meter(100)
    for _ in range(2):
        named[0][1].grad = torch.randn(100)
        one.note()
        named[0][1].grad.mul_(0.5)
        one.measure()
    assert one.take() > 1
    named[0][1].grad = torch.randn(100)
    one.note()
    one.measure()
    assert one.take() == 1.0


def test_what_it_saved_goes_on():
    one, named = meter(100)
    named[0][1].grad = torch.randn(100)
    one.note()
    named[0][1].grad.mul_(0.3)
    one.measure()
    other, _ = meter(100)
    other.load(one.state())
    assert other.take() == one.take() == pytest.approx(1 / 0.3, rel=1e-5)
