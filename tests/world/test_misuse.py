"""First wrong moves: noticed, refused, or made right, as one process that adds in order does it."""

import copy
import logging
import threading
from contextlib import contextmanager

import pytest
import torch
from expected_errors import raises
from sequential import Sequential
from torch import nn
from worlds import SEVERAL_NODES

import daso
from daso.errors import ConfigError, LayoutError, NonFiniteError

RARE = daso.Fixed(3, 1)
SYNC = daso.Fixed(1, 0)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2)
    )


def batch_loss(model, rank, step):
    generator = torch.Generator().manual_seed(97 * step + rank)
    return model(torch.randn(4, 2, 4, 4, generator=generator)).square().mean()


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def wrap(topology, model, inner=None, **keywords):
    inner = sgd(model) if inner is None else inner
    return daso.DASO(inner, module=model, topology=topology, **keywords)


def step(optimizer, model, rank_info, number, edit=None, *, to_none=True):
    optimizer.zero_grad(set_to_none=to_none)
    batch_loss(model, rank_info.rank, number).backward()
    if edit is not None:
        edit(model)
    optimizer.step()


def bits(model):
    return [tensor.detach().clone() for tensor in model.parameters()]


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def alike(topology, tensors):
    everyones = topology.world_comm.allgather([tensor.detach().cpu().clone() for tensor in tensors])
    return all(equal(everyones[0], other) for other in everyones[1:])


def oracle(rank_info, policy=SYNC, lr=0.1):
    return Sequential(
        network, lambda model: sgd(model, lr), batch_loss, rank_info.node_sizes, policy=policy
    )


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, logger="daso")

    def times(text):
        return sum(text in record.getMessage() for record in caplog.records)

    return times


def on_rank_0(topology, count):
    """What rank 0 counted: threads of one process share the log."""
    return topology.world_comm.bcast(count)


# --- memory behind gradients and parameters ----------------------------------------------------


def convert(model):
    model.double()
    model.float()


def replace_data(model):
    for p in model.parameters():
        p.grad.data = p.grad.data.clone()


def set_storage(model):
    for p in model.parameters():
        p.grad.set_(p.grad.clone())


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("order", ["bucketed", "host"])
@pytest.mark.parametrize("edit", [convert, replace_data, set_storage])
def test_memory_behind_gradients_may_be_replaced(topology, rank_info, edit, order, to_none):
    model, one = network(), oracle(rank_info)
    with wrap(topology, model, policy=SYNC, gradients=daso.Gradients(reducer=order)) as optimizer:
        for number in range(5):
            step(
                optimizer, model, rank_info, number, edit if number == 1 else None, to_none=to_none
            )
        one.run(5)
        assert equal(bits(model), one.params(0))


def as_flat_buffer(model):
    """Let gradients be views of one buffer; return what resets them."""
    params = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in params))
    for p, row in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = row.view_as(p)
    return flat.zero_


def as_a_list(model):
    grads = [torch.zeros_like(p) for p in model.parameters()]
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad
    return lambda: torch._foreach_zero_(grads)


