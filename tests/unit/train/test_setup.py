"""What is compared between ranks, and between a checkpoint and the run that loads it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from models import mlp, seeded, sgd

from daso.plan.policies import Fixed
from daso.train.setup import make_setup


class Often:
    """A policy of one's own, as a plain class."""

    def __init__(self, skip, helper=None):
        self.skip, self.helper = skip, helper

    start = Fixed.start
    tune_batch = Fixed.tune_batch
    tune_exchange = Fixed.tune_exchange
    tune_epoch = Fixed.tune_epoch


def made(policy):
    keywords = dict.fromkeys(["module", "outer", "exchange", "gradients"])
    return make_setup(
        sgd(seeded(mlp)()), None, policy=policy, wire="bf16", merge="auto", **keywords
    )


def text(policy):
    return made(policy).lasting()


def test_a_policy_of_ones_own_is_the_same_in_every_process_and_differs_by_its_values():
    assert text(Often(2, object())) == text(Often(2, object()))
    assert text(Often(2)) != text(Often(3))
    assert "Often" in text(Often(2))


def test_a_policy_that_counts_in_itself_is_known_by_what_it_was_when_it_was_given():
    policy = Often(2)
    setup = made(policy)
    policy.skip = 7  # as it would in a run
    assert setup.lasting() == text(Often(2))
    assert replace(setup, module=None).text() == setup.text()


def test_what_is_in_slots_counts_and_where_a_function_lies_does_not():
    class Slotted(Often):
        __slots__ = ("more",)

        def __init__(self, more):
            super().__init__(2)
            self.more = more

    @dataclass
    class Told(Often):
        skip: Callable[[], int]

    assert text(Slotted(1)) == text(Slotted(1)) != text(Slotted(2))
    assert text(Told(lambda: 1)) == text(Told(lambda: 1))


@pytest.mark.parametrize("other", [Fixed(2, 1), Fixed(4, 0)])
def test_ours_say_what_they_are_themselves(other):
    assert text(Fixed(2, 0)) == text(Fixed(2, 0)) != text(other)
    assert repr(other) in text(other)
