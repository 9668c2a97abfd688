"""What is compared between ranks, and between a checkpoint and the run that loads it."""

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


def text(policy):
    keywords = dict.fromkeys(["module", "outer", "exchange", "gradients"])
    setup = make_setup(
        sgd(seeded(mlp)()), None, policy=policy, wire="bf16", merge="auto", **keywords
    )
    return setup.lasting()


def test_a_policy_of_ones_own_is_the_same_in_every_process_and_differs_by_its_values():
    assert text(Often(2, object())) == text(Often(2, object()))
    assert text(Often(2)) != text(Often(3))
    assert "Often" in text(Often(2))


@pytest.mark.parametrize("other", [Fixed(2, 1), Fixed(4, 0)])
def test_ours_say_what_they_are_themselves(other):
    assert text(Fixed(2, 0)) == text(Fixed(2, 0)) != text(other)
    assert repr(other) in text(other)
