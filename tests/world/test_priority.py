"""Gradients that cross in portions: whatever the order, the bits are those of synchronous steps."""

import copy
import itertools
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from compare import compare
from expected_errors import raises
from models import Odd, adamw, batch_loss, flat_bytes, mlp, seeded, sgd
from pairwise import pairwise
from torch import nn
from torch.nn.utils import prune

import daso
from daso.comm.node.shm import ShmNode
from daso.errors import ConfigError, NonFiniteError
from daso.train.channels import ABREAST
from daso.train.gradients.background import CarriedBuckets
from daso.train.gradients.priority import PriorityReducer

ORDERS = ["layer", "lifo", "fifo"]
FREE = {
    "priority": {"reducer": "prioritized", "bucket_bytes": 64},
    "host": {"reducer": "host", "step": "layerwise", "bucket_bytes": 64},
}
ORDERED = daso.Exchange(algorithm="direct")


class Attention(nn.Module):
    """Uses parameters of a module that it never calls (out_proj), and tied ones."""

    def __init__(self):
        super().__init__()
        self.first, self.tied = nn.Linear(6, 4), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 3)
        self.last.bias = nn.Parameter(torch.zeros(3))
        self.again = self.tied
        self.loose = nn.Parameter(torch.ones(4))

    def forward(self, x):
        h = self.again(torch.relu(self.tied(self.first(x)))) * self.loose
        h, _ = self.attention(h[None], h[None], h[None])
        return self.last(h[0])


def wrapped(topology, model, inner, policy=None, **gradients):
    return daso.DASO(
        inner(model),
        module=model,
        topology=topology,
        policy=daso.Fixed(1, 0) if policy is None else policy,
        exchange=ORDERED,
        gradients=daso.Gradients(**gradients),
    )


@pytest.fixture(params=FREE)
def free(request):
    """Gradients for which no step waits as a whole."""
    return FREE[request.param]


def is_free(topology, free):
    """Return whether steps are taken layer by layer then."""
    rank_info = topology.rank_info
    return rank_info.nodes > 1 or (free["reducer"] == "host" and rank_info.world_size > 1)


def bits(model):
    return b"".join(flat_bytes(p) for p in model.parameters())


def plain(model, optimizer, rank, step):
    """Take one step as most programs do."""
    optimizer.zero_grad()
    batch_loss(model, rank, step).backward()
    optimizer.step()


def train(topology, make, inner, *, steps=4, policy=None, each=plain, **gradients):
    model = seeded(make)()
    with wrapped(topology, model, inner, policy, **gradients) as optimizer:
        for step in range(steps):
            each(model, optimizer, topology.rank, step)
        optimizer.flush()
        report = optimizer.report()
    return bits(model), report


@pairwise(
    case=[(mlp, adamw, 1), (mlp, adamw, 100), (Odd, sgd, 400), (Odd, sgd, 1 << 20)],
    portions=ORDERS,
    update=["model", "layerwise"],
)
def test_no_order_and_no_cut_changes_a_bit(topology, case, portions, update):
    make, inner, nbytes = case
    same, before = train(topology, make, inner)
    cut = {"bucket_bytes": nbytes, "priority": portions, "step": update}
    found, report = train(topology, make, inner, reducer="prioritized", **cut)
    assert found == same
    assert report["batches"] == 4
    assert report["exchanges"] == before["exchanges"]


@pytest.mark.parametrize(("make", "inner"), [(Odd, sgd), (Attention, adamw)])
def test_every_step_equals_one_process_once_it_is_flushed(topology, free, make, inner):
    gradients = daso.Gradients(**free)
    compare(topology, make, inner, daso.Fixed(1, 0), steps=4, gradients=gradients)


