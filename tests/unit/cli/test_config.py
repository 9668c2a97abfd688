import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.cli.train.config import (
    USED_BY,
    CheckpointConfig,
    Config,
    DataConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from daso.cli.train.keys import describe, read_config
from daso.cli.train.task import make_task
from daso.errors import ConfigError, DataError
from daso.plan.auto import Auto
from daso.plan.options import Exchange, Gradients
from daso.plan.policies import Fixed, Plateau, Qsr

KEYS = [
    "name",
    "runs",
    "epochs",
    "seed",
    "device",
    "tensorboard",
    "trace",
    "wire",
    "merge",
    "outer",
    "outer_lr",
    "outer_momentum",
    "data.name",
    "data.folder",
    "data.batch_size",
    "data.context",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.momentum",
    "optimizer.weight_decay",
    "schedule.policy",
    "schedule.skip",
    "schedule.wait",
    "schedule.warmup",
    "schedule.cooldown",
    "schedule.alpha",
    "schedule.drift",
    "schedule.budget",
    "schedule.selective",
    "exchange.algorithm",
    "exchange.chunk_bytes",
    "exchange.nonfinite",
    "exchange.timeout_seconds",
    "exchange.fragments",
    "exchange.gpu_direct",
    "exchange.step_restoration",
    "exchange.elastic",
    "exchange.keep_local",
    "gradients.bucket_bytes",
    "gradients.reducer",
    "gradients.step",
    "gradients.priority",
    "gradients.link_efficiency",
    "gradients.wire",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.background",
]


def toml(folder, text):
    path = folder / "settings.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(path, *words):
    with pytest.raises(ConfigError) as caught:
        read_config(path, words)
    return str(caught.value)


def items(record, prefix=""):
    for one in fields(record):
        value = getattr(record, one.name)
        if is_dataclass(value):
            yield from items(value, f"{prefix}{one.name}.")
        else:
            yield prefix + one.name, value


def test_nothing_said_gives_the_defaults():
    config = read_config(None, [])
    assert config == Config()
    assert (config.epochs, config.seed, config.data.name) == (3, 0, "auto")
    assert config.folder == Path("runs/train")
    assert config.policy() == Auto()
    assert config.settings().wire == "auto"
    assert config.settings().exchange == Exchange()
    assert config.settings().gradients == Gradients()


def test_an_empty_file_gives_the_defaults(tmp_path):
    assert read_config(toml(tmp_path, "# nothing\n[data]\n"), []) == Config()


def test_toml_sets_keys_at_the_top_and_in_sections(tmp_path):
    path = toml(
        tmp_path,
        """
        name = "mine"
        tensorboard = true
        data.name = "digits"
        [optimizer]
        lr = 1
        [exchange]
        timeout_seconds = 2.5
        """,
    )
    assert read_config(path, []) == Config(
        name="mine",
        tensorboard=True,
        data=DataConfig(name="digits"),
        optimizer=OptimizerConfig(lr=1.0),
        exchange=Exchange(timeout_seconds=2.5),
    )


def test_a_word_wins_over_the_file_and_leaves_the_rest(tmp_path):
    path = toml(tmp_path, "epochs = 5\n[data]\nname = 'digits'\nbatch_size = 8\n")
    config = read_config(path, ["--data.batch_size=16"])
    assert (config.epochs, config.data.name, config.data.batch_size) == (5, "digits", 16)


def test_of_a_key_given_twice_the_last_wins():
    assert read_config(None, ["--epochs=5", "--seed=1", "--epochs=7"]) == Config(epochs=7, seed=1)
    with pytest.raises(ConfigError, match="epochs"):
        read_config(None, ["--epochs=5", "--epochs=many"])


def test_dashes_in_a_key_are_underscores_and_those_in_a_value_stay():
    config = read_config(None, ["--data.batch-size=8", "--name=a-b"])
    assert (config.data.batch_size, config.name) == (8, "a-b")


def test_the_settings_reach_the_records_of_the_optimizer():
    words = [
        "--wire=fp32",
        "--merge=delta",
        "--exchange.algorithm=mpi",
        "--exchange.chunk_bytes=1024",
        "--gradients.bucket_bytes=2048",
        "--gradients.reducer=host",
        "--gradients.step=layerwise",
        "--exchange.nonfinite=raise",
        "--exchange.timeout_seconds=7",
    ]
    made = read_config(None, words).settings()
    assert (made.wire, made.merge) == ("fp32", "delta")
    assert made.exchange == Exchange(
        algorithm="mpi", chunk_bytes=1024, nonfinite="raise", timeout_seconds=7.0
    )
    assert made.gradients == Gradients(reducer="host", step="layerwise", bucket_bytes=2048)
    narrow = read_config(None, ["--gradients.wire=int8"]).settings()
    assert narrow.gradients == Gradients(wire="int8")
    direct = read_config(None, ["--exchange.gpu_direct=true"]).settings()
    assert direct.exchange == Exchange(gpu_direct=True)
    elastic = read_config(None, ["--exchange.elastic=true"]).settings()
    assert elastic.exchange == Exchange(elastic=True)
    for other in ("--trace=true", "--checkpoint.background=true"):
        with pytest.raises(ConfigError, match=r"must keep all of its ranks to be recorded, or"):
            read_config(None, ["--exchange.elastic=true", other])


def test_no_size_of_buckets_is_one_to_be_searched():
    made = read_config(None, ["--gradients.bucket_bytes=search"]).settings()
    assert made.gradients == Gradients(bucket_bytes="search")


def test_the_schedule_reaches_the_policy():
    words = ["--schedule.policy=fixed", "--schedule.skip=8", "--schedule.wait=2"]
    assert read_config(None, [*words, "--schedule.warmup=3"]).policy() == Fixed(8, 2, 3)
    words = ["--schedule.policy=qsr", "--schedule.skip=3", "--schedule.alpha=0.2"]
    assert read_config(None, words).policy() == Qsr(0.2, 3, 1)
    assert read_config(None, ["--schedule.drift=0.1"]).policy() == Auto(0.1)
    assert read_config(None, ["--schedule.selective=9"]).policy() == Auto(selective=9)
    assert read_config(None, ["--schedule.selective=0"]).policy() == Auto(selective=None)
    words = ["--schedule.policy=plateau", "--schedule.skip=8", "--schedule.warmup=1"]
    policy = read_config(None, [*words, "--schedule.cooldown=2", "--epochs=9"]).policy()
    assert policy == Plateau(9, warmup=1, cooldown=2, max_skip=8)


def test_the_run_folder_is_runs_and_name():
    assert read_config(None, ["--runs=/a", "--name=b"]).folder == Path("/a/b")


@pytest.mark.parametrize("seed", [2**53 + 1, 2**64 - 1])
def test_a_large_whole_number_keeps_its_last_digit(tmp_path, seed):
    assert read_config(None, [f"--seed={seed}"]).seed == seed
    assert read_config(toml(tmp_path, f"seed = {seed}"), []).seed == seed


@pytest.mark.parametrize(
    "word", ["true", "True", "yes", "1", "TRUE", "false", "False", "no", "NO", "0"]
)
def test_words_for_true_and_false(word):
    expected = word.lower() in {"true", "yes", "1"}
    assert read_config(None, [f"--tensorboard={word}"]).tensorboard is expected


@pytest.mark.parametrize(("key", "near"), [("epoch", "epochs"), ("data.batchsize", "batch_size")])
def test_an_unknown_key_is_named_with_the_near_and_the_valid_ones(key, near):
    message = refused(None, f"--{key}=3")
    assert repr(key) in message
    assert f"did you mean '{near}'" in message or f"did you mean 'data.{near}'" in message
    section = key.partition(".")[0] if "." in key else ""
    ours = [one for one in KEYS if one.startswith(section + ".") or not (section or "." in one)]
    assert f"valid keys: {', '.join(ours)}" in message


def test_an_unknown_key_like_no_other_gets_no_guess():
    message = refused(None, "--zzzzzz=3")
    assert "did you mean" not in message
    assert "valid keys: name, runs, epochs" in message
    assert "optimizer.*" in message


def test_an_unknown_key_in_a_file_is_refused_too(tmp_path):
    message = refused(toml(tmp_path, "[optimizer]\nlearning_rate = 1\n"))
    assert "'optimizer.learning_rate'" in message
    assert "optimizer.lr" in message


@pytest.mark.parametrize("text", ["[nosuch]\n", "[epochs]\n", "[data.name]\n"])
def test_an_empty_section_that_does_not_exist_is_refused(tmp_path, text):
    assert text.strip("[]\n") in refused(toml(tmp_path, text))


@pytest.mark.parametrize(
    ("word", "rule", "value"),
    [
        ("--epochs=3.5", "epochs must be a whole number", "'3.5'"),
        ("--epochs=three", "epochs must be a whole number", "'three'"),
        ("--epochs=", "epochs must be a whole number", "''"),
        ("--epochs=true", "epochs must be a whole number", "'true'"),
        ("--seed=inf", "seed must be a whole number", "'inf'"),
        ("--seed=nan", "seed must be a whole number", "'nan'"),
        ("--seed=1e999", "seed must be a whole number", "'1e999'"),
        ("--optimizer.lr=fast", "optimizer.lr must be a number", "'fast'"),
        ("--optimizer.lr=nan", "optimizer.lr must be a number", "nan"),
        ("--tensorboard=maybe", "tensorboard must be true or false", "'maybe'"),
        ("--seed=-1", "seed must be a whole number, 0 or more", "-1"),
        ("--tensorboard=", "tensorboard must be true or false", "''"),
        ("--data.name=mnist", "auto, fashion, digits, text, synthetic", "'mnist'"),
        ("--wire=fp17", "wire must be one of auto, fp32", "'fp17'"),
        ("--schedule.policy=", "schedule.policy must be one of auto, fixed, plateau, qsr", "''"),
        ("--epochs=0", "epochs must be a whole number of at least 1", "0"),
        ("--name=..", "name must be the name of a folder", "'..'"),
        ("--name=a/../../b", "name must be the name of a folder", "'a/../../b'"),
        ("--name=/etc/daso", "name must be the name of a folder", "'/etc/daso'"),
        ("--name=", "name must be the name of a folder", "''"),
        ("--runs=a\nb", "runs must be the path of a folder", r"'a\nb'"),
        ("--data.batch_size=-2", "data.batch_size must be a whole number of at least 1", "-2"),
        ("--checkpoint.every=-1", "checkpoint.every must be a whole number of at least 0", "-1"),
        ("--checkpoint.keep=0", "checkpoint.keep must be a whole number of at least 1", "0"),
        ("--schedule.drift=-1", "drift must be a positive number", "-1.0"),
        ("--schedule.selective=-1", "selective must be a whole number", "-1"),
        ("--schedule.budget=0", "budget must be a positive number", "0.0"),
        ("--merge=mean", "merge must be a number or auto or daso", "'mean'"),
        ("--merge=1.5", "or a number between 0 and 1", "1.5"),
        ("--exchange.fragments=0", "fragments must be a whole number of at least 1", "0"),
        ("--schedule.warmup=-1", "warmup must be a whole number of at least 0", "-1"),
        ("--exchange.chunk_bytes=0", "chunk_bytes must be a whole number of bytes", "0"),
        ("--gradients.bucket_bytes=-1", "bucket_bytes must be a whole number of bytes", "-1"),
        ("--exchange.timeout_seconds=-1", "timeout_seconds must be a positive number", "-1.0"),
    ],
)
def test_a_value_that_does_not_fit_is_told_with_the_rule(word, rule, value):
    message = refused(None, word)
    assert rule in message
    assert message.endswith(f"not {value}") or f"not {value};" in message


@pytest.mark.parametrize(
    ("text", "rule", "value"),
    [
        ("epochs = 3.5", "epochs must be a whole number", "3.5"),
        ("epochs = true", "epochs must be a whole number", "True"),
        ("epochs = [3]", "epochs must be a whole number", "[3]"),
        ("epochs = '3x'", "epochs must be a whole number", "'3x'"),
        ("name = 3", "name must be text", "3"),
        ("name = true", "name must be text", "True"),
        ("name = ['a']", "name must be text", "['a']"),
        ("optimizer.lr = true", "optimizer.lr must be a number", "True"),
        ("optimizer.lr = nan", "optimizer.lr must be a number", "nan"),
        ("tensorboard = 'maybe'", "tensorboard must be true or false", "'maybe'"),
        ("tensorboard = 2", "tensorboard must be true or false", "2"),
        ("data.name = 3", "data.name must be one of auto, fashion", "3"),
        ("data.name = ['auto']", "data.name must be one of auto, fashion", "['auto']"),
    ],
)
def test_a_value_of_a_wrong_type_in_a_file_is_refused(tmp_path, text, rule, value):
    message = refused(toml(tmp_path, text))
    assert rule in message
    assert message.endswith(f"not {value}")


@pytest.mark.parametrize("text", ["data = 3", "data = 'digits'", "[[data]]\nname = 'digits'"])
def test_a_section_given_as_a_value_is_refused_with_its_keys(tmp_path, text):
    message = refused(toml(tmp_path, text))
    assert "'data'" in message
    assert "data.name, data.folder" in message


def test_a_value_given_as_a_section_is_refused(tmp_path):
    message = refused(toml(tmp_path, "[epochs]\nmany = 3\n"))
    assert "'epochs.many'" in message
    assert "did you mean 'epochs'?" in message


def test_wait_above_skip_is_refused_with_what_to_do():
    message = refused(None, "--schedule.policy=fixed", "--schedule.skip=3", "--schedule.wait=4")
    assert "wait must not exceed skip=3" in message
    assert "not 4" in message
    assert "lower wait or raise skip" in message


@pytest.mark.parametrize(
    ("word", "owners", "remedy"),
    [
        ("--schedule.skip=8", "fixed and plateau and qsr", "--schedule.policy=fixed"),
        ("--schedule.cooldown=1", "plateau", "--schedule.policy=plateau"),
        ("--schedule.alpha=1", "qsr", "--schedule.policy=qsr"),
    ],
)
def test_a_setting_of_another_policy_is_not_passed_over(word, owners, remedy):
    message = refused(None, word)
    assert f"is of {owners}, but schedule.policy is auto" in message
    assert remedy in message


def test_plateau_phases_longer_than_the_run_are_refused_with_what_to_do():
    words = ["--schedule.policy=plateau", "--schedule.warmup=2", "--schedule.cooldown=2"]
    message = refused(None, *words, "--epochs=3")
    assert "must not exceed epochs=3" in message
    assert "not 2 + 2" in message
    assert "shorten" in message
    assert read_config(None, [*words, "--epochs=4"]).epochs == 4


def test_mpi_on_a_bf16_wire_is_refused_with_what_to_do():
    message = refused(None, "--exchange.algorithm=mpi", "--wire=bf16")
    assert "fp32" in message
    assert "'bf16'" in message
    assert "algorithm='auto'" in message


@pytest.mark.parametrize("key", ["lr", "momentum", "weight_decay"])
def test_numbers_that_torch_would_refuse_are_refused_before(key):
    message = refused(None, f"--optimizer.{key}=-1")
    assert key in message
    assert "-1" in message


def test_a_missing_file_is_told_with_its_path(tmp_path):
    message = refused(tmp_path / "nosuch.toml")
    assert str(tmp_path / "nosuch.toml") in message
    assert "No such file" in message


def test_a_folder_is_not_a_file_of_settings(tmp_path):
    assert f"{tmp_path}: Is a directory" in refused(tmp_path)


def test_broken_toml_is_told_with_the_file_and_the_place(tmp_path):
    message = refused(toml(tmp_path, "epochs = 3\nname = \n"))
    assert "settings.toml must be TOML" in message
    assert "line 2" in message


def test_a_key_twice_in_a_file_is_broken_toml(tmp_path):
    assert "must be TOML" in refused(toml(tmp_path, "epochs = 3\nepochs = 4\n"))


def test_a_file_that_is_not_utf8_is_refused_with_its_path(tmp_path):
    assert "settings.toml" in refused(toml(tmp_path, b"name = '\xff'\n"))


@pytest.mark.parametrize("word", ["epochs=3", "--epochs", "-epochs=3", "3", ""])
def test_a_word_that_is_no_setting_is_told_how_one_looks(word):
    message = refused(None, word)
    assert "--key=value" in message
    assert repr(word) in message


def described():
    """Each key's line of the help, with what is below it."""
    return re.split(r"\n(?=  --)", describe())


def test_describe_lists_every_key_once_with_meaning_default_and_choices():
    entries = described()
    assert [entry.split("=")[0].strip() for entry in entries] == [f"--{key}" for key in KEYS]
    defaults = dict(items(Config()))
    for key, entry in zip(KEYS, entries, strict=True):
        assert entry.split("=", 1)[1].startswith(str(defaults[key] if defaults[key] != () else ""))
        meaning = " ".join(entry.split()[1:])
        assert re.fullmatch(r"[A-Z].{5,} \(.+\)", meaning), entry
    joined = " ".join(describe().split())
    assert "Chooses skip and wait (auto | fixed | plateau | qsr)" in joined


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_describe_is_as_wide_as_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    lines = describe().splitlines()
    assert max(map(len, lines)) <= max(80, min(100, int(columns)))
    starts = {line.index(line.split()[1]) for line in lines if line.startswith("  --")}
    assert len(starts) == 1


def test_the_defaults_that_describe_shows_are_valid_words():
    assert read_config(None, [entry.split()[0] for entry in described()]) == Config()


def numbers(least, most=None):
    return st.floats(least, most, allow_nan=False, allow_infinity=False)


printable = st.text(st.sampled_from("aZ09 ._-=+äß漢\"'#[]{}\\"), min_size=1, max_size=40)


@st.composite
def configs(draw):
    wire = draw(st.sampled_from(["bf16", "fp32"]))
    algorithm = draw(st.sampled_from(["auto", "ring"] + ["mpi"] * (wire == "fp32")))
    warmup, cooldown = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    skip = draw(st.integers(1, 100))
    policy = draw(st.sampled_from(list(USED_BY)))
    least = 1 if policy == "qsr" and skip == 1 else 0  # Qsr refuses a synchronous phase
    values = {
        "skip": skip,
        "wait": draw(st.integers(least, skip)),
        "warmup": warmup,
        "cooldown": cooldown,
        "alpha": draw(st.floats(1e-6, 1e6)),
        "drift": draw(st.floats(1e-6, 1e6)),
        "budget": draw(st.floats(1e-6, 1e6)),
        "selective": draw(st.integers(0, 2**40)),
    }
    return Config(
        name=draw(printable.filter(lambda one: one not in (".", ".."))),
        runs=draw(printable),
        epochs=draw(st.integers(max(1, warmup + cooldown), 2**40)),
        seed=draw(st.integers(0, 2**64 - 1)),
        tensorboard=draw(st.booleans()),
        trace=draw(st.booleans()),
        data=DataConfig(
            name=draw(st.sampled_from(["auto", "fashion", "digits", "text", "synthetic"])),
            folder=draw(st.text()),
            batch_size=draw(st.integers(1, 2**40)),
            context=draw(st.integers(1, 2**20)),
        ),
        optimizer=OptimizerConfig(
            name=draw(st.sampled_from(["sgd", "adamw"])),
            lr=draw(numbers(0, 1e4)),
            momentum=draw(st.floats(0, 1, exclude_max=True)),
            weight_decay=draw(numbers(0, 1e4)),
        ),
        schedule=ScheduleConfig(policy=policy, **{name: values[name] for name in USED_BY[policy]}),
        wire=wire,
        merge=draw(st.sampled_from(["auto", "daso", "delta", "eager", 0.5])),
        gradients=Gradients(
            bucket_bytes=draw(st.integers(1, 2**40)),
            link_efficiency=draw(st.floats(0.01, 0.999)),
            priority=draw(st.sampled_from(["layer", "lifo", "fifo"])),
        ),
        exchange=Exchange(
            algorithm=algorithm,
            chunk_bytes=draw(st.integers(1, 2**40)),
            keep_local=tuple(draw(st.lists(st.sampled_from(["queue", "*.hidden"])))),
            nonfinite=draw(st.sampled_from(["drop", "raise"])),
            timeout_seconds=draw(numbers(1e-9, 1e9)),
            gpu_direct=draw(st.booleans()) and algorithm != "mpi",
        ),
        checkpoint=CheckpointConfig(
            every=draw(st.integers(0, 2**40)), keep=draw(st.integers(1, 2**40))
        ),
    )


@settings(deadline=None, max_examples=150, database=None)
@given(configs())
def test_any_configuration_written_as_words_is_read_back_equal(config):
    words = [
        f"--{key}={','.join(value) if isinstance(value, tuple) else value}"
        for key, value in items(config)
    ]
    assert read_config(None, words) == config


def written(value):
    if isinstance(value, tuple):
        return json.dumps(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("toml")


@settings(deadline=None, max_examples=100, database=None)
@given(config=configs())
def test_any_configuration_written_as_toml_is_read_back_equal(folder, config):
    text = "\n".join(f"{key} = {written(value)}" for key, value in items(config))
    assert read_config(toml(folder, text), []) == config


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("exchange.merge", "merge"),
        ("exchange.reducer", "gradients.reducer"),
        ("lr", "optimizer.lr"),
        ("optimizer.l", "optimizer.lr"),
        ("optimizr.name", "optimizer.name"),
        ("dat.name", "data.name"),
        ("gradient.wire", "gradients.wire"),
    ],
)
def test_an_unknown_key_suggests_its_namesake_or_a_similar_key(key, suggestion):
    message = refused(None, f"--{key}=1")
    assert f"unknown key {key!r}; did you mean {suggestion!r}?" in message


def test_a_file_may_give_a_merge_as_a_number_and_begin_with_a_mark(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("\ufeffmerge = 0.5\n", encoding="utf-8")
    assert read_config(path, []).settings().merge == 0.5


def test_the_users_folder_has_its_short_name_in_files_and_words(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "run.toml"
    path.write_text('runs = "~/there"\n')
    for config in (read_config(path, []), read_config(None, ["--runs=~/there"])):
        assert config.folder == Path("/home/me/there/train")
        assert config.runs == "~/there", "as it was written, where it is kept"
    with pytest.raises(DataError, match="/home/me/there"):
        make_task(DataConfig(name="fashion", folder="~/there"))
