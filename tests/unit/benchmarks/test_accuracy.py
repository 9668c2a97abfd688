import json
from types import SimpleNamespace

import pytest
from benchmarks import accuracy
from benchmarks.accuracy import main
from benchmarks.simulations import AUTO, QUICK, SETTINGS, Trial


@pytest.mark.later("trains for ten seconds")
def test_a_small_bench_writes_its_table_figures_and_plot(tmp_path, monkeypatch, capsys):
    trial = Trial("digits", nodes=4, epochs=1, samples=600)
    monkeypatch.setattr(accuracy, "trials", lambda *, quick: [(trial, QUICK)])
    monkeypatch.setattr(accuracy, "overhead", lambda steps: 1.0)
    files = {name: tmp_path / f"accuracy.{name}" for name in ("json", "png")}
    words = ["--quick", "--jobs=1", "--json", str(files["json"]), "--plot", str(files["png"])]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in QUICK)
    assert main([*words, "--setting", AUTO]) == 0
    said = capsys.readouterr().out
    assert [name in said for name in QUICK] == [name in (AUTO, QUICK[0]) for name in QUICK]
    found = json.loads(files["json"].read_text())
    auto, synchronous = (
        next(row for row in found["rows"] if row["setting"] == name) for name in (AUTO, QUICK[0])
    )
    assert found["figures"]["bytes_ratio_auto_4_nodes"]["value"] == auto["bytes_ratio"] > 2
    assert found["figures"]["accuracy_gap_auto_4_nodes"]["value"] == auto["gap"]
    assert (synchronous["bytes_ratio"], synchronous["gap"]) == (1.0, 0.0)
    assert found["versions"]["torch"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_a_trial_is_named_whole_or_in_part():
    listed = [(trial, ()) for trial, _ in accuracy.trials(quick=False)]
    assert [str(one) for one, _ in accuracy.named("text, 2 nodes", listed)] == ["text, 2 nodes"]
    wide = [str(one) for one, _ in accuracy.named("wide", listed)]
    assert wide == [f"text, {nodes} nodes, wide" for nodes in (2, 4, 8)]
    assert accuracy.named("", listed) == listed


def test_a_name_that_no_trial_has_is_told(capsys):
    assert main(["--only=imagenet"]) == 2
    assert "no trial has 'imagenet' in its name" in capsys.readouterr().err


def test_the_overhead_is_the_ratio_of_median_steps_that_alternate(monkeypatch):
    seconds = [2, 3, 2, 3, 9, 4]  # bare, wrapped, bare, ...
    clock = iter([0.0, *(time for second in seconds for time in (second, 0.0))])
    monkeypatch.setattr(accuracy, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert accuracy.overhead(steps=3) == 3 / 2


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_is_one_the_optimizer_takes(setting):
    assert setting.settings().wire == setting.wire
    assert setting.policy(8, 0.05).start()
