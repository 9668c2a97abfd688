"""Times the kernels of an exchange on one core, in nanoseconds a number.

Each row of the table is one function on one wire; its columns are a plain copy of as many fp32
numbers, the torch operations, and the C kernels of each instruction set of this processor. Columns
alternate within a round. Operands that a kernel changes are restored before each call; that time is
not counted.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from daso.cli.bench.options import at_least_one
from daso.cli.bench.rounds import take_turns
from daso.cli.train.report import versions
from daso.kernels import torch_kernels
from daso.kernels.choice import Kernels
from daso.kernels.codecs import Codec, codec_named
from daso.kernels.native import KernelError, load_native, supported_variants
from daso.kernels.rows import NOWHERE, EncodeRows, FlatTensors, Mean, ShardRows
from daso.strict import json_by_rows

__all__ = ["Case", "Row", "cases", "figures", "implementations", "main", "measure"]

NUMEL = 4_580_000  # the CNN of `daso bench train`
WIRES = ("fp32", "bf16", "fp16", "int8", "int4", "int2", "topk")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL_TENSORS, SMALL_NUMEL = 200, 1000
COPY, TORCH = "copy", "torch"
# Part of a figure's name: the function whose time it is.
FIGURES = {"encode": "encode, residual", "reduce2": "reduce 2 to row", "accept": "accept 1"}
FIGURE_WIRES = ("int4", "int8", "bf16")
WIDTH = 11  # of a column


@dataclass(frozen=True, slots=True)
class Case:
    """One function with its operands.

    Args:
        function: Row label.
        wire: Wire of the payloads, or type of the tensors.
        numel: Numbers that a call works on.
        call: Calls the function of an implementation.
        changed: Pairs (tensor that the call changes, values to restore before it).
    """

    function: str
    wire: str
    numel: int
    call: Callable[[Kernels], None]
    changed: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def restore(self) -> None:
        """Undo the changes of the last call."""
        for tensor, values in self.changed:
            tensor.copy_(values)


@dataclass(frozen=True, slots=True)
class Row:
    """Median nanoseconds a number of one case, by column; C columns are instruction sets."""

    function: str
    wire: str
    numel: int
    ns: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a line of the table."""
        columns = "".join(f"{value:>{WIDTH}.2f}" for value in self.ns.values())
        return f"{self.function:<18}{self.wire:<6}{columns}"


def main(words: Sequence[str] | None = None) -> int:
    """Run the bench.

    Args:
        words: Arguments; the process's own if None.

    Returns:
        Exit code.
    """
    options = parse(words)
    rounds = options.rounds or (3 if options.quick else 9)
    torch.set_num_threads(1)
    columns = implementations()
    conditions = (
        f"{processor_name()}, C kernels {' '.join([*columns][1:]) or 'not built'}, "
        f"{options.numel:,} numbers, one thread, medians of {rounds} alternating rounds"
    )
    print(f"ns a number: {conditions}")
    print("".join([f"{'':<24}", *(f"{name:>{WIDTH}}" for name in (COPY, *columns))]), flush=True)
    rows = []
    for case in cases(options.numel, options.wire or WIRES):
        rows.append(measure(case, columns, rounds))
        print(rows[-1], flush=True)
    if options.json:
        write(options.json, figures(rows, conditions), rows)
    return 0


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench kernels", description=__doc__)
    parser.add_argument("--numel", type=at_least_one, default=NUMEL, help=f"of a row ({NUMEL})")
    parser.add_argument("--rounds", type=at_least_one, help="of each case (9; quick 3)")
    parser.add_argument("--wire", action="append", choices=WIRES, help="several (all)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write figures and rows to this file")
    return parser.parse_args(words)


def implementations() -> dict[str, Kernels]:
    """Return the kernels that run on this processor, by name of their column."""
    columns = {TORCH: cast("Kernels", torch_kernels)}
    for variant in supported_variants():
        try:
            columns[variant] = load_native(variant)
        except KernelError as error:
            print(f"{variant}: {error}", file=sys.stderr)
    return columns


