"""Which writes between steps are a new start: of one process, on plain tensors."""

from types import SimpleNamespace

import pytest
import torch

from daso.train.model.changes import ParameterWrites


def steps(tensor, count, write):
    """Take so many steps; return those before which a new start was found."""
    writes = ParameterWrites(SimpleNamespace(local=[("a", tensor)], module=None))
    found = []
    for step in range(count):
        tensor.add_(0.001)  # the optimizer's
        writes.mark()
        write(step)
        if writes.changed():
            found.append(step)
            writes.widen()
    return found


def clamped_at(*when):
    """Return a projection behind every step that binds at some."""
    tensor = torch.zeros(40)

    def write(step):
        tensor.clamp_(max=-1.0 if step in when else 1e6)

    return tensor, write


def test_a_projection_that_seldom_binds_is_part_of_training():
    assert steps(*((pair := clamped_at(115, 365, 615))[0], 700, pair[1])) == []


@pytest.mark.parametrize("by_data", [True, False])
def test_writes_far_apart_are_new_starts_that_get_rarer(by_data):
    tensor = torch.zeros(40)

    def write(step):
        if step and step % 150 == 0:
            (tensor.data if by_data else tensor).mul_(0.5)

    assert steps(tensor, 1000, write) == [150]


def test_rare_writes_are_new_starts_for_ever():
    tensor = torch.zeros(40)

    def write(step):
        if step and step % 450 == 0:
            tensor.mul_(0.5)

    assert steps(tensor, 2000, write) == [450, 900, 1350, 1800]


def test_parameters_that_are_swapped_hide_no_new_start():
    tensor = torch.arange(40.0)

    def write(step):
        if step % 90 == 5:
            kept = tensor.clone()
            tensor.zero_()
            tensor.copy_(kept)
        if step == 500:
            tensor.fill_(-1.0)

    assert steps(tensor, 700, write) == [500]


def test_two_writes_far_apart_are_two_new_starts():
    tensor = torch.zeros(40)

    def write(step):
        if step in (10, 400):
            tensor.fill_(-1.0)

    assert steps(tensor, 500, write) == [10, 400]


def test_what_is_put_back_is_unchanged():
    tensor = torch.arange(40.0)

    def write(step):
        if step == 10:
            kept = tensor.clone()
            tensor.zero_()
            tensor.copy_(kept)

    assert steps(tensor, 20, write) == []
