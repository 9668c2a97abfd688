"""Processes that tests start load torch's compiler when they compile, and not before."""

import subprocess
import sys
from textwrap import dedent

import pytest


def run(program: str) -> str:
    words = [sys.executable, "-c", dedent(program)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.mark.later("imports torch's compiler")
def test_steps_do_not_load_it_and_who_compiles_gets_all_of_it() -> None:
    found = run("""
        import sys, torch
        loaded = lambda: "torch._dynamo.eval_frame" in sys.modules
        param = torch.nn.Parameter(torch.ones(3))
        param.grad = torch.ones(3)
        inner = torch.optim.SGD([param], lr=0.25)
        inner.step()
        print(loaded(), param.tolist())
        twice = torch.compile(lambda x: x + x, backend="eager")
        print(twice(torch.ones(2)).tolist(), loaded())
        inner.step()
        print(param.tolist(), torch._dynamo is sys.modules["torch._dynamo"])
    """)
    assert found.splitlines() == [
        "False [0.75, 0.75, 0.75]",
        "[2.0, 2.0] True",
        "[0.5, 0.5, 0.5] True",
    ]


@pytest.mark.later("imports torch's compiler")
def test_parts_of_it_can_be_imported_first() -> None:
    assert run("import torch, torch._dynamo.config as c; print(c.__name__)").strip() == (
        "torch._dynamo.config"
    )
