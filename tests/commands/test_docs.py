"""Programs in docs/ run as they stand; other code compiles; the reference is complete.

A program has ``<!-- run -->`` above it, or ``<!-- run -n 2 --ranks-per-node 1 -->`` with options of
`daso run`. Those of the pages in `ON_FOUR_RANKS` are programs too; those of frameworks are
started by torchrun, as their users do (test_integrations.py starts others by `daso run`).
"""

import ast
import dataclasses
import importlib
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import started
from local_world import run_ranks

import daso
from daso.plan.schedule import Measurements
from daso.train.metrics import Report

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
PAGES_BY_NAME = {page.stem: page.read_text() for page in PAGES}
ON_FOUR_RANKS = ("combine", "elastic")  # test_readme.py runs those of other pages
BLOCK = re.compile(
    r"(?:<!-- run(?P<options>[^>]*?) *-->\n+)?```python\n(?P<text>.*?)```", re.DOTALL
)
BLOCKS = [
    pytest.param(block["text"], block["options"], id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(BLOCK.finditer(page.read_text()))
]
PROGRAMS = [
    one
    for one in BLOCKS
    if one.id.split("-")[0] in ON_FOUR_RANKS or "daso.integrations.start" in one.values[0]
]
MARKED = [one for one in BLOCKS if one.values[1] is not None]

run_daso = partial(started, "daso")


@pytest.mark.later("starts ranks")
@pytest.mark.slow("starts ranks")
@pytest.mark.parametrize(("program", "_"), PROGRAMS)
def test_a_program_runs_as_it_stands(tmp_path: Path, program: str, _, monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    path = tmp_path / "train.py"
    path.write_text(program)
    if "daso.integrations" in program:
        words = ("torch.distributed.run", "--standalone", "--nproc-per-node=4", str(path))
        run = started(*words, DASO_RANKS_PER_NODE="2")
    else:
        run = run_daso("run", "-n", "4", "--ranks-per-node", "2", str(path))
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    if "last loss" in program:
        loss, exchanges = re.findall(r"last loss (\d+\.\d+)(?:, (\d+) exchanges)?", run.stdout)[0]
        assert float(loss) < 6  # 8 where nothing was learned
        assert exchanges != "0"
    else:
        told = re.findall(r"batch (\d+): (\d+) bytes, exposed \S+ ms, skip 4", run.stdout)
        assert [int(batch) for batch, _ in told] == [5, 9, 13, 17]


@pytest.mark.later("starts ranks")
@pytest.mark.slow("starts ranks")
@pytest.mark.parametrize(("program", "options"), MARKED)
def test_a_marked_program_runs(tmp_path: Path, program: str, options: str, monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    path = tmp_path / "train.py"
    path.write_text(program)
    run = started("daso", "run", *options.split(), str(path), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr


def test_tutorials_and_guides_for_newcomers_hold_a_program() -> None:
    ids = {one.id.rpartition("-")[0] for one in MARKED}
    assert {"first-training", "from-ddp", "from-others", "slow-links", "stragglers"} <= ids


@pytest.mark.parametrize(("text", "_"), BLOCKS)
def test_code_compiles_and_names_what_there_is(text: str, _) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "daso":
            assert hasattr(daso, node.attr) or importlib.import_module(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("daso"):
            module = importlib.import_module(node.module)
            assert [one.name for one in node.names if not hasattr(module, one.name)] == []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "daso.Exchange",
            "daso.Gradients",
        ):
            known = {one.name for one in dataclasses.fields(getattr(daso, node.func.attr))}
            assert {one.arg for one in node.keywords} <= known


def test_every_public_name_is_in_the_reference() -> None:
    pages = (ROOT / "docs/reference/api").glob("*.md")
    text = "\n".join(page.read_text() for page in pages)
    listed = set(re.findall(r"auto(?:class|function|module):: (\S+)", text))
    rooms = ("flow", "memory", "predict", "integrations")
    public = {f"daso.{name}" for name in daso.__all__ if name not in rooms}
    for room in (*rooms, "data", "testing.faults"):
        public |= {
            f"daso.{room}.{name}" for name in importlib.import_module(f"daso.{room}").__all__
        }
    assert listed == public


def keys(part: str) -> set[str]:
    cells = re.findall(r"^\| ([^|]+) \|", part, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", " ".join(cells)))


def test_the_keys_of_a_report_are_those_that_it_tells() -> None:
    report, rest = PAGES_BY_NAME["report"].split("An exchange among the events:")
    assert keys(report) == set(Report.__annotations__)
    assert {one.name for one in dataclasses.fields(Measurements)} <= keys(rest)


def test_a_report_has_the_keys_of_its_type() -> None:
    def keys_of_report(world: Any) -> set[str]:
        model = torch.nn.Linear(2, 2)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        topology = daso.Topology(world, ranks_per_node=1)
        with daso.DASO(inner, module=model, topology=topology) as optimizer:
            keys = set(optimizer.report())
        topology.free()
        return keys

    assert run_ranks(2, keys_of_report) == [Report.__annotations__.keys()] * 2


def test_messages_of_the_reference_are_those_of_the_code(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/_ext"))
    from error_messages import messages

    told = list(messages())
    assert len(told) > 200
    assert sum(remedy != "" or " must " in text for _, text, remedy, _ in told) > 0.9 * len(told)
    assert [one for one in told if "{" in one[1]] == []
    placeholders = {name for one in told for name in re.findall("<([^<>]*)>", one[1] + one[2])}
    assert [name for name in placeholders if name.startswith("_") or name == "self"] == []


def test_the_page_of_errors_is_as_errors_are_printed(monkeypatch) -> None:
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(ROOT / "docs/_ext"))
    from error_messages import KINDS
    from generated import Messages

    lines = Messages.lines(None)
    sections = "\n".join(lines).split("\n## ")[1:]
    assert [section.split("\n")[0] for section in sections] == KINDS
    for section in sections:
        rows = [line for line in section.split("\n") if line.startswith("| ")]
        assert len(rows) != 1, f"an empty table: {section[:40]}"
    assert any(
        r"| --resume goes on" in line and "| `nothing-to-resume` |" in line for line in lines
    )
    assert "smartquotes = False" in (ROOT / "docs/conf.py").read_text()  # else "--" becomes a dash


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:daso|docs|scripts|slurm|tests)/[\w/.-]+\.\w+)`", page.read_text())
    assert all((ROOT / name).exists() for name in named), named
