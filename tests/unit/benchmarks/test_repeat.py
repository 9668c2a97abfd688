"""`scripts/bench repeat`: rows of simulated nodes, trained again and compared to the last bit."""

import json
from dataclasses import replace

import pytest
from benchmarks import repeat
from benchmarks.accuracy import figures, summarize
from benchmarks.simulations import AUTO, SLOW, SYNCHRONOUS, Result, Trial, run

TINY = Trial("digits", nodes=2, epochs=1, samples=64, batch=16, seeds=2)
ENDED = Result(90.0, 0.5, 1000, 8000, exchanges=3, gain=1.0, steps=10, seconds=1.0)


@pytest.fixture
def _only_tiny(monkeypatch):
    monkeypatch.setattr(repeat, "trials", lambda **_: [(TINY, ())])


@pytest.mark.usefixtures("_only_tiny")
def test_runs_of_a_row_are_those_it_was_made_of():
    rows = [
        {"trial": "digits, 2 nodes", "setting": AUTO, "peak": 0.05, "scores": [1.0, 2.0]},
        {"trial": "not one any more", "setting": AUTO, "peak": 0.05, "scores": [1.0]},
        {
            "trial": "digits, 2 nodes",
            "setting": SLOW,
            "peak": 0.1,
            "scores": [3.0],
            "seed_numbers": [5],
        },
    ]
    found = [
        (one.row, one.setting, one.seed, one.peak, one.score) for one in repeat.repeats(rows, 1)
    ]
    assert found == [(0, AUTO, 0, 0.05, 1.0), (2, SLOW, 5, 0.1, 3.0)]
    assert len(list(repeat.repeats(rows, 9))) == 3


@pytest.mark.usefixtures("_only_tiny")
def test_new_rows_compare_with_synchronous_runs_of_their_seeds():
    settings = {
        (SYNCHRONOUS, 0.05): [ENDED, replace(ENDED, score=80.0)],
        (AUTO, 0.05): [ENDED, replace(ENDED, score=79.0)],
    }
    rows = summarize(TINY, settings)
    found = {"figures": figures(TINY, rows), "date": "2026-01-01", "rows": rows}
    rows[1]["repeated"] = {"commit": "abc1234"}
    now = {"commit": "def5678", "date": "2026-01-02"}
    repeat.retake(found, [1], now, lambda runs: [replace(ENDED, score=78.0 + r.seed) for r in runs])
    assert found["rows"][1]["scores"] == [78.0, 79.0]
    assert found["rows"][1]["gap"] == (12.0 + 1.0) / 2
    assert found["rows"][1]["commit"] == "def5678"
    assert "repeated" not in found["rows"][1]
    assert found["figures"]["accuracy_gap_auto_2_nodes"]["value"] == 6.5
    assert found["date"] == "2026-01-02"
    with pytest.raises(SystemExit, match="take all anew"):
        repeat.retake(found, [0], now, lambda runs: [ENDED for _ in runs])


def test_a_row_that_is_taken_anew_is_of_the_rate_it_ends_best_with(monkeypatch):
    rates = replace(TINY, peaks=(0.05, 0.1, 0.2))
    monkeypatch.setattr(repeat, "trials", lambda *, quick: [(rates, ())])
    ended = {SYNCHRONOUS: (90.0, 80.0), AUTO: (88.0, 79.0)}
    rows = summarize(
        TINY,
        {
            (name, 0.05): [replace(ENDED, score=one) for one in scores]
            for name, scores in ended.items()
        },
    )
    found = {"figures": figures(TINY, rows), "date": "2026-01-01", "rows": rows}

    def train(runs):
        assert [(one.peak, one.seed) for one in runs] == [
            (peak, seed) for seed in (0, 1) for peak in (0.05, 0.1, 0.2)
        ]
        return [replace(ENDED, score=80.0 - abs(one.peak - 0.1) + one.seed) for one in runs]

    repeat.retake(found, [1], {"commit": "def5678", "date": "2026-01-02"}, train)
    assert (found["rows"][1]["peak"], found["rows"][1]["scores"]) == (0.1, [80.0, 81.0])
    assert found["rows"][1]["gap"] == (10.0 - 1.0) / 2


@pytest.mark.later("trains in processes of its own")
@pytest.mark.slow("trains in processes of its own")
@pytest.mark.usefixtures("_only_tiny")
def test_a_run_ends_the_same_when_it_is_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(repeat, "FIGURES", tmp_path)
    names = (SYNCHRONOUS, AUTO)
    rows = summarize(TINY, {(name, 0.05): [run(TINY, name, 0, 0.05)] for name in names})
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({"figures": {}, "date": "", "rows": rows}))
    assert repeat.main(["tiny", "--jobs=1"]) == 0
    assert capsys.readouterr().out.count("the same") == 2
    assert all(row["repeated"]["seeds"] == 1 for row in json.loads(path.read_text())["rows"])
    rows[1]["losses"] = [0.0]
    path.write_text(json.dumps({"figures": {}, "date": "", "rows": rows}))
    assert repeat.main(["tiny", "--jobs=1", "--setting=Auto"]) == 1, "the loss is another"
    del rows[1]["losses"]
    rows[1]["scores"] = [1.0]
    path.write_text(json.dumps({"figures": {}, "date": "", "rows": rows}))
    assert repeat.main(["tiny", "--jobs=1", "--setting=Auto"]) == 1
    assert "not 1.0000" in capsys.readouterr().out
    assert repeat.main(["tiny", "--jobs=1", "--setting=Auto", "--retake"]) == 0
    (_, anew) = json.loads(path.read_text())["rows"]
    assert anew["scores"] != [1.0]
    assert "repeated" not in anew
    with pytest.raises(SystemExit, match="trials that there are"):
        repeat.main(["tiny", "--only=nothing"])
