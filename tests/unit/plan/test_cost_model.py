"""What orders of transfers cost, against schedules that are worked out by hand or by force."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daso.plan.allreduce_plan import named_plan
from daso.plan.cost_model import (
    LARGEST_PORTION,
    SMALL_BYTES,
    Layers,
    LinkCosts,
    allreduce_cost,
    choose_plan,
    efficient_portion_bytes,
    flow_shop_seconds,
    step_seconds,
)

seconds = st.floats(0.0, 10.0)
models = st.integers(1, 6).flatmap(
    lambda count: st.builds(
        Layers,
        *[st.lists(st.floats(0.01, 10.0), min_size=count, max_size=count).map(tuple)] * 3,
    )
)


def test_a_flow_shop_by_hand():
    assert flow_shop_seconds([]) == 0.0
    assert flow_shop_seconds([(1, 2, 3)]) == 6
    #  1 | 2 2 | 3 3 3
    #    1 1 . | 2 . . | 1
    assert flow_shop_seconds([(1, 2, 3), (2, 1, 1)]) == 7
    # Equal chunks: all stages once, and the slowest for each further chunk.
    assert flow_shop_seconds([(1, 4, 2)] * 5) == 7 + 4 * 4


@given(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=8))
def test_a_flow_shop_takes_its_longest_way(chunks):
    """The makespan is the longest monotone path through the table of seconds, found by force."""
    last = {(0, 0): chunks[0][0]}
    for at in range(len(chunks)):
        for stage in range(3):
            ways = [last.get((at - 1, stage)), last.get((at, stage - 1))]
            known = [way for way in ways if way is not None]
            if known:
                last[at, stage] = max(known) + chunks[at][stage]
    assert flow_shop_seconds(chunks) == pytest.approx(last[len(chunks) - 1, 2])


HEAVY_TOP = Layers(  # the last layer's gradient is most of all, and comes first
    forward_seconds=(3.0, 3.0, 3.0), backward_seconds=(6.0, 6.0, 6.0), transfer_seconds=(2, 2, 26)
)


def test_the_whole_order_by_hand():
    """One layer behind the other: 9 of forward, 18 of backward, 30 on the link."""
    whole = (1, 1, 1)
    # Layer 2 crosses from 15 to 41, then 1 and 0 until 45: the barrier waits for all.
    assert step_seconds(HEAVY_TOP, order="fifo", portions=whole, barrier=True) == 45
    # Without cutting, layer 0 goes before 1, behind 2; forward begins at 43 instead of 45.
    assert step_seconds(HEAVY_TOP, order="layer", portions=whole, barrier=False) < 45
    # Cut into 26, layers 1 and 0 overtake: what is left of layer 2 crosses during forward.
    cut = step_seconds(HEAVY_TOP, order="layer", portions=(1, 1, 26), barrier=False)
    assert cut < step_seconds(HEAVY_TOP, order="layer", portions=whole, barrier=False)


@given(models, st.sampled_from(["layer", "lifo", "fifo"]), st.booleans(), st.integers(1, 8))
def test_flow_shop_time_lies_between_its_bounds(model, order, barrier, portions):
    count = len(model.forward_seconds)
    taken = step_seconds(model, order=order, portions=[portions] * count, barrier=barrier, steps=40)
    compute = sum(model.forward_seconds) + sum(model.backward_seconds)
    link = sum(model.transfer_seconds)
    assert taken <= compute + link + 1e-6
    if barrier:
        assert taken >= max(compute, link) - 1e-6


@given(models, st.integers(1, 4), st.sampled_from(["layer", "lifo", "fifo"]))
def test_with_a_barrier_the_order_does_not_matter(model, portions, order):
    """The link is busy for as long as anything is ready, whatever goes first."""
    many = [portions] * len(model.forward_seconds)
    fifo = step_seconds(model, order="fifo", portions=many, barrier=True)
    assert step_seconds(model, order=order, portions=many, barrier=True) == pytest.approx(fifo)


@given(models)
def test_the_model_is_deterministic_and_settles(model):
    many = [2] * len(model.forward_seconds)
    several = [
        step_seconds(model, order="fifo", portions=many, barrier=True, steps=steps)
        for steps in (5, 6, 7)
    ]
    assert all(a == pytest.approx(b) for a, b in pairwise(several))


COSTS = st.builds(
    LinkCosts,
    latency_seconds=st.floats(1e-6, 1e-2),
    byte_seconds=st.floats(1e-11, 1e-6),
    message_seconds=st.floats(0, 1e-4),
)


@given(COSTS, st.floats(0.01, 0.999), st.integers(2, 64))
def test_portions_reach_the_efficiency_that_is_asked_for(costs, efficiency, nodes):
    plan = choose_plan("auto", nodes, 1 << 20, costs)
    nbytes = efficient_portion_bytes(efficiency, plan, costs)
    assert SMALL_BYTES <= nbytes <= LARGEST_PORTION
    one = allreduce_cost(plan, nbytes, costs, message_bytes=LARGEST_PORTION)
    link = one.sent_bytes * costs.byte_seconds
    fixed = one.rounds * costs.latency_seconds + 2 * one.messages * costs.message_seconds
    reached = link / (link + fixed)
    if SMALL_BYTES < nbytes < LARGEST_PORTION:
        assert reached == pytest.approx(efficiency, rel=1e-3)
    else:
        assert (reached >= efficiency) == (nbytes == SMALL_BYTES) or reached == pytest.approx(
            efficiency, rel=1e-3
        )


def test_portions_by_hand():
    """Two nodes swap halves: one round of 100 us, one message each way of 20 us at both ends."""
    costs = LinkCosts(latency_seconds=100e-6, byte_seconds=8e-9, message_seconds=20e-6)
    plan = named_plan("direct", 2)
    fixed = plan.rounds * 100e-6 + 2 * allreduce_cost(plan, 1, costs).messages * 20e-6
    sent = allreduce_cost(plan, 1 << 20, costs, message_bytes=1 << 20).sent_bytes / (1 << 20)
    assert efficient_portion_bytes(0.9, plan, costs) == round(9 * fixed / (sent * 8e-9))