def as_two_names(model):
    """Keep tensors over the same memory, not the gradients themselves."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    aliases = [p.grad.detach() for p in model.parameters()]
    return lambda: torch._foreach_zero_(aliases)


@pytest.mark.nodes(*SEVERAL_NODES, (2,))
@pytest.mark.parametrize("reducer", ["bucketed", "host", "prioritized"])
@pytest.mark.parametrize("own", [as_flat_buffer, as_a_list, as_two_names])
def test_gradients_stay_in_the_memory_of_the_program(topology, rank_info, own, reducer):
    model, one = network(), oracle(rank_info)
    gradients = daso.Gradients(reducer=reducer, step="model")
    with wrap(topology, model, policy=SYNC, gradients=gradients) as optimizer:
        reset = own(model)
        for number in range(5):
            before = [p.grad for p in model.parameters()]
            reset()
            batch_loss(model, rank_info.rank, number).backward()
            assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
            optimizer.step()
        one.run(5)
        assert equal(bits(model), one.params(0))


@pytest.mark.nodes(*SEVERAL_NODES, (2,))
@pytest.mark.parametrize("narrow", ["fp32", "int4"])
def test_a_list_of_gradients_outlives_a_layer_that_freezes(topology, rank_info, narrow):
    """Also gradients that were in no list are reset through it; both as one that begins so."""
    ends = []
    for listed in (False, True):
        model = network()
        gradients = daso.Gradients(wire=narrow)
        with wrap(topology, model, policy=SYNC, gradients=gradients) as optimizer:
            step(optimizer, model, rank_info, 0)
            grads = [p.grad for p in model.parameters()]
            for number in range(1, 7):
                if number == 3:
                    model[0].requires_grad_(False)
                torch._foreach_zero_(grads if listed else live_grads(model))
                batch_loss(model, rank_info.rank, number).backward()
                optimizer.step()
            ends.append(bits(model))
    assert equal(*ends)


@pytest.mark.nodes((2,), (1, 1), (2, 2))
def test_gradients_have_memory_of_their_own_when_training_is_over(topology, rank_info):
    """That of the node is given back: a list of gradients must not point there."""
    model = network()
    optimizer = wrap(topology, model, policy=SYNC)
    step(optimizer, model, rank_info, 0)
    grads = [p.grad for p in model.parameters()]
    before = [(grad.data_ptr(), grad.clone()) for grad in grads]
    for p in list(model.parameters())[:2]:
        p.grad = None  # in the list alone
    optimizer.close()
    for grad, (pointer, values) in zip(grads, before, strict=True):
        assert grad.data_ptr() != pointer
        assert torch.equal(grad, values)


def live_grads(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.nodes(*SEVERAL_NODES, (2,))
@pytest.mark.parametrize("reducer", ["bucketed", "host"])
def test_a_gradient_that_a_program_keeps_stays_what_it_was(topology, rank_info, reducer):
    model, one = network(), oracle(rank_info)
    gradients = daso.Gradients(reducer=reducer)
    kept = []
    with wrap(topology, model, policy=SYNC, gradients=gradients) as optimizer:
        for number in range(5):
            step(optimizer, model, rank_info, number)
            grads = [p.grad for p in model.parameters()]
            kept.append((grads, [grad.clone() for grad in grads]))
        del grads
        one.run(5)
        assert equal(bits(model), one.params(0))
    assert all(equal(grads, clones) for grads, clones in kept)


def share(model):
    model.share_memory()


def share_one(model):
    model[2].weight.grad.share_memory_()


@pytest.mark.nodes((2,), *SEVERAL_NODES, (3,))
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("reducer", ["bucketed", "host"])
@pytest.mark.parametrize("edit", [share, share_one])
def test_memory_behind_gradients_may_become_shared(topology, rank_info, edit, reducer, to_none):
    model, one = network(), oracle(rank_info)
    gradients = daso.Gradients(reducer=reducer)
    with wrap(topology, model, policy=SYNC, gradients=gradients) as optimizer:
        for number in range(5):
            now = edit if number == 1 else None
            step(optimizer, model, rank_info, number, now, to_none=to_none)
        one.run(5)
        assert equal(bits(model), one.params(0))


def penalized(model, losses):
    """A step of one process: the mean loss, and a penalty on its gradient."""
    params = list(model.parameters())
    mean = torch.stack(losses).mean()
    grads = torch.autograd.grad(mean, params, create_graph=True)
    more = torch.autograd.grad(sum(g.square().sum() for g in grads), params, allow_unused=True)
    with torch.no_grad():
        for p, g, m in zip(params, grads, more, strict=True):
            p.sub_(0.1 * (g if m is None else g + m))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.nodes(*SEVERAL_NODES, (2,))
def test_a_penalty_on_gradients_counts(topology, rank_info):
    model, alone = network().double(), network().double()

    def loss(of, rank, number):
        generator = torch.Generator().manual_seed(97 * number + rank)
        return of(torch.randn(4, 2, 4, 4, generator=generator).double()).square().mean()

    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrap(topology, model, inner, policy=SYNC) as optimizer:
        for number in range(4):
            optimizer.zero_grad()
            loss(model, rank_info.rank, number).backward(create_graph=True)
            sum(p.grad.square().sum() for p in model.parameters()).backward()
            optimizer.step()
            penalized(alone, [loss(alone, rank, number) for rank in range(topology.world_size)])
        optimizer.zero_grad()
        for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(mine, its, rtol=1e-9, atol=1e-12)


class Widened(torch.autograd.Function):
    """A parameter in fp32, whose gradient stays in fp32."""

    @staticmethod
    def forward(_, tensor):
        return tensor.float()

    @staticmethod
    def backward(_, grad):
        return grad


def widened_loss(model, rank):
    """A loss whose gradients are 1 + rank / 4096, which bf16 rounds to 1."""
    factor = 1 + rank * 2.0**-12
    return sum((Widened.apply(p) * factor).sum() for p in model.parameters())


def with_grads_of(dtype):
    model = network().bfloat16()
    for p in model.parameters():
        p.grad_dtype = dtype
    return model


@pytest.mark.nodes(*SEVERAL_NODES, (2,))
@pytest.mark.parametrize("reducer", ["bucketed", "host"])
def test_gradients_of_another_type_than_parameters_keep_it(topology, rank_info, reducer):
    model = with_grads_of(torch.float32)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    mean = 1 + (topology.world_size - 1) / 2 * 2.0**-12
    gradients = daso.Gradients(reducer=reducer)
    with wrap(topology, model, inner, policy=SYNC, gradients=gradients) as optimizer:
        for _ in range(2):
            optimizer.zero_grad()
            widened_loss(model, rank_info.rank).backward()
            for p in model.parameters():
                assert p.grad.dtype == torch.float32
                assert torch.allclose(p.grad, torch.full_like(p.grad, mean), rtol=0, atol=2e-7)
            optimizer.step()


@pytest.mark.nodes((1, 1), (2,))
def test_gradients_that_would_be_rounded_in_silence_are_refused(topology, rank_info):
    model = with_grads_of(None)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(topology, model, inner, policy=SYNC)
    with pytest.raises(LayoutError, match=r"must have one type.*is float32.*set its grad_dtype"):
        widened_loss(model, rank_info.rank).backward()
    optimizer.close()


@pytest.mark.parametrize("policy", [SYNC, RARE])
def test_gradients_that_are_scaled_by_their_data_count(topology, rank_info, policy):
    def halve(model):
        for p in model.parameters():
            p.grad.data = p.grad.data * 0.5

    model, one = network(), oracle(rank_info, policy, lr=0.05)
    with wrap(topology, model, policy=policy, wire="fp32", merge="daso") as optimizer:
        for number in range(5):
            step(optimizer, model, rank_info, number, halve)
        optimizer.synchronize()
        one.run(5)
        one.synchronize()
        assert all(
            torch.allclose(a, b, atol=1e-6) for a, b in zip(bits(model), one.params(0), strict=True)
        )


def test_gradients_replaced_where_they_cross_by_priority_are_refused(topology, rank_info):
    model = network()
    optimizer = wrap(topology, model, gradients=daso.Gradients(reducer="prioritized"))
    step(optimizer, model, rank_info, 0)
    with raises("gradients-changed-before-step"):
        step(optimizer, model, rank_info, 1, replace_data)
    optimizer.close()


def channels_last(model):
    model.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("at", ["before", "between"])
def test_another_order_in_memory_is_laid_out_anew(topology, rank_info, at):
    model, one = network(), oracle(rank_info)
    with wrap(topology, model, policy=SYNC) as optimizer:
        for number in range(2):
            step(optimizer, model, rank_info, number)
        if at == "before":
            channels_last(model)
        step(optimizer, model, rank_info, 2, channels_last if at == "between" else None)
        one.run(2)
        if at == "before":
            channels_last(one.models[0])
        one.run(1)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        close = [
            torch.allclose(a, b, atol=1e-6) for a, b in zip(bits(model), one.params(0), strict=True)
        ]
        assert all(close)
        assert alike(topology, model.parameters())


@pytest.mark.parametrize("policy", [SYNC, RARE])
def test_parameters_that_grow_are_laid_out_anew(topology, rank_info, policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2))
    optimizer = wrap(topology, model, torch.optim.SGD(model.parameters(), 0.1), policy=policy)

    def train(rows, first):
        for number in range(first, first + 4):
            generator = torch.Generator().manual_seed(97 * number + rank_info.rank)
            tokens = torch.randint(rows, (8,), generator=generator)
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()

    train(6, 0)
    old = model[0].weight.detach()
    model[0].weight.data = torch.cat([old, torch.ones(2, 4)])
    model[0].num_embeddings = 8
    train(8, 4)
    optimizer.synchronize()
    assert alike(topology, model.parameters())
    assert not torch.equal(model[0].weight[6:], torch.ones(2, 4))  # they are trained
    optimizer.close()


# --- who steps, with what ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", [SYNC, RARE])
def test_bypassing_steps_warn_once_and_synchronize_agrees(topology, rank_info, policy, said):
    model = network()
    inner = sgd(model)
    optimizer = wrap(topology, model, inner, policy=policy)
    for number in range(3):
        inner.zero_grad()
        batch_loss(model, rank_info.rank, number).backward()
        with torch.no_grad():
            model[2].bias += rank_info.rank  # as far as nodes go apart by themselves
        inner.step()
    optimizer.synchronize()
    assert alike(topology, model.parameters())
    assert on_rank_0(topology, said("SGD inside it was")) == 1
    step(optimizer, model, rank_info, 3)
    optimizer.synchronize()
    assert alike(topology, model.parameters())
    optimizer.close()


def test_bypassing_steps_warn_after_the_wrapper_was_dropped(topology, rank_info, said):
    model = network()
    inner = sgd(model)
    wrap(topology, model, inner)
    for number in range(3):
        step(inner, model, rank_info, number)
    assert on_rank_0(topology, said("it was dropped, and the SGD inside it was")) == 1


@pytest.mark.nodes((2, 1))
def test_an_edit_on_one_rank_is_the_mean_after_synchronize(topology, rank_info, said):
    model = network()
    with wrap(topology, model, policy=SYNC) as optimizer:
        step(optimizer, model, rank_info, 0)
        before = model[4].bias.detach().clone()
        if rank_info.rank == 1:
            with torch.no_grad():
                model[4].bias += 3.0
        optimizer.synchronize()
        assert alike(topology, model.parameters())
        assert torch.allclose(model[4].bias, before + 3.0 / rank_info.world_size)
        host = topology.liveness.hosts[1]
        text = f"differed between ranks (rank 1 on {host} from the others)"
        assert on_rank_0(topology, said(text)) == 1
        optimizer.synchronize()
        assert on_rank_0(topology, said("differed between ranks")) == 1


def test_nan_in_a_parameter_of_one_rank_names_both(topology, rank_info):
    model = network()
    optimizer = wrap(topology, model, policy=SYNC)
    step(optimizer, model, rank_info, 0)
    if rank_info.rank == 1:
        with torch.no_grad():
            model[2].bias[3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"2\.bias on rank 1 is not"):
        optimizer.synchronize()
    optimizer.close()


@pytest.mark.parametrize("policy", [SYNC, RARE])
def test_learning_rates_that_differ_are_told_once(topology, rank_info, policy, said):
    model = network()
    with wrap(topology, model, sgd(model, 0.1 + 0.1 * rank_info.rank), policy=policy) as optimizer:
        for number in range(8):
            step(optimizer, model, rank_info, number)
        optimizer.synchronize()
        assert alike(topology, model.parameters())
    assert (
        on_rank_0(topology, said("it is 0.1 to 0.2" if rank_info.world_size == 2 else "it is 0.1"))
        == 1
    )


@pytest.mark.parametrize("policy", [SYNC, RARE])
@pytest.mark.parametrize("same", [True, False])
def test_the_same_batches_on_all_ranks_are_told(topology, rank_info, policy, same, said):
    model = network()
    with wrap(topology, model, policy=policy) as optimizer:
        for number in range(4):
            optimizer.zero_grad()
            batch_loss(model, 0 if same else rank_info.rank, number).backward()
            optimizer.step()
    assert on_rank_0(topology, said("train on different batches")) == same


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("policy", [SYNC, RARE, daso.Auto()])
def test_layers_that_freeze_are_no_equal_batches(topology, rank_info, policy, said):
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with wrap(topology, model, inner, policy=policy) as optimizer:
        for number in range(24):
            if number > 1:
                model[(0, 2, 4)[number % 3]].requires_grad_(number % 2 == 0)
            step(optimizer, model, rank_info, number)
    assert not on_rank_0(topology, said("train on different batches"))


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("narrow", ["fp32", "int4"])
def test_gradients_of_a_step_that_freezes_a_layer_are_averaged_once(topology, rank_info, narrow):
    """Frozen behind the backward, a layer changes nothing of the others' step."""
    ends = []
    for frozen in (False, True):
        model = network()
        gradients = daso.Gradients(wire=narrow)
        with wrap(topology, model, policy=SYNC, gradients=gradients) as optimizer:
            step(optimizer, model, rank_info, 0)

            def freeze(model, frozen=frozen):
                model[0].requires_grad_(not frozen)

            step(optimizer, model, rank_info, 1, freeze)
            ends.append(bits(model[2:]))
    assert equal(*ends)


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("policy", [SYNC, RARE, daso.Auto()])
def test_a_resume_from_one_copy_is_no_equal_batches(topology, rank_info, policy, said):
    """State of one rank alone: all is set up again before the first step, not in its backward."""
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with wrap(topology, model, inner, policy=policy) as optimizer:
        for number in range(4):
            step(optimizer, model, rank_info, number)
        optimizer.synchronize()
        saved = topology.world_comm.bcast(
            copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        )
    saved[1]["daso"]["sync"] = None
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with wrap(topology, model, inner, policy=policy) as optimizer:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        batch_loss(model, rank_info.rank, 4).backward()
        mine = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        averaged = optimizer.report()["skip_history"][-1][1:] == (1, 0)
        assert alike(topology, [p.grad for p in model.parameters()]) == averaged
        if not averaged and rank_info.largest_node == 1:
            assert equal(mine, [p.grad for p in model.parameters()])
    assert not on_rank_0(topology, said("train on different batches"))


