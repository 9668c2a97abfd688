"""torch.distributed.checkpoint keeps one copy for all ranks: refused where nodes hold others."""

import copy
import io
import logging

import pytest
import torch
from doors import DOORS, bits
from models import MuonOrLion
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from training import adamw, train

import daso
from daso.errors import CheckpointError

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("world_group")]
RARE = daso.Fixed(4, 2)
doors = pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
REMEDY = r"one copy for all ranks.* call optimizer\.synchronize\(optimizer_state=True\) before"


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def states(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


@doors
def test_what_nodes_hold_apart_is_refused(door, topology, rank_info):
    model = network()
    with door(adamw(model), module=model, topology=topology, policy=RARE) as (optimizer, handle):
        states(model, optimizer)  # before the first step all are alike
        train(optimizer, model, rank_info.rank, 6)
        nodes_differ = rank_info.nodes > 1
        for attempt in (get_model_state_dict, lambda model: states(model, optimizer)):
            if nodes_differ:
                with pytest.raises(CheckpointError, match="one copy for all ranks"):
                    attempt(model)
            else:
                attempt(model)
        handle.synchronize()
        get_model_state_dict(model)
        if nodes_differ:  # moments are those of a node yet
            with pytest.raises(CheckpointError, match=REMEDY):
                states(model, optimizer)
        handle.synchronize(optimizer_state=True)
        states(model, optimizer)


@doors
def test_one_copy_is_loaded_on_all_ranks_with_the_count(door, topology, rank_info, shared_folder):
    model, again = network(), network(seed=1)
    with door(adamw(model), module=model, topology=topology, policy=RARE) as (optimizer, handle):
        train(optimizer, model, rank_info.rank, 6)
        handle.synchronize(optimizer_state=True)
        saved = states(model, optimizer)
        assert topology.equal_on_all_ranks(bits(saved))
        checkpoint.save(saved, checkpoint_id=shared_folder / "one copy")
        expected = bits(model), bits(optimizer.state_dict()["state"])
    with door(adamw(again), module=again, topology=topology, policy=RARE) as (optimizer, handle):
        target = states(again, optimizer)
        checkpoint.load(target, checkpoint_id=shared_folder / "one copy")
        set_state_dict(
            again,
            optimizer,
            model_state_dict=target["model"],
            optim_state_dict=target["optimizer"],
        )
        assert (bits(again), bits(optimizer.state_dict()["state"])) == expected
        assert handle.report()["batches"] == 6
        assert "daso" not in optimizer.param_groups[0]
        train(optimizer, again, rank_info.rank, 5, first=6)
        handle.synchronize()
        assert topology.equal_on_all_ranks(bits(again))


def test_a_state_that_may_be_mixed_is_told_once(topology, rank_info, caplog):
    model = network()
    with daso.DASO(adamw(model), module=model, topology=topology, policy=RARE) as optimizer:
        train(optimizer, model, rank_info.rank, 2)
        with caplog.at_level(logging.WARNING, logger="daso"):
            model.state_dict()
            model.state_dict()
    said = [one for one in caplog.messages if "this node's parameters" in one]
    assert len(said) == (rank_info.nodes > 1 and rank_info.rank == 0)


class Application:
    """What torch.distributed.checkpoint asks for a state, and gives one."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return {"model": get_model_state_dict(self.model)}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])


def test_loading_overwrites_what_nodes_hold_apart(topology, rank_info, shared_folder):
    model = network()
    with daso.DASO(adamw(model), module=model, topology=topology, policy=RARE) as optimizer:
        application = {"application": Application(model)}
        checkpoint.save(application, checkpoint_id=shared_folder / "whole")
        saved = bits(model)
        train(optimizer, model, rank_info.rank, 2)
        checkpoint.load(application, checkpoint_id=shared_folder / "whole")
        assert bits(model) == saved


def test_a_copy_of_a_model_has_its_state_alone(topology, rank_info):
    model = network()
    with daso.DASO(adamw(model), module=model, topology=topology, policy=RARE) as optimizer:
        train(optimizer, model, rank_info.rank, 2)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert bits(copied.state_dict()) == bits(model.state_dict())
    hooks = len(model._state_dict_pre_hooks)
    for _ in range(2):  # dropped ones leave none behind
        daso.DASO(adamw(model), module=model, topology=topology, policy=RARE)
    assert len(model._state_dict_pre_hooks) <= hooks + 1


def test_several_optimizers_are_saved_and_loaded_as_one(topology, rank_info, shared_folder):
    def make(seed):
        model = network(seed)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        inner = [MuonOrLion(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
        return model, daso.DASO(inner, module=model, topology=topology, policy=RARE)

    model, optimizer = make(0)
    train(optimizer, model, rank_info.rank, 6)
    optimizer.synchronize(optimizer_state=True)
    checkpoint.save(states(model, optimizer), checkpoint_id=shared_folder / "several")
    expected = bits(model), bits(optimizer.state_dict()["state"])
    optimizer.close()
    again, optimizer = make(1)
    target = states(again, optimizer)
    checkpoint.load(target, checkpoint_id=shared_folder / "several")
    set_state_dict(
        again, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"]
    )
    assert (bits(again), bits(optimizer.state_dict()["state"])) == expected
    optimizer.close()