@pytest.mark.parametrize("update", ["model", "layerwise"])
def test_phases_change_between_synchronous_and_local(topology, free, update):
    """Portions are buckets like any others where nodes step by themselves."""
    policy = daso.Plateau(epochs=5, warmup=1, cooldown=1, patience=1)
    gradients = daso.Gradients(**free | {"step": update})
    compare(topology, Odd, sgd, policy, steps=3, epochs=5, gradients=gradients, wire="bf16")


def zero_late(model, optimizer, rank, step):
    loss = batch_loss(model, rank, step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def zero_in_place(model, optimizer, rank, step):
    optimizer.zero_grad(set_to_none=False)
    batch_loss(model, rank, step).backward()
    optimizer.step()


def zero_by_model(model, optimizer, rank, step):
    model.zero_grad()
    batch_loss(model, rank, step).backward()
    optimizer.step()


def zero_never(model, optimizer, rank, step):
    batch_loss(model, rank, step).backward()
    optimizer.step()


def zero_at_the_end(model, optimizer, rank, step):
    batch_loss(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulate(model, optimizer, rank, step):
    optimizer.zero_grad()
    with optimizer.no_sync():
        batch_loss(model, rank, 2 * step).backward()
    batch_loss(model, rank, 2 * step + 1).backward()
    optimizer.step()


def evaluate(model, optimizer, rank, step):
    plain(model, optimizer, rank, step)
    with torch.inference_mode():
        batch_loss(model, rank, step)


def save(model, optimizer, rank, step):
    plain(model, optimizer, rank, step)
    fresh = mlp() if step % 2 else Odd()
    if set(fresh.state_dict()) == set(model.state_dict()):
        fresh.load_state_dict(model.state_dict())
        assert bits(fresh) == bits(model)


def look_at_both(model, optimizer, rank, step):
    plain(model, optimizer, rank, step)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize(
    "each",
    [
        *(zero_late, zero_in_place, zero_by_model, zero_never, zero_at_the_end),
        *(accumulate, evaluate, save, look_at_both),
    ],
)
@pytest.mark.parametrize(("make", "inner"), [(Odd, sgd)])
def test_loops_of_all_kinds_see_what_they_saw(topology, free, make, inner, each):
    same, _ = train(topology, make, inner, each=each)
    found, _ = train(topology, make, inner, each=each, **free)
    assert found == same


@pytest.mark.parametrize("rate", [float, torch.tensor])
def test_a_step_takes_the_learning_rate_of_its_own_batch(topology, free, rate):
    def inner(model):  # a scheduler writes to a rate that is a tensor
        return torch.optim.SGD(model.parameters(), lr=rate(0.05), momentum=0.9)

    def scheduled(**gradients):
        model = seeded(mlp)()
        with wrapped(topology, model, inner, **gradients) as optimizer:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            rates = []
            for step in range(6):
                plain(model, optimizer, topology.rank, step)
                scheduler.step()
                rates.append(float(optimizer.param_groups[0]["lr"]))
        return bits(model), rates

    same, rates = scheduled()
    assert scheduled(**free) == (same, rates)
    assert all(b == a / 2 for a, b in itertools.pairwise(rates))


def test_without_a_policy_all_batches_are_synchronous(topology, free):
    model = seeded(mlp)()
    inner, gradients = sgd(model), daso.Gradients(**free)
    with daso.DASO(inner, module=model, topology=topology, gradients=gradients) as optimizer:
        assert optimizer.report()["policy"] == repr(daso.Fixed(1, 0))


def test_what_crosses_is_counted(topology, free):
    """As many bytes as synchronous buckets send, whatever the cut; waiting is told."""
    _, same = train(topology, mlp, sgd)
    _, found = train(topology, mlp, sgd, **free)
    # Parts of portions, by lanes and by nodes, are rounded to whole numbers.
    assert found["global_bytes_sent"] == pytest.approx(same["global_bytes_sent"], rel=0.05)
    if is_free(topology, free):
        assert found["exposed_seconds"] > 0


# --- when things happen --------------------------------------------------------------------------


@pytest.fixture
def logged(monkeypatch, topology):
    """Let every crossing write down what it does; a list for each round."""
    rounds = []
    begin = PriorityReducer.begin

    def begun(self, portions, *, world):
        begin(self, portions, world=world)
        self.log = []
        rounds.append((self.log, [portion for portion, _ in portions]))

    monkeypatch.setattr(PriorityReducer, "begin", begun)
    return rounds


def chain():
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)), nn.Linear(6, 3))