# --- what is wrapped ---------------------------------------------------------------------------


def test_a_module_with_other_parameters_is_refused(topology):
    with pytest.raises(ConfigError, match="none of the 6 is in this Linear"):
        daso.DASO(sgd(network()), module=nn.Linear(2, 2), topology=topology)


def test_batch_norm_that_daso_was_not_given_is_told(topology, rank_info, said):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with daso.DASO(sgd(model), topology=topology) as optimizer:
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    assert on_rank_0(topology, said("pass module=model")) == 1


def test_what_is_wrapped_already_is_refused_or_taken_over(topology, rank_info, said):
    model = network()
    inner = sgd(model)
    first = wrap(topology, model, inner, policy=RARE)
    with pytest.raises(ConfigError, match="not wrapped yet"):
        daso.DASO(first, topology=topology)
    for number in range(4):
        step(first, model, rank_info, number)
    second = wrap(topology, model, inner, policy=SYNC)
    with pytest.raises(ConfigError, match="was closed when its parameters were wrapped again"):
        first.step()
    assert alike(topology, [*model.parameters(), *momenta(inner, model)])
    one = oracle(rank_info)
    for node in range(rank_info.nodes):  # goes on from here
        for mine, theirs in zip(model.parameters(), one.params(node), strict=True):
            theirs.data.copy_(mine)
            one.inners[node].state[theirs] = {
                "momentum_buffer": inner.state[mine]["momentum_buffer"].clone()
            }
    one.step_number = 4
    for number in range(4, 8):
        step(second, model, rank_info, number)
    one.run(4)
    assert equal(bits(model), one.params(0))
    assert on_rank_0(topology, said("closes the earlier optimizer")) == 1
    second.close()


