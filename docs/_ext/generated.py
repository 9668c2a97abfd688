"""Pages that the code itself writes: commands, settings, error messages with their remedies.

Directives of Sphinx, so that none of it can be older than the code beside it. Formulas become
MathML, which browsers show without fetching a script: these pages are read on clusters too.
"""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util.docutils import SphinxDirective

from daso import errors
from daso.cli.main import make_parser
from daso.cli.train.config import settings

__all__ = ["messages", "setup"]

PACKAGE = Path(errors.__file__).parent
KINDS = [name for name in errors.__all__ if name.endswith("Error") and name != "DasoError"]


class Settings(SphinxDirective):
    """A table of every key of `daso train`."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        lines = ["| key | default | may be | |", "|---|---|---|---|"]
        for key, default, meaning, choices in settings():
            shown = "" if default == "" else f"`{default}`"
            lines.append(f"| `{key}` | {shown} | {_cell(choices)} | {_cell(meaning)} |")
        return self.parse_text_to_nodes("\n".join(lines))


class Commands(SphinxDirective):
    """The help of every command, as it is printed."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each command."""
        (commands,) = [
            action
            for action in make_parser()._actions
            if isinstance(action, argparse._SubParsersAction)
        ]
        lines: list[str] = []
        for name, parser in commands.choices.items():
            parser.epilog = None if name == "train" else parser.epilog  # a page of its own
            lines += [f"## daso {name}", "", "```text", parser.format_help().rstrip(), "```", ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


class Messages(SphinxDirective):
    """Every error message, by its class."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each class."""
        lines: list[str] = []
        found = list(messages())
        for kind in KINDS:
            rows = sorted({(text, remedy) for one, text, remedy in found if one == kind})
            lines += ["", f"## {kind}", "", (getattr(errors, kind).__doc__ or "").split("\n")[0]]
            lines += [""]
            lines += ["| message | remedy |", "|---|---|"]
            lines += [f"| {_cell(text)} | {_cell(remedy)} |" for text, remedy in rows]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


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


def _show_inline(writer: Any, node: nodes.Node) -> None:
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _show_block(writer: Any, node: nodes.Node) -> None:
    writer.body.append(convert(node.astext(), display="block"))
    raise nodes.SkipNode


def _text(node: ast.expr) -> str | None:
    """Return what an expression says, with ``{name}`` for what is only known at run time."""
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


def _cell(text: object) -> str:
    """Return a text as a cell of a table shows it."""
    escaped = str(text).replace("\\", "\\\\")
    for sign in "|<*_[`$":
        escaped = escaped.replace(sign, f"\\{sign}")
    return " ".join(escaped.split())


def setup(app: Any) -> dict[str, bool]:
    """Add the directives."""
    app.add_html_math_renderer("mathml", (_show_inline, None), (_show_block, None))
    app.add_directive("daso-commands", Commands)
    app.add_directive("daso-settings", Settings)
    app.add_directive("daso-messages", Messages)
    return {"parallel_read_safe": True}
