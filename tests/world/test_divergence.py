"""A node whose reference differs in a single bit is named at the next exchange."""

import logging
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import bits, mlp, seeded, sgd
from training import train_batches

import daso
from daso.comm.allreduce.message_sums import MessageSums, find_damage
from daso.errors import DivergenceError
from daso.plan.exchange import Tally
from daso.train.deltas.divergence import find_divergence

SKIP, WAIT = 4, 1
OPTIONS = {
    "fp32": {},
    "int4": {"wire": "int4"},
    "topk": {"wire": "topk"},
    "fragments": {"exchange": daso.Exchange(fragments=2)},
    "ahead": {"merge": "eager"},
    "outer": {"outer": lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9)},
}


def names_of(model):
    return [name for name, _ in model.named_parameters()]


def flip(optimizer, element, bit):
    """Change a bit of this rank's part of the reference; return the name of its parameter."""
    rows = [row for rows in optimizer._session.runner.deltas.rows.values() for row in rows]
    row = rows[0]
    index = element % row.span.numel
    row.part.reference.view(torch.int32)[index : index + 1].bitwise_xor_(
        torch.tensor([1 << bit if bit < 31 else -(1 << 31)], dtype=torch.int32)
    )
    return row.views.layout.name_at(row.span.start + index)


@pytest.mark.nodes((1, 1, 1), (2, 2, 1), (1, 1), (2, 2))
@pytest.mark.parametrize("case", OPTIONS)
def test_the_node_is_named_at_the_next_exchange(topology, rank_info, case):
    model, culprit = seeded(mlp)(), 1
    policy = daso.Fixed(SKIP, WAIT)
    optimizer = daso.DASO(
        sgd(model), module=model, topology=topology, policy=policy, **OPTIONS[case]
    )
    try:
        train_batches(optimizer, model, topology.rank, range(9))
        struck = rank_info.node == culprit and rank_info.local_rank == 0
        name = flip(optimizer, 5, 3) if struck else ""
        name = max(topology.world_comm.allgather(name))
        fragments = 2 if case == "fragments" else 1
        with pytest.raises(DivergenceError) as caught:
            train_batches(optimizer, model, topology.rank, range(9, 9 + fragments * SKIP + WAIT))
    finally:
        optimizer.close()
    first = rank_info.node_of.index(culprit)
    assert f"rank {first} on host" in str(caught.value)
    assert f"first in {name};" in str(caught.value)
    known = rank_info.nodes > 2
    assert ("from the others" if known else "from each other") in str(caught.value)
    assert len(re.findall("rank ", str(caught.value))) == (1 if known else 2)


@pytest.mark.nodes((1, 1))
@pytest.mark.parametrize("bit", [0, 22, 30, 31])
def test_every_bit_counts(topology, bit):
    model = seeded(mlp)()
    policy = daso.Fixed(SKIP, WAIT)
    optimizer = daso.DASO(sgd(model), module=model, topology=topology, policy=policy)
    try:
        train_batches(optimizer, model, topology.rank, range(5))
        if topology.rank == 1:
            flip(optimizer, 1, bit)
        with pytest.raises(DivergenceError, match="same reference"):
            train_batches(optimizer, model, topology.rank, range(5, 5 + SKIP + WAIT))
    finally:
        optimizer.close()


@pytest.mark.nodes((1, 1, 1), (2, 1))
def test_nodes_that_differ_after_a_synchronous_phase_start_from_their_mean(topology, caplog):
    """As where a program, or another kind of processor, changed parameters of a rank."""
    model, policy = seeded(mlp)(), daso.Fixed(SKIP, WAIT, warmup=3)
    caplog.set_level(logging.WARNING, logger="daso")
    with daso.DASO(sgd(model), module=model, topology=topology, policy=policy) as optimizer:
        train_batches(optimizer, model, topology.rank, range(2))
        if topology.rank == 2:
            with torch.no_grad():
                model[0].weight[0, 0] += 1e-3
        train_batches(optimizer, model, topology.rank, range(2, 14))
        optimizer.synchronize()
        assert topology.equal_on_all_ranks(bits(model))
        assert optimizer.report()["exchanges"] >= 2
    text = f"differed between ranks (rank 2 on {topology.liveness.hosts[2]} from the others)"
    count = sum(text in record.getMessage() for record in caplog.records)
    assert topology.world_comm.bcast(count) == 1


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=3, max_size=6), st.data())
def test_those_that_differ_from_most_are_named(sizes, data):
    node_of = [node for node, size in enumerate(sizes) for _ in range(size)]
    wrong = data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))
    at = data.draw(st.integers(0, 3))
    usual = [("abcd"[i], i) for i in range(4)]
    other = [(name, value + (i == at)) for i, (name, value) in enumerate(usual)]
    prints = [other if node in wrong else usual for node in node_of]
    if len(wrong) == len(sizes):
        assert find_divergence(prints, node_of) is None
        return
    result = find_divergence(prints, node_of)
    firsts = [node_of.index(node) for node in range(len(sizes))]
    few = min((wrong, set(range(len(sizes))) - wrong), key=len)
    assert result.parameter == "abcd"[at]
    assert result.is_known == (2 * len(few) < len(sizes))
    named = few if result.is_known else range(len(sizes))
    assert result.ranks == tuple(firsts[node] for node in sorted(named))