def momenta(inner, model):
    return [inner.state[p]["momentum_buffer"] for p in model.parameters()]


def test_a_head_and_then_all_of_a_model(topology, rank_info):
    model, one = network(), oracle(rank_info)
    head = daso.DASO(torch.optim.SGD(model[4].parameters(), 0.0), module=model, topology=topology)
    for number in range(2):
        step(head, model, rank_info, number)
    del head
    with wrap(topology, model, policy=SYNC) as optimizer:
        for number in range(3):
            step(optimizer, model, rank_info, number)
    one.run(3)
    assert equal(bits(model), one.params(0))


def test_nothing_can_be_done_after_the_end(topology, rank_info):
    model = network()
    with wrap(topology, model) as optimizer:
        step(optimizer, model, rank_info, 0)
    for call in (optimizer.step, optimizer.synchronize, lambda: optimizer.end_epoch(1.0)):
        with pytest.raises(ConfigError, match="this one was closed; wrap the inner"):
            call()


class TwoSteps(torch.optim.SGD):
    """With methods of its own, as SAM and schedule-free optimizers have."""

    mode = "train"

    def eval(self):
        self.mode = "eval"

    def first_step(self):
        raise AssertionError("it goes past the exchanges")


def test_the_inner_optimizers_own_methods_are_there_but_for_steps(topology):
    model = network()
    with wrap(topology, model, TwoSteps(model.parameters(), lr=0.1)) as optimizer:
        optimizer.eval()
        assert optimizer.inner.mode == optimizer.mode == "eval"
        with pytest.raises(AttributeError, match=r"optimizer.inner.first_step\(\)"):
            optimizer.first_step()
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = optimizer.nothing


# --- evaluating --------------------------------------------------------------------------------


@pytest.mark.nodes(*SEVERAL_NODES)
def test_a_model_is_the_mean_of_all_ranks_for_a_while(topology, rank_info):
    plain, model = network(), network()
    with (
        wrap(topology, plain, policy=daso.Fixed(4, 2)) as undisturbed,
        wrap(topology, model, policy=daso.Fixed(4, 2)) as optimizer,
    ):
        for number in range(9):
            step(undisturbed, plain, rank_info, number)
            step(optimizer, model, rank_info, number)
            mine = bits(model)
            with torch.inference_mode(), optimizer.averaged():
                assert alike(topology, model.parameters())
                everyones = topology.world_comm.allgather(mine)
                mean = [torch.stack(some).mean(0) for some in zip(*everyones, strict=True)]
                close = zip(mean, model.parameters(), strict=True)
                assert all(torch.allclose(a, b, atol=1e-6) for a, b in close)
            assert equal(mine, bits(model))
        assert equal(bits(plain), bits(model))


def test_synchronize_in_inference_mode(topology, rank_info):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with wrap(topology, model, policy=RARE) as optimizer:
        for _number in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()
            with torch.inference_mode():
                optimizer.synchronize()
            assert alike(topology, [*model.parameters(), *model.buffers()])


class Caches(nn.Module):
    """With buffers of all kinds."""

    def __init__(self, rank):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("mean", torch.full((3,), float(rank)))
        self.register_buffer("cache", torch.full((2 + rank,), float(rank)))
        self.register_buffer("wide", torch.zeros(1).expand(3))
        self.register_buffer("phases", torch.full((2,), complex(rank, 1)))
        self.register_buffer("few", torch.eye(3).to_sparse())
        self.register_buffer("shape", torch.empty(2, device="meta"))
        with torch.inference_mode():
            self.register_buffer("fixed", torch.full((2,), float(rank)))
        if rank == 1:
            self.register_buffer("own", torch.ones(2))

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("policy", [SYNC, RARE])
def test_buffers_that_ranks_do_not_share_are_named_and_left_alone(
    topology, rank_info, policy, said
):
    model = Caches(rank_info.rank)
    with wrap(topology, model, policy=policy) as optimizer:
        assert float(model.mean[0]) == 0.0  # as world rank 0's
        model.mean.fill_(rank_info.rank)
        model.phases.fill_(complex(rank_info.rank, 2))
        for _number in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()
        optimizer.synchronize()
        optimizer.synchronize()
        half = (rank_info.world_size - 1) / 2
        assert torch.equal(model.mean, torch.full((3,), half))
        assert torch.equal(model.phases, torch.full((2,), complex(half, 2)))
        assert torch.equal(model.cache, torch.full((2 + rank_info.rank,), float(rank_info.rank)))
    text = "cache is (2,) float32 on rank 0 and (3,) float32 on rank 1; wide is expanded"
    assert on_rank_0(topology, said(text)) == 2  # when it is wrapped, and once later


# --- a backward that raises --------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Raises in backward, half way through the model."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, grad):
        raise RuntimeError("out of memory")


@contextmanager
def failing(model):
    hook = model[2].register_forward_hook(lambda *parts: Fails.apply(parts[-1]))
    yield
    hook.remove()


RESETS = {
    "optimizer": lambda optimizer, _: optimizer.zero_grad(),
    "optimizer, zeros": lambda optimizer, _: optimizer.zero_grad(set_to_none=False),
    "model": lambda _, model: model.zero_grad(),
}


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("policy", [SYNC, RARE])
@pytest.mark.parametrize("order", ["bucketed", "host"])
def test_a_backward_that_raised_on_all_ranks_is_forgotten(
    topology, rank_info, policy, reset, order
):
    model, one = network(), oracle(rank_info, policy)
    gradients = daso.Gradients(reducer=order, bucket_bytes=64)
    options = {"policy": policy, "wire": "fp32", "merge": "daso", "gradients": gradients}
    with wrap(topology, model, **options) as optimizer:
        for number in range(6):
            if number:
                batch_loss(model, rank_info.rank, number).backward()
                optimizer.step()
            else:
                step(optimizer, model, rank_info, number)
            model.zero_grad()
            with failing(model), pytest.raises(RuntimeError, match="out of memory"):
                batch_loss(model, rank_info.rank, number).backward()
            RESETS[reset](optimizer, model)
        optimizer.synchronize()
        one.run(6)
        one.synchronize()
        assert equal(bits(model), one.params(0))