def processor_name(cpuinfo: str | None = None) -> str:
    """Return the processor's model name, as Linux has it."""
    text = Path("/proc/cpuinfo").read_text("utf-8") if cpuinfo is None else cpuinfo
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else "unknown processor"


def measure(case: Case, columns: Mapping[str, Kernels], rounds: int) -> Row:
    """Time a case in every column; each is called once before the first round."""
    here, there = torch.ones(case.numel), torch.ones(case.numel)
    calls: dict[str, Callable[[], Any]] = {COPY: partial(there.copy_, here)}
    calls |= {name: partial(case.call, kernels) for name, kernels in columns.items()}
    times: dict[str, list[int]] = {name: [] for name in calls}
    for name in (*calls, *take_turns(list(calls), rounds)):
        case.restore()
        begin = time.perf_counter_ns()
        calls[name]()
        times[name].append(time.perf_counter_ns() - begin)
    ns = {name: statistics.median(taken[1:]) / case.numel for name, taken in times.items()}
    return Row(case.function, case.wire, case.numel, ns)


# --- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operands:
    """Rows (numel) with the magnitudes of a training's, and room for results.

    Args:
        values: Parameters after some local steps.
        reference: Parameters before them.
        gradients: Gradients, some of them zero.
        residual: Rounding errors of earlier exchanges.
        changed: Row that a kernel changes.
        scratch: Rows that a kernel writes.
    """

    values: torch.Tensor
    reference: torch.Tensor
    gradients: torch.Tensor
    residual: torch.Tensor
    changed: torch.Tensor
    scratch: tuple[torch.Tensor, torch.Tensor]


