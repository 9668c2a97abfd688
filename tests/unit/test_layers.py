"""Who may import whom. A change of the order is a decision, and is made in the tables here."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

import daso

ROOT = Path(daso.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# Besides the standard library and what is for all, a row may import what it lists.
FOR_ALL = {
    *("daso.checks", "daso.environment", "daso.errors", "daso.processes", "daso.trace"),
    "daso.version",
    "daso.workers",
}
MAY_IMPORT = {
    "plan": {"daso.plan"},
    "sim": {"daso.sim", "daso.plan"},
    "comm": {"daso.comm", "mpi4py", "cupy", "numpy", "torch", "triton"},
    "data": {"daso.data", "numpy", "torch", "sklearn"},
    "train": {"daso.train", "daso.comm", "daso.plan", "torch"},
    "server": {"daso.server", "daso.train", "daso.comm", "daso.plan", "torch"},
    "checkpoint": {"daso.checkpoint", "daso.comm", "daso.plan", "torch"},
    "flow": {"daso.flow", "daso.comm", "daso.plan", "torch"},
    # Ranks of a bench import its module by name: those of scripts/benchmarks too.
    "run": {"daso", "torch", "jinja2", "matplotlib", "rich", "horovod", "torchft"}
    | {"import_module(module)"},
    "examples": {"daso.data", "torch"} | {f"daso.{name}" for name in daso.__all__},
    "environment": set(),
    "checks": set(),
    "errors": set(),
    "processes": set(),
    "trace": set(),
    "version": set(),
    "workers": set(),
    "memory": {"daso.train"},
    "predict": {"daso.plan", "daso.sim", "daso.train"},
    # The one module that imports by a computed name: public names, on first use.
    "__init__": {"daso", "import_module(_HOME[name])"},
    "__main__": {"daso.run"},
}
# Who may say `import daso`; what is then taken from it (daso.DASO) is held against the row.
MAY_IMPORT_THE_ROOT = {"run", "examples"}

# What `if TYPE_CHECKING:` excuses: mpi4py, in train and flow, which pass on communicators that
# comm made and have to name their type. Nothing else: any other import there counts as if it ran.
EXCUSED_FOR_TYPES = {"train": {"mpi4py"}, "flow": {"mpi4py"}}


# Reads environment variables; and who hands them on, as a whole, to a process that it starts.
READS_ENVIRONMENT = {"daso.environment"}
PASSES_ENVIRONMENT_ON = {"daso.run.local", "daso.run.doctor", "daso.run.client"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def row_of(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


def name_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


NAMES = [name_of(path) for path in MODULES]
SOURCES = {
    name: path.read_text(encoding="utf-8") for name, path in zip(NAMES, MODULES, strict=True)
}


# --- what a module imports ------------------------------------------------------------------------


def is_for_types(node):
    tests = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
    return isinstance(node, ast.If) and ast.unparse(node.test) in tests


def running(node):
    """Walk over everything but what stands in `if TYPE_CHECKING:`."""
    yield node
    for child in node.orelse if is_for_types(node) else ast.iter_child_nodes(node):
        yield from running(child)


def for_types(tree):
    for block in filter(is_for_types, ast.walk(tree)):
        yield from chain.from_iterable(map(ast.walk, block.body))


def imported(nodes):
    """List what these import or take from the root, each as package.module.name.

    A relative import keeps its dots, and a computed one is the call as it is written.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{a.name}" for a in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "daso":
            yield f"daso.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            argument = node.args[0]
            constant = isinstance(argument, ast.Constant)
            yield argument.value if constant else ast.unparse(node)


def may_import(row, name):
    if name == "daso":
        return row in MAY_IMPORT_THE_ROOT
    if name.split(".")[0] in sys.stdlib_module_names:
        return True
    return any(f"{name}.".startswith(f"{root}.") for root in MAY_IMPORT[row] | FOR_ALL)


def forbidden_imports(row, source):
    tree = ast.parse(source)
    excused = EXCUSED_FOR_TYPES.get(row, set())
    names = [
        *imported(running(tree)),
        *(name for name in imported(for_types(tree)) if name.split(".")[0] not in excused),
    ]
    return [name for name in names if not may_import(row, name)]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_its_row_may(path):
    row = row_of(path)
    assert forbidden_imports(row, SOURCES[name_of(path)]) == [], f"{row} may not import these"


def test_every_row_is_there_and_every_module_has_a_row():
    assert {row_of(path) for path in MODULES} == set(MAY_IMPORT)


LATE = "def choose():\n    {}"
TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}"