@pytest.mark.parametrize("order", ["bucketed", "host"])
def test_gradients_that_may_be_on_their_way_must_be_reset_by_the_optimizer(
    topology, rank_info, order
):
    model = network()
    optimizer = wrap(topology, model, policy=SYNC, gradients=daso.Gradients(reducer=order))
    step(optimizer, model, rank_info, 0)
    with failing(model), pytest.raises(RuntimeError, match="out of memory"):
        batch_loss(model, rank_info.rank, 1).backward()
    model.zero_grad(set_to_none=False)
    with raises("gradients-kept-after-error"):
        batch_loss(model, rank_info.rank, 1).backward()
    optimizer._session.runner.parts.abandon()  # a program ends there
    optimizer.close()


# --- the server --------------------------------------------------------------------------------


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


@pytest.mark.parametrize("edit", [clip, replace_data])
def test_gradients_changed_before_a_servers_step_are_refused(topology, rank_info, edit):
    model = network()
    server = daso.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=0.1), topology=topology)
    batch_loss(model, rank_info.rank, 0).backward()
    server.step()
    server.zero_grad()
    batch_loss(model, rank_info.rank, 1).backward()
    edit(model)
    with pytest.raises(
        ConfigError, match=r"that of .* was changed; clip with .* clip_norm=, or use"
    ):
        server.step()
    server.close()


@pytest.mark.parametrize(
    ("door", "wrong"),
    [
        ("DASO", {"policy": 4}),
        ("DASO", {"module": nn.Linear(2, 2)}),
        ("attach", {"wire": "fp8"}),
        ("ParameterServer", {"mode": "owned"}),
        ("Runtime", {"seed": -1}),
    ],
)
def test_what_is_wrong_on_one_rank_is_the_same_error_on_all(topology, rank_info, door, wrong):
    model, keywords = network(), wrong if rank_info.rank == 1 else {}

    def make(**keywords):
        if door == "ParameterServer":
            return daso.ParameterServer(model, lambda p: torch.optim.SGD(p, 0.1), **keywords)
        if door == "Runtime":
            graph = daso.flow.Graph()
            row = graph.source(lambda _: torch.zeros(1, 2))
            graph.loss(lambda _, y: y.square().mean(), graph.layer(nn.Linear(2, 2), row))
            return daso.flow.Runtime(graph, lambda p: torch.optim.SGD(p, 0.1), **keywords)
        return getattr(daso, door)(sgd(model), **{"module": model} | keywords)

    with pytest.raises(ConfigError, match=r"^rank 1: ") as caught:
        make(topology=topology, **keywords)
    assert topology.equal_on_all_ranks(str(caught.value))
    made = make(topology=topology)  # ranks are in step
    made.close()


