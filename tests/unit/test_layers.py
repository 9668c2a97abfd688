"""Who may import whom. A change of the order is a decision, and is made in the tables here."""

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

import daso

ROOT = Path(daso.__file__).parent
SOURCES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path.read_text(encoding="utf-8")
    for path in sorted(ROOT.rglob("*.py"))
}

# Besides itself and the standard library, a room may import what it lists; all may import these.
FOR_ALL = {
    "checks",
    "environment",
    "errors",
    "paths",
    "processes",
    "public_names",
    "trace",
    "version",
}
FOR_ALL |= {"strict", "workers"}
TRAINING = {"daso.comm", "daso.kernels", "daso.plan", "daso.torch_private", "torch"}
ROOMS = {
    "plan": set(),
    "torch_private": {"torch"},
    "kernels": {"daso.torch_private", "torch", "triton"},
    "comm": {"daso.plan", "daso.kernels", "daso.torch_private", "mpi4py", "cupy", "numpy", "torch"},
    "data": {"numpy", "torch", "sklearn"},
    "train": TRAINING,
    "checkpoint": TRAINING,
    "flow": TRAINING,
    "timeline": {"daso.comm", "torch"},
    "server": TRAINING | {"daso.train"},
    "integrations": TRAINING | {"daso.train", "accelerate", "lightning", "transformers"},
    "memory": TRAINING | {"daso.train"},
    "predict": TRAINING | {"daso.train"},
    "slurm": {"daso.comm", "jinja2"},
    "testing": {"runpy.run_path", "runpy.run_module"},
    # Ranks of a bench import its module by name: those of scripts/benchmarks too.
    "cli": {
        "daso",
        "torch",
        "matplotlib",
        "rich",
        "shtab",
        "horovod",
        "torchft",
        "import_module(module)",
    },
    "examples": {"daso.data", "torch"} | {f"daso.{name}" for name in daso.__all__},
    "public_names": {"import_module(homes[name])"},
    "": {"daso"},
    "__main__": {"daso.cli"},
    **{name: set() for name in FOR_ALL - {"public_names"}},
}
# Decisions outside plan: standard library, and of daso only each other and what is for all.
PURE = {
    *("daso.flow.plan", "daso.memory.course", "daso.memory.planner", "daso.server.plan"),
    *("daso.memory.captured.planner", "daso.predict.throttle_plan"),
    "daso.timeline.clock_offsets",
    *(f"daso.predict.{name}" for name in ("cluster", "jobs", "links", "simulator")),
}
# mpi4py's communicators are made in comm; those who pass them on have to name their type.
NAME_COMMUNICATORS = {"train", "flow", "memory", "timeline"}
# Imports inside of functions, for what is slow to load or missing on some machines. Commands (cli)
# may do it anywhere.
LATE_IMPORTS = {
    ("daso.comm.mpi", "daso.comm.torchrun.pmi"),  # under torchrun with MPICH only
    ("daso.kernels.choice", "daso.kernels.triton_kernels"),  # where Triton is installed
    ("daso.train.model.shards", "daso.comm.process_group"),  # for sharded models only
}
# At installation there is no package yet that could be asked.
READS_ENVIRONMENT = {"daso.environment", "daso.kernels.build"}
STARTS_PROCESSES = {"daso.cli.launch", "daso.cli.doctor", "daso.slurm.slurm_commands"}


def is_for_types(node):
    tests = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
    return isinstance(node, ast.If) and ast.unparse(node.test) in tests


def running(node):
    """Walk over everything but what stands in `if TYPE_CHECKING:`."""
    yield node
    for child in node.orelse if is_for_types(node) else ast.iter_child_nodes(node):
        yield from running(child)


def for_types(tree):
    blocks = filter(is_for_types, ast.walk(tree))
    return chain.from_iterable(ast.walk(one) for block in blocks for one in block.body)


def imported(nodes):
    """List what these import or take from the root; a computed import is the call as written."""
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
            constant = isinstance(node.args[0], ast.Constant)
            yield node.args[0].value if constant else ast.unparse(node)


def allowed(name, roots):
    stdlib = name.split(".")[0] in sys.stdlib_module_names
    common = {f"daso.{one}" for one in FOR_ALL}
    return stdlib or any(f"{name}.".startswith(f"{root}.") for root in roots | common)


def forbidden(module, source):
    room = [*module.split("."), ""][1]
    roots = ROOMS[room] | {f"daso.{room}" if room else "daso"}
    if module in PURE:
        roots = {one for one in PURE if one.split(".")[1] == room} | {"daso.plan"}
    tree = ast.parse(source)
    typed = [
        name
        for name in imported(for_types(tree))
        if module in PURE or room not in NAME_COMMUNICATORS or not name.startswith("mpi4py")
    ]
    whole_root = {"daso"} if room == "examples" else set()  # what is taken from it is looked at
    names = {*imported(running(tree)), *typed} - whole_root
    return sorted(name for name in names if not allowed(name, roots))


