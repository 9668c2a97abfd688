"""Error messages of the package, read from its code: what each says, and what it tells to do."""

import ast
from collections.abc import Iterator
from pathlib import Path

from daso import errors

__all__ = ["KINDS", "messages"]

PACKAGE = Path(errors.__file__).parent
KINDS = [name for name in errors.__all__ if name.endswith("Error") and name != "DasoError"]


def messages() -> Iterator[tuple[str, str, str]]:
    """List (class, message, remedy) of every error that the package raises, names for values."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if named and node.func.id in KINDS and node.args:
                text = _text(node.args[0])
                if text is not None and " " in text:
                    message, _, remedy = text.rpartition("; ")
                    yield node.func.id, message or remedy, remedy if message else ""


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
    value = part.value if isinstance(part, ast.FormattedValue) else part
    names = [
        one.attr if isinstance(one, ast.Attribute) else one.id
        for one in ast.walk(value)
        if isinstance(one, ast.Attribute | ast.Name)
    ]
    named = [name for name in names if name not in ("format_value", "join", "str", "len", "told")]
    return f"<{named[0] if named else 'value'}>"
