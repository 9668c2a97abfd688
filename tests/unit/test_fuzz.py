"""Nonsense from a fixed seed: refused in one line by an error of ours, or legal by a table.

``DASO_FUZZ`` is how many inputs are tried of each kind, ``DASO_FUZZ_SEED`` another seed.
"""

import inspect
import math
import os
import random
import string
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from jobs import typed

import daso
from daso.checkpoint.files import Entry, Manifest, read_payload, write_payload
from daso.cli.train.keys import read_config
from daso.comm.topology import RankInfo
from daso.errors import DasoError
from daso.kernels import torch_kernels
from daso.kernels.choice import kernels_for
from daso.kernels.codecs import codec_named
from daso.kernels.rows import Mean
from daso.predict.throttle_plan import RATES
from daso.slurm.sites import parse_site
from daso.timeline.report import read_timeline

INFINITE = math.inf
WIRES = ("fp32", "bf16", "fp16", "int8", "int4", "int2", "topk")
NONE = torch.empty(0, dtype=torch.uint8)
EACH = int(os.environ.get("DASO_FUZZ", "250"))
SEED = os.environ.get("DASO_FUZZ_SEED", "")
ODD = [
    *(None, True, False, 0, 1, -1, 2, 3, 10**6, 10**30, -(10**30), 0.0, -0.0, 0.5, 1.0, 2.5, -3.5),
    *(math.nan, INFINITE, -math.inf, 1e308, 1e-308, "", "x", "auto", "4", "a\nb", "\0", "é" * 300),
    *(b"x", (), (1,), (1, 2), [], [3, 1], {}, {"a": 1}, object, object(), len, daso.Fixed, 1j),
    *(range(3), torch.zeros(2), torch.nn.Linear(1, 1), Path("x"), daso.Fixed(), daso.Exchange()),
]

Number = int | float


def whole(least, most=2**63 - 1):
    return lambda one: type(one) is int and least <= one <= most


def real(least, most):
    return lambda one: type(one) in (int, float) and least <= one <= most


def above(least, most):
    return lambda one: real(least, most)(one) and one > least


def named(*names):
    return lambda one: (one is None or isinstance(one, str)) and one in names


def one_of(*rules):
    return lambda one: any(rule(one) for rule in rules)


BYTES = whole(1)
FLAG = lambda one: isinstance(one, bool)  # noqa: E731 - a row of the table
# What a record may hold, field by field, in words of this test: the oracle.
LEGAL = {
    daso.Fixed: {"skip": whole(1), "wait": whole(0), "warmup": whole(0)},
    daso.Plateau: {
        **dict.fromkeys(("epochs", "max_skip", "patience"), whole(1)),
        **dict.fromkeys(("warmup", "cooldown"), whole(0)),
        "threshold": lambda one: real(0, 1)(one) and one < 1,
    },
    daso.Qsr: {
        "alpha": above(0, 1e9),
        "skip": whole(1),
        "wait": whole(0),
        "max_skip": whole(1),
    },
    daso.Auto: {
        "drift": lambda one: one is None or above(0, 1e9)(one),
        "max_skip": whole(1),
        "warmup": whole(0),
        "budget": above(0, 1e9),
    },
    daso.Exchange: {
        "algorithm": named("auto", "direct", "two-level", "halving", "ring", "planned", "mpi"),
        "chunk_bytes": BYTES,
        "nonfinite": named("drop", "raise"),
        "timeout_seconds": above(0, 1e9),
        "fragments": whole(1, 100_000),
        "gpu_direct": FLAG,
        "step_restoration": named("auto", "on", "off"),
    },
    daso.Gradients: {
        "bucket_bytes": one_of(BYTES, named("auto", "search")),
        "reducer": named("bucketed", "prioritized", "host"),
        "step": named("auto", "model", "layerwise"),
        "priority": named("layer", "lifo", "fifo"),
    },
    daso.flow.Updates: {
        "min_update_interval": whole(1),
        "unit": named("instance", "message"),
        "weights": named("current", "stashed"),
        "scale_by_staleness": FLAG,
    },
    daso.predict.Link: {
        "bytes_per_second": lambda one: above(0, 1e18)(one) or one is INFINITE,
        "latency_seconds": real(0, 1e6),
        "headers": real(1, 100),
    },
    daso.predict.Job: {
        "parameters": above(0, 1e15),
        "step_seconds": above(0, 1e9),
        **dict.fromkeys(("host_seconds", "own_seconds", "gradient_seconds"), real(0, 1)),
        "jitter": real(0, 0.999),
        **dict.fromkeys(("lr", "drift"), real(0, 1e6)),
    },
    daso.predict.Cluster: {
        "nodes": whole(1, 1_000_000),
        "link": lambda one: isinstance(one, daso.predict.Link),
        "slower": lambda one: isinstance(one, dict),
        "cores": above(0, 1e6),
    },
    daso.predict.Machine: {
        "compute": above(0, 1e30),
        **dict.fromkeys(RATES, lambda one: one is None or above(0, 1e18)(one)),
        "latency_seconds": real(0, 1e12),
    },
    daso.predict.ThrottlePlan: dict.fromkeys(
        ("current", "target"), lambda one: isinstance(one, daso.predict.Machine)
    ),
}