def found_in(look, modules=SOURCES):
    """Return what a function finds in modules, without those in which it finds nothing."""
    found = {module: look(module, SOURCES[module]) for module in modules}
    return {module: one for module, one in found.items() if one}


def test_a_module_imports_only_what_its_room_may():
    assert found_in(forbidden) == {}


def test_every_room_is_there_and_every_module_has_one():
    assert {[*module.split("."), ""][1] for module in SOURCES} == set(ROOMS)
    assert set(SOURCES) >= PURE | READS_ENVIRONMENT | STARTS_PROCESSES


def test_a_room_has_at_most_fifteen_modules():
    folders = {}
    for path in ROOT.rglob("*.py"):
        folders.setdefault(str(path.parent.relative_to(ROOT)), []).append(path.stem)
    crowded = {name: len(found) - 1 for name, found in folders.items() if len(found) > 16}
    assert crowded == {}


LATE = "def choose():\n    {}"
TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}"


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("daso.plan.x", "import math, torch", "torch"),
        ("daso.plan.x", "import daso", "daso"),
        ("daso.plan.x", "from daso import Exchange", "daso.Exchange"),
        ("daso.plan.x", "import daso.planning", "daso.planning"),
        ("daso.plan.x", "from . import layout", "..layout"),
        ("daso.plan.x", LATE.format("import torch"), "torch"),
        ("daso.plan.x", "try:\n    import torch\nexcept ImportError:\n    torch = None", "torch"),
        ("daso.plan.x", "import importlib\nimportlib.import_module('torch')", "torch"),
        ("daso.plan.x", "__import__('torch')", "torch"),
        ("daso.plan.x", "import_module(name)", "import_module(name)"),
        ("daso.plan.x", TYPES.format("import torch"), "torch"),
        ("daso.memory.planner", "import torch", "torch"),
        ("daso.server.plan", "import daso.server.hooks", "daso.server.hooks"),
        ("daso.comm.x", "from daso.train.optimizer import DASO", "daso.train.optimizer.DASO"),
        ("daso.server.x", "import daso.flow.model.graph", "daso.flow.model.graph"),
        ("daso.train.x", "from mpi4py import MPI", "mpi4py.MPI"),
        ("daso.train.x", TYPES.format("import cupy"), "cupy"),
        ("daso.train.x", "if not TYPE_CHECKING:\n    from mpi4py import MPI", "mpi4py.MPI"),
        ("daso.train.x", TYPES.format("pass\nelse:\n    import mpi4py"), "mpi4py"),
        ("daso.train.x", "import daso.memory.api", "daso.memory.api"),
        ("daso.train.x", "from daso.cli.train import loop", "daso.cli.train.loop"),
        ("daso.memory.planner", TYPES.format("from mpi4py import MPI"), "mpi4py.MPI"),
        ("daso.server.plan", "import daso.flow.plan", "daso.flow.plan"),
        ("daso.data.x", "import mpi4py", "mpi4py"),
        ("daso.data.x", "from daso.comm.world import init", "daso.comm.world.init"),
        ("daso.slurm.x", "import torch", "torch"),
        ("daso.timeline.x", "import daso.train.session", "daso.train.session"),
        ("daso.predict.x", "import daso.server.plan", "daso.server.plan"),
        ("daso.checkpoint.x", "import daso.train.session", "daso.train.session"),
        ("daso.errors", "from daso.comm import mpi", "daso.comm.mpi"),
        ("daso.public_names", "import_module(name)", "import_module(name)"),
        ("daso.__main__", "from daso.train.optimizer import DASO", "daso.train.optimizer.DASO"),
        ("daso.train.x", "from ..comm.engine import Engine", "..comm.engine.Engine"),
        ("daso.cli.x", "import numpy as np", "numpy"),
        ("daso.examples.x", "import daso\nprint(daso.train.parts)", "daso.train"),
        ("daso.environment", "from daso.plan.options import BITS", "daso.plan.options.BITS"),
        ("daso", "import torch", "torch"),
    ],
)
def test_a_planted_import_is_found(module, source, found):
    assert forbidden(module, source) == [found]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("daso.plan.x", "from daso.plan.layout import split\nfrom daso.errors import ConfigError"),
        ("daso.comm.x", "import torch.distributed\nfrom mpi4py import MPI\nimport cupy.cuda.nccl"),
        ("daso.train.x", TYPES.format("from mpi4py import MPI")),
        ("daso.examples.x", "import daso\ndaso.DASO(inner, topology=daso.init())"),
    ],
)
def test_an_import_of_the_room_is_let_through(module, source):
    assert forbidden(module, source) == []


