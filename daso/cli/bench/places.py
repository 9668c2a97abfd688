"""Places where ranks of a bench run: this machine, or hosts that the caller starts."""

import json
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from daso.cli.launch import Local, launch
from daso.errors import ExchangeError

HERE = "here"
RANKS = ("-m", "daso.cli.bench.ranks")
INTERRUPTED = 130  # exit code


class RankStarter(Protocol):
    """Starts ranks of a bench."""

    fastest: str  # link

    def run(self, kind: str, plan: Mapping[str, Any], *, link: str, nodes: int, ranks: int) -> Any:
        """Measure on ranks of this place, and return their result; blocking."""
        ...


class Here:
    """This machine, cut into pretend nodes; its links are not shaped."""

    fastest = HERE

    def run(self, kind: str, plan: Mapping[str, Any], *, link: str, nodes: int, ranks: int) -> Any:  # noqa: ARG002 - a place's
        """Measure on ranks of this machine, and return their result; blocking."""
        return run_here(kind, plan, ranks=nodes * ranks, ranks_per_node=ranks)


def program(kind: str, plan: Mapping[str, Any], out: Path) -> tuple[str, ...]:
    """Return the command line of ranks, with the folder of the bench's module."""
    spec = find_spec(kind)
    assert spec is not None and spec.origin is not None, kind
    folder = Path(spec.origin).parents[kind.count(".")]
    return (*RANKS, kind, str(folder), json.dumps(plan), str(out))


def read_result(out: Path, code: int) -> Any:
    """Return the result that ranks wrote, and remove the file; their exit code must be 0."""
    if code != 0 or not out.exists():
        raise ExchangeError(
            f"the ranks must end with exit code 0, not {code}; see their output",
            code="bench-ranks-failed",
        )
    result = json.loads(out.read_text(encoding="utf-8"))
    out.unlink()
    return result


def run_here(kind: str, plan: Mapping[str, Any], *, ranks: int, ranks_per_node: int) -> Any:
    """Measure on ranks of this machine, cut into pretend nodes; blocking."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = program(kind, plan, out)
        code = launch(Local(ranks=ranks, ranks_per_node=str(ranks_per_node), program=words))
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        return read_result(out, code)