MACHINE = daso.predict.Machine(1.0, 1e9)
# What a record cannot do without.
SANE = {
    daso.Plateau: {"epochs": 9},
    daso.Qsr: {"alpha": 0.1},
    daso.predict.Link: {"bytes_per_second": 1e9},
    daso.predict.Job: {"parameters": 1e6, "step_seconds": 0.1},
    daso.predict.Cluster: {"nodes": 4, "link": daso.predict.Link(1e9)},
    daso.predict.Machine: {"compute": 1.0},
    daso.predict.ThrottlePlan: {"current": MACHINE, "target": MACHINE},
}


def dice_of(name):
    return random.Random(f"{SEED}{name}")


def refused(call):
    """Return what a call returns, or None where an error of ours refused it in one line."""
    try:
        return call()
    except DasoError as error:
        assert len(str(error).splitlines()) == 1, str(error)
        assert len(str(error)) > 20
        return None


@pytest.mark.parametrize("kind", LEGAL, ids=lambda kind: kind.__name__)
def test_a_record_holds_what_it_may_and_nothing_else(kind):
    rows, dice = LEGAL[kind], dice_of(kind.__name__)
    made = 0
    for _ in range(EACH):
        chosen = SANE.get(kind, {}) | {
            name: dice.choice(ODD) for name in rows if dice.random() < 0.3
        }
        if dice.random() < 0.1:
            chosen[dice.choice(["foo", "skp", "Skip", ""])] = 1
        given = [dice.choice(ODD)] if dice.random() < 0.05 else []
        one = refused(lambda given=given, chosen=chosen: kind(*given, **chosen))
        if one is not None:
            made += 1
            for name, is_legal in rows.items():
                assert is_legal(getattr(one, name)), (name, getattr(one, name))
    assert made


def doors():
    """Calls of what trains, with arguments of which some are odd; on one rank."""
    model = torch.nn.Linear(3, 2)

    def inner():
        return torch.optim.SGD(model.parameters(), lr=0.1)

    yield daso.DASO, {"inner": inner, "module": lambda: model}
    yield daso.attach, {"inner": inner, "module": lambda: model}
    yield (
        daso.ParameterServer,
        {
            "model": lambda: torch.nn.Linear(3, 2),
            "optimizer_factory": lambda: lambda params: torch.optim.SGD(params, lr=0.1),
        },
    )
    yield daso.Topology, {}


