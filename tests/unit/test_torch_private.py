"""Private names of torch are used in `daso.torch_private` alone."""

import ast
import re

import pytest
import torch
from unit.test_layers import SOURCES, found_in, imported

from daso import torch_private

# Attributes of torch's objects; with `_optimizer_`, all of an optimizer's own.
TORCH_OBJECTS = (
    torch.zeros(1),
    torch.zeros(1).untyped_storage(),
    torch.nn.Identity(),
    torch.optim.SGD([torch.zeros(1)]),
    torch.ops.aten.clone.default,
)
PRIVATE = {"_local_tensor", "_orig_mod", "_spec", "_execution_engine"}
PRIVATE |= {name for one in TORCH_OBJECTS for name in dir(one) if re.match("_[a-z]", name)}


def is_private(name):
    return any(re.match("_[A-Za-z]", part) for part in name.split("."))


def of_torch(tree):
    """Return the names that a module has of torch's modules and their members."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                one.asname or one.name.split(".")[0]
                for one in node.names
                if one.name.split(".")[0] == "torch"
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {one.asname or one.name for one in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.value) == "torch.ops.aten":
            found |= {ast.unparse(target) for target in node.targets}
    return found


def torch_privates(source):
    """Return the private names of torch that a module uses, in the order of its lines."""
    tree = ast.parse(source)
    ours, found = of_torch(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [one for one in imported([node]) if one.split(".")[0] == "torch"]
            found += [(node.lineno, name) for name in names if is_private(name)]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            chain = ast.unparse(node)
            is_own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if (
                chain.split(".")[0] in ours
                or (node.attr in PRIVATE and not is_own)
                or node.attr.startswith("_optimizer_")
            ):
                found.append((node.lineno, node.attr))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr"}:
            names = [one.value for one in node.args[1:2] if isinstance(one, ast.Constant)]
            found += [(node.lineno, name) for name in names if name in PRIVATE]
        elif isinstance(node, ast.Constant) and str(node.value).startswith("_optimizer_"):
            found.append((node.lineno, node.value))
    return [name for _, name in sorted(set(found))]


def test_private_names_of_torch_are_used_in_one_module():
    modules = SOURCES.keys() - {"daso.torch_private"}
    assert found_in(lambda _, source: torch_privates(source), modules) == {}


def test_every_private_name_of_torch_has_a_user():
    others = "\n".join(SOURCES[module] for module in SOURCES if module != "daso.torch_private")
    assert [name for name in torch_private.__all__ if not re.search(rf"\b{name}\b", others)] == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from torch._compile import _disable_dynamo", "torch._compile._disable_dynamo"),
        (
            "from torch.nn.modules.batchnorm import _BatchNorm",
            "torch.nn.modules.batchnorm._BatchNorm",
        ),
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch\ntorch._foreach_copy_(a, b)", "_foreach_copy_"),
        ("from torch import nn\nnn.modules.dropout._DropoutNd", "_DropoutNd"),
        ("import torch\naten = torch.ops.aten\naten._to_copy.default", "_to_copy"),
        ("tensor.grad._version", "_version"),
        ("self.base._version", "_version"),
        ("tensor.untyped_storage()._cdata", "_cdata"),
        ("module._parameters.items()", "_parameters"),
        ("self._optimizer_step_pre_hooks", "_optimizer_step_pre_hooks"),
        ("hasattr(inner, '_optimizer_step_pre_hooks')", "_optimizer_step_pre_hooks"),
        ("getattr(module, '_orig_mod', None)", "_orig_mod"),
    ],
)
def test_a_planted_private_name_of_torch_is_found(line, found):
    assert set(torch_privates(line)) == {found}


@pytest.mark.parametrize(
    "line", ["self._version += 1", "import os\nos._exit(1)", "import torch\ntorch.__version__"]
)
def test_private_names_of_others_are_let_through(line):
    assert torch_privates(line) == []
