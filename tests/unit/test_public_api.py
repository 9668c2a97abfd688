import ast
import inspect
import subprocess
import sys
from importlib import import_module

import pytest
from jobs import HANG_SECONDS

import daso

PUBLIC = [
    "DASO",
    "Auto",
    "Exchange",
    "Fixed",
    "Gradients",
    "ParameterServer",
    "Plateau",
    "Qsr",
    "Recording",
    "StopRequest",
    "Topology",
    "attach",
    "ddp_hook",
    "ddp_hook_state",
    "errors",
    "flow",
    "init",
    "integrations",
    "memory",
    "predict",
]
HEAVY = {"torch", "mpi4py", "cupy", "numpy", "triton"}


def python(*words):
    run = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert run.returncode == 0, run.stderr
    return run


def imported_by(*words):
    """Return the names of all modules that a Python program imports, and what it prints."""
    run = python("-X", "importtime", *words)
    lines = [line for line in run.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}, run.stdout


def packages(modules):
    return {module.partition(".")[0] for module in modules}


def test_the_public_names_are_these():
    # A new name is a decision: DESIGN.md section 6, README and CHANGELOG tell of it too.
    assert daso.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name):
    assert getattr(daso, name).__name__ in (name, f"daso.{name}")


def test_every_public_name_can_be_imported_with_a_star():
    names = {}
    exec("from daso import *", names)
    assert set(PUBLIC) <= set(names)


def test_a_public_name_is_the_object_of_its_module():
    assert daso.Fixed is import_module("daso.plan.policies").Fixed
    assert daso.errors is import_module("daso.errors")


def test_dir_shows_the_public_names():
    assert dir(daso) == sorted(PUBLIC)


def test_type_checkers_see_the_same_names_as_everybody():
    tree = ast.parse(inspect.getsource(daso))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    assert sorted(alias.name for line in block.body for alias in line.names) == sorted(PUBLIC)


@pytest.mark.parametrize("name", ["daso", "dASO", "auto", "torch", "_Hidden"])
def test_an_unknown_name_is_an_attribute_error_that_names_it(name):
    with pytest.raises(AttributeError, match=f"module 'daso' has no attribute '{name}'"):
        getattr(daso, name)
    assert not hasattr(daso, name)


def test_importing_an_unknown_name_is_an_import_error():
    with pytest.raises(ImportError, match="Plateaux"):
        exec("from daso import Plateaux")


def test_the_version_is_three_numbers():
    assert [part.isdigit() for part in daso.__version__.split(".")] == [True] * 3


def test_the_keywords_of_the_optimizer_are_these():
    # A ninth keyword is a missing record.
    parameters = inspect.signature(daso.DASO.__init__).parameters
    assert {
        name: one.default for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY
    } == {
        "module": None,
        "topology": None,
        "policy": None,
        "wire": "auto",
        "merge": "auto",
        "outer": None,
        "exchange": None,
        "gradients": None,
    }
    assert [name for name, one in parameters.items() if one.kind is not one.KEYWORD_ONLY] == [
        "self",
        "inner",
    ]


def test_import_daso_starts_nothing_heavy():
    modules, _ = imported_by("-c", "import daso")
    assert "daso" in modules
    assert packages(modules) & HEAVY == set()


@pytest.mark.parametrize(
    "name", ["Auto", "Exchange", "Fixed", "Gradients", "Plateau", "Qsr", "errors"]
)
def test_records_policies_and_errors_start_nothing_heavy(name):
    modules = python("-c", f"import sys, daso; daso.{name}; print(*sys.modules)").stdout.split()
    assert "daso.errors" in modules
    assert packages(modules) & HEAVY == set()


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"]], ids=" ".join)
def test_the_command_tells_its_use_without_anything_heavy(words):
    modules, said = imported_by("-m", "daso", *words)
    assert "daso.cli.main" in modules
    assert "daso" in said
    assert packages(modules) & HEAVY == set()


def test_a_command_imports_its_own_module_alone():
    program = (
        "import sys; from daso.cli.main import main\n"
        "try: main(['trace', '--help'])\n"
        "except SystemExit: print(*sys.modules)\n"
    )
    modules = python("-c", program).stdout.split()
    ours = {module for module in modules if module.startswith(("daso.cli.", "daso.slurm"))}
    assert ours == {"daso.cli.main", "daso.cli.outputs", "daso.cli.parser", "daso.cli.trace"}


def test_what_is_heavy_would_be_seen():
    modules, _ = imported_by("-c", "import numpy")
    assert packages(modules) & HEAVY == {"numpy"}


def test_taking_every_public_name_does_not_start_mpi():
    said = python(
        "-c", "import sys, daso; from daso import *; print(DASO, 'mpi4py.MPI' in sys.modules)"
    ).stdout
    assert said.split() == ["<class", "'daso.train.optimizer.DASO'>", "False"]
