"""What a few steps of a copy tell of an optimizer."""

import copy

import pytest
import torch
from lion_pytorch import Lion

from daso.train.inner import optimizer_probe
from daso.train.inner.optimizer_probe import OptimizerTraits, probe_optimizer

O = torch.optim  # noqa: E741


def params():
    return [torch.nn.Parameter(torch.full((8, 8), 0.5)), torch.nn.Parameter(torch.ones(3))]


MATRIX = [torch.nn.Parameter(torch.ones(8, 8))]

LINEAR = {
    "SGD": lambda: O.SGD(params(), lr=0.1),
    "momentum": lambda: O.SGD(params(), lr=0.1, momentum=0.9, weight_decay=1e-4),
    "Nesterov": lambda: O.SGD(params(), lr=0.1, momentum=0.9, nesterov=True),
    "ASGD": lambda: O.ASGD(params()),
}
NORMALIZES = {
    "Adam": (lambda: O.Adam(params(), weight_decay=0.1), False, 0.9),
    "AdamW": (lambda: O.AdamW(params(), betas=(0.95, 0.98)), True, 0.95),
    "amsgrad": (lambda: O.AdamW(params(), amsgrad=True), True, 0.9),
    "fused": (lambda: O.AdamW(params(), fused=True), True, 0.9),
    "a rate on a device": (lambda: O.AdamW(params(), lr=torch.tensor(0.1)), True, 0.9),
    "RMSprop": (lambda: O.RMSprop(params()), False, 0.0),
    "NAdam": (lambda: O.NAdam(params()), False, 0.9),
    "RAdam": (lambda: O.RAdam(params(), decoupled_weight_decay=True), True, 0.9),
    "Adamax": (lambda: O.Adamax(params()), False, 0.9),
    "Adagrad": (lambda: O.Adagrad(params()), False, 0.0),
    "Adadelta": (lambda: O.Adadelta(params()), False, 0.0),
    "Adafactor": (lambda: O.Adafactor(params()), True, 0.0),
    "Lion": (lambda: Lion(params()), True, 0.99),
}
FAR = 1e4  # of a sum of squares, beside which those of gradients are nothing
LINEAR["Adagrad, begun far away"] = lambda: O.Adagrad(params(), initial_accumulator_value=FAR)
if hasattr(O, "Muon"):
    NORMALIZES["Muon"] = (lambda: O.Muon(MATRIX), True, 0.95)


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_in_its_gradients_lacks_nothing(name):
    assert not any(kind.normalizes for kind in probe_optimizer(LINEAR[name]()))


@pytest.mark.parametrize("name", NORMALIZES)
def test_what_divides_by_the_size_of_gradients_is_told_by_its_steps(name):
    make, decays_by_lr, momentum = NORMALIZES[name]
    for kind in probe_optimizer(make()):
        assert (kind.normalizes, kind.decays_by_lr) == (True, decays_by_lr)
        assert kind.momentum == momentum


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        *[("Adam", 0.999), ("AdamW", 0.98), ("amsgrad", 0.999), ("NAdam", 0.999), ("RAdam", 0.999)],
        *[("RMSprop", 0.99), ("Adagrad", 0.0), ("Lion", 0.0)],
        *([("Muon", 0.0)] if hasattr(O, "Muon") else []),
    ],
)
def test_how_long_it_remembers_the_size_of_gradients(name, memory):
    assert next(kind.memory for kind in probe_optimizer(NORMALIZES[name][0]())) == memory


def test_each_group_is_looked_at():
    first, second = params()
    groups = [{"params": [first]}, {"params": [second], "betas": (0.5, 0.9)}]
    assert [kind.momentum for kind in probe_optimizer(O.AdamW(groups))] == [0.9, 0.5]


def test_hundreds_of_groups_are_looked_at_with_three_copies(monkeypatch):
    """As where every layer has a learning rate of its own."""
    made = []
    before = optimizer_probe._Copy.__init__

    def counted(self, *args, **options):
        made.append(self)
        before(self, *args, **options)

    monkeypatch.setattr(optimizer_probe._Copy, "__init__", counted)
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(300)]
    assert len(probe_optimizer(O.AdamW(groups))) == 300
    assert len(made) == 3


def test_nothing_of_the_users_is_touched():
    torch.manual_seed(3)
    optimizer = O.AdamW(params())
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    scheduler = O.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own in place
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a step of the user's"))
    before = copy.deepcopy(optimizer.state_dict())
    values = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    random = torch.get_rng_state()
    assert probe_optimizer(optimizer)[0].normalizes
    assert torch.equal(random, torch.get_rng_state())
    assert optimizer.state_dict() == before
    assert all(map(torch.equal, values, optimizer.param_groups[0]["params"]))
    assert scheduler.last_epoch == 0


class Wrapper(O.Optimizer):
    """As SAM: holds another optimizer of the same parameters."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.param_groups = self.param_groups
        return self.inner.step(closure)


def test_an_optimizer_inside_another_is_copied_with_it():
    inner = O.AdamW(params())
    assert probe_optimizer(Wrapper(inner))[0].normalizes
    assert not inner.state


@pytest.mark.parametrize("make", [lambda: O.LBFGS(params()), lambda: O.SparseAdam(params())])
def test_what_cannot_be_told_is_not_guessed(make):
    assert probe_optimizer(make()) is None


def test_a_model_that_an_optimizer_holds_is_not_copied():
    optimizer = O.AdamW(params())
    optimizer.model = torch.nn.Linear(2, 2)
    assert probe_optimizer(optimizer) is None


def test_a_kind_is_frozen():
    with pytest.raises(AttributeError):
        OptimizerTraits().momentum = 0.9
