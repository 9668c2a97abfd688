"""A flow on virtual time: against what can be counted by hand, and limits that hold for any."""

import random

import pytest
from benchmarks.flow import simulated_speed
from benchmarks.flow_simulator import Costs, Task, run_flow
from benchmarks.flow_tasks import tasks_of
from flows import ONES, normed

from daso.flow.model.checks import wire
from daso.flow.placement import place_longest_first

FREE = Costs()


def chain(*seconds):
    """Nodes one after the other, forward and back."""
    nodes = len(seconds)
    forward = [Task(n, False, taken, (n - 1,) if n else ()) for n, taken in enumerate(seconds)]
    back = [
        Task(n, True, seconds[n], (nodes + at - 1,)) for at, n in enumerate(reversed(range(nodes)))
    ]
    return [*forward, *back]


def test_one_rank_does_one_thing_at_a_time():
    course = run_flow([chain(1.0, 2.0)], [(0,), (0,)], 1, count=5, most=3, costs=FREE)
    assert course.seconds == pytest.approx(5 * 6)
    assert course.busy == pytest.approx((1.0,))
    assert course.highest == 3


def test_one_at_once_takes_as_long_on_any_number_of_ranks():
    where = [(0,), (1,), (2,)]
    course = run_flow([chain(1.0, 2.0, 3.0)], where, 3, count=4, most=1, costs=FREE)
    assert course.seconds == pytest.approx(4 * 12)


def test_a_pipeline_goes_as_fast_as_its_slowest_rank():
    course = run_flow([chain(2.0, 2.0)], [(0,), (1,)], 2, count=100, most=8, costs=FREE)
    # 4 s of each rank for an instance, and one way through before the second has anything to do.
    assert 400 <= course.seconds <= 400 + 2 * 8


def test_replicas_share_instances():
    course = run_flow([chain(1.0)], [(0, 1, 2, 3)], 4, count=80, most=16, costs=FREE)
    assert course.seconds == pytest.approx(2 * 80 / 4)


def test_messages_take_their_time_of_both_ranks():
    costs = Costs(message_seconds=0.1, latency_seconds=0.5, stretch=2.0)
    course = run_flow([chain(1.0, 1.0)], [(0,), (1,)], 2, count=1, most=1, costs=costs)
    # Rank 0: 2 and sending; under way; rank 1: taking, 2 and 2, sending; under way; rank 0:
    # taking, 2, telling that it is over.
    parts = (2 + 0.1, 0.5, 0.1 + 2 + 2 + 0.1, 0.5, 0.1 + 2, 0.1)
    assert course.seconds == pytest.approx(sum(parts))


def test_what_joins_waits_for_all():
    tasks = [
        Task(0, False, 1.0, ()),
        Task(1, False, 5.0, (0,)),
        Task(2, False, 2.0, (0,)),
        Task(3, False, 1.0, (1, 2)),
    ]
    where = [(0,), (1,), (2,), (0,)]
    assert run_flow([tasks], where, 3, count=1, most=1, costs=FREE).seconds == pytest.approx(7.0)


@pytest.mark.parametrize("seed", range(20))
def test_limits_that_hold_for_any_flow(seed):
    draw = random.Random(seed)
    nodes, ranks = draw.randint(1, 8), draw.randint(1, 5)
    measured = []
    for _ in range(3):
        tasks = []
        for number in range(draw.randint(1, 20)):
            after = draw.sample(range(number), min(number, draw.randint(0, 2)))
            tasks.append(Task(draw.randrange(nodes), bool(number % 2), draw.random(), tuple(after)))
        measured.append(tasks)
    where = [tuple(draw.sample(range(ranks), draw.randint(1, ranks))) for _ in range(nodes)]
    count, most = draw.randint(1, 40), draw.randint(1, 8)
    course = run_flow(measured, where, ranks, count=count, most=most, costs=FREE)
    work = sum(sum(task.seconds for task in measured[n % 3]) for n in range(count))
    longest = max(map(longest_way, measured[: min(3, count)]))
    assert max(work / ranks, longest) <= course.seconds * (1 + 1e-9)
    assert course.seconds <= work * (1 + 1e-9)
    assert sum(course.busy) * course.seconds == pytest.approx(work)
    assert course.highest <= most
    slower = run_flow(measured, where, ranks, count=count, most=1, costs=FREE)
    assert slower.highest == 1


def longest_way(tasks):
    ends = []
    for task in tasks:
        ends.append(task.seconds + max((ends[one] for one in task.after), default=0.0))
    return max(ends)


def test_sixteen_ranks_are_not_faster_than_the_one_with_most_to_do():
    measured = [chain(1.0, 6.0, 1.0)]
    seconds = [2.0, 12.0, 2.0]
    spread = place_longest_first(seconds, [], 16, {}, 0, {})
    few = run_flow(measured, spread, 16, count=64, most=64, costs=FREE)
    assert 64 * 12 <= few.seconds <= 64 * 12 + 16
    copied = place_longest_first(seconds, [], 16, dict.fromkeys(range(1, 3), 16), 0, {})
    many = run_flow(measured, copied, 16, count=64, most=64, costs=FREE)
    assert many.seconds < few.seconds / 4


@pytest.mark.parametrize("measured", [1, 50, 64])
def test_many_ranks_are_at_most_that_many_times_as_fast_as_one(measured):
    """Long instances come first: a count that is no whole number of passes favours many ranks."""
    tasks = [chain(2.0 if number < measured / 4 else 1.0) for number in range(measured)]
    alone = simulated_speed(tasks, [(0,)], 1, 32, FREE)
    for ranks in (2, 3, 16):
        assert simulated_speed(tasks, [range(ranks)], ranks, 4 * ranks, FREE) <= ranks * alone


def test_tasks_of_an_instance_name_those_that_they_waited_for():
    graph, _ = normed()
    measured = tasks_of(wire(graph), ONES.__getitem__, len(ONES))
    assert len(measured) == len(ONES)
    for tasks in measured:
        # Forward: two layers, the second for two states, their losses; backward likewise.
        assert sorted((task.node, task.back) for task in tasks) == [
            *((1, False), (1, True)),
            *((3, False), (3, False), (3, True), (3, True)),
            *((4, False), (4, False)),
        ]
        assert all(before < place for place, task in enumerate(tasks) for before in task.after)
        last = next(task for task in tasks if task.node == 1 and task.back)
        behind = [tasks[place] for place in last.after]
        assert [task.node for task in behind if task.back] == [3, 3]  # both of the flatmap
