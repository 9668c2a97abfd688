"""`daso predict --throttle` as its user types it, and the files that it reads."""

import re
import sys

import pytest
from jobs import started, typed

from daso.cli.throttled import with_runner
from daso.errors import ConfigError
from daso.predict.throttle_file import parse_throttle_file
from daso.predict.throttle_plan import Machine

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
    assert " ".join(with_runner(command.split(), "PLAN")) == expected


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
        with_runner(command.split(), "PLAN")


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("[current", "must be TOML, but here"),
        ("[current]\ncompute = 1", "must have a table [target], but here has none"),
        ("[target]\ncompute = 1", "must have a table [current], but here has none"),
        ("target = 3\n[current]\ncompute = 1", "must have a table [target]"),
        ("[current]\n[target]", "must say compute, or measure = true, but it says neither"),
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


def test_a_target_is_told_in_numbers_or_times_of_what_is_measured():
    text = "[current]\nmeasure = true\ncompute = 4\n[target]\nlink_bytes_per_second = '2x'"
    plan = parse_throttle_file(text, "here").plan(lambda: Machine(1.0, 10.0, 1e-3))
    assert plan.current == Machine(4.0, 10.0, 1e-3)
    assert plan.target == Machine(4.0, 20.0, 1e-3)


def test_times_of_what_there_is_not_is_refused():
    found = parse_throttle_file(
        "[current]\ncompute=1\n[target]\nlink_bytes_per_second='2x'", "here"
    )
    with pytest.raises(ConfigError, match="must be a number where the current machine has none"):
        found.plan(lambda: Machine(1.0))


@pytest.mark.parametrize("value", ["'2x'", "1e8"])
def test_a_link_where_one_node_has_none_to_measure_is_refused(value):
    text = f"[current]\nmeasure = true\n[target]\nlink_bytes_per_second = {value}"
    with pytest.raises(ConfigError, match="must be left out where there is none to be measured"):
        parse_throttle_file(text, "here").plan(lambda: Machine(1.0))


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
    assert "a program is run with --throttle=PLAN alone" in done.stderr
    done = typed("predict", "--throttle", tmp_path / "none.toml", "--", "python", "train.py")
    assert done.returncode == 2
    assert "a plan of throttles must be readable text, but" in done.stderr


@pytest.mark.parametrize(("steps", "told"), [(60, "emulated: "), (5, "no estimate: it needs 24")])
def test_a_program_runs_unchanged_and_the_target_is_estimated(tmp_path, steps, told):
    plan, program = tmp_path / "plan.toml", tmp_path / "train.py"
    plan.write_text(TWICE)
    program.write_text(PROGRAM)
    words = ["daso", "predict", "--throttle", plan, "--", sys.executable, program, steps]
    done = started(*words)
    assert done.returncode == 0, done.stderr
    assert f"argument {steps} __main__" in done.stdout
    assert told in done.stdout
    assert ("the time measured here divided by 2;" in done.stdout) == (steps == 60)


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
