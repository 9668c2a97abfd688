"""Programs in docs/ run as they stand, on four ranks as two nodes; files they name exist."""

import re
from functools import partial
from pathlib import Path

import pytest
from jobs import started

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
PROGRAMS = [
    pytest.param(text, id=f"{page.stem}-{number}")
    for page in PAGES
    if page.stem in ("combine", "elastic")  # test_readme.py runs those of other pages
    for number, text in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]

run_daso = partial(started, "daso")


@pytest.mark.later("starts ranks")
@pytest.mark.slow("starts ranks")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs_as_it_stands(tmp_path: Path, program: str, monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    path = tmp_path / "train.py"
    path.write_text(program)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:daso|docs|scripts|slurm|tests)/[\w/.-]+\.\w+)`", page.read_text())
    assert all((ROOT / name).exists() for name in named), named
