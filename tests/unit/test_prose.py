"""Ceilings on prose that readers stumble over: in first lines of docstrings, locals and pages.

The patterns find places to reread, not mistakes: clauses as nouns, "there is", ranks as persons,
words carried over from another language. A few of them are right where they stand.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VAGUE = set("found made told there one mine kept given taken said seen asked wanted".split())  # noqa: SIM905
CLAUSE_FIRST = re.compile(
    r"^(What|Who|Whose|Whoever|Where|Whether|How|Which|That|Those|There|One|Nobody)\b"
)
DIALECT = re.compile(
    r"\b(what (?!if\b|follows\b)\w+|who (?!le)\w+|whoever|nobody|somebody|everyone|"
    r"there (is|are|was|were|lies?|stands?)|seldom|anew|beside(?!s)|of (its|their|one's) own|"
    r"next to nothing|as (rare|often|seldom) as|shall|so many|so much|takes? (part|turns)|"
    r"goes? on|stands? still|tells?|told|hears?|says?)\b",
    re.IGNORECASE,
)
MODULES = sorted((ROOT / "daso").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def first_lines(path: Path) -> Iterator[str]:
    """List the summaries of the docstrings of a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                summary = " ".join(text.partition("\n\n")[0].split())
                yield f"{path.relative_to(ROOT)}: {summary}"


def vague_names(path: Path) -> Iterator[str]:
    """List the bindings of vague names in a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = node.arg if isinstance(node, ast.arg) else getattr(node, "id", None)
        is_bound = isinstance(node, ast.arg) or isinstance(getattr(node, "ctx", None), ast.Store)
        if is_bound and name in VAGUE:
            yield f"{path.relative_to(ROOT)}:{node.lineno} {name}"


def sentences(path: Path) -> Iterator[str]:
    """List the sentences of a page, without code, tables and headings."""
    text = re.sub(r"```.*?```|<!--.*?-->", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"^\s*\|.*$|^#.*$", " ", text, flags=re.MULTILINE)
    for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(text.split())):
        if len(words(sentence)) > 3:
            yield f"{path.relative_to(ROOT)}: {sentence}"


def words(sentence: str) -> list[str]:
    """List the words of a sentence."""
    return re.findall(r"[A-Za-z][\w'-]*", sentence)


def text_of(line: str) -> str:
    """Return a line without the name of its file."""
    return line.partition(": ")[2]


def is_dialect(line: str) -> bool:
    """Return whether a pattern matches a line."""
    return bool(CLAUSE_FIRST.match(text_of(line)) or DIALECT.search(text_of(line)))


FIRST_LINES = [line for path in MODULES for line in first_lines(path)]
SENTENCES = [sentence for path in PAGES for sentence in sentences(path)]


@pytest.mark.parametrize(
    ("lines", "is_odd", "share"),
    [
        pytest.param(FIRST_LINES, is_dialect, 0.03, id="first lines in dialect"),
        pytest.param(
            SENTENCES, lambda line: DIALECT.search(text_of(line)), 0.02, id="pages in dialect"
        ),
        pytest.param(
            SENTENCES, lambda line: len(words(text_of(line))) > 30, 0.02, id="long sentences"
        ),
        pytest.param(
            SENTENCES,
            lambda line: len(re.findall(r"\b\d[\d,.]*", text_of(line))) > 4,
            0.01,
            id="sentences of numbers",
        ),
    ],
)
def test_few_lines_need_a_second_reading(lines, is_odd, share):
    odd = [line for line in lines if is_odd(line)]
    assert len(odd) <= share * len(lines), "\n".join([f"{len(odd)} of {len(lines)}", *odd])


def test_no_local_has_a_vague_name():
    assert [line for path in MODULES for line in vague_names(path)] == []


@pytest.mark.parametrize(
    ("line", "odd"),
    [
        ("x.py: What crosses between nodes.", True),
        ("x.py: Return what crosses between nodes.", True),
        ("x.py: Average gradients over a node.", False),
    ],
)
def test_the_patterns_find_the_dialect(line, odd):
    assert is_dialect(line) == odd