@pytest.mark.real_mpi
def test_what_is_needed_sooner_overtakes_all_but_a_few(topology, logged):
    """When a portion is chosen, none that is needed sooner was ready one portion before."""
    train(topology, chain, sgd, steps=4, reducer="prioritized", bucket_bytes=32)
    assert len(logged) == (4 if topology.nodes > 1 else 0)
    for log, portions in logged[1:]:
        chosen = [portion for what, portion in log if what == "next"]
        assert sorted(chosen) == list(range(len(portions)))
        assert topology.equal_on_all_ranks(chosen)
        check_abreast(log)
        if topology.rank == 0:
            check_inversions(log, portions)


def test_a_portion_is_of_the_layer_that_the_next_forward_comes_to(topology):
    model = seeded(chain)()
    with wrapped(topology, model, sgd, reducer="prioritized", bucket_bytes=1) as optimizer:
        plain(model, optimizer, topology.rank, 0)
        rows = optimizer._session.runner.parts.gradients.reducer.rows
        first_needed = sorted(rows.buckets, key=lambda bucket: bucket.portion.layer)
        layers = [min(bucket.params) // 2 for bucket in first_needed]  # a weight and a bias each
    assert layers == sorted(layers)
    assert set(layers) == set(range(len(model)))


@pytest.mark.parametrize("reducer", ["prioritized", "host"])
def test_an_earlier_run_may_have_had_smaller_portions(topology, reducer):
    """Their size follows from what messages cost, which is measured anew at every start."""
    model = seeded(lambda: nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 3)))()
    with wrapped(topology, model, sgd, reducer=reducer, bucket_bytes=1 << 20) as optimizer:
        for nbytes in (1 << 20, 1 << 16, 100):
            buckets = optimizer._session.runner.parts.gradients.reducer
            buckets.rows.arrange(buckets.rows.order, nbytes)
            optimizer.zero_grad()
            torch.manual_seed(topology.rank)
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
            optimizer.flush()
        count = len(buckets.rows.buckets)
    assert count > (1000 if reducer == "prioritized" else 4)
    everyones = topology.world_comm.allgather([p.detach().clone() for p in model.parameters()])
    assert all(
        torch.equal(a, b) for one in everyones for a, b in zip(one, everyones[0], strict=True)
    )


def check_abreast(log):
    """A few portions are under way at a time, and one is told ahead."""
    under_way, most = 0, 0
    for what, _ in log:
        under_way += {"next": 1, "crossed": -1}.get(what, 0)
        most = max(most, under_way)
    assert 1 <= most <= ABREAST + 1


def check_inversions(log, portions):
    ready = set()
    before = set()  # what was ready when the last one was chosen
    for what, portion in log:
        if what == "ready":
            ready.add(portion)
        elif what == "taken":
            sooner = [one for one in before if portions[one].layer < portions[portion].layer]
            assert not sooner
            ready.discard(portion)
            before = set(ready)
            before.discard(portion)


def test_layer_steps_between_its_gradient_and_its_forward(topology, free):
    model, waits = seeded(chain)(), is_free(topology, free)
    with wrapped(topology, model, sgd, **free) as optimizer:
        rank = topology.rank
        plain(model, optimizer, rank, 0)
        old = [bits(layer) for layer in model]
        seen = []

        def look(at):
            return lambda *_: seen.append([bits(layer) != old[i] for i, layer in enumerate(model)])

        hooks = [layer.register_forward_pre_hook(look(at)) for at, layer in enumerate(model)]
        optimizer.zero_grad()
        loss = batch_loss(model, rank, 1)
        # Before layer 3's forward layers 0 to 3 have been stepped, others if their gradients came.
        assert all(all(done[: at + 1]) == waits for at, done in enumerate(seen))
        for hook in hooks:
            hook.remove()
        loss.backward()
        optimizer.step()


