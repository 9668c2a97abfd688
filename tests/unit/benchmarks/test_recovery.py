"""What `scripts/bench recovery` reads out of what ranks wrote."""

import json
import os
import shlex
import subprocess

import pytest
from benchmarks import recovery
from benchmarks.recovery import (
    ALTERNATING,
    CONTENDERS,
    Contender,
    Outcome,
    figures,
    outcome_of,
    script_of,
    table,
)
from benchmarks.recovery_ranks import DASO, TORCHFT, Plan

from daso.errors import ConfigError

PLAN = Plan(DASO, "/seen by all", steps=8, skip=2, seed=0, kill_step=4)


def rank(number, ends, exchanges, *, first_step=0, ready_at=0.0, accuracy=90.0):
    return {
        "rank": number,
        "by": "torch 2",
        "first_step": first_step,
        "ready_at": ready_at,
        "step_ends": ends,
        "exchanges": exchanges,
        "accuracy": accuracy,
    }


def test_an_undisturbed_training_tells_its_accuracy_and_its_longest_step():
    ranks = [
        rank(0, [1.0, 2.0, 4.5], [(2.0, 3), (4.5, 3)], accuracy=90.0),
        rank(1, [1.0, 2.5, 4.0], [(2.5, 3), (4.0, 3)], accuracy=92.0),
    ]
    assert outcome_of(None, ranks) == Outcome(91.0, 3.5, "torch 2", longest_step_seconds=2.5)


def test_recovery_seconds_count_from_the_kill():
    ranks = [
        rank(0, [1.0, 2.0, 5.0, 6.0], [(2.0, 3), (5.0, 2), (8.0, 3)]),
        rank(2, [1.0, 2.0, 5.5, 6.0], [(2.0, 3), (5.5, 2), (8.5, 3)]),
        rank(1, [7.0, 9.0], [(8.25, 3)], first_step=2, ready_at=4.0),
    ]
    outcome = outcome_of(2.5, ranks)
    assert (outcome.shrink_seconds, outcome.join_seconds) == (3.0, 6.0)  # of who came last
    assert (outcome.ready_seconds, outcome.longest_step_seconds) == (1.5, 3.5)


def test_exchange_sent_before_a_kill_includes_that_rank():
    stayed = [(2.02, 3), (8.0, 2), (12.0, 3)]
    ranks = [rank(0, [1.0, 2.0, 3.0], stayed), rank(2, [1.0, 2.0, 3.0], stayed)]
    new = rank(1, [9.0, 12.0], [(12.0, 3)], first_step=3, ready_at=6.0)
    outcome = outcome_of(2.0, [*ranks, new])
    assert (outcome.shrink_seconds, outcome.join_seconds) == (6.0, 10.0)
    assert outcome_of(2.0, ranks).join_seconds is None


def test_a_spare_joins_at_once_and_takes_no_time_to_be_ready():
    ranks = [
        rank(0, [1.0, 5.0], [(2.1, 3), (5.0, 3)]),
        rank(3, [4.5, 5.0], [(5.0, 3)], first_step=1, ready_at=0.5),
    ]
    outcome = outcome_of(2.0, ranks)
    assert (outcome.shrink_seconds, outcome.join_seconds, outcome.ready_seconds) == (3, 3, 0)


def test_who_trains_in_turns_has_no_spare():
    script = script_of(ALTERNATING, PLAN, "")
    assert "DASO_SPARES=0" in script
    assert " -n 3 " in script


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
        again = words[words.index("-c") + 1]
        assert again.count('"$@"') == 1 + contender.returns
        for rank, works, times in ((0, True, 1), (1, False, 1 + contender.returns)):
            ends = "exit 0" if works else "exit 1"
            run = subprocess.run(
                ["bash", "-c", again, "again", "bash", "-c", f"echo once; {ends}"],
                env={**os.environ, "SLURM_PROCID": str(rank)},
                capture_output=True,
                check=False,
            )
            assert run.stdout == b"once\n" * times, rank


def test_figures_are_medians_of_who_was_run():
    runs = [{"shrink_seconds": s, "join_seconds": None, "by": "us"} for s in (1.0, 5.0, 2.0)]
    turns = {"plain": [0.2, 0.4, 0.2], "elastic": [0.2, 0.5, 0.3]}
    made = figures([{"name": "daso, one rank killed", "runs": runs}], turns, PLAN, "1gbit")
    assert made["shrink_seconds"]["value"] == 2.0
    assert "median of 3 runs" in made["shrink_seconds"]["conditions"]
    assert set(made) == {"shrink_seconds", "elastic_overhead_ratio"}  # of the others none
    assert made["elastic_overhead_ratio"]["value"] == 1.25  # beside the round of its own turn


@pytest.mark.parametrize("words", ["--steps=8 --skip=4", "--steps=30 --skip=4"])
def test_steps_that_do_not_end_with_an_exchange_are_refused(words, monkeypatch):
    monkeypatch.setattr(recovery, "library", lambda: "Open MPI 5.0.10")
    with pytest.raises(ConfigError, match="--steps must be a multiple of --skip=4"):
        recovery.main(words.split())


def test_a_library_that_ends_the_job_is_refused(monkeypatch):
    monkeypatch.setattr(recovery, "library", lambda: "MPICH 5.0.2")
    with pytest.raises(ConfigError, match="Open MPI 5 or later alone, not MPICH"):
        recovery.main([])


def test_a_table_has_a_row_for_each_and_a_dash_for_what_did_not_happen():
    run = dict.fromkeys(("shrink_seconds", "join_seconds", "ready_seconds"))
    rows = [
        {
            "name": Contender("a", DASO, False, False).name,
            "runs": [run | {"longest_step_seconds": 0.25, "accuracy": 90.0}],
        }
    ]
    assert table(rows).splitlines()[1].split() == ["a", "-", "-", "-", "0.25", "90.00"]