@pytest.mark.parametrize(
    ("row", "source", "found"),
    [
        ("plan", "import torch", "torch"),
        ("plan", "import numpy.linalg as la", "numpy.linalg"),
        ("plan", "import math, torch", "torch"),
        ("plan", "import daso", "daso"),
        ("plan", "from daso import Exchange", "daso.Exchange"),
        ("plan", "from daso.comm import mpi", "daso.comm.mpi"),
        ("plan", "from daso import comm", "daso.comm"),
        ("plan", "import daso.planning", "daso.planning"),
        ("plan", "from daso import *", "daso.*"),
        ("comm", "from daso.plan.layout import split", "daso.plan.layout.split"),
        ("comm", "import daso.train.synchronizer", "daso.train.synchronizer"),
        ("data", "import mpi4py", "mpi4py"),
        ("data", "import torchvision", "torchvision"),
        ("data", "from daso.comm.topology import init", "daso.comm.topology.init"),
        ("train", "from mpi4py import MPI", "mpi4py.MPI"),
        ("train", "import cupy", "cupy"),
        ("train", "from daso.run.loop import train", "daso.run.loop.train"),
        ("train", "from daso.data import ShardedSampler", "daso.data.ShardedSampler"),
        ("run", "from mpi4py import MPI", "mpi4py.MPI"),
        ("run", "import numpy as np", "numpy"),
        ("examples", "from daso.plan.schedule import Fixed", "daso.plan.schedule.Fixed"),
        ("examples", "import daso\nprint(daso.train.synchronizer)", "daso.train"),
        ("examples", "from daso import comm", "daso.comm"),
        ("examples", "import mpi4py", "mpi4py"),
        ("environment", "import torch", "torch"),
        ("environment", "from daso.plan.merge import MERGES", "daso.plan.merge.MERGES"),
        ("errors", "from daso.comm import mpi", "daso.comm.mpi"),
        ("__init__", "import torch", "torch"),
        ("__init__", "import_module(name)", "import_module(name)"),
        ("__main__", "from daso.train.optimizer import DASO", "daso.train.optimizer.DASO"),
        # relative
        ("plan", "from . import layout", "..layout"),
        ("plan", "from .layout import split", ".layout.split"),
        ("train", "from ..comm.engine import Engine", "..comm.engine.Engine"),
        # hidden
        ("plan", LATE.format("import torch"), "torch"),
        ("plan", "try:\n    import torch\nexcept ImportError:\n    torch = None", "torch"),
        ("plan", "class Policy:\n    import torch", "torch"),
        ("plan", "from importlib import import_module\nimport_module('torch')", "torch"),
        ("plan", "import importlib\nimportlib.import_module('torch')", "torch"),
        ("plan", "__import__('torch')", "torch"),
        ("plan", "import_module(name)", "import_module(name)"),
        # for type checkers
        ("plan", TYPES.format("import torch"), "torch"),
        ("plan", TYPES.format("from mpi4py import MPI"), "mpi4py.MPI"),
        ("train", TYPES.format("import cupy"), "cupy"),
        ("train", TYPES.format("from daso.run.config import Config"), "daso.run.config.Config"),
        ("train", TYPES.format("pass\nelse:\n    import mpi4py"), "mpi4py"),
        ("train", "import typing\nif typing.TYPE_CHECKING:\n    import cupy", "cupy"),
        ("train", "if not TYPE_CHECKING:\n    from mpi4py import MPI", "mpi4py.MPI"),
    ],
)
def test_a_planted_import_is_found(row, source, found):
    assert forbidden_imports(row, source) == [found]


@pytest.mark.parametrize(
    ("row", "source"),
    [
        ("plan", "import math\nfrom collections.abc import Sequence"),
        ("plan", "from daso.plan.layout import split\nfrom daso.errors import ConfigError"),
        ("comm", "import torch.distributed\nfrom mpi4py import MPI\nimport cupy.cuda.nccl"),
        ("comm", "from daso.environment import read_launch"),
        ("data", "from sklearn import datasets\nfrom torch.utils.data import Dataset"),
        ("train", "from daso.comm.engine import Engine\nfrom daso.plan.schedule import Act"),
        ("train", TYPES.format("from mpi4py import MPI")),
        ("run", "import daso\nprint(daso.__version__)\nfrom daso.train.optimizer import DASO"),
        ("examples", "import daso\ndaso.DASO(inner, topology=daso.init())\nfrom daso import Fixed"),
        ("examples", "from daso.data import load_digits"),
        ("__init__", "import_module(_HOME[name])\nimport_module('daso.errors')"),
    ],
)
def test_an_import_of_the_row_is_let_through(row, source):
    assert forbidden_imports(row, source) == []