def test_a_scaler_that_looks_before_gradients_are_averaged_is_refused(topology, rank_info):
    model = nn.Linear(3, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with wrap(topology, model, sgd(model), policy=SYNC) as optimizer:
        with optimizer.no_sync():
            scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        if rank_info.world_size == 1:
            scaler.step(optimizer)
            return
        with pytest.raises(ConfigError, match="the last backward was inside no_sync"):
            scaler.step(optimizer)
        optimizer.zero_grad()
        with optimizer.no_sync():
            scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        scaler.step(optimizer)


def test_close_within_with_ends_it(topology):
    model = nn.Linear(3, 1)
    with wrap(topology, model, sgd(model), policy=SYNC) as optimizer:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.close()


def test_all_parameters_may_be_frozen_for_a_while(topology, rank_info):
    """As those of a backbone with an optimizer of its own."""
    model = nn.Linear(3, 1)
    with wrap(topology, model, sgd(model), policy=SYNC) as optimizer:
        before = None
        for number in range(6):
            model.requires_grad_(not 2 <= number < 4)
            optimizer.zero_grad()
            loss = model(torch.full((2, 3), rank_info.rank + number + 1.0)).sum()
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            if number == 1:
                before = bits(model)
            if number == 3:
                assert equal(before, bits(model))
        assert not equal(before, bits(model))
        assert alike(topology, list(model.parameters()))


class Bare(torch.optim.SGD):
    """Has torch's methods, and not what its __init__ makes; as some wrappers."""

    def __init__(self, inner):
        named = inner.__dict__.items()
        self.__dict__ |= {name: value for name, value in named if not name.endswith("_hooks")}
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("several", [False, True])
def test_an_optimizer_without_hooks_is_wrapped_but_not_attached(topology, several):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    inner = [Bare(sgd(layer)) for layer in model] if several else Bare(sgd(model))
    with wrap(topology, model, inner, policy=SYNC) as optimizer:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    with pytest.raises(ConfigError, match="must have the hooks of torch"):
        daso.attach(Bare(sgd(model)), module=model, topology=topology)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")  # torch's own, from 2.15
def test_a_scripted_model_is_trained(topology):
    model = torch.jit.script(nn.Linear(3, 1))
    with wrap(topology, model, sgd(model), policy=SYNC) as optimizer:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("policy", [SYNC, RARE], ids=repr)
def test_parameter_of_no_module_changes_no_other_gradient(topology, rank_info, policy):
    def trained(how):
        model, scale = network(), nn.Parameter(torch.ones(1))
        inner = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
        gradients = daso.Gradients(reducer="prioritized", step=how)
        with wrap(topology, model, inner, policy=policy, gradients=gradients) as optimizer:
            for number in range(4):
                model.zero_grad()
                scale.grad = None
                (scale * batch_loss(model, rank_info.rank, number)).sum().backward()
                optimizer.step()
        return [*bits(model), scale.detach()]

    assert equal(trained("layerwise"), trained("model"))


def test_a_layer_that_is_frozen_as_a_group_is_added_stays_as_it_is(topology, rank_info):
    model, more = network(), nn.Linear(2, 1)
    with wrap(topology, model, policy=RARE) as optimizer:
        for number in range(3):
            step(optimizer, model, rank_info, number, to_none=False)
        model[0].requires_grad_(False)
        optimizer.add_param_group({"params": list(more.parameters())})
        before = bits(model[0])
        for number in range(3, 7):
            step(optimizer, model, rank_info, number, to_none=False)
        assert equal(bits(model[0]), before)
        optimizer.synchronize()
        assert alike(topology, list(model.parameters()))


# --- slow kernels ------------------------------------------------------------------------------


SLOW = threading.local()  # ranks may be threads of one process


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("ranks", ["none", "one", "all"])
def test_ranks_that_compute_with_slow_kernels_are_warned_of(topology, said, monkeypatch, ranks):
    last = topology.world_size - 1
    is_slow = ranks == "all" or (ranks == "one" and topology.rank == last)
    SLOW.line = "torch's operations (no library)" if is_slow else ""
    monkeypatch.setattr("daso.train.build.slow_kernels", lambda _: SLOW.line)
    wrap(topology, network()).close()
    who = {"none": "", "one": f"rank {last} (1 in all) ", "all": "every rank "}[ranks]
    expected = int(ranks != "none")
    assert on_rank_0(topology, said(f"{who}encodes and adds with torch's operations")) == expected


# --- what the module holds and the optimizer does not train ----------------------------------


class Taught(nn.Module):
    """A student, and a teacher that is the running mean of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(6, 4)
        self.teacher = nn.Linear(6, 4).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())
        self.register_buffer("queue", torch.zeros(3))
        self.hidden = nn.Parameter(torch.zeros(2), requires_grad=False)

    def follow(self, how):
        for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if how == "counted":
                with torch.no_grad():
                    mine.mul_(0.9).add_(its, alpha=0.1)
            elif how == "by data":  # of which torch keeps no count
                mine.data.mul_(0.9).add_(its.detach().data, alpha=0.1)
            else:
                mine.data = mine.data * 0.9 + its.detach() * 0.1

    def forward(self, x):
        return self.student(x) - self.teacher(x)


def taught_loss(model, rank, step):
    generator = torch.Generator().manual_seed(97 * step + rank)
    inputs, targets = (torch.randn(8, size, generator=generator) for size in (6, 4))
    return (model(inputs) - targets).square().mean()


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("how", ["counted", "by data", "replaced"])
def test_a_teacher_that_follows_its_student_is_the_mean_of_all(topology, rank_info, how, said):
    model = Taught()
    inner = torch.optim.SGD(model.student.parameters(), lr=0.1)
    with wrap(topology, model, inner, policy=daso.Fixed(4, 1), wire="fp32") as optimizer:
        for number in range(6):
            optimizer.zero_grad()
            taught_loss(model, rank_info.rank, number).backward()
            optimizer.step()
            model.follow(how)
        mine = torch.cat([p.detach().flatten() for p in model.teacher.parameters()])
        everyones = topology.world_comm.allgather(mine.clone())
        assert not alike(topology, [mine])
        with optimizer.averaged():
            assert alike(topology, model.parameters())
        now = torch.cat([p.detach().flatten() for p in model.teacher.parameters()])
        assert torch.equal(now, mine)
        optimizer.synchronize()
        assert alike(topology, model.parameters())
        now = torch.cat([p.detach().flatten() for p in model.teacher.parameters()])
        assert torch.allclose(now, torch.stack(everyones).mean(0), atol=1e-6)
    assert not on_rank_0(topology, said("require"))


@pytest.mark.nodes(*SEVERAL_NODES, (2,))
@pytest.mark.parametrize("mode", ["sharded", "local_rows"])
def test_a_teacher_beside_a_server_is_the_mean_of_all(topology, rank_info, mode):
    model = Taught()
    kept = daso.Exchange(keep_local=("queue",))
    how = {"topology": topology, "mode": mode, "staleness": 2, "exchange": kept}
    with daso.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=0.1), **how) as server:
        for number in range(6):
            server.zero_grad()
            taught_loss(model, rank_info.rank, number).backward()
            server.step()
            model.follow("by data")
            with torch.no_grad():
                model.teacher.weight.add_(rank_info.rank)
        model.queue.fill_(rank_info.rank)
        everyones = topology.world_comm.allgather(model.teacher.weight.clone())
        server.synchronize()
        assert alike(topology, model.parameters())
        assert torch.allclose(model.teacher.weight, torch.stack(everyones).mean(0), atol=1e-6)
        assert model.queue.tolist() == [rank_info.rank] * 3


@pytest.mark.nodes(*SEVERAL_NODES)
def test_tensors_that_stay_each_ranks_own_are_left_alone(topology, rank_info):
    model = Taught()
    inner = torch.optim.SGD(model.student.parameters(), lr=0.1)
    kept = daso.Exchange(keep_local=("queue", "hid*"))
    with wrap(topology, model, inner, exchange=kept) as optimizer:
        model.queue.fill_(rank_info.rank)
        model.hidden.data.fill_(rank_info.rank)
        with optimizer.averaged():
            assert model.queue.tolist() == [rank_info.rank] * 3
        optimizer.synchronize()
        model.student.bias.requires_grad_(False)  # everything is set up again
        optimizer.zero_grad()
        taught_loss(model, rank_info.rank, 0).backward()
        optimizer.step()
        assert model.queue.tolist() == [rank_info.rank] * 3
        assert model.hidden.tolist() == [rank_info.rank] * 2


def test_a_name_that_no_tensor_has_is_refused(topology):
    model = Taught()
    inner = torch.optim.SGD(model.student.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"keep_local must name buffers.*'quee' names none"):
        wrap(topology, model, inner, exchange=daso.Exchange(keep_local=("quee",)))


@pytest.mark.nodes(*SEVERAL_NODES)
def test_a_parameter_that_no_wrapped_optimizer_trains_is_named(topology, rank_info, said):
    model = network()
    inner = torch.optim.SGD(model[2].parameters(), lr=0.1)
    other = torch.optim.SGD(model[4].parameters(), lr=0.1)
    with wrap(topology, model, inner) as optimizer:
        for number in range(3):
            optimizer.zero_grad()
            batch_loss(model, rank_info.rank, number).backward()
            optimizer.step()
            other.step()
        optimizer.synchronize()
        assert alike(topology, model.parameters())
        optimizer.synchronize()
    assert on_rank_0(topology, said("trained by an optimizer that daso wraps, but 4.weight is not"))
    assert on_rank_0(topology, said("trained by an optimizer that daso wraps")) == 1


@pytest.mark.nodes(*SEVERAL_NODES)
def test_two_wrapped_optimizers_of_one_module_leave_each_others_parameters(
    topology, rank_info, said
):
    """Between exchanges the other's parameters differ, as its schedule wants."""
    model = network()
    first = torch.optim.SGD(model[:3].parameters(), lr=0.1)
    second = torch.optim.SGD(model[3:].parameters(), lr=0.1)
    with wrap(topology, model, first) as one, wrap(topology, model, second, policy=RARE) as other:
        for number in range(4):
            one.zero_grad()
            other.zero_grad()
            batch_loss(model, rank_info.rank, number).backward()
            one.step()
            other.step()
        before = bits(model[3:])
        one.synchronize()
        assert equal(before, bits(model[3:]))
    assert alike(topology, model.parameters())
    assert not on_rank_0(topology, said("differed between ranks"))


@pytest.mark.nodes(*SEVERAL_NODES)
def test_a_frozen_tensor_that_cannot_be_averaged_is_left_alone(topology, rank_info):
    model = Taught()
    with torch.inference_mode():
        odd = nn.Parameter(torch.full((3,), float(rank_info.rank)), requires_grad=False)
    model.odd = odd
    inner = torch.optim.SGD(model.student.parameters(), lr=0.1)
    with wrap(topology, model, inner) as optimizer:
        optimizer.zero_grad()
        taught_loss(model, rank_info.rank, 0).backward()
        optimizer.step()
        optimizer.synchronize()
        assert alike(topology, model.student.parameters())
        assert odd.tolist() == [rank_info.rank] * 3


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_an_observer_that_saw_nothing_on_one_rank_takes_what_others_saw(topology, rank_info, odd):
    model = Taught()
    inner = torch.optim.SGD(model.student.parameters(), lr=0.1)
    with wrap(topology, model, inner) as optimizer:
        model.queue.copy_(torch.tensor([odd if rank_info.rank == 0 else -1.0, 2.0, 3.0]))
        with optimizer.averaged():
            assert model.queue.tolist() == [-1.0, 2.0, 3.0]
        optimizer.synchronize()
        assert model.queue.tolist() == [-1.0, 2.0, 3.0]


@pytest.mark.nodes(*SEVERAL_NODES)
def test_a_report_says_the_same_after_the_end(topology, rank_info):
    model = network()
    optimizer = wrap(topology, model)
    for number in range(3):
        step(optimizer, model, rank_info, number)
    optimizer.synchronize()
    before = optimizer.report()
    optimizer.close()
    after = optimizer.report()
    for name in ("skip_because", "wire", "allreduce", "kernels", "node_transport", "gain"):
        assert before[name] == after[name]


class ScheduleFree(torch.optim.Optimizer):
    """SGD at a point between its iterate and the mean of these (Defazio et al. 2024)."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "beta": 0.9, "k": 0, "training": True})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                x = (p - (1 - group["beta"]) * z) / group["beta"]
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                p.copy_(group["beta"] * x + (1 - group["beta"]) * z)

    def _to(self, training):
        for group in self.param_groups:
            for p in group["params"]:
                z, beta = self.state[p]["z"], group["beta"]
                with torch.no_grad():
                    p.copy_((p - (1 - beta) * z) / beta if not training else p.lerp(z, 1 - beta))

    def eval(self):
        self._to(training=False)

    def train(self):
        self._to(training=True)


@pytest.mark.nodes(*SEVERAL_NODES)
def test_parameters_for_evaluating_are_the_same_on_all_ranks(topology, rank_info):
    model = network()
    inner = ScheduleFree(model.parameters(), lr=0.1)
    with wrap(topology, model, inner, policy=RARE) as optimizer:
        for number in range(5):
            step(optimizer, model, rank_info, number)
        optimizer.synchronize()
        inner.eval()
        assert alike(topology, model.parameters())
        inner.train()


@pytest.mark.nodes(*SEVERAL_NODES)
def test_parameters_for_evaluating_are_no_new_start(topology, rank_info, said):
    model = network()
    inner = ScheduleFree(model.parameters(), lr=0.01)
    with wrap(topology, model, inner, policy=daso.Fixed(4, 2)) as optimizer:
        for number in range(270):
            step(optimizer, model, rank_info, number)
            if number % 130 == 121:
                optimizer.synchronize()
                inner.eval()
                inner.train()
        optimizer.synchronize()
    assert not on_rank_0(topology, said("wrote parameters between steps"))


class Coded(torch.optim.Optimizer):
    """Momentum whose values are kept as 8-bit codes and a scale."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                before = state["codes"].float() * state["scale"] if state else torch.zeros_like(p)
                moment = 0.9 * before + p.grad
                state["scale"] = (moment.abs().max() / 127).clamp_min(1e-12)
                state["codes"] = (moment / state["scale"]).round().to(torch.int8)
                p.sub_(state["codes"].float() * state["scale"], alpha=group["lr"])


@pytest.mark.nodes(*SEVERAL_NODES)
def test_moments_in_codes_are_those_of_one_node(topology, rank_info):
    model = network()
    inner = Coded(model.parameters(), lr=0.1)
    with wrap(topology, model, inner, policy=RARE) as optimizer:
        for number in range(5):
            step(optimizer, model, rank_info, number)
        decoded = [one["codes"].float() * one["scale"] for one in inner.state.values()]
        first = topology.world_comm.bcast([one.clone() for one in decoded])
        optimizer.synchronize(optimizer_state=True)
        now = [one["codes"].float() * one["scale"] for one in inner.state.values()]
        assert equal(now, first)


# --- parameters that the program writes between steps ------------------------------------------


def load(model, first):
    model.load_state_dict(first)


def copy_in_place(model, first):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(first[name])


def copy_data(model, first):
    for name, p in model.named_parameters():
        p.data.copy_(first[name])


def assign_data(model, first):
    for name, p in model.named_parameters():
        p.data = first[name].clone()


def load_layer(model, first):
    model[2].load_state_dict({name: first[f"2.{name}"] for name in ("weight", "bias")})


def prune_layer(model, _):
    with torch.no_grad():
        for p in model[2].parameters():
            p.masked_fill_(p.abs() <= p.abs().median(), 0)


WHOLE = (load, copy_in_place, copy_data, assign_data)


def outer_nesterov(params):
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("write", [*WHOLE, load_layer, prune_layer])
@pytest.mark.parametrize(
    "options",
    [
        *({"merge": rule} for rule in ("daso", 0.5, "delta", "eager", "auto")),
        {"outer": outer_nesterov},
    ],
)
def test_weights_that_were_discarded_do_not_come_back(topology, rank_info, options, write, said):
    model = network()
    first = copy.deepcopy(model.state_dict())
    inner = sgd(model)
    with wrap(topology, model, inner, policy=daso.Fixed(4, 2), wire="fp32", **options) as optimizer:
        for number in range(9):
            step(optimizer, model, rank_info, number)
        write(model, first)
        written = {name: p.detach().clone() for name, p in model.named_parameters()}
        everyones = topology.world_comm.allgather(written)
        now = {
            name: torch.stack([one[name] for one in everyones]).mean(0)
            for name in ("2.weight", "2.bias", *(first if write in WHOLE else ()))
        }
        inner.param_groups[0]["lr"] = 0.0
        for number in range(9, 20):
            step(optimizer, model, rank_info, number)
        optimizer.synchronize()
        assert alike(topology, model.parameters())
        for name, its in now.items():
            assert torch.allclose(model.state_dict()[name], its, rtol=0, atol=1e-6), name
    assert on_rank_0(topology, said("wrote parameters between steps")) == 1


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("every", [1, 3])
def test_projections_behind_steps_are_no_new_start(topology, rank_info, every, said):
    model = network()
    with wrap(topology, model, policy=daso.Fixed(4, 2), merge="daso") as optimizer:
        for number in range(20):
            step(optimizer, model, rank_info, number)
            if number % every == 0:
                with torch.no_grad():
                    for p in model.parameters():
                        p.clamp_(-0.05, 0.05)
        optimizer.synchronize()
    assert not on_rank_0(topology, said("wrote parameters between steps"))


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("again", ["end_epoch", "synchronize"])
def test_a_load_between_two_meetings_is_a_new_start(topology, rank_info, again, said):
    model = network()
    first = copy.deepcopy(model.state_dict())
    inner, policy = sgd(model), daso.Fixed(4, 2)
    with wrap(
        topology, model, inner, policy=policy, wire="fp32", outer=outer_nesterov
    ) as optimizer:
        for number in range(9):
            step(optimizer, model, rank_info, number)
        optimizer.synchronize()
        model.load_state_dict(first)
        if again == "end_epoch":
            optimizer.end_epoch(1.0)
        else:
            optimizer.synchronize()
        inner.param_groups[0]["lr"] = 0.0
        for number in range(9, 24):
            step(optimizer, model, rank_info, number)
        optimizer.synchronize()
        for name, its in first.items():
            assert torch.allclose(model.state_dict()[name], its, rtol=0, atol=1e-6), name
    assert on_rank_0(topology, said("wrote parameters between steps")) == 1


@pytest.mark.nodes(*SEVERAL_NODES)
def test_projections_are_no_new_start_in_a_resumed_run(topology, rank_info, said):
    """And it goes on to the same bits."""
    policy, ends = daso.Fixed(4, 2), []
    for saves in (False, True):
        model = network()
        saved = None
        for start, stop in ((0, 9), (9, 18)) if saves else ((0, 18),):
            with wrap(topology, model, policy=policy, wire="fp32") as optimizer:
                if saved is not None:
                    model.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                for number in range(start, stop):
                    step(optimizer, model, rank_info, number)
                    with torch.no_grad():
                        for p in model.parameters():
                            p.clamp_(-0.2, 0.2)
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        ends.append(bits(model))
    assert equal(*ends)
    assert not on_rank_0(topology, said("wrote parameters between steps"))


@pytest.mark.nodes(*SEVERAL_NODES)
def test_a_drain_right_after_a_load_keeps_what_was_loaded(topology, rank_info):
    model = network()
    first = copy.deepcopy(model.state_dict())
    policy = daso.Fixed(4, 2)
    with wrap(topology, model, policy=policy, merge="daso", wire="fp32") as optimizer:
        for number in range(9):
            step(optimizer, model, rank_info, number)
        model.load_state_dict(first)
        optimizer.synchronize()
        assert alike(topology, model.parameters())
        for name, its in first.items():
            assert torch.allclose(model.state_dict()[name], its, rtol=0, atol=1e-6), name


@pytest.mark.nodes(*SEVERAL_NODES)
def test_parameters_that_are_put_back_are_no_load(topology, rank_info, said):
    """Rank 0 evaluates other weights in between, all ranks inside `averaged()`."""
    ends = []
    for swaps in (False, True):
        model = network()
        other = copy.deepcopy(model.state_dict())
        with wrap(topology, model, policy=daso.Fixed(3, 1), merge="daso") as optimizer:
            for number in range(8):
                step(optimizer, model, rank_info, number)
                if swaps and rank_info.rank == 0:
                    mine = copy.deepcopy(model.state_dict())
                    model.load_state_dict(other)
                    model.load_state_dict(mine)
                    for name, p in model.named_parameters():
                        p.data.copy_(other[name])
                    with torch.no_grad():
                        for name, p in model.named_parameters():
                            p.copy_(mine[name])
                if swaps and number == 4:
                    with optimizer.averaged():
                        mine = copy.deepcopy(model.state_dict())
                        model.load_state_dict(other)
                        model.load_state_dict(mine)
            optimizer.synchronize()
            ends.append(bits(model))
    assert equal(*ends)
    assert not on_rank_0(topology, said("wrote parameters between steps"))


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_resume_in_the_midst_is_no_load(topology, rank_info, first, said):
    """A program goes back to a state of its own, in any order, and on to the same bits."""
    model = network()
    policy = daso.Fixed(3, 1)
    with wrap(topology, model, policy=policy, merge="daso") as optimizer:
        for number in range(5):
            step(optimizer, model, rank_info, number)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        ends = []
        for _ in range(2):
            for number in range(5, 12):
                step(optimizer, model, rank_info, number)
            optimizer.synchronize()
            ends.append(bits(model))
            if first == "model":
                model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
            if first == "optimizer":
                model.load_state_dict(saved[0])
        assert equal(*ends)
    assert not on_rank_0(topology, said("wrote parameters between steps"))


# --- ends in the midst of an exchange ------------------------------------------------------------


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("merge", ["daso", 0.5, "delta", "auto"])
def test_an_end_takes_no_work_back(topology, rank_info, merge):
    """Parameters become the mean of what nodes hold, whatever is still on its way."""
    model = network()
    with wrap(topology, model, policy=daso.Fixed(4, 3), merge=merge, wire="fp32") as optimizer:
        for number in range(6):  # sent after 4
            step(optimizer, model, rank_info, number)
        flat = torch.nn.utils.parameters_to_vector
        held = topology.world_comm.allgather(flat(model.parameters()).detach())
        optimizer.synchronize()
        now = flat(model.parameters()).detach()
    torch.testing.assert_close(now, torch.stack(held).mean(0), rtol=0, atol=1e-6)
