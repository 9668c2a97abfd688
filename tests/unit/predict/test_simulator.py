"""Virtual time against closed forms; the policies are those of real runs."""

import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
from expected_errors import raises
from hypothesis import given as given_by
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.plan.auto import Auto
from daso.plan.options import Exchange, Gradients, Settings
from daso.plan.policies import Fixed, Plateau, Replay
from daso.predict.cluster import Cluster, exchange_cost, exchange_seconds
from daso.predict.jobs import Job
from daso.predict.links import HEADERS, Link, vote_seconds
from daso.predict.simulator import simulate

GIGABIT = Link(125e6, 2e-5)
UNSHAPED = Cluster(2, Link(math.inf))
EXACT = pytest.approx


def settings(wire="bf16"):
    return Settings(wire=wire, merge="auto", exchange=Exchange(), gradients=Gradients())


def given(*values):
    """Draw the same examples each time, however long one takes."""
    fixed = hypothesis_settings(derandomize=True, deadline=None, max_examples=40)
    return lambda test: fixed(given_by(*values)(test))


# --- links ---------------------------------------------------------------------------------------


def test_a_vote_goes_up_a_tree_and_down():
    assert [vote_seconds(Link(1, 1.0), nodes) for nodes in (1, 2, 3, 4, 1024)] == [0, 2, 4, 4, 20]


# --- exchanges -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "row"), [(2, 1.0), (3, 4 / 3), (4, 1.5), (16, 1.875)])
def test_two_nodes_send_the_row_and_more_send_it_twice_but_their_part(nodes, row):
    assert exchange_cost(1e6, "bf16", Cluster(nodes, GIGABIT)).sent_bytes == EXACT(2e6 * row)
    assert exchange_cost(1e6, "int4", Cluster(nodes, GIGABIT)).sent_bytes == EXACT(
        1e6 * 4.5 / 8 * row
    )


def test_many_nodes_send_as_much_and_hosts_work_on_each_message():
    cost = exchange_cost(1e6, "bf16", Cluster(100, GIGABIT))
    assert cost.sent_bytes == EXACT(2e6 * 1.98, rel=0.05)
    assert cost.smallest_bytes >= 0.95 * 2e6 / 100
    few, many = (Job(1e6, 0.05, message_seconds=seconds) for seconds in (0.0, 1e-3))
    fast = Cluster(100, Link(math.inf))
    cost = exchange_cost(1e6, "bf16", fast)
    added = exchange_seconds(many, fast, "bf16") - exchange_seconds(few, fast, "bf16")
    assert added == EXACT(2 * cost.messages * 1e-3)


@pytest.mark.parametrize(
    ("rate", "wire", "measured"),
    [
        # Seconds of exchanges of 4.58 M parameters beside training, 2 ranks on 2 cores,
        # train --link 100mbit,10mbit, 2026-11-22, when int4 took 4.25 bits.
        (12.5e6, "bf16", 0.767),
        (12.5e6, "int4", 0.212 * 4.5 / 4.25),
        (1.25e6, "int4", 1.990 * 4.5 / 4.25),
    ],
)
def test_an_exchange_takes_what_was_measured_where_the_link_is_slow(rate, wire, measured):
    job = Job(4.58e6, 0.08, host_seconds=0.13 / 4.58e6)
    found = exchange_seconds(job, Cluster(2, Link(rate, 1e-4)), wire)
    assert found == EXACT(measured, rel=0.07)


