"""`scripts/bench kernels`: a row for each function on each wire, and figures of the C kernels."""

import json

import pytest
import torch
from benchmarks import kernels
from benchmarks.kernels import COPY, TORCH, WIRES, Row, cases, figures, main, processor_name

from daso.kernels import torch_kernels
from daso.kernels.native import KernelError

FUNCTIONS = ("encode", "encode, residual", "encode, gradients")
FUNCTIONS += ("reduce 2 to row", "reduce 2, carry", "accept 1", "accept 2")
OF_TENSORS = ("mean_rows 2", "gather 200", "merge 200")


def refuse(variant):
    raise KernelError("no library was built")


def test_a_small_bench_prints_its_rows_and_writes_figures(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    words = ["--numel=3000", "--rounds=2", "--wire=int4", "--wire=bf16", f"--json={path}"]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + 2 * len(FUNCTIONS) + len(OF_TENSORS)
    assert "3,000 numbers, one thread, medians of 2 alternating rounds" in printed[0]
    content = json.loads(path.read_text())
    assert [(row["function"], row["wire"]) for row in content["rows"]] == [
        *((function, "bf16") for function in FUNCTIONS + OF_TENSORS),
        *((function, "int4") for function in FUNCTIONS),
    ]
    assert all(value > 0 for row in content["rows"] for value in row["ns"].values())
    assert content["versions"]["torch"]
    assert content["date"]
    assert content["commit"] == content["versions"].get("commit", "")


def test_figures_are_of_the_first_instruction_set_and_name_it():
    ns = {COPY: 0.3, TORCH: 8.0, "x86-64-v4": 0.5, "x86-64": 1.0}
    rows = [
        Row("encode, residual", "int4", 100, ns),
        Row("reduce 2 to row", "bf16", 100, ns),
        Row("accept 1", "int8", 100, ns),
        Row("encode", "int4", 100, ns),  # not one of them
        Row("accept 1", "topk", 100, ns),
    ]
    named = figures(rows, "a processor")
    assert {name: figure["value"] for name, figure in named.items()} == {
        f"{name}_{unit}": value
        for name in ("int4_encode", "bf16_reduce2", "int8_accept")
        for unit, value in (("ns", 0.5), ("over_torch", 16.0))
    }
    assert named["int4_encode_ns"]["conditions"].endswith("int4, x86-64-v4: a processor")


def test_without_c_kernels_torch_is_measured_and_figures_are_absent(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "load_native", refuse)
    path = tmp_path / "kernels.json"
    assert main(["--numel=100", "--rounds=1", "--wire=int8", f"--json={path}"]) == 0
    printed = capsys.readouterr()
    assert "C kernels not built" in printed.out
    assert "no library was built" in printed.err
    content = json.loads(path.read_text())
    assert content["figures"] == {}
    assert content["rows"][0]["ns"].keys() == {COPY, TORCH}


@pytest.mark.parametrize("wire", WIRES)
def test_operands_are_the_same_before_every_call(wire):
    for case in cases(5000, [wire]):
        case.restore()
        before = [tensor.clone() for tensor, _ in case.changed]
        case.call(torch_kernels)
        changed = [tensor.clone() for tensor, _ in case.changed]
        case.restore()
        for (tensor, _), earlier, later in zip(case.changed, before, changed, strict=True):
            assert torch.equal(tensor, earlier)
            assert not torch.equal(later, earlier), f"{case.function} does not change it"


def test_the_processor_is_named():
    assert processor_name("processor : 0\nmodel name\t: A CPU @ 3 GHz\nmodel name\t: B\n") == (
        "A CPU @ 3 GHz"
    )
    assert processor_name("CPU part : 0xd0c\n") == "unknown processor"
