"""`daso memory` as its user types it, on scripts as users write them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from jobs import HANG_SECONDS

from daso.cli.main import main
from daso.cli.memory import split_words

HEAD = """
import sys, torch
from torch import nn
wide = 256
model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(wide, wide), nn.GELU())))
batch = torch.randn(1024, wide)
"""
PARAMETERS = 8 * (256 * 256 + 256)
TRAIN = """
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    print("stepped")
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("PMI", "OMPI_", "PRTE_", "SLURM_", "DASO_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    before = sys.argv, sys.path[:], sys.modules["__main__"], torch.nn.Module.__call__
    yield
    assert before == (sys.argv, sys.path[:], sys.modules["__main__"], torch.nn.Module.__call__)


def script(body, head=HEAD, name="train.py"):
    path = Path(name)
    path.write_text(dedent(head) + dedent(body))
    return str(path)


def command(*words):
    words = [sys.executable, "-m", "daso", "memory", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )


def found(*words):
    """Return the JSON of a command that does what it should."""
    path = Path("found.json").absolute()
    assert main(["memory", f"--json={path.name}", *words]) == 0
    return json.loads(path.read_text())


def refusal(capfd, *words, lines=1):
    assert main(["memory", *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == lines or lines is None
    assert err.splitlines()[-1].startswith("daso: ")
    return err


# --- what it prints and writes --------------------------------------------------------------------


def test_without_a_budget_the_cost_of_some_is_shown(capfd):
    assert main(["memory", script(TRAIN)]) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0] == f"model         Sequential, {PARAMETERS:,} parameters"
    assert lines[1] == "called with   float32 (1024, 256)"
    assert "Adam 4.02, batch 1.00" in lines[2]
    rows = [line.split() for line in lines[lines.index("") + 3 :]]
    rows = [row for row in rows if len(row) == 6 and row[0][0].isdigit()]
    budgets = [float(row[0]) for row in rows]
    assert len(budgets) >= 4
    assert budgets == sorted(budgets)
    assert all(float(row[1]) <= float(row[0]) for row in rows)
    assert float(rows[-1][2]) == 1
    assert rows[-1][4:] == ["0.00", "0.00"]
    assert "stepped" not in err + out


def test_a_budget_gets_a_plan_with_a_row_for_each_unit_and_a_picture(capfd):
    pytest.importorskip("matplotlib")
    words = ["--budget", "20MiB", "--json=x.json", "--plot", "x.png", script(TRAIN)]
    assert main(["memory", *words]) == 0
    out, _ = capfd.readouterr()
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")
    assert Path("x.png").stat().st_size > 10_000
    told = json.loads(Path("x.json").read_text())
    assert "budget        20.00 MiB" in out
    lines = out.splitlines()
    header = lines[lines.index("") + 1].split()
    assert header[:2] == ["module", "way"]
    rows = [line.split() for line in lines[lines.index("") + 2 :]]
    rows = rows[: rows.index([])]
    assert [row[:2] for row in rows] == [[one["module"], one["way"]] for one in told["units"]]
    assert [row[0] for row in rows[:3]] == ["1-2", "3-4", "5-6"]  # children of the Sequential
    assert rows[-1][0] == "(loss)"
    assert len(rows) >= 8


def test_the_bytes_of_a_plan_add_up():
    told = found("--budget=20MiB", script(TRAIN))
    static, plan = told["static_bytes"], told["plan"]
    assert static["parameters"] == 4 * PARAMETERS
    assert static["gradients"] == 4 * PARAMETERS
    assert static["optimizer"] == 2 * 4 * PARAMETERS
    assert static["batch"] == 1024 * 256 * 4
    groups = sum(unit["saved_bytes"] for unit in told["units"])
    assert groups > 0
    assert groups == plan["kept_bytes"] + plan["swapped_bytes"] + plan["recomputed_bytes"]
    assert plan["kept_bytes"] < groups
    assert told["floor_bytes"] <= plan["peak_bytes"] <= plan["budget_bytes"] < told["plain_bytes"]
    assert plan["measured_bytes"] <= plan["budget_bytes"]
    assert plan["budget_bytes"] == 20 * 2**20
    there = told["bytes_over_a_step"]
    assert max(there["planned"]) == plan["peak_bytes"]
    assert max(there["plain"]) == told["plain_bytes"]
    assert len(there["plain"]) == len(there["planned"]) == 2 * len(told["units"])
    assert min(there["planned"]) >= static["total"]


def test_a_budget_that_is_shown_can_be_asked_for(capfd):
    path = script(TRAIN)
    shown = found(path)["budgets"]
    assert shown[0]["fits"]
    floor = next(
        line.split()[1] for line in capfd.readouterr().out.splitlines() if line.startswith("floor")
    )
    assert shown[0]["budget_bytes"] - int(float(floor) * 2**20) in (0, 1)
    again = found(f"--budget={floor}MiB", path)
    assert again["plan"]["peak_bytes"] <= again["plan"]["budget_bytes"]


def test_the_picture_without_a_budget_and_many_units_in_few_rows(capfd):
    pytest.importorskip("matplotlib")
    deep = HEAD.replace("range(8)", "range(70)").replace("wide = 256", "wide = 32")
    path = script("model(batch)", head=deep)
    told = found("--plot=deep.png", path)
    assert Path("deep.png").stat().st_size > 10_000
    assert len(told["units"]) > 40
    assert told["policy"] == "search"
    capfd.readouterr()
    found("--policy=keep_late_swap", f"--budget={told['budgets'][2]['budget_bytes']}", path)
    lines = capfd.readouterr().out.splitlines()
    assert sum(line.split()[1:2] in (["swap"], ["keep"]) for line in lines) == 40
    assert any(line.endswith("rows more") for line in lines)


def test_units_and_policy_are_passed_on():
    whole = found("--units=0,2,4,6", "--policy=all_swap", "--budget=1GiB", script(TRAIN))
    assert {unit["way"] for unit in whole["units"]} == {"swap"}
    assert len(whole["units"]) > 4
    assert whole["plan"]["kept_bytes"] == 0


def test_the_second_memory_may_be_a_folder_and_is_measured():
    Path("swap").mkdir()
    path = script("import os; os.chdir('/'); model(batch)")
    here = Path.cwd()
    try:
        told = found("--second", "file:swap", "--budget=20MiB", path)
    finally:
        os.chdir(here)
    assert told["second"] == f"file:{here}/swap"
    assert told["link"]["bytes_per_second"] > 1e6


# --- which call of which module -------------------------------------------------------------------


def test_a_script_gets_its_own_flags_name_folder_and_module():
    Path("code").mkdir()
    Path("code/beside.py").write_text("wide = 128\n")
    body = """
    import argparse, beside, os, pickle
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args()
    class Mine(nn.Linear): pass
    assert sys.modules["__main__"].Mine is Mine and __name__ == "__main__"
    assert pickle.loads(pickle.dumps(Mine)) is Mine
    print("own", sys.argv, __file__, options.budget, options.json, options.rest)
    os.system("echo its program")
    Mine(beside.wide, 64)(torch.randn(100, beside.wide))
    """
    path = script(body, name="code/train.py")
    done = command("--policy", "all_keep", path, "--budget", "7", "--json", "-x"[:0], "a b")
    assert done.returncode == 0, done.stderr
    own = [path, "--budget", "7", "--json", "", "a b"]
    assert f"own {own} {Path(path).absolute()} 7 True ['', 'a b']" in done.stderr
    assert "its program" in done.stderr
    assert done.stdout.startswith("model         Mine, 8,256 parameters\n")
    assert "its program" not in done.stdout


@pytest.mark.parametrize(
    ("words", "ours", "theirs"),
    [
        (["a.py", "--json", "x"], [], ("a.py", "--json", "x")),
        (["--budget", "1", "a.py", "-h"], ["--budget=1"], ("a.py", "-h")),
        (["--json=x", "--", "-a.py", "--"], ["--json=x"], ("-a.py", "--")),
        (["-h"], ["-h"], ()),
        (["--plot"], ["--plot"], ()),
    ],
)
def test_options_end_where_the_script_begins(words, ours, theirs):
    assert split_words(words) == (ours, theirs)


def test_a_script_that_swallows_errors_is_stopped_all_the_same():
    body = """
    for step in range(3):
        try:
            model(batch).sum().backward()
        except Exception:
            pass
        open(f"stepped{step}", "w")
    """
    assert found(script(body))["model"]["parameters"] == PARAMETERS
    assert not Path("stepped0").exists()


def test_a_script_that_swallows_all_gets_no_further():
    body = """
    for step in range(3):
        try:
            model(batch).sum().backward()
            open("stepped", "w")
        except:
            pass
    raise ValueError
    """
    assert found(script(body))["model"]["parameters"] == PARAMETERS
    assert not Path("stepped").exists()


def test_a_model_may_be_called_with_names_and_with_a_dict():
    body = """
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model
        def forward(self, row, *, scale, extra=None):
            return {"x": self.inner(row["a"]) * scale, "n": 3}
    model = Named()
    """
    for call in ("(row={'a': batch}, scale=batch)", "({'a': batch}, scale=batch, extra=3)"):
        told = found(script(dedent(body) + f"model{call}\n"))
        assert told["model"]["class"] == "Named"
        assert told["called_with"] == "float32 (1024, 256), float32 (1024, 256)"
        assert told["static_bytes"]["batch"] == 1024 * 256 * 4  # one storage, given twice


def test_calls_that_train_nothing_are_passed():
    body = """
    frozen = nn.Linear(wide, wide).requires_grad_(False)
    with torch.no_grad():
        assert model(batch[:5]).shape == (5, wide)
    with torch.inference_mode():
        model(batch[:6])
    assert nn.MSELoss()(frozen(batch), batch).item() > 0
    """
    told = found(script(dedent(body) + TRAIN))
    assert told["called_with"] == "float32 (1024, 256)"
    assert told["model"] == {
        "class": "Sequential",
        "parameters": PARAMETERS,
        "trained": PARAMETERS,
    }
    assert told["optimizer"] == "Adam"


def test_frozen_parameters_have_no_gradients_and_are_told(capfd):
    path = script("model[0].requires_grad_(False)\n" + TRAIN)
    assert main(["memory", path]) == 0
    told = found(path)["static_bytes"]
    assert told["parameters"] == 4 * PARAMETERS
    assert told["gradients"] == 3.5 * PARAMETERS
    assert f"{PARAMETERS * 7 // 8:,} of them trained" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("made", "name", "times", "note"),
    [
        ("", None, 0, "no optimizer has the model's parameters"),
        ("other = torch.optim.Adam([nn.Parameter(batch)])", None, 0, "no optimizer has"),
        ("one = torch.optim.SGD(model.parameters(), lr=1)", "SGD", 0, None),
        ("one = daso.DASO(torch.optim.Adam(model.parameters()))", "DASO(Adam)", 2, None),
        (
            "a = torch.optim.SGD(model.parameters()); b = torch.optim.Adam(model.parameters())",
            "Adam",
            2,
            None,
        ),
        ("one = torch.optim.Adam(model[0].parameters())", "Adam", 0.25, "14 trained parameters"),
    ],
)
def test_the_optimizer_with_the_models_parameters_is_counted(made, name, times, note):
    told = found(script(f"import daso\n{made}\nmodel(batch)\n"))
    assert told["optimizer"] == name
    assert told["static_bytes"]["optimizer"] == pytest.approx(times * 4 * PARAMETERS, abs=64)
    notes = " ".join(told["notes"])
    assert (note in notes) if note else ("optimizer" not in notes)
    assert "the loss is not counted" in notes


def test_autocast_is_that_of_the_script():
    full = found(script("model(batch)"))
    body = "with torch.autocast('cpu', dtype=torch.bfloat16):\n    model(batch)\n"
    half = found(script(body))
    sizes = [sum(unit["saved_bytes"] for unit in one["units"]) for one in (full, half)]
    assert sizes[1] < 0.8 * sizes[0]


def test_a_lazy_model_has_its_parameters_before_it_is_planned():
    told = found(script("model = nn.LazyLinear(wide)\nmodel(batch)\n"))
    assert told["model"]["parameters"] == 256 * 256 + 256


def test_a_model_is_taken_out_of_what_wraps_it():
    told = found(script("model = nn.DataParallel(model)\nmodel(batch)\n"))
    assert told["model"]["class"] == "Sequential"
    assert "inside of DataParallel" in told["notes"][0]


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_budget_below_the_floor_is_told_in_one_line(capfd):
    err = refusal(capfd, "--budget", "12MiB", script(TRAIN))
    assert "budget must be at least" in err
    assert "not 12,582,912" in err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--budget=lots", "train.py"], "budget must be bytes, such as 8GiB"),
        (["--budget=1e999GiB", "train.py"], "budget must be bytes"),
        (["--second=disk", "train.py"], "second must be 'host', 'file:FOLDER' or"),
        (["--second=file:/nowhere", "train.py"], "/nowhere"),
        (["--json=/nowhere/x.json", "train.py"], "existing folder"),
        (["--plot=x.jpg", "train.py"], "--plot must end in .png, .pdf, .svg"),
        ([], "a script must follow the options"),
        (["--budget=1GiB"], "a script must follow the options"),
        (["nosuch.py"], "SCRIPT must be an existing Python file, not nosuch.py"),
        (["."], "SCRIPT must be an existing Python file"),
    ],
)
def test_wrong_use_is_told_in_one_line_before_the_script_runs(capfd, words, part):
    script("open('ran', 'w')", head="")
    assert part in refusal(capfd, *words)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--polcy", "search", "train.py"], "--polcy=search"),
        (["--policy", "best", "train.py"], "invalid choice: 'best'"),
        (["--budget"], "expected one argument"),
    ],
)
def test_a_wrong_flag_is_named(capfd, words, part):
    with pytest.raises(SystemExit) as caught:
        main(["memory", *words])
    assert caught.value.code == 2
    assert part in capfd.readouterr().err