def damage(optimizer, peer, bit):
    """Flip a bit of the next payload from a peer when it has arrived, before it is added."""
    sums = optimizer._session.runner.parts.channels.message_sums
    count = sums.receive

    def receive(sender, payload, index):
        if sender == peer and sums.receive is receive:
            sums.receive = count
            payload[bit // 8 % payload.numel()] ^= 1 << bit % 8
        count(sender, payload, index)

    sums.receive = receive


DAMAGED = {
    "direct": ({"algorithm": "direct"}, "fp32", 2),
    "narrow": ({"algorithm": "direct"}, "int4", 0),
    "sparse": ({"algorithm": "direct"}, "topk", 0),
    "fragments": ({"fragments": 2}, "int8", 2),
    "two levels": ({"algorithm": "two-level"}, "fp32", None),
    "halving": ({"algorithm": "halving"}, "int4", None),
    "ring": ({"algorithm": "ring"}, "fp32", 0),
}


@pytest.mark.nodes((1, 1, 1), (2, 2, 1, 1))
@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("bit", [0, 29])
def test_a_payload_that_changes_on_its_way_is_detected_at_the_next_exchange(
    topology, rank_info, case, bit
):
    """All nodes would add it, and hold the same wrong bits."""
    exchange, wire, sender = DAMAGED[case]
    model, policy, receiver = seeded(mlp)(), daso.Fixed(SKIP, WAIT), 1
    optimizer = daso.DASO(
        sgd(model),
        module=model,
        topology=topology,
        policy=policy,
        wire=wire,
        exchange=daso.Exchange(chunk_bytes=1 << 12, **exchange),
    )
    fragments = exchange.get("fragments", 1)
    try:
        train_batches(optimizer, model, topology.rank, range(9))
        if rank_info.node == receiver and rank_info.lane == 0:
            sums = optimizer._session.runner.parts.channels.message_sums
            peers = list(sums.of_peers.received)
            assert sender is None or sender in peers
            damage(optimizer, peers[0] if sender is None else sender, bit)
        with pytest.raises(DivergenceError) as caught:
            train_batches(optimizer, model, topology.rank, range(9, 9 + 2 * fragments * SKIP + 2))
    finally:
        optimizer.close()
    assert f"and rank {rank_info.node_of.index(receiver)} on host" in str(caught.value)
    if sender is not None:
        assert f"between rank {rank_info.node_of.index(sender)} on host" in str(caught.value)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.integers(3, 6), st.data())
def test_the_sender_and_the_receiver_of_a_changed_payload_are_found(size, data):
    sums = [MessageSums() for _ in range(size)]
    payloads = {
        (sender, receiver): torch.randint(0, 256, (37,), dtype=torch.uint8)
        for sender in range(size)
        for receiver in range(size)
        if sender != receiver
    }
    struck = data.draw(st.sampled_from([None, *payloads]))
    for (sender, receiver), payload in payloads.items():
        for index in range(2):
            sums[sender].send(receiver, payload, index)
            if (sender, receiver) == struck and index == 1:
                payload[data.draw(st.integers(0, 36))] ^= 1 << data.draw(st.integers(0, 7))
            sums[receiver].receive(sender, payload, index)
    assert find_damage([each.of_peers for each in sums]) == struck
    total = Tally(unmatched=float(sum(each.balance() for each in sums)))
    assert total.payloads_arrived == (struck is None)