def make_operands(numel: int) -> Operands:
    """Draw rows; a tensor's deltas have one magnitude, those of different tensors up to 100."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    magnitude = 10 ** (2 * torch.rand(-(-numel // 5000), generator=generator) - 5)
    scales = magnitude.repeat_interleave(5000)[:numel]
    reference = draw(numel) * 0.02
    gradients = draw(numel) * scales
    gradients[torch.rand(numel, generator=generator) < 0.05] = 0
    return Operands(
        values=reference + draw(numel) * scales,
        reference=reference,
        gradients=gradients,
        residual=draw(numel) * scales * 0.1,
        changed=torch.empty(numel),
        scratch=(torch.empty(numel), torch.empty(numel)),
    )


def cases(numel: int, wires: Sequence[str]) -> Iterator[Case]:
    """Yield the cases of the table, in its order."""
    operands = make_operands(numel)
    for wire in WIRES:
        if wire not in wires:
            continue
        codec = codec_named(wire)
        yield from _encode_cases(codec, operands)
        yield from _mean_cases(codec, operands)
        if wire in DTYPES:
            yield from _tensor_cases(wire, operands)


def _encode_cases(codec: Codec, rows: Operands) -> Iterator[Case]:
    numel = rows.values.numel()
    payload = torch.empty(codec.nbytes(numel), dtype=torch.uint8)
    residual, restored = rows.changed, (rows.changed, rows.residual)
    first = torch.full((), NOWHERE, dtype=torch.int64)
    deltas, gradients = FlatTensors([rows.values]), FlatTensors([rows.gradients])

    def encode(values: FlatTensors, kernels: Kernels, **rows_of: Any) -> None:
        kernels.encode(codec, values, [(0, numel)], payload, EncodeRows(**rows_of))

    def case(function: str, values: FlatTensors, **rows_of: Any) -> Case:
        call = partial(encode, values, **rows_of)
        return Case(function, codec.wire, numel, call, [restored] if "residual" in rows_of else [])

    delta = {"reference": rows.reference, "first": first}
    yield case("encode", deltas, **delta)
    yield case(FIGURES["encode"], deltas, **delta, residual=residual, rounding=residual)
    yield case("encode, gradients", gradients, residual=residual, gradients=True)


def _mean_cases(codec: Codec, rows: Operands) -> Iterator[Case]:
    """Yield reductions and merges of the payloads of two nodes."""
    numel, changed = rows.values.numel(), rows.changed
    payloads = [_payload(codec, row) for row in (rows.gradients, rows.residual)]
    one, two = Mean(codec, payloads[:1]), Mean(codec, payloads, (1, 1), 2)
    row, published = rows.scratch
    payload = torch.empty(codec.nbytes(numel), dtype=torch.uint8)
    sums = torch.zeros(3, dtype=torch.float64)
    shard = ShardRows(changed, shown=published, residual=rows.residual)

    def reduce(kernels: Kernels, **to: Any) -> None:
        kernels.reduce(two, numel, **to)

    def accept(mean: Mean, kernels: Kernels) -> None:
        kernels.accept(mean, payloads[0], 0, numel, shard, sums)

    restored, moved = [(changed, rows.residual)], [(changed, rows.reference)]
    carrying = partial(reduce, payload=payload, carry=changed)
    yield Case(FIGURES["reduce2"], codec.wire, numel, partial(reduce, row=row))
    yield Case("reduce 2, carry", codec.wire, numel, carrying, restored)
    yield Case(FIGURES["accept"], codec.wire, numel, partial(accept, one), moved)
    yield Case("accept 2", codec.wire, numel, partial(accept, two), moved)


def _payload(codec: Codec, row: torch.Tensor) -> torch.Tensor:
    payload = torch.empty(codec.nbytes(row.numel()), dtype=torch.uint8)
    torch_kernels.encode(codec, FlatTensors([row]), [(0, row.numel())], payload)
    return payload


def _tensor_cases(wire: str, rows: Operands) -> Iterator[Case]:
    """Yield functions of tensors of a type: a mean inside a node, gather and merge."""
    dtype, numel = DTYPES[wire], rows.values.numel()
    pair = [row.to(dtype) for row in (rows.gradients, rows.residual)]
    mean = torch.empty(numel, dtype=dtype)
    to: dict[str, Any] = {"total": mean} if dtype == torch.float32 else {"to": [mean]}

    def mean_rows(kernels: Kernels) -> None:
        kernels.mean_rows(pair, 2, **to)

    yield Case("mean_rows 2", wire, numel, mean_rows)
    count = SMALL_TENSORS * SMALL_NUMEL
    state = torch.randn(count, generator=torch.Generator().manual_seed(1)) * 0.02
    initial, row, target = state.to(dtype), torch.empty(count), -state
    memory = initial.clone()
    tensors = FlatTensors(memory.split(SMALL_NUMEL))

    def gather(kernels: Kernels) -> None:
        kernels.gather(tensors, 0, count, row)

    def merge(kernels: Kernels) -> None:
        kernels.merge(tensors, target, 0.5)

    yield Case(f"gather {SMALL_TENSORS}", wire, count, gather)
    yield Case(f"merge {SMALL_TENSORS}", wire, count, merge, [(memory, initial)])


# --- figures -------------------------------------------------------------------------------------


def figures(rows: Sequence[Row], conditions: str) -> dict[str, dict[str, Any]]:
    """Return the figures: times of the fastest instruction set, and torch's over them."""
    named: dict[str, dict[str, Any]] = {}
    for row in rows:
        variants = [name for name in row.ns if name not in (COPY, TORCH)]
        keys = [key for key, function in FIGURES.items() if function == row.function]
        if row.wire not in FIGURE_WIRES or not keys or not variants:
            continue
        best, name = variants[0], f"{row.wire}_{keys[0]}"
        where = f"{row.function}, {row.wire}, {best}: {conditions}"
        named[f"{name}_ns"] = {"value": row.ns[best], "unit": "ns a number", "conditions": where}
        named[f"{name}_over_torch"] = {
            "value": row.ns[TORCH] / row.ns[best],
            "unit": "time of torch's operations over that of C",
            "conditions": where,
        }
    return named


def write(path: Path, named: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write figures and rows; the commit of a changed tree ends in -dirty."""
    known = versions("none")
    content = {
        "figures": named,
        "versions": known,
        "date": date.today().isoformat(),
        "commit": known.get("commit", ""),
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json_by_rows(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