def test_exchanges_of_2_to_8_hosts_take_what_was_measured():
    """Host work from 16 hosts alone; two cores carry all, whose share shrinks with their number."""
    path = Path(__file__).parents[3] / "scripts/figures/many_nodes.json"
    recorded = json.loads(path.read_text())
    errors, cores = [], 2
    for wire in ("fp32", "bf16"):
        taken = {
            len(run["nodes"]): (run["plan"]["numel"], 1e-3 * (row["ms"] - row["packing_ms"]))
            for run in recorded["runs"]
            for row in run["rows"]
            if row["name"] == wire
        }
        numel, seconds = taken.pop(16)
        host_seconds = seconds / numel * cores / 16
        for nodes, (numel, seconds) in taken.items():
            job = Job(numel, 1.0, host_seconds=host_seconds, message_seconds=2e-5)
            cluster = Cluster(nodes, Link(125e6, 5e-5), cores=min(2.0, cores / nodes))
            errors.append(abs(exchange_seconds(job, cluster, wire) / seconds - 1))
    assert len(errors) == 8
    assert statistics.median(errors) <= 0.05
    assert max(errors) <= 0.15
    figures = recorded["figures"]
    assert figures["prediction_error_median_16_hosts"]["value"] == EXACT(statistics.median(errors))
    assert figures["prediction_error_worst_16_hosts"]["value"] == EXACT(max(errors))


@pytest.mark.parametrize(("skip", "wait"), [(1, 1), (4, 1), (4, 4), (16, 3), (2, 0)])
@pytest.mark.parametrize("nodes", [2, 3, 16])
@pytest.mark.parametrize("wire", ["bf16", "int4"])
def test_steps_wait_for_what_is_not_hidden_and_no_longer(skip, wait, nodes, wire):
    """An exchange by hand: its bytes with their headers, and 20 us for each message in a row."""
    job, cluster = Job(1e7, 0.05), Cluster(nodes, GIGABIT)
    found = simulate(job, cluster, Fixed(skip, wait), settings(wire), steps=64 * skip)
    nbytes = 1e7 * {"bf16": 2, "int4": 4.5 / 8}[wire] * {2: 1, 3: 4 / 3, 16: 15 / 8}[nodes]
    in_a_row = {2: 2 + 1, 3: 4 + 2, 16: 8 + 2}[nodes]  # a vote, then the payload
    takes = nbytes * 1538 / 1448 / 125e6 + in_a_row * 2e-5
    exposed = max(0.0, takes - wait * job.step_seconds) / skip
    assert found.step_seconds == EXACT(job.step_seconds + exposed, rel=1e-9)
    assert found.exposed_seconds == EXACT(exposed, rel=1e-9, abs=1e-12)
    assert found.bytes_per_step == EXACT(exchange_cost(1e7, wire, cluster).sent_bytes / skip)
    assert found.wire == wire


def test_synchronous_steps_take_what_the_chain_of_layers_takes():
    job, cluster = Job(1e7, 0.05), Cluster(4, GIGABIT)
    found = simulate(job, cluster, Fixed(1, 0), settings(), steps=100)
    crossing = 1.5 * 4e7 * 1538 / 1448 / 125e6 + 16 * 4 * 2e-5  # a vote with each of 16 portions
    assert found.step_seconds == EXACT(0.05 / 3 + 0.1 / 3 / 16 + crossing)
    assert found.bytes_per_step == EXACT(6e7)


@pytest.mark.parametrize(
    ("cores", "stretch", "taken"), [(2, 1, 0), (1.5, 1, 0.5), (1, 1, 1), (0.5, 2, 1)]
)
def test_what_exchanges_take_of_cores_is_lost_to_computing(cores, stretch, taken):
    """On a link that takes next to nothing: 10 ms of work for each exchange, or step."""
    job = Job(1e7, 0.05, host_seconds=1e-9, gradient_seconds=1e-9)
    cluster = Cluster(4, Link(math.inf), cores=cores)
    found = simulate(job, cluster, Fixed(4, 4), settings(), steps=400)
    assert found.step_seconds == EXACT(stretch * (0.05 + taken * 0.01 / 4))
    found = simulate(job, cluster, Fixed(1, 0), settings(), steps=100)
    last = 0.01 / 16  # of the portions in which gradients go
    assert found.step_seconds == EXACT(stretch * (0.05 + taken * 0.01 + (1 - taken) * last))