@pytest.mark.parametrize(
    ("door", "right"), [*doors()], ids=lambda one: getattr(one, "__name__", "")
)
def test_a_door_opens_or_says_in_one_line_why_not(door, right):
    dice = dice_of(door.__name__)
    names = [name for name in inspect.signature(door).parameters if name not in ("self", "args")]
    for _ in range(EACH // 4):
        given = {name: make() for name, make in right.items() if dice.random() < 0.9}
        given |= {name: dice.choice(ODD) for name in names if dice.random() < 0.2}
        if dice.random() < 0.1:
            given[dice.choice(["skip", "model_", "policies"])] = 3
        opened = refused(lambda given=given: door(**given))
        if hasattr(opened, "close"):
            opened.close()


WORDS = [
    *(
        "",
        "--",
        "-",
        "=",
        "--=",
        "--=x",
        "nan",
        "inf",
        "-inf",
        "-1",
        "0",
        "9" * 30,
        "1e308",
        "1e-9",
    ),
    *("a/b", "..", "\n", "\0", "é", "x" * 5000, "[", "{}", "'", '"', "\\", "true", "none", "1,2"),
]
KEYS = [
    *("epochs", "seed", "name", "runs", "device", "trace", "data.name", "data.batch_size"),
    *("optimizer.lr", "optimizer.momentum", "optimizer.name", "schedule.policy", "schedule.skip"),
    *("schedule.wait", "schedule.drift", "schedule.warmup", "wire", "merge"),
    *(
        "outer_lr",
        "outer_momentum",
        "exchange.timeout_seconds",
        "checkpoint.every",
    ),
    *("exchange.fragments", "exchange.chunk_bytes", "gradients.bucket_bytes", "checkpoint.keep"),
    *("nothing", "schedule", "exchange.nothing"),
]


def is_sane(config):
    """Whether numbers of a configuration are ones that can train."""
    rates = [config.optimizer.lr, config.optimizer.weight_decay, config.schedule.drift]
    return (
        config.epochs >= 1
        and config.data.batch_size >= 1
        and all(0 <= one < 1e6 for one in rates)
        and 0 <= config.optimizer.momentum < 1
        and 0 <= config.outer_lr < 1e6
        and 0 <= config.outer_momentum < 1
        and 0 < config.exchange.timeout_seconds <= 1e9
        and "/" not in config.name
    )


def test_settings_as_words_or_toml():
    dice = dice_of("settings")
    for _ in range(EACH):
        pairs = [(dice.choice(KEYS), dice.choice(WORDS)) for _ in range(dice.randint(1, 3))]
        words = [f"--{key}={word}" if dice.random() < 0.9 else word for key, word in pairs]
        config = refused(lambda words=words: read_config(None, words))
        assert config is None or is_sane(config), words


def test_settings_from_a_file(tmp_path):
    dice, path = dice_of("toml"), tmp_path / "x.toml"
    for _ in range(EACH):
        lines = [f"{dice.choice(KEYS)} = {dice.choice(WORDS)}" for _ in range(dice.randint(1, 3))]
        path.write_bytes("\n".join(lines).encode() + dice.randbytes(dice.choice([0, 0, 0, 3])))
        config = refused(lambda: read_config(path, []))
        assert config is None or is_sane(config), lines


def test_profiles_of_sites():
    dice = dice_of("sites")
    keys = ["nodes", "time", "mem", "module", "setup", "launcher", "extra", "client", "python", "x"]
    for _ in range(EACH):
        lines = [f"{dice.choice(keys)} = {dice.choice(WORDS)!r}" for _ in range(dice.randint(1, 3))]
        refused(lambda lines=lines: parse_site("x", "\n".join(lines), "x.toml"))


TYPED = [word for word in WORDS if "\0" not in word]  # no command line can have it
# Options of each command, and the words behind them, with which nothing is started here.
COMMANDS = {
    "submit": (
        ["nodes", "time", "mem", "name", "array", "account", "signal-seconds", "site", "logs"],
        ["--dry-run", "train.py"],
    ),
    "trace": (["json", "plot", "batch"], ["nosuch.jsonl"]),
    "logs": (["logs"], ["12"]),
    "status": (["logs"], ["12"]),
    "run": (["ranks", "ranks-per-node"], ["nosuch.py"]),
    "predict": (["nodes", "parameters", "steps", "step-ms", "seed", "policy"], ["--no-such"]),
    "memory": (["budget", "batch", "rate"], ["--no-such"]),
    "nothing": (["x"], []),
}


def test_command_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train.py").touch()
    dice, codes = dice_of("commands"), set()
    for _ in range(EACH):
        command = dice.choice(list(COMMANDS))
        options, rest = COMMANDS[command]
        flags = [f"--{dice.choice(options)}={dice.choice(TYPED)}" for _ in range(2)]
        done = typed(command, *flags, *rest)
        codes.add(done.returncode)
        assert done.returncode == 2 or (done.returncode, command) == (0, "submit"), (flags, done)
        assert done.stderr.startswith("daso"), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    assert codes == {0, 2}


# Small words with which `daso predict` is done in no time; one of them is made odd.
PREDICT = {
    "parameters": "1e6",
    "step-ms": "10",
    "nodes": "2",
    "steps": "400",
    "link": "1gbit",
    "latency-us": "20",
    "jitter": "0.02",
    "drift": "1e-5",
    "cores": "2",
    "policy": "fixed:4:1",
    "wire": "int4",
    "faster-compute": "1",
}


def test_predictions_to_their_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dice, codes = dice_of("predict"), set()
    for _ in range(EACH // 2):
        chosen = PREDICT | {dice.choice(list(PREDICT)): dice.choice(TYPED)}
        done = typed("predict", *(f"--{name}={word}" for name, word in chosen.items()))
        codes.add(done.returncode)
        if done.returncode == 0:
            assert "nan" not in done.stdout, chosen
            assert "inf" not in done.stdout.replace("infini", ""), chosen
        else:
            assert done.returncode == 2
            assert done.stderr.startswith("daso"), (chosen, done.stderr)
            assert done.stderr.count("\n") == 1, (chosen, done.stderr)
    assert codes == {0, 2}


MEMORY = """
import torch
model = torch.nn.Linear(8, 4)
model(torch.ones(2, 8)).sum().backward()
"""


def test_plans_of_memory_to_their_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(MEMORY)
    dice, codes = dice_of("memory"), set()
    policies = ["all_keep", "search", "exact"]
    for _ in range(EACH // 10):
        name = dice.choice(["budget", "second", "policy", "units"])
        odd = dice.choice([[], [f"--{name}={dice.choice(TYPED)}"]])
        done = typed("memory", f"--policy={dice.choice(policies)}", *odd, "train.py")
        codes.add(done.returncode)
        if done.returncode != 0:
            assert done.returncode == 2
            assert done.stderr.startswith("daso"), (odd, done.stderr)
            assert done.stderr.count("\n") == 1, (odd, done.stderr)
    assert codes == {0, 2}


def damaged(dice, data):
    """Bytes cut off, changed, doubled, or others altogether."""
    at = dice.randrange(len(data) + 1)
    return dice.choice(
        [
            data[:at],
            data[:at] + dice.randbytes(4) + data[at + 4 :],
            data[:at] + data,
            dice.randbytes(64),
            b"",
            "".join(dice.choices(string.printable, k=80)).encode(),
        ]
    )


def test_checkpoints(tmp_path):
    dice, path = dice_of("checkpoints"), tmp_path / "rank-00000.pt"
    path.parent.mkdir(exist_ok=True)
    write_payload(path, {"model": torch.ones(4), "step": 3})
    data = path.read_bytes()
    for _ in range(EACH):
        bad = damaged(dice, data)
        path.write_bytes(bad)
        # As if it had been saved so: else its hash tells.
        payload, problem = read_payload(path, Entry(sha256(bad).hexdigest(), len(bad)))
        assert isinstance(payload, dict)
        assert problem is None or len(problem.splitlines()) == 1


@pytest.mark.parametrize("wire", WIRES)
def test_payloads_of_any_bytes_are_numbers_and_the_same_ones_in_c(wire):
    dice, native = dice_of(f"payloads {wire}"), kernels_for(torch.device("cpu"))
    for _ in range(EACH):
        dtype = dice.choice([torch.float32, torch.float64])
        codec, numel = codec_named(wire, dtype), dice.choice([0, 1, 33, 4095, 5000])
        damaged_bytes = bytearray(dice.randbytes(codec.nbytes(numel)))
        payload = torch.frombuffer(damaged_bytes, dtype=torch.uint8) if damaged_bytes else NONE
        rows = [torch.zeros(numel, dtype=dtype) for _ in range(2)]
        for kernels, row in zip((native, torch_kernels), rows, strict=True):
            kernels.reduce(Mean(codec, [payload]), numel, row=row)
        torch.testing.assert_close(*rows, rtol=0, atol=0, equal_nan=True)


def test_what_is_no_checkpoint(tmp_path):
    torch.save([1, 2], tmp_path / "list")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("list", "fifo", "folder", "none"):
        path = tmp_path / name
        data = path.read_bytes() if path.is_file() else b""
        payload, problem = read_payload(path, Entry(sha256(data).hexdigest(), len(data)))
        assert payload == {}
        assert problem.startswith(str(path))
        assert len(problem.splitlines()) == 1


def test_manifests(tmp_path):
    dice, path = dice_of("manifests"), tmp_path / "manifest.json"
    text = Manifest(3, (0, 0), (Entry("a" * 64, 5), Entry("b" * 64, 6))).text(PLACE).encode()
    for _ in range(EACH):
        path.write_bytes(damaged(dice, text))
        refused(lambda: Manifest.read(path, 3))


PLACE = RankInfo(rank=0, world_size=2, local_rank=0, node=0, node_of=(0, 0))
TRACE = (
    b'{"schema": 1, "ranks": [{"node": 0, "host": "a"}, {"node": 1, "host": "b"}]}\n'
    b'{"rank": 0, "spans": [[0, 0.0, 1.0, 3, 0]]}\n'
)


def test_traces(tmp_path):
    dice, path = dice_of("traces"), tmp_path / "trace.jsonl"
    for _ in range(EACH):
        path.write_bytes(damaged(dice, TRACE))
        refused(lambda: read_timeline(path))
