"""Programs in docs/ run as they stand; other code compiles; the reference is complete.

A program has ``<!-- run -->`` above it, or ``<!-- run -n 2 --ranks-per-node 1 -->`` with options of
`daso run`. Those of the pages in `ON_FOUR_RANKS` are programs too; those of frameworks are
started by torchrun, as their users do (test_integrations.py starts others by `daso run`).
"""

import ast
import dataclasses
import importlib
import json
import re
from functools import partial
from pathlib import Path

import pytest
from jobs import started

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
    assert {"first-training", "from-ddp", "from-horovod", "slow-links", "stragglers"} <= ids


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
    stopping = {"daso.checkpoint.preemption.StopRequest"}
    public = {f"daso.{name}" for name in daso.__all__ if name not in rooms}
    for room in (*rooms, "data", "testing.faults"):
        public |= {
            f"daso.{room}.{name}" for name in importlib.import_module(f"daso.{room}").__all__
        }
    assert listed == public | stopping


def keys(part: str) -> set[str]:
    cells = re.findall(r"^\| ([^|]+) \|", part, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", " ".join(cells)))


def test_the_keys_of_a_report_are_those_that_it_tells() -> None:
    report, rest = PAGES_BY_NAME["report"].split("An exchange among the events:")
    assert keys(report) == set(Report.__annotations__)
    assert {one.name for one in dataclasses.fields(Measurements)} <= keys(rest)


def test_a_report_has_the_keys_of_its_type(tmp_path: Path) -> None:
    path = tmp_path / "told.py"
    path.write_text(
        "import json, torch, daso\n"
        "world, model = daso.init(), torch.nn.Linear(2, 2)\n"
        "inner = torch.optim.SGD(model.parameters(), 0.1)\n"
        "with daso.DASO(inner, module=model) as optimizer:\n"
        "    keys = list(optimizer.report())\n"
        "if world.rank == 0: print(json.dumps(keys))\n"
    )
    run = started("daso", "run", "-n", "2", "--ranks-per-node", "1", str(path))
    assert run.returncode == 0, run.stderr
    assert set(json.loads(run.stdout)) == Report.__annotations__.keys()


def test_messages_of_the_reference_are_those_of_the_code(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/_ext"))
    from error_messages import messages

    told = list(messages())
    assert len(told) > 200
    assert sum(remedy != "" or " must " in text for _, text, remedy in told) > 0.9 * len(told)
    assert [one for one in told if "{" in one[1]] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:daso|docs|scripts|slurm|tests)/[\w/.-]+\.\w+)`", page.read_text())
    assert all((ROOT / name).exists() for name in named), named
