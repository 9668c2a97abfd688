"""What is compared between ranks, and between a checkpoint and the run that loads it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from models import mlp, seeded, sgd

from daso.plan.options import Settings
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
    return made(policy).compatibility_text()


def test_custom_policy_has_a_stable_identity():
    assert text(Often(2, object())) == text(Often(2, object()))
    assert text(Often(2)) != text(Often(3))
    assert "Often" in text(Often(2))


def test_mutable_policy_is_identified_by_its_first_values():
    policy = Often(2)
    setup = made(policy)
    policy.skip = 7  # as it would in a run
    assert setup.compatibility_text() == text(Often(2))
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


def test_settings_are_made_and_checked_once(monkeypatch):
    built, check = [], Settings.__post_init__

    def counted(self):
        built.append(self)
        check(self)

    monkeypatch.setattr(Settings, "__post_init__", counted)
    setup = made(Fixed(2, 1))
    setup.start()
    setup.text()
    assert built == [setup.settings]
