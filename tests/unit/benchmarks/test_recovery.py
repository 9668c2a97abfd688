"""What `scripts/bench recovery` reads out of what ranks wrote."""

import json
import shlex

import pytest
from benchmarks.recovery import (
    CONTENDERS,
    Contender,
    Outcome,
    figures,
    outcome_of,
    script_of,
    table,
)
from benchmarks.recovery_ranks import DASO, TORCHFT, Plan

PLAN = Plan(DASO, "/seen by all", steps=8, skip=2, seed=0, kill_step=4)


def rank(number, ends, exchanges, *, first_step=0, began_at=0.0, accuracy=90.0):
    return {
        "rank": number,
        "world": 3,
        "first_step": first_step,
        "began_at": began_at,
        "step_ends": ends,
        "exchanges": exchanges,
        "accuracy": accuracy,
    }


def test_an_undisturbed_training_tells_its_accuracy_and_its_longest_step():
    ranks = [
        rank(0, [1.0, 2.0, 4.5], [(2.0, 3), (4.5, 3)], accuracy=90.0),
        rank(1, [1.0, 2.5, 4.0], [(2.5, 3), (4.0, 3)], accuracy=92.0),
    ]
    assert outcome_of(None, ranks, 3) == Outcome(91.0, 3.5, 3, longest_step_seconds=2.5)


def test_seconds_count_from_the_kill_to_exchanges_without_and_with_the_one_in_its_place():
    ranks = [
        rank(0, [1.0, 2.0, 5.0, 6.0], [(2.0, 3), (5.0, 2), (8.0, 3)]),
        rank(2, [1.0, 2.0, 5.5, 6.0], [(2.0, 3), (5.5, 2), (8.5, 3)]),
        rank(1, [7.0, 9.0], [(7.5, 3)], first_step=2, began_at=4.0),
    ]
    outcome = outcome_of(2.5, ranks, 4)
    assert (outcome.shrink_seconds, outcome.join_seconds) == (2.5, 5.5)  # by those that stayed
    assert outcome.started_seconds == 1.5
    assert (outcome.longest_step_seconds, outcome.lost_steps) == (3.5, 0)


def test_steps_that_are_taken_again_are_counted_and_nobody_joins_who_was_there_before():
    ranks = [rank(0, [1.0, 2.0, 3.0, 4.0, 5.0], [(2.0, 3), (4.0, 2)])]
    outcome = outcome_of(2.5, ranks, 4)
    assert outcome.lost_steps == 1
    assert (outcome.join_seconds, outcome.started_seconds) == (None, None)


def test_a_spare_was_there_before_and_takes_no_time_to_start():
    ranks = [
        rank(0, [1.0, 5.0], [(5.0, 3)]),
        rank(3, [5.0], [(5.0, 3)], first_step=1, began_at=0.5),
    ]
    assert outcome_of(2.5, ranks, 2).started_seconds == 0.0


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda one: one.name)
def test_a_script_starts_the_ranks_that_train_and_those_that_wait(contender):
    script = script_of(contender, PLAN, "/their env/bin/python")
    words = shlex.split(script.splitlines()[-2 if contender.by == TORCHFT else -1])
    assert json.loads(words[-1])["folder"] == PLAN.folder
    if contender.by == DASO:
        assert f"DASO_SPARES={int(contender.returns)}" in script
        assert words[words.index("-n") + 1] == str(3 + contender.returns)
        assert "ulfm" in words
    else:
        assert f"--heartbeat_timeout_ms {contender.heartbeat_ms} &" in script
        assert ("for _ in 1 2;" in script) == contender.returns


def test_figures_are_medians_of_who_was_run():
    runs = [{"shrink_seconds": s, "join_seconds": None} for s in (1.0, 5.0, 2.0)]
    made = figures([{"name": "daso, one rank killed", "runs": runs}], PLAN, "1gbit")
    assert made["shrink_seconds"]["value"] == 2.0
    assert "median of 3 runs" in made["shrink_seconds"]["conditions"]
    assert set(made) == {"shrink_seconds"}


def test_a_table_has_a_row_for_each_and_a_dash_for_what_did_not_happen():
    run = dict.fromkeys(("shrink_seconds", "join_seconds", "started_seconds"))
    rows = [
        {
            "name": Contender("a", DASO, False, False).name,
            "runs": [run | {"longest_step_seconds": 0.25, "accuracy": 90.0}],
        }
    ]
    assert table(rows).splitlines()[1].split() == ["a", "-", "-", "-", "0.25", "90.00"]
