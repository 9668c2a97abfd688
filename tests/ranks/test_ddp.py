"""torch's DDP inside a node, made before or after the optimizer is wrapped, and named or not.

And in place of daso, whose synchronous training has its losses.
"""

from contextlib import nullcontext

import pytest
import torch
from doors import bits
from expected_errors import raises
from torch import nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel
from training import batch, sgd, train

import daso
from daso.errors import ConfigError
from daso.examples.transformer import ByteTransformer
from daso.train.gradients.ddp import DdpFinder

pytestmark = pytest.mark.mpi
STEPS = 20
# Which module is given to DASO, and whether DDP comes first.
ORDERS = {
    "DDP": ("parallel", True),
    "its model": ("model", True),
    "none": ("nothing", True),
    "DDP last": ("model", False),
    "DDP last, none": ("nothing", False),
}


def network():
    """A model of which DDP makes several buckets; the last gradients are large."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 200), nn.Linear(200, 2))


def parallel(model, *, views=False):
    return DistributedDataParallel(model, bucket_cap_mb=0.05, gradient_as_bucket_view=views)


def trained(order, topology, policy, *, views=False):
    """Return the parameters of a training under DDP and DASO."""
    given, first = ORDERS[order]
    model = network()
    both = {"model": model, "nothing": None}
    if first:
        both["parallel"] = parallel(model, views=views)
    optimizer = daso.DASO(sgd(model, lr=0.01), module=both[given], topology=topology, policy=policy)
    try:
        if "parallel" not in both:
            both["parallel"] = parallel(model, views=views)
        train(optimizer, both["parallel"], topology.rank, STEPS)
        optimizer.synchronize()
    finally:  # where DDP is refused, on all ranks
        optimizer.close()
    return bits(model)


@pytest.mark.nodes((2,))
def test_only_ddp_around_these_parameters_is_waited_for(topology, node_group):
    """Whatever process groups and other models there are: else buckets leave during backward."""
    model, other = network(), network()
    parallel(other)
    finder = DdpFinder(model.parameters())
    assert finder.around() == []
    first = parallel(model)
    assert finder.around() == [first]
    replicate(model)
    model(torch.ones(1, 4))  # makes its DDP
    assert len(finder.around()) == 2


@pytest.mark.nodes((1, 1), (2, 2))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(4, 1)], ids=repr)
def test_ddp_over_nodes_is_refused_at_the_first_step(topology, world_group, order, policy):
    with pytest.raises(ConfigError, match="DDP must average inside a node only, but the model's"):
        trained(order, topology, policy)


@pytest.mark.nodes((1, 1), (2, 2))
def test_ddp_over_nodes_is_refused_where_steps_have_closures(topology, world_group):
    model = network()
    under = parallel(model)
    optimizer = daso.DASO(
        sgd(model, lr=0.01), module=model, topology=topology, policy=daso.Fixed(4, 1)
    )

    def closure():
        loss = under(batch(0, topology.rank)).square().mean()
        loss.backward()
        return loss

    with raises("ddp-across-nodes"):
        optimizer.step(closure)
    optimizer.close()


@pytest.mark.nodes((2,))
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_in_one_node_every_order_is_ddp_alone(topology, node_group, order, views, caplog):
    """With views, gradients lie in DDP's buckets, which DDP sums in place during a backward."""
    alone = network()
    under = parallel(alone)
    train(sgd(alone, lr=0.01), under, topology.rank, STEPS)
    assert trained(order, topology, daso.Fixed(1, 0), views=views) == bits(alone)
    assert "different batches" not in caplog.text  # DDP has made gradients equal


@pytest.mark.nodes((2, 2))
@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(4, 1)], ids=repr)
def test_on_several_nodes_every_order_is_the_same(topology, node_group, policy):
    ends = {order: trained(order, topology, policy) for order in ORDERS}
    assert len(set(ends.values())) == 1, [order for order in ends if ends[order] != ends["DDP"]]
    assert topology.equal_on_all_ranks(ends["DDP"])


def losses_of_a_language_model(model, optimizer, rank):
    """Return the loss of each step of a small transformer, clipped, two micro-batches a step."""
    draw, losses = torch.Generator().manual_seed(rank), []
    for _ in range(20):
        optimizer.zero_grad()
        for last in (False, True):
            unsynced = optimizer if isinstance(optimizer, daso.DASO) else model
            text = torch.randint(0, 9, (2, 17), generator=draw)
            with nullcontext() if last else unsynced.no_sync():
                scores = model(text[:, :-1]).flatten(0, 1)
                loss = nn.functional.cross_entropy(scores, text[:, 1:].flatten())
                (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.nodes((1, 1), (2, 1))
def test_synchronous_training_has_the_losses_of_ddp(topology, rank_info, world_group):
    def started():
        torch.manual_seed(0)
        model = ByteTransformer(16, width=16, layers=1)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, adamw = started()
    theirs = losses_of_a_language_model(DistributedDataParallel(model), adamw, rank_info.rank)
    model, adamw = started()
    with daso.DASO(adamw, module=model, topology=topology, policy=daso.Fixed(1, 0)) as optimizer:
        ours = losses_of_a_language_model(model, optimizer, rank_info.rank)
    assert theirs[-1] < 0.6 * theirs[0]
    assert ours == pytest.approx(theirs, abs=5e-5)  # four digits, as nanoGPT prints them
