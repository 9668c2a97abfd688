"""`daso predict --throttle` as its user types it, and the files that it reads."""

import re
import sys
from dataclasses import replace

import pytest
from jobs import slowness, started, typed

from daso.cli.throttled import with_runner
from daso.errors import ConfigError
from daso.predict.emulate import StepTimes, emulated
from daso.predict.run_throttled import report
from daso.predict.throttle_plan import RATES, Machine, ThrottlePlan, parse_throttle_file
from daso.predict.throttles import OperationPadding

RUNNER = "-m daso.predict.run_throttled PLAN"
PROGRAM = """
import sys, torch
print("argument", sys.argv[1], __name__)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""
TWICE = "[current]\ncompute = 1.0\n[target]\ncompute = 2.0\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py -m 3", f"python {RUNNER} train.py -m 3"),
        ("/bin/python3.11 -u -W error -m mpi4py train.py", None),
        ("python -u -mpkg.train -m 3", f"python -u {RUNNER} -m pkg.train -m 3"),
        ("mpirun -n 2 python -m train --n=2", f"mpirun -n 2 python {RUNNER} -m train --n=2"),
        (
            "daso run -n 2 --elastic train.py -n 3",
            f"daso run -n 2 --elastic {RUNNER} train.py -n 3",
        ),
        ("daso run -n 2 -- train.py", f"daso run -n 2 -- {RUNNER} train.py"),
        ("python -u -m daso run -n 2 x.py", f"python -u -m daso run -n 2 {RUNNER} x.py"),
        ("python -X dev -m daso run x.py", f"python -X dev -m daso run {RUNNER} x.py"),
        ("python -m daso run -n 2 train.py", f"python -m daso run -n 2 {RUNNER} train.py"),
    ],
)
def test_the_runner_comes_before_the_program(command, expected):
    expected = expected or f"/bin/python3.11 -u -W error {RUNNER} -m mpi4py train.py"
    assert " ".join(with_runner(tuple(command.split()), "PLAN")) == expected


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("", "a program must follow that Python or `daso run` starts"),
        ("bash train.sh", "a program must follow that Python or `daso run` starts"),
        ("python -c pass", "must be a file or a module (-m), not words after -c"),
        ("python -uc'pass'", "must be a file or a module (-m), not words after -c"),
        ("python -um train", "not part of '-um'; write -u -m"),
        ("python -u", "a program must follow the options"),
    ],
)
def test_a_command_without_a_program_of_python_is_refused(command, refused):
    with pytest.raises(ConfigError, match=re.escape(refused)):
        with_runner(tuple(command.split()), "PLAN")


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("[current", "must be TOML, but here"),
        ("[current]\ncompute = 1", "must have a table [target], but here has none"),
        ("[target]\ncompute = 1", "must have a table [current], but here has none"),
        ("target = 3\n[current]\ncompute = 1", "must have a table [target]"),
        ("[current]\n[target]", "must set compute, or measure = true, but sets neither"),
        ("[current]\nmeasure = 1\n[target]", "measure in here must be true or false, not 1"),
        ("[current]\ncompute = '1x'\n[target]", "compute in here must be a number, or"),
        ("[current]\ncompute = 1\n[target]\ncompute = '3'", "must be a number, or of the target"),
        ("[current]\ncompute = 1\n[target]\ncompute = '-3x'", "must be a number, or of the target"),
        ("[current]\ncompute = 1\n[target]\nflops = 3", "must be given by compute, link_bytes_"),
        ("[current]\ncompute = 1\n[target]\n[other]", "has the tables current and target, but"),
    ],
)
def test_a_file_that_says_something_else_is_refused(text, refused):
    with pytest.raises(ConfigError, match=re.escape(refused)):
        parse_throttle_file(text, "here")


def plan_of(text, machine):
    return parse_throttle_file(text, "here").plan(lambda: machine)


def test_a_target_is_told_in_numbers_or_times_of_what_is_measured():
    text = "[current]\nmeasure = true\ncompute = 4\n[target]\nlink_bytes_per_second = '2x'"
    plan = plan_of(text, Machine(1.0, 10.0, 1e-3))
    assert plan.current == Machine(4.0, 10.0, 1e-3)
    assert plan.target == Machine(4.0, 20.0, 1e-3)


def test_parts_that_are_not_named_are_as_here():
    """So they are slowed down where computing is faster, and left alone where it is slower."""
    measured = Machine(1.0, 10.0, 1e-3, memory_bytes_per_second=6.0, disk_write_bytes_per_second=3)
    faster = plan_of("[current]\nmeasure = true\n[target]\ncompute = '3x'", measured)
    assert faster.target == replace(measured, compute=3.0)
    assert faster.slowed == RATES[:2] + RATES[3:4]
    assert (faster.rate("memory_bytes_per_second"), faster.link_bytes_per_second) == (2, 10 / 3)
    slower = plan_of("[current]\nmeasure = true\n[target]\ncompute = '0.5x'", measured)
    assert (slower.ratio, slower.compute_factor, slower.counted) == (1, 2, ())
    late = plan_of("[current]\nmeasure = true\n[target]\nlatency_seconds = 0.1", measured)
    assert late.counted == late.slowed == ("link_bytes_per_second",)


@pytest.mark.parametrize(
    ("current", "target", "refused"),
    [
        ("compute = 1", "link_bytes_per_second = '2x'", "[current] lacks it; give it there, or"),
        ("compute = 1", "link_bytes_per_second = 1e8", "[current] lacks it; give it there, or"),
        ("measure = true", "link_bytes_per_second = '2x'", "this machine lacks it, as a"),
        ("measure = true", "copy_bytes_per_second = 1e8", "this machine lacks it, as a"),
    ],
)
def test_a_rate_that_is_not_known_here_is_refused(current, target, refused):
    text = f"[current]\n{current}\n[target]\n{target}"
    with pytest.raises(ConfigError, match=re.escape(f"needs that of this machine, but {refused}")):
        plan_of(text, Machine(1.0))


def test_a_latency_may_be_given_of_the_target_alone():
    text = "[current]\ncompute = 1\nlink_bytes_per_second = 1e8\n[target]\nlatency_seconds = {}\n"
    assert plan_of(text.format("1e-3"), None).latency_seconds == 1e-3
    with pytest.raises(ConfigError, match="latency_seconds of the target needs that of this"):
        plan_of(text.format("'2x'"), None)


# --- what is said at the end ---------------------------------------------------------------------

FASTER = ThrottlePlan(
    Machine(1.0, disk_write_bytes_per_second=1.0), Machine(3.0, disk_write_bytes_per_second=1.0)
)


def steps_of(plan, count=60, *, use=0.0):
    steps = StepTimes(plan)
    steps.seconds += [0.3] * count
    steps.used["a part"] = lambda: use * 0.3 * count
    return steps


def test_a_program_that_was_slowed_down_is_estimated():
    assert report(steps_of(FASTER, use=0.011)).startswith("daso: emulated: 100.000 ms a step")


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (steps_of(FASTER, 5), "it needs 24 steps at least, and an optimizer took 5"),
        (steps_of(FASTER), "nothing was slowed down: the steps use the parts that are slower here"),
        (steps_of(FASTER, use=0.009), "nothing was slowed down: the steps use the parts that are"),
        (steps_of(ThrottlePlan(Machine(1.0), Machine(3.0)), use=1.0), "nothing was slowed do"),
    ],
)
def test_a_program_that_was_not_slowed_down_is_not_estimated(steps, said):
    text = report(steps)
    assert text.startswith(f"daso: no estimate: {said}")
    assert "ms a step" not in text


def test_what_cannot_be_slowed_down_is_said_where_it_was_not_named(monkeypatch):
    """In one line with a remedy, and the throttle ends."""
    ended = []
    monkeypatch.setattr(OperationPadding, "memory_off", lambda _: -0.4)
    monkeypatch.setattr(OperationPadding, "__exit__", lambda padding, *_: ended.append(padding))
    monkeypatch.setattr(OperationPadding, "__enter__", lambda padding: padding)
    memory = {"memory_bytes_per_second": 1.0}
    plan = ThrottlePlan(Machine(1.0, **memory), Machine(3.0, **memory))
    with pytest.raises(ConfigError, match=r"a copy in memory takes 0\.60 of the plan"):
        emulated(plan).__enter__()
    with emulated(plan, optional=RATES) as steps:
        assert len(ended) == 2
        steps.seconds += [0.3] * 60
        assert (steps.plan.counted, steps.used) == ((), {})
        first, *_, said = report(steps).split("\n")
    assert first.startswith("daso: no estimate: nothing was slowed down")
    assert said == (
        "- memory cannot be slowed down here (a copy in memory takes 0.60 of the plan's time), and "
        "an estimate assumes 3 times the rate on the target; let nothing else run here, or "
        "correct [current]"
    )


def test_an_error_of_the_program_keeps_its_traceback(tmp_path):
    plan, program = tmp_path / "plan.toml", tmp_path / "train.py"
    plan.write_text(TWICE)
    program.write_text("from daso.errors import DataError\nraise DataError('of its own')")
    done = started("daso", "predict", f"--throttle={plan}", "--", sys.executable, program)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.strip().endswith("DataError: of its own")


def test_options_and_program_are_told_apart(tmp_path):
    done = typed("predict", "--", "python", "train.py")
    assert done.returncode == 2
    assert "a program is run with --throttle=PLAN or --sweep-link alone" in done.stderr
    done = typed("predict", "--throttle", tmp_path / "none.toml", "--", "python", "train.py")
    assert done.returncode == 2
    assert "a plan of throttles must be readable text, but" in done.stderr


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("2.0", "no estimate: nothing was slowed down: computing of the target: 2 times as fast"),
        pytest.param("0.5", "emulated: ", marks=pytest.mark.later("computes for seconds")),
    ],
)
def test_a_program_runs_unchanged_and_the_target_is_estimated(tmp_path, target, told):
    """One process: faster computing alone slows down nothing, slower computing is padded."""
    plan, program = tmp_path / "plan.toml", tmp_path / "train.py"
    plan.write_text(f"[current]\ncompute = 1.0\n[target]\ncompute = {target}\n")
    program.write_text(PROGRAM)
    done = started("daso", "predict", "--throttle", plan, "--", sys.executable, program, 60)
    if target == "0.5" and "computing takes" in done.stderr:
        # Computing cannot be held to 5 % where others take the core meanwhile: then it says so.
        assert slowness() > 1
        return
    assert done.returncode == 0, done.stderr
    assert "argument 60 __main__" in done.stdout
    assert told in done.stdout
    assert ("computing is stretched 2 times by sleeping" in done.stdout) == (target == "0.5")


def test_a_program_that_hardly_uses_the_slower_part_is_not_estimated(tmp_path):
    """Computing is faster on the target, the disk is as here, and the program starts with a log."""
    plan, program, log = (tmp_path / name for name in ("plan.toml", "train.py", "log"))
    disk = "disk_write_bytes_per_second = 2e8\ndisk_read_bytes_per_second = 2e8"
    plan.write_text(f"[current]\ncompute = 1.0\n{disk}\n[target]\ncompute = '3x'\n")
    begin = f"import os\nfile = open({str(log)!r}, 'wb')\nfile.write(bytes(4 << 20))\n"
    program.write_text(f"{begin}file.flush()\nos.fsync(file.fileno())\n{PROGRAM}")
    done = started("daso", "predict", "--throttle", plan, "--", sys.executable, program, 60)
    assert done.returncode == 0, done.stderr
    assert "no estimate: nothing was slowed down" in done.stdout
    assert "ms a step" not in done.stdout


def test_the_programs_own_exit_code_and_error_are_passed_on(tmp_path):
    plan, program = tmp_path / "plan.toml", tmp_path / "train.py"
    plan.write_text(TWICE)
    program.write_text("raise SystemExit(7)")
    done = started("daso", "predict", f"--throttle={plan}", "--", sys.executable, program)
    assert (done.returncode, done.stdout) == (7, "")


def test_a_program_that_is_killed_ends_as_a_shell_tells_it(tmp_path):
    plan, path = tmp_path / "plan.toml", tmp_path / "kills_itself.py"
    plan.write_text(TWICE)
    path.write_text("import os\nos.kill(os.getpid(), 9)\n")
    done = started("daso", "predict", f"--throttle={plan}", "--", sys.executable, path)
    assert done.returncode == 137


# --- sweeps of links -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factors", "refused"),
    [
        ("2,x", "--sweep-link must be numbers by commas, not '2,x'; write 1.5,2,3,4"),
        ("2,3", "must be at least 3 different factors above 1, by commas, not '2,3'; write"),
        ("1,2,3", "must be at least 3 different factors above 1, by commas, not '1,2,3'; write"),
        ("2,3,inf", "must be at least 3 different factors above 1, by commas, not '2,3,inf'"),
    ],
)
def test_a_sweep_of_other_factors_is_refused(factors, refused):
    done = typed("predict", f"--sweep-link={factors}", "--", "python", "train.py")
    assert done.returncode == 2
    assert refused in done.stderr


def test_a_sweep_without_a_link_is_refused(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = "predict", "--sweep-link=2,3,4", "--", sys.executable, program, 60
    done = started("daso", *command, cwd=tmp_path)
    assert done.returncode == 2
    assert "a sweep needs a link between nodes or to a device, but this program ha" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


OVER_A_LINK = """
import torch, daso
world = daso.init()
torch.set_num_threads(1)
torch.manual_seed(world.rank)
model = torch.nn.Linear(1024, 1024)
inner = torch.optim.SGD(model.parameters(), lr=0.01)
with daso.DASO(inner, module=model, policy=daso.Fixed(1, 0)) as optimizer:
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
"""


@pytest.mark.later("starts ranks four times")
@pytest.mark.slow("starts ranks four times")
def test_a_sweep_runs_the_program_over_slower_links(tmp_path):
    """Its steps are all exchange: they take as many times as long, and the target gains nothing."""
    (tmp_path / "train.py").write_text(OVER_A_LINK)
    ranks = "run", "-n", 2, "--ranks-per-node", 1, "train.py"
    command = sys.executable, "-m", "daso", *ranks
    done = started("daso", "predict", "--sweep-link=4,8,16", "--", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ +(\d+)x +([\d.]+) +([\d.]+) +[\d.]+$", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "4", "8", "16"]
    times = {int(factor): float(here) for factor, here, _ in rows}
    assert times[16] > 1.5 * times[8] > 2.0 * times[4]
    assert float(rows[-1][2]) == pytest.approx(times[16] / 16, abs=1e-3)
    assert "ms a step there, the time of the links" in done.stdout