# --- what needs all gradients --------------------------------------------------------------------


def clip(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def scale(model, optimizer):
    for param in model.parameters():
        param.grad = param.grad * 2
    optimizer.step()


def hook(model, optimizer):
    optimizer.inner.register_step_post_hook(lambda *_: None)
    optimizer.step()


def closure(model, optimizer):
    optimizer.step(lambda: batch_loss(model, 0, 0))


def scaler(model, optimizer):
    optimizer.found_inf = torch.zeros(())
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (clip, "gradients must be left alone between backward and step"),
        (scale, "gradients must be left alone between backward and step"),
        (hook, "must have no hooks on its step, but SGD has"),
        (closure, "but closures need all"),
        (scaler, "but GradScalers need all"),
    ],
)
def test_what_needs_all_gradients_is_refused_with_the_alternative(topology, free, use, says):
    model = seeded(mlp)()
    optimizer = wrapped(topology, model, sgd, **free)
    batch_loss(model, topology.rank, 0).backward()
    if not is_free(topology, free):
        use(model, optimizer)
    else:
        alternative = r"use Gradients\(step='model'\)"
        with pytest.raises(ConfigError, match=f"{says}.*{alternative}"):
            use(model, optimizer)
    optimizer.close()


class Counting(torch.optim.SGD):
    """Keeps a count in its groups, as some optimizers do."""

    def step(self, closure=None):
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_counts_in_its_groups_is_refused(topology, free):
    def counting(model):
        return Counting(model.parameters(), lr=0.1)

    model = seeded(mlp)()
    optimizer = wrapped(topology, model, counting, **free)
    plain(model, optimizer, topology.rank, 0)
    if is_free(topology, free):
        with pytest.raises(ConfigError, match="Counting counts in 'k'; use Gradients"):
            optimizer.flush()
    optimizer.close()


def test_layers_need_the_model_and_an_optimizer_that_is_wrapped(topology):
    model = mlp()
    gradients = daso.Gradients(reducer="prioritized")
    with pytest.raises(ConfigError, match=r"needs the model whose layers wait .* pass module="):
        daso.DASO(sgd(model), topology=topology, gradients=gradients)
    with pytest.raises(ConfigError, match=r"attached must step as a whole.*wrap it with daso.DASO"):
        daso.attach(sgd(model), module=model, topology=topology, gradients=gradients)


def test_third_nonfinite_gradient_raises(topology, free):
    """The rank that has it is one of many; what is dropped, and raised, is the same on all."""
    last = topology.world_size - 1

    def poisoned(model, optimizer, rank, step):
        optimizer.zero_grad()
        loss = batch_loss(model, rank, step)
        (loss * float("nan") if rank == last and step in bad else loss).backward()
        optimizer.step()

    for bad in ([2], [2, 5]):
        same, before = train(topology, mlp, sgd, steps=8, each=poisoned)
        found, after = train(topology, mlp, sgd, steps=8, each=poisoned, **free)
        if topology.nodes > 1:  # on one node nobody looks: a NaN stays
            assert found == same
            assert after["dropped"] == before["dropped"] == len(bad)
    bad, model = [1, 2, 3], seeded(mlp)()
    optimizer = wrapped(topology, model, sgd, **free)
    with pytest.raises(NonFiniteError, match=r"drop number 3"), warnings.catch_warnings():
        for step in range(8):
            poisoned(model, optimizer, topology.rank, step)
    optimizer.close()


# --- what a review found -------------------------------------------------------------------------