def test_packing_and_merging_keep_the_training_thread_whatever_is_hidden():
    job = Job(1e7, 0.05, own_seconds=1e-9)  # 5 ms before, 5 after
    for rate in (125e6, math.inf):
        cluster = Cluster(4, Link(rate))
        found = simulate(job, cluster, Fixed(4, 1), settings(), steps=400)
        exposed = max(0.0, exchange_seconds(job, cluster, "bf16") - 0.05)
        assert found.step_seconds == EXACT(0.05 + (0.01 + exposed) / 4)
        assert found.exposed_seconds == EXACT(exposed / 4)


def test_a_core_that_waits_for_the_link_has_time_for_the_exchange():
    """What an exchange takes of the only core does not add to what the link takes longer."""
    job = Job(1e7, 0.05, host_seconds=1e-9)
    for cores in (1, 2):
        cluster = Cluster(2, GIGABIT, cores=cores)
        found = simulate(job, cluster, Fixed(2, 1), settings(), steps=400)
        exposed = exchange_seconds(job, cluster, "bf16") - 0.05
        assert found.step_seconds == EXACT(0.05 + exposed / 2)


@given(st.floats(0.1, 3), st.floats(0.1, 3), st.integers(2, 200), st.floats(0, 1e-3))
def test_fewer_cores_never_make_a_step_shorter(one, other, nodes, latency):
    job = Job(1e6, 0.05, host_seconds=2e-9, gradient_seconds=3e-9, own_seconds=1e-9)
    few, many = sorted((one, other))
    for policy in (Fixed(1, 0), Fixed(4, 1)):
        steps = [
            simulate(job, Cluster(nodes, Link(1e9, latency), cores=c), policy, settings(), steps=40)
            for c in (few, many)
        ]
        assert steps[0].step_seconds >= steps[1].step_seconds * (1 - 1e-9)


@pytest.mark.parametrize("cores", [0, -1, math.nan, math.inf])
def test_cores_are_a_number_above_0(cores):
    with pytest.raises(ConfigError, match="cores must be a positive number"):
        Cluster(2, GIGABIT, cores=cores)


def test_one_node_waits_for_nobody():
    found = simulate(Job(1e7, 0.05), Cluster(1, GIGABIT), Auto(), settings("auto"), steps=100)
    assert (found.step_seconds, found.exchanges) == (EXACT(0.05), 0)


@given(st.floats(1e-3, 1e3), st.integers(2, 9), st.sampled_from([Fixed(3, 1), Fixed(1, 0), Auto()]))
def test_what_takes_k_times_as_long_everywhere_takes_k_times_as_long(k, nodes, policy):
    """Seed system H2: time of any order of tasks is homogeneous."""
    job = Job(1e6, 0.02, host_seconds=1e-8, jitter=0.05, drift=1e-4)
    slow = Job(1e6, 0.02 * k, host_seconds=1e-8 * k, jitter=0.05, drift=1e-4)
    link, slow_link = Link(1e8, 1e-4), Link(1e8 / k, 1e-4 * k)
    one = simulate(job, Cluster(nodes, link), policy, settings(), steps=60)
    other = simulate(slow, Cluster(nodes, slow_link), policy, settings(), steps=60)
    assert other.step_seconds == EXACT(k * one.step_seconds, rel=1e-12)


def test_all_go_as_fast_as_the_slowest():
    job, cluster = Job(1e6, 0.01), Cluster(8, Link(12.5e9), slower={3: 1.5})
    for policy in (Fixed(1, 0), Fixed(8, 2), Auto()):
        found = simulate(job, cluster, policy, settings(), steps=400)
        assert found.step_seconds == EXACT(0.015, rel=0.15)
        assert found.step_seconds >= 0.015 * (1 - 1e-2)


# --- policies ------------------------------------------------------------------------------------


def test_auto_hides_exchanges_on_any_link():
    job = Job(25.6e6, 0.1, jitter=0.02, drift=1e-5)
    for rate in (125e6, 1.25e9, 12.5e9):
        cluster = Cluster(64, Link(rate, 2e-5))
        found = simulate(job, cluster, Auto(), settings("auto"), steps=1000)
        synchronous = simulate(job, cluster, Fixed(1, 0), settings(), steps=100)
        assert found.efficiency(job) > 0.97
        assert found.efficiency(job) > synchronous.efficiency(job)


