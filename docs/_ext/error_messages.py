"""Error messages of the package, read from its code: what each says, and what it tells to do."""

import ast
from collections.abc import Iterator
from pathlib import Path

from daso import errors

__all__ = ["KINDS", "messages"]

PACKAGE = Path(errors.__file__).parent
KINDS = [name for name in errors.__all__ if name.endswith("Error") and name != "DasoError"]


def messages() -> Iterator[tuple[str, str, str, str]]:
    """List (class, message, remedy, code) of every error of the package, with names for values."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if named and node.func.id in KINDS and node.args:
                text = _text(node.args[0])
                if text is not None and " " in text:
                    message, _, remedy = text.rpartition("; ")
                    code = next(word.value for word in node.keywords if word.arg == "code")
                    yield node.func.id, message or remedy, remedy if message else "", code.value


def _text(node: ast.expr) -> str | None:
    """Return what an expression says, with ``<name>`` for what is only known at run time."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else _placeholder(part)
            for part in node.values
        )
    return None


def _placeholder(part: ast.expr) -> str:
    """Return ``<name>`` for a value: the name of its variable or attribute, as a reader says it."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    called = {id(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)}
    names = [
        _plain(node.attr if isinstance(node, ast.Attribute) else node.id)
        for node in sorted(ast.walk(value), key=lambda node: id(node) in called)
        if isinstance(node, ast.Attribute | ast.Name)
    ]
    spoken = [name for name in names if name != "self"]
    return f"<{spoken[0] if spoken else 'value'}>"


def _plain(name: str) -> str:
    """Return a name without the marks of private names and getters."""
    return "type" if name == "__name__" else name.removeprefix("Get_").strip("_")