def normed():
    """Weights that are computed before each forward, by hooks of torch's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 5)), nn.Linear(5, 3))


def pruned():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    prune.random_unstructured(model[0], "weight", amount=0.3)
    return model


@pytest.mark.parametrize("make", [normed, pruned])
def test_weights_that_hooks_compute_are_computed_after_the_step(topology, free, make):
    torch.manual_seed(3)
    same, _ = train(topology, make, sgd)
    torch.manual_seed(3)
    assert train(topology, make, sgd, **free)[0] == same


def load_bare(model, optimizer, rank, step):
    plain(model, optimizer, rank, step)
    if step in (1, 3):
        optimizer.flush()
        optimizer.load_state_dict(copy.deepcopy(optimizer.inner.state_dict()))


def average_and_load(model, optimizer, rank, step):
    """Roll back to weights of before: what is due belongs to those that are replaced."""
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain(model, optimizer, rank, step)
    if step % 2:
        model.load_state_dict(old)


@pytest.mark.parametrize("each", [load_bare, average_and_load])
def test_states_are_loaded_between_steps(topology, free, each):
    same, _ = train(topology, mlp, adamw, each=each)
    assert train(topology, mlp, adamw, each=each, **free)[0] == same


def test_a_second_backward_before_the_step_is_refused(topology, free):
    model = seeded(mlp)()
    optimizer = wrapped(topology, model, sgd, **free)
    rank = topology.rank
    plain(model, optimizer, rank, 0)
    batch_loss(model, rank, 1).backward()
    if not is_free(topology, free):
        batch_loss(model, rank, 2).backward()
        optimizer.step()
    else:
        with pytest.raises(ConfigError, match=r"another backward came first; .*no_sync\(\)"):
            batch_loss(model, rank, 2).backward()
    optimizer.close()


def waited_for(carried, params):
    """Leave out gradients that came while nobody waited for them, as on a slow network."""
    return set(params) - {i for one in carried._rows.buckets if one.under_way for i in one.params}


def all_came(carried, params):
    """Have all gradients there whenever one is waited for, as on a fast network."""
    return set(params)


@pairwise(come=[waited_for, all_came], each=[plain, accumulate, evaluate])
def test_no_loop_depends_on_when_gradients_come(topology, monkeypatch, free, each, come):
    """Not either where a batch that is only added uses layers that those before did not."""
    same, _ = train(topology, Odd, sgd, each=each, steps=6)
    monkeypatch.setattr(CarriedBuckets, "arrived", come)
    found, _ = train(topology, Odd, sgd, each=each, steps=6, **free)
    assert found == same


def test_a_parameter_used_behind_the_back_of_its_module_is_refused(topology, monkeypatch, free):
    monkeypatch.setattr(CarriedBuckets, "arrived", waited_for)
    model = seeded(chain)()
    optimizer = wrapped(topology, model, sgd, **free)

    def around():
        """Uses all but the first layer without calling a module."""
        x = model[0](torch.ones(2, 6))
        for layer in list(model)[1:]:
            x = x @ layer.weight.t()
        return x.sum()

    plain(model, optimizer, topology.rank, 0)
    if not is_free(topology, free):
        around().backward()
    else:
        told = "was used before the step with its last gradient|modified by an inplace operation"
        with pytest.raises((ConfigError, RuntimeError), match=told):
            around().backward()
        optimizer._session.runner.parts.abandon()  # a program ends there
    optimizer.close()


class Around(nn.Module):
    """Uses a bias of a module that it called once, and never again."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.called = False

    def forward(self, x):
        h = self.first(x)
        h = h + self.gate.bias if self.called else self.gate(h)
        self.called = True
        return self.last(h)