@pytest.mark.parametrize("normalizes", [False, True])
def test_a_slow_link_gets_2_bits_where_steps_are_restored(normalizes):
    job = Job(25.6e6, 0.1, drift=1e-5, normalizes=normalizes)
    chosen = {
        rate: simulate(job, Cluster(8, Link(rate)), Auto(), settings("auto"), steps=400).wire
        for rate in (12.5e6, 12.5e9)
    }
    assert chosen == {
        12.5e6: "int2" if normalizes else "int4",
        12.5e9: "int8" if normalizes else "int4",
    }


def test_small_tensors_go_alone_and_cost_what_they_take():
    """Every 2nd batch without room for one before or after everything goes, which is every 16th."""
    job = Job(4e6, 0.1, small_parameters=4e4, small_seconds=2e-3)
    cluster, policy = Cluster(2, GIGABIT), Replay(((0, 16, 1),), selective=1, small=((0, 2),))
    found = simulate(job, cluster, policy, settings(), steps=64)
    alone = simulate(replace(job, small_parameters=0.0), cluster, policy, settings(), steps=64)
    small_exchanges, at_a_time = 7 * 4, 7 / 16
    assert (found.exchanges, found.small_exchanges) == (alone.exchanges, small_exchanges)
    assert alone.small_exchanges == 0
    assert found.step_seconds - alone.step_seconds == EXACT(2e-3 * at_a_time)
    assert found.bytes_per_step - alone.bytes_per_step == EXACT(2 * 4e4 * at_a_time)
    assert found.exposed_seconds == alone.exposed_seconds == 0


@pytest.mark.parametrize(
    ("small_seconds", "of_32"),
    # 4 % of 50 ms are 2 ms a batch; twice that every 2nd, three times every 3rd. Everything goes
    # every 32nd batch, and takes 2.
    [(1e-3, 14), (4e-3, 14), (5.9e-3, 9)],
)
def test_auto_is_told_what_small_tensors_take_and_goes_by_it(small_seconds, of_32):
    found = simulate(_with_small(small_seconds), UNSHAPED, Auto(), settings(), steps=2000)
    assert (found.skip, found.wait) == (32, 2)  # 16 ms of 50, for 1 %
    assert found.small_exchanges / 2000 == EXACT(of_32 / 32, rel=0.01)


def test_small_tensors_that_take_too_much_are_given_up_and_tried_again():
    often = [
        simulate(_with_small(seconds), UNSHAPED, Auto(), settings(), steps=2000).small_exchanges
        for seconds in (5.9e-3, 6.1e-3, 12e-3)
    ]
    assert often[0] > 1.2 * often[1] > 2 * often[2] > 0


def _with_small(small_seconds):
    costs = {"own_seconds": 4e-9, "small_seconds": small_seconds}
    return Job(4e6, 0.05, small_parameters=4e4, drift=1e-6, **costs)


def test_small_tensors_get_room_where_everything_takes_long():
    job = Job(4e6, 0.05, drift=1e-3, small_parameters=4e4)
    cluster = Cluster(2, Link(16e6 * HEADERS / 0.15))  # of a bf16 exchange: 75 ms, or so
    slower = Cluster(2, Link(16e6 * HEADERS / 0.3))
    skips = [
        simulate(job, place, policy, settings(), steps=600).skip
        for place in (cluster, slower)
        for policy in (Auto(), Auto(selective=None))
    ]
    assert skips[:2] == [2, 2]
    assert skips[2:] == [8 * 4, 4]


def test_models_that_are_small_and_policies_without_send_none_alone():
    job = Job(4e6, 0.05, own_seconds=4e-9, drift=1e-6, small_parameters=4e4)
    cluster = Cluster(2, GIGABIT)
    for policy in (Auto(selective=5_000_000), Auto(selective=None), Fixed(16, 1)):
        assert simulate(job, cluster, policy, settings(), steps=400).small_exchanges == 0
    fragments = replace(settings(), exchange=Exchange(fragments=2))
    assert simulate(job, cluster, Auto(), fragments, steps=400).small_exchanges == 0
    assert simulate(job, cluster, Auto(), settings(), steps=400).small_exchanges > 0


