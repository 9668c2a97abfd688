"""Who may import whom. A change of the order is a decision, and is made in the tables here."""

import ast
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

import daso

ROOT = Path(daso.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# A row may import what it lists, itself in the list or not, and the standard library.
FOR_ALL = {"daso.environment", "daso.errors"}
MAY_IMPORT = {
    "plan": {"daso.plan"} | FOR_ALL,
    "comm": {"daso.comm", "mpi4py", "cupy", "numpy", "torch"} | FOR_ALL,
    "data": {"daso.data", "numpy", "torch", "sklearn"} | FOR_ALL,
    "train": {"daso.train", "daso.comm", "daso.plan", "torch"} | FOR_ALL,
    "run": {"daso", "torch", "rich"} | FOR_ALL,
    "examples": {"daso.data", "torch", *(f"daso.{name}" for name in daso.__all__)} | FOR_ALL,
    "environment": FOR_ALL,
    "errors": FOR_ALL,
    "__init__": {"daso"},  # for type checkers; at run time names are found when first used
    "__main__": {"daso.run"},
}
# Bare `import daso` runs nothing but its __init__, but then every name is one attribute away, so
# what is taken from it is looked up in the row like an import.

# Names for type checkers only: train types a communicator that comm hands it, and mpi4py is the one
# package for which `if TYPE_CHECKING:` excuses a row. Everything else there counts in full.
MAY_NAME_IN_TYPES = {"train": {"mpi4py"}}

# Modules that only these may import while they run, inside a function, against the order: a chooser
# must know what it chooses from.
CHOOSERS = {("daso.comm.node", "daso.comm.node_shm")}

# These hand the whole environment on to a process they start. Only daso/environment.py reads it.
PASS_ENVIRONMENT_ON = {"run/local.py", "run/doctor.py"}
READS_ENVIRONMENT = "environment.py"


def row_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


# --- reading a module ---------------------------------------------------------------------------


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def walk(node: ast.AST, *, lazy: bool = True) -> Iterator[ast.AST]:
    """Walk over what runs: without TYPE_CHECKING blocks, and without functions unless lazy."""
    yield node
    children = node.orelse if is_type_checking(node) else ast.iter_child_nodes(node)
    for child in children:
        if lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from walk(child, lazy=lazy)


def type_only(tree: ast.AST) -> Iterator[ast.AST]:
    for block in filter(is_type_checking, ast.walk(tree)):
        yield from chain.from_iterable(map(ast.walk, block.body))


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """List what is imported, as module.name; a relative or computed import as it stands."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name != "daso")
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{a.name}" for a in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "daso":
            yield f"daso.{node.attr}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.rpartition(".")[2] in ("import_module", "__import__"):
                yield getattr(node.args[0], "value", None) or ast.unparse(node)


def below(name: str, roots: set[str]) -> bool:
    return any(f"{name}.".startswith(f"{root}.") for root in roots)


def import_violations(row: str, source: str) -> list[str]:
    tree = ast.parse(source)
    allowed = MAY_IMPORT[row] | set(sys.stdlib_module_names)
    if row == "run" or row == "examples":
        allowed |= {"daso.__version__", "daso.__doc__"}
    in_types = allowed | MAY_NAME_IN_TYPES.get(row, set())
    names = [(name, allowed) for name in imported(walk(tree))]
    names += [(name, in_types) for name in imported(type_only(tree))]
    return [f"{row} imports {name}" for name, roots in names if not below(name, roots)]