@pytest.mark.real_mpi
@pytest.mark.parametrize("added", [False, True])
def test_gradient_during_forward_hides_no_early_use(topology, monkeypatch, free, added):
    """The bias was used before the step, which was then taken, with what had come, later on."""
    model, calls = seeded(Around)(), []
    optimizer = wrapped(topology, model, sgd, **free)
    plain(model, optimizer, topology.rank, 0)

    def arrived(buckets, params):
        calls.append(params)
        return waited_for(buckets, params) if len(calls) == 1 else set(params)

    monkeypatch.setattr(CarriedBuckets, "arrived", arrived)
    loss = batch_loss(model, topology.rank, 1)
    if is_free(topology, free):
        told = r"gate\.bias was used before the step"
        with (
            optimizer.no_sync() if added else nullcontext(),
            pytest.raises(ConfigError, match=told),
        ):
            loss.backward()
        optimizer._session.runner.parts.abandon()  # a program ends there
    else:
        loss.backward()
    optimizer.close()


def test_gradients_that_are_zeroed_in_place_while_they_cross_are_refused(topology, free):
    model = seeded(mlp)()
    optimizer = wrapped(topology, model, sgd, **free)
    plain(model, optimizer, topology.rank, 0)
    model.zero_grad(set_to_none=False)
    if is_free(topology, free):
        with raises("gradients-written-after-step"):
            model(torch.ones(2, 6))
        with raises("gradients-written-after-step"):
            optimizer.close()
    optimizer.close()


def test_only_the_nonfinite_parameter_is_dropped(topology):
    """Ranks come to layers in different orders; what is stepped is the same on all."""
    model, rank = seeded(chain)(), topology.rank
    with wrapped(topology, model, sgd, reducer="prioritized", bucket_bytes=1) as optimizer:
        plain(model, optimizer, rank, 0)
        optimizer.flush()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        loss = batch_loss(model, rank, 1)
        model[3].weight.register_hook(lambda grad: grad * float("inf"))
        loss.backward()
        optimizer.step()
        if rank == 0:
            model[3](torch.ones(2, 6))
        optimizer.flush()
        if topology.nodes > 1:
            named = zip(model.named_parameters(), before, strict=True)
            changed = {name: not torch.equal(p, old) for (name, p), old in named}
            assert [name for name, was in changed.items() if not was] == ["3.weight"]
            assert topology.equal_on_all_ranks(bits(model))


def test_the_step_is_not_part_of_the_forwards_autocast(topology, free):
    def mixed(model, optimizer, rank, step):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = batch_loss(model, rank, step)
        loss.backward()
        optimizer.step()

    def adafactor(model):
        return torch.optim.Adafactor(model.parameters(), lr=0.05)

    same, _ = train(topology, mlp, adafactor, each=mixed)
    assert train(topology, mlp, adafactor, each=mixed, **free)[0] == same


def test_hooks_on_the_wrapper_see_the_step_and_copies_have_no_hooks(topology, free):
    def watched(**gradients):
        model, seen = seeded(mlp)(), []
        with wrapped(topology, model, sgd, **gradients) as optimizer:
            optimizer.register_step_post_hook(lambda *_: seen.append(bits(model)))
            for step in range(3):
                plain(model, optimizer, topology.rank, step)
            copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
            assert bits(copied) == seen[-1]
            copied(torch.ones(2, 6))  # steps nothing
        return seen

    assert watched(**free) == watched()


def test_memory_for_portions_grows_with_portions_and_not_with_numbers(topology, monkeypatch):
    asked = []
    progress = ShmNode._progress
    monkeypatch.setattr(ShmNode, "_progress", lambda node, n: asked.append(n) or progress(node, n))
    model = nn.Sequential(nn.Linear(6, 1000), nn.Linear(1000, 3))
    gradients = {"reducer": "prioritized", "bucket_bytes": 4000}
    with wrapped(topology, model, sgd, **gradients) as optimizer:
        plain(model, optimizer, topology.rank, 0)
    assert max(asked, default=0) <= 2 * 4 + 10_007 // 1000