def test_adam_stays_synchronous_while_backward_hides_4_bits():
    step = 0.105
    job, cluster = Job(1e7, step, lr=1e-3, normalizes=True), Cluster(4, GIGABIT)
    found = simulate(job, cluster, Auto(), settings("auto"), steps=1000)
    crossing = 1.5 * 1e7 * 4.5 / 8 * 1538 / 1448 / 125e6 + 16 * 4 * 2e-5
    assert found.step_seconds == EXACT(step / 3 + 2 * step / 3 / 16 + crossing)
    assert found.bytes_per_step == EXACT(1.5 * 1e7 * 4.5 / 8)
    assert (found.skip, found.wait, found.wire, found.exchanges) == (1, 0, "int4", 0)
    linear = simulate(replace(job, normalizes=False), cluster, Auto(), settings("auto"), steps=1000)
    assert linear.exchanges > 0


@pytest.mark.parametrize(("steps", "exchanges"), [(100, 0), (101, 1)])
def test_steps_of_adam_leave_it_after_100_where_they_stand_still(steps, exchanges):
    job, cluster = Job(1e7, 0.08, normalizes=True), Cluster(4, GIGABIT)
    found = simulate(job, cluster, Auto(), settings("auto"), steps=steps)
    assert found.exchanges == exchanges


@pytest.mark.parametrize(("steps", "exchanges"), [(5, 0), (6, 1)])
def test_steps_of_adam_leave_it_early_where_they_take_eight_times_as_long(steps, exchanges):
    job, cluster = Job(1e7, 0.01, normalizes=True), Cluster(4, GIGABIT)
    assert simulate(job, cluster, Auto(), settings("auto"), steps=steps).exchanges == exchanges


@pytest.mark.parametrize("parameters", [0.5, 3.0, 1e6])
def test_more_fragments_than_parameters_cost_their_votes(parameters):
    fragments = replace(settings("int4"), exchange=Exchange(fragments=32))
    job = Job(parameters, 0.1, small_parameters=parameters / 16)
    found = simulate(job, Cluster(2, GIGABIT), Fixed(1, 1), fragments, steps=64)
    assert found.exchanges == 64
    assert found.step_seconds == EXACT(0.1, rel=0.01)


def test_fragments_take_their_turns_and_their_part_of_the_time():
    job, cluster = Job(1e7, 0.1, own_seconds=1e-9), Cluster(2, GIGABIT)
    fragments = replace(settings("int4"), exchange=Exchange(fragments=4))
    whole, quarter = (
        simulate(job, cluster, Fixed(1, 1), chosen, steps=400)
        for chosen in (settings("int4"), fragments)
    )
    assert quarter.exchanges == whole.exchanges == 400
    assert quarter.bytes_per_step == EXACT(whole.bytes_per_step / 4, rel=1e-3)
    assert whole.step_seconds - 0.1 == EXACT(4 * (quarter.step_seconds - 0.1))


def test_adam_retries_synchronous_steps_with_averaged_state():
    """Votes of a slow network lengthen steps, and an exchange, which takes one, is short."""
    job, cluster = Job(1e7, 0.05, normalizes=True), Cluster(2, Link(1e9, 1e-3))
    runs = [simulate(job, cluster, Auto(), settings("auto"), steps=n) for n in (1099, 1100)]
    assert [(run.skip, run.wait) for run in runs] == [(1, 1), (1, 0)]
    before, after = (run.exposed_seconds * 825 for run in runs)  # of all but a quarter
    state = exchange_seconds(replace(job, parameters=2e7), cluster, "fp32")
    assert before == 0
    assert after == EXACT(exchange_seconds(job, cluster, "int4") + state)  # all agree first