def test_unwritable_files_are_refused(capfd):
    Path("taken").mkdir()
    assert main(["memory", "--json=taken", script(TRAIN)]) == 2
    assert "a file must be writable" in capfd.readouterr().err.splitlines()[-1]


def test_a_policy_or_units_that_do_not_go_are_told_in_one_line(capfd):
    path = script(TRAIN)
    assert "with all_keep they do not" in refusal(
        capfd, "--policy=all_keep", "--budget=20MiB", path
    )
    assert "'nosuch' is not" in refusal(capfd, "--units=0,nosuch", path)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("pass", "train.py ended without"),
        ("with torch.no_grad(): model(batch)", "train.py ended without"),
        ("sys.exit(3)", "train.py ended with exit code 3 without"),
        ("sys.exit()", "train.py ended without"),
    ],
)
def test_a_script_that_calls_no_model_is_told_so(capfd, body, part):
    err = refusal(capfd, script(body))
    assert "a script must call a model that has parameters to train" in err
    assert part in err


def test_an_error_of_the_script_has_its_traceback_alone():
    body = """
    def load():
        raise FileNotFoundError("no data")
    load()
    """
    done = command(script(body))
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[1].endswith('train.py", line 10, in <module>')
    assert lines[-2] == "FileNotFoundError: no data"
    assert lines[-1].startswith("daso: a script must complete one call of its model")
    assert "FileNotFoundError, as shown above" in lines[-1]
    assert "daso/cli" not in done.stderr


@pytest.mark.parametrize(
    ("body", "error"), [("def (:", "SyntaxError"), ("model(batch[:, :5])", "RuntimeError")]
)
def test_a_script_or_model_that_fails_is_told_by_its_error(capfd, body, error):
    path = script(f"try:\n    {body}\nexcept Exception:\n    pass\n")
    err = refusal(capfd, path, lines=None)
    assert err.startswith("Traceback" if error == "RuntimeError" else "  File")
    assert f"{error}:" in err
    assert f"ended with {error}, as shown above" in err.splitlines()[-1]


def test_ctrl_c_ends_it_in_one_line():
    path = script("print('waiting', flush=True)\nimport time\ntime.sleep(60)\n", head="")
    words = [sys.executable, "-m", "daso", "memory", path]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr.readline() == "waiting\n"
        time.sleep(0.1)
        started.send_signal(signal.SIGINT)
        _, err = started.communicate(timeout=HANG_SECONDS)
    assert (started.returncode, err) == (130, "daso: interrupted\n")