def module_of(name, sources):
    """Return the module that an imported name is, or is in; None: of another package."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in sources), None)


@cache
def names_in(source):
    return list(imported(ast.walk(ast.parse(source))))


def circle(sources):
    """Return a circle of modules that import each other, early, late or for types; or nothing."""
    graph = TopologicalSorter()
    for name, source in sources.items():
        for found in names_in(source):
            target = module_of(found, sources)
            if target not in {None, name}:
                graph.add(name, target)
    try:
        graph.prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other_in_a_circle():
    assert circle(SOURCES) == []


@pytest.mark.parametrize(
    "planted",
    [
        {"daso.plan.options": "from daso.plan import exchange"},
        {"daso.plan.options": LATE.format("from daso.plan.exchange import Sent")},
        {"daso.plan.options": TYPES.format("from daso.plan.exchange import Sent")},
        {"daso": "from daso.cli.main import main"},
        {"daso.errors": "import daso.a", "daso.a": "import daso.b", "daso.b": "import daso.errors"},
    ],
)
def test_a_planted_circle_is_found(planted):
    changed = {name: f"{line}\n{SOURCES.get(name, '')}" for name, line in planted.items()}
    assert set(circle(SOURCES | changed)) >= set(planted)


def late_imports(module, source):
    """Return the pairs of this module and those of daso that its functions import."""
    functions = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    imports = (
        node
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )
    targets = {module_of(name, SOURCES) for name in imported(imports)} - {None}
    return {(module, target) for target in targets}


def test_imports_inside_of_functions_are_listed():
    found = set().union(*(late_imports(module, source) for module, source in SOURCES.items()))
    assert {pair for pair in found if not pair[0].startswith("daso.cli.")} == LATE_IMPORTS


def test_a_planted_import_inside_of_a_function_is_found():
    planted = LATE.format("from daso.plan.options import Exchange")
    assert late_imports("daso.comm.x", planted) == {("daso.comm.x", "daso.plan.options")}


def environment_uses(module, source):
    """List the lines where a module touches the environment and may not."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    if module in READS_ENVIRONMENT:
        return []
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    handed_on = [  # as a whole, to a process that is started
        one
        for call in calls
        for one in [*call.args, *(word.value for word in call.keywords if word.arg)]
        if module in STARTS_PROCESSES and ast.unparse(one) == "os.environ"
    ]
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names and node not in handed_on)
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(alias.name in names | {"*"} for alias in node.names)
        )
    ]


def test_only_one_module_reads_environment_variables():
    assert found_in(environment_uses) == {}


@pytest.mark.parametrize("module", sorted(READS_ENVIRONMENT | STARTS_PROCESSES))
def test_every_exception_for_the_environment_is_needed(module):
    assert environment_uses("daso.another", SOURCES[module]) != []


@pytest.mark.parametrize(
    "line",
    [
        "home = os.environ.get('HOME')",
        "home = os.environ['HOME']",
        "home = os.getenv('HOME')",
        "os.environ['HOME'] = '/'",
        "os.putenv('HOME', '/')",
        "from os import environ",
        "env = os.environ",
        "env = system.environ",
        "launch('HOME' in os.environ)",
        "launch(os.getenv)",
        "from os import path, getenv as read",
        "from os import *",
        "env = {**os.environ}",
        "launch(env=os.environ.copy())",
        "launch(**os.environ)",
    ],
)
@pytest.mark.parametrize("module", ["daso.plan.layout", "daso.examples.cnn", "daso.cli.launch"])
def test_a_planted_use_of_the_environment_is_found(module, line):
    assert environment_uses(module, f"import os\n{line}") == [2]


def test_the_environment_may_be_handed_on_by_those_who_start_processes():
    for line in ("launch(os.environ)", "launch(1, env=os.environ)"):
        assert environment_uses("daso.cli.launch", line) == []
        assert environment_uses("daso.cli.doctor", line) == []
    assert environment_uses("daso.cli.train.loop", "launch(1, env=os.environ)") == [1]


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


def test_tensors_are_made_on_the_device_that_is_named():
    """A user may call `torch.set_default_device`; what MPI reads and writes stays on the host."""
    modules = [one for one in SOURCES if one.split(".")[1:2] not in (["cli"], ["examples"])]
    assert found_in(lambda _, source: undecided(source), modules) == {}


def test_a_tensor_of_no_named_device_is_found():
    planted = "a = torch.zeros(3)\nb = torch.zeros(3, device='cpu')\nc = torch.zeros_like(b)"
    assert undecided(planted) == [1]