def test_steps_of_adam_send_no_small_tensors_alone():
    job = replace(_with_small(1e-3), normalizes=True)
    slow = Cluster(2, Link(1e7))
    assert simulate(job, slow, Auto(), settings("auto"), steps=1000).small_exchanges == 0
    unlike = replace(job, normalizes=False)
    assert simulate(unlike, slow, Auto(), settings("auto"), steps=1000).small_exchanges > 0


def test_more_drift_brings_more_exchanges():
    cluster = Cluster(8, GIGABIT)
    runs = [
        simulate(Job(1e6, 0.1, drift=drift), cluster, Auto(), settings(), steps=600).exchanges
        for drift in (1e-3, 1e-4, 1e-5)
    ]
    assert runs == sorted(runs, reverse=True)
    assert runs[0] > 2 * runs[2]


def test_a_node_that_is_slower_does_not_make_exchanges_longer():
    """They are timed by the rank that comes last; the others' waiting is no reason to wait more."""
    job = Job(1e7, 0.05, drift=1e-5)
    runs = [
        simulate(job, Cluster(4, GIGABIT, slower), Auto(), settings(), steps=600)
        for slower in ({}, {2: 1.3})
    ]
    assert [run.skip for run in runs] == [runs[0].skip] * 2
    assert runs[1].wait <= runs[0].wait


def test_a_phase_of_warm_up_is_gone_through_and_epochs_are_refused():
    with raises("policy-needs-losses"):
        simulate(Job(1e6, 0.1), Cluster(4, GIGABIT), Plateau(9), settings(), steps=200)
    warm = simulate(Job(1e6, 0.1), Cluster(4, GIGABIT), Fixed(4, 1, 50), settings(), steps=200)
    assert (warm.skip, warm.wait) == (4, 1)
    assert warm.exchanges == (200 - 50) // 4


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    job = Job(1e6, 0.1, jitter=0.1)
    runs = [
        simulate(job, Cluster(4, GIGABIT), Fixed(4, 1), settings(), steps=100, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0].step_seconds >= 0.1


def test_many_nodes_are_gone_through_in_seconds():
    job, start = Job(1e9, 0.5, jitter=0.02, drift=1e-5), time.process_time()
    simulate(job, Cluster(2000, Link(1.25e9, 2e-5)), Auto(), settings("auto"), steps=200)
    assert time.process_time() - start < 20  # of 400,000 steps of nodes; 10,000,000 in a minute


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Job(0, 1), "parameters must be a positive number"),
        (lambda: Job(1, math.inf), "step_seconds must be a positive number"),
        (lambda: Job(1, 1, jitter=-1), "jitter must be a part of a step"),
        (lambda: Job(1, 1, small_parameters=2), "small_parameters must be a number from 0 to 1"),
        (lambda: Cluster(0, GIGABIT), "nodes must be a whole number of at least 1"),
        (lambda: Cluster(2, GIGABIT, slower={2: 1.0}), "one of 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


def test_settings_that_are_not_given_are_the_usual_ones():
    job, cluster = Job(1e6, 0.02, drift=1e-4), Cluster(4, GIGABIT)
    given_none = simulate(job, cluster, Auto(), steps=100)
    assert given_none == simulate(job, cluster, Auto(), settings("auto"), steps=100)


def test_what_is_not_restored_goes_by_the_drift_of_other_optimizers():
    job, cluster = Job(25.6e6, 0.1, own_seconds=3e-9, drift=1e-5), Cluster(8, Link(125e6, 2e-5))
    ran = [
        simulate(replace(job, normalizes=one), cluster, Auto(), settings("topk"), steps=2000)
        for one in (False, True)
    ]
    assert ran[0].skip == ran[1].skip > 1


def test_no_steps_are_refused_and_one_node_keeps_none():
    with pytest.raises(ConfigError, match="steps must be"):
        simulate(Job(1000, 0.1), Cluster(2, GIGABIT), Fixed(4, 1), steps=0)
    assert simulate(Job(1000, 0.1), Cluster(1, GIGABIT), Fixed(4, 1), steps=9).exchanges == 0
