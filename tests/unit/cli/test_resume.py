from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from daso.checkpoint import state
from daso.checkpoint.state import Loaded
from daso.cli.train import resume
from daso.cli.train.config import USED_BY, Config
from daso.cli.train.keys import read_config
from daso.cli.train.resume import FREE, Saver, _differs, _place, _rescaled
from daso.errors import ConfigError


def run_of(config, name="digits", samples=1437):
    return SimpleNamespace(config=config, data={"name": name, "samples": samples})


def saved_by(config, epoch=0):
    data = {"name": "digits", "samples": 1437}
    return {"config": asdict(config), "data": data, "sampler": {"epoch": epoch, "batch": 1}}


def other(key, default):
    """Return another value that a setting may have."""
    words = {
        "optimizer.name": "adamw",
        "schedule.policy": "plateau",
        "exchange.algorithm": "direct",
    }
    words |= {"gradients.bucket_bytes": "search", "data.name": "digits"}
    words |= {"wire": "fp32", "merge": "delta"}
    words |= {"exchange.nonfinite": "raise", "tensorboard": "true", "data.folder": "f"}
    words |= {
        "name": "n",
        "runs": "r",
        "device": "cpu",
        "schedule.wait": "2",
        "outer": "nesterov",
    }
    words |= {"gradients.reducer": "prioritized", "gradients.step": "model"}
    words |= {"gradients.wire": "int8", "gradients.priority": "fifo"}
    words |= {"gradients.link_efficiency": "0.5", "exchange.keep_local": "queue"}
    words |= {"exchange.gpu_direct": "true", "exchange.step_restoration": "off"}
    words |= {"optimizer.momentum": "0.5", "outer_momentum": "0.5"}
    return words.get(key) or str(default + 1)


def needed(key):
    """Return the policy that a setting of the schedule belongs to, as a word."""
    used = [policy for policy, names in USED_BY.items() if key.removeprefix("schedule.") in names]
    return [f"--schedule.policy={used[0]}"] if key.startswith("schedule.") and used else []


def keys(settings, prefix=""):
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from keys(value, f"{key}.")
        else:
            yield prefix + key, value


@pytest.mark.parametrize(("key", "default"), list(keys(asdict(Config()))))
def test_a_setting_that_differs_is_named_unless_it_is_free(key, default):
    now = read_config(None, [*needed(key), f"--{key}={other(key, default)}"])
    why = _differs(run_of(now), saved_by(read_config(None, needed(key))))
    if key in FREE:
        assert why is None
    else:
        assert why.code == "resumed-with-other-settings"
        assert f"{key} was {default!r} and is now" in str(why)
        assert "--name=NAME" in str(why)


def test_every_free_setting_is_one():
    assert set(dict(keys(asdict(Config())))) >= FREE


def test_equal_settings_go_on():
    assert _differs(run_of(Config()), saved_by(Config())) is None


def test_a_setting_that_a_newer_version_has_does_not_stand_in_the_way():
    saved = saved_by(Config())
    del saved["config"]["exchange"]["nonfinite"]
    assert _differs(run_of(Config()), saved) is None


def test_what_auto_became_must_be_the_same():
    other_data = _differs(run_of(Config(), name="fashion"), saved_by(Config()))
    assert "data.name was 'digits' and is now 'fashion'" in str(other_data)
    assert "data.samples" in str(_differs(run_of(Config(), samples=1), saved_by(Config())))


def test_epochs_that_are_done_already_are_refused():
    saved = saved_by(Config(epochs=9), epoch=5)
    done = _differs(run_of(Config(epochs=5)), saved)
    assert "must be above those that are done, 5, not 5" in str(done)
    assert _differs(run_of(Config(epochs=6)), saved) is None


@pytest.mark.parametrize(
    ("batch", "world", "size", "placed"),
    [(7, 4, 4, 7), (7, 4, 2, 14), (7, 2, 4, 3), (7, 4, 3, 9), (0, 4, 2, 0), (1, 2, 4, 0)],
)
def test_another_number_of_ranks_counts_the_same_samples(batch, world, size, placed):
    payload = {"sampler": {"epoch": 3, "batch": batch}, "total": torch.tensor(2.0 * batch)}
    loaded = Loaded(70, payload, world, world == size, ())
    sampler, total = _place(loaded, size)
    assert sampler == {"epoch": 3, "batch": placed}
    assert total.item() == pytest.approx(2.0 * placed), "the mean of the batches stays"
    assert _place(replace(loaded, world=size), size) == (payload["sampler"], payload["total"])


class Alone:
    """A topology of one rank."""

    rank, world_size, is_spare = 0, 1, False

    def raise_on_all_ranks(self, problem, _):
        assert problem is None


@pytest.fixture
def saver(tmp_path, monkeypatch):
    """One that tells where it would begin."""
    made = Saver(SimpleNamespace(config=Config(runs=str(tmp_path), name="x"), topology=Alone()))
    monkeypatch.setattr(made, "resume", lambda: "resumed")
    # torchrun's agents count their own restarts.
    monkeypatch.setattr(resume, "gather", lambda _, value, __: [set(), value])
    monkeypatch.setattr(state, "broadcast", lambda _, value, __: value)
    monkeypatch.setattr(resume, "broadcast", lambda _, value, __: value)
    return made


def checkpoint(saver, step):
    folder = saver._folder / f"step-{step:08}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def test_a_job_that_slurm_started_anew_goes_on_where_it_left_a_checkpoint(saver):
    own = {"SLURM_JOB_ID=17"}
    assert saver.open(resume=False, restarted=own).step == 0
    checkpoint(saver, 7)
    saver.note(own)
    assert saver.open(resume=False, restarted=own) == "resumed"
    assert saver.open(resume=False, restarted={"DASO_JOB=1", *own}) == "resumed"


@pytest.mark.parametrize("noted", [True, False])
def test_a_job_that_was_started_anew_does_not_take_up_another_ones_run(saver, noted):
    checkpoint(saver, 7)
    if noted:
        saver.note({"SLURM_JOB_ID=16"})
    with pytest.raises(ConfigError, match=r"has one of step 7; go on from it with --resume"):
        saver.open(resume=False, restarted={"SLURM_JOB_ID=17"})


def test_a_job_at_its_first_start_goes_on_only_when_it_is_told_to(saver):
    assert saver.open(resume=False).step == 0
    checkpoint(saver, 7)
    with pytest.raises(ConfigError, match=r"has one of step 7; go on from it with --resume"):
        saver.open(resume=False)
    assert saver.open(resume=True) == "resumed"


def test_a_sum_of_losses_is_told_on_the_scale_of_the_place():
    assert float(_rescaled(torch.tensor(30.0), 10, 20)) == 60.0  # half of the ranks were lost
    assert float(_rescaled(torch.tensor(0.0), 0, 0)) == 0.0