# --- circles --------------------------------------------------------------------------------------


def edges(sources):
    """Pair every module with the modules that it imports when it runs, early or late."""
    for name, source in sources.items():
        for found in imported(running(ast.parse(source))):
            parts = found.split(".")
            prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
            target = next((prefix for prefix in prefixes if prefix in sources), None)
            if target not in (None, name):
                yield name, target


def circle(pairs):
    """Return a circle of modules, or nothing."""
    graph = TopologicalSorter()
    for name, target in pairs:
        graph.add(name, target)
    try:
        graph.prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other_in_a_circle():
    assert circle(edges(SOURCES)) == []


@pytest.mark.parametrize(
    "planted",
    [
        {"daso.plan.merge": "import daso.plan.options"},
        {"daso.plan.merge": "from daso.plan.options import Exchange"},
        {"daso.plan.merge": "from daso.plan import options"},
        {"daso.plan.merge": LATE.format("from daso.plan.options import Exchange")},
        {"daso.errors": "import daso.a", "daso.a": "import daso.b", "daso.b": "import daso.errors"},
        {"daso": "from daso.run.cli import main"},
    ],
)
def test_a_planted_circle_is_found(planted):
    sources = {
        name: f"{planted.get(name, '')}\n{SOURCES.get(name, '')}" for name in SOURCES | planted
    }
    found = circle(edges(sources))
    assert set(found) >= set(planted)


def test_a_circle_for_type_checkers_alone_is_none():
    late = TYPES.format("from daso.b import B")
    assert circle(edges({"daso.a": late, "daso.b": "from daso.a import A"})) == []


# --- environment variables ------------------------------------------------------------------------


def environment_uses(name, source):
    """List the lines where a module touches the environment and may not."""
    if name in READS_ENVIRONMENT:
        return []
    tree = ast.parse(source)
    handed_on = set()
    if name in PASSES_ENVIRONMENT_ON:
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            arguments = [*call.args, *(word.value for word in call.keywords if word.arg)]
            handed_on |= {one for one in arguments if ast.unparse(one) == "os.environ"}
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and node not in handed_on)
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(alias.name in ENVIRONMENT | {"*"} for alias in node.names)
        )
    ]


@pytest.mark.parametrize("name", NAMES)
def test_only_one_module_reads_environment_variables(name):
    assert environment_uses(name, SOURCES[name]) == []


@pytest.mark.parametrize("name", sorted(READS_ENVIRONMENT | PASSES_ENVIRONMENT_ON))
def test_every_exception_for_the_environment_is_needed(name):
    assert environment_uses("daso.another", SOURCES[name]) != []


@pytest.mark.parametrize(
    "line",
    [
        "home = os.environ['HOME']",
        "home = os.environ.get('HOME')",
        "home = os.getenv('HOME')",
        "os.environ['HOME'] = '/'",
        "os.putenv('HOME', '/')",
        "from os import environ",
        "from os import path, getenv as read",
        "from os import *",
        "env = os.environ",
        "env = {**os.environ}",
        "env = system.environ",
        "launch(env=os.environ.copy())",
        "launch(**os.environ)",
        "launch('HOME' in os.environ)",
        "launch(os.getenv)",
    ],
)
@pytest.mark.parametrize("name", ["daso.plan.layout", "daso.examples.cnn", "daso.run.local"])
def test_a_planted_use_of_the_environment_is_found(name, line):
    assert environment_uses(name, f"import os\n{line}") == [2]


@pytest.mark.parametrize("line", ["launch(os.environ)", "launch(1, env=os.environ)"])
def test_the_whole_environment_may_be_handed_on_by_those_who_start_processes(line):
    assert environment_uses("daso.run.local", line) == []
    assert environment_uses("daso.run.doctor", line) == []
    assert environment_uses("daso.run.loop", line) == [1]


FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor"),
    *("tensor", "tril_indices", "triu_indices", "zeros"),
}


def undecided(source):
    """Return the lines that make a tensor wherever torch's default device is."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and getattr(node.func.value, "id", None) == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name.split(".")[1:2] != ["run"] and "examples" not in name]
)
def test_tensors_are_made_on_the_device_that_is_named(name):
    """A user may call `torch.set_default_device`; what MPI reads and writes stays on the host."""
    assert undecided(SOURCES[name]) == []


def test_a_planted_tensor_of_the_default_device_is_found():
    planted = "a = torch.zeros(3)\nb = torch.zeros(3, device=a.device)\nc = torch.zeros_like(b)"
    assert undecided(planted) == [1]
