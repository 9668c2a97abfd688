"""Pages that the code itself writes: commands, settings, error messages with their remedies.

Directives of Sphinx, so that none of it can be older than the code beside it. Formulas become
MathML, which browsers show without fetching a script: these pages are read on clusters too.
"""

from typing import Any

from docutils import nodes
from error_messages import KINDS, messages
from latex2mathml.converter import convert
from sphinx.util.docutils import SphinxDirective

from daso import errors
from daso.cli.main import COMMANDS, Parser, add_options
from daso.cli.train.keys import settings

__all__ = ["setup"]


class FromCode(SphinxDirective):
    """Content that the package's code writes, in every build; replaces the note in its body."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the content as nodes."""
        self.env.note_reread()  # Sphinx would keep the page while its own text stays the same
        return self.parse_text_to_nodes("\n".join(self.lines()), allow_section_headings=True)

    def lines(self) -> list[str]:
        """Return Markdown."""
        raise NotImplementedError


class Settings(FromCode):
    """A table of every key of `daso train`."""

    def lines(self) -> list[str]:
        """Return the table, in Markdown."""
        lines = ["| key | default | may be | |", "|---|---|---|---|"]
        for key, default, meaning, choices in settings():
            shown = f"`{default}`" if default else ""
            lines.append(f"| `{key}` | {shown} | {_cell(choices)} | {_cell(meaning)} |")
        return lines


class Commands(FromCode):
    """The help of every command, as it is printed."""

    def lines(self) -> list[str]:
        """Return a section for each command, in Markdown."""
        lines: list[str] = []
        for name in COMMANDS:
            parser = Parser(prog=f"daso {name}", allow_abbrev=False)
            add_options(parser, name)
            parser.epilog = None if name == "train" else parser.epilog  # a page of its own
            lines += [f"## daso {name}", "", "```text", parser.format_help().rstrip(), "```", ""]
        return lines


class Messages(FromCode):
    """Every error message, by its class."""

    def lines(self) -> list[str]:
        """Return a section for each class, in Markdown."""
        lines: list[str] = []
        listed = sorted(set(messages()))
        for kind in KINDS:
            lines += ["", f"## {kind}", "", getattr(errors, kind).__doc__, ""]
            lines += ["| message | remedy | code |", "|---|---|---|"]
            lines += [
                f"| {_cell(text)} | {_cell(remedy)} | `{code}` |"
                for raised, text, remedy, code in listed
                if raised == kind
            ]
        return lines


def _show_inline(writer: Any, node: nodes.Node) -> None:
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _show_block(writer: Any, node: nodes.Node) -> None:
    writer.body.append(convert(node.astext(), display="block"))
    raise nodes.SkipNode


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
