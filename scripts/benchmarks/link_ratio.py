"""What `sweep_link` estimates of a faster device, beside that device. SIMULATED devices.

The device of the tests (tests/support/pretended_cuda), whose copies take what a link of a rate
takes, told by its own code and not by what slows copies down. The program copies batches to the
device ahead, computes for a known time, and reads a loss back after each.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from daso.errors import ExchangeError

__all__ = ["figures", "measure", "table"]

TESTS = Path(__file__).parents[2] / "tests" / "support"
BATCH_BYTES = 4 << 20
COMPUTE_SECONDS = 8e-3
COPIES = (0.3, 0.8, 1.5)  # times computing that a batch takes over the link
FASTER = (1.5, 2.0, 3.0)  # devices that are estimated
STEPS = 16


def measure() -> dict[str, Any]:
    """Sweep and measure in a process that has a simulated device; blocking."""
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.link_ratio"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise ExchangeError(f"the simulated device failed: {run.stderr.strip()[-2000:]}")
    rows: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return {"rows": rows}


def _rows() -> list[dict[str, Any]]:
    """Return what is estimated and measured; in a process that has the device."""
    pretended_cuda: Any = import_module("pretended_cuda")  # before torch

    pretended_cuda.install()
    import torch

    from daso.predict import sweep_link

    side, cycles = torch.cuda.Stream(), pretended_cuda.CYCLES_PER_SECOND
    batches = [torch.ones(BATCH_BYTES // 4, pin_memory=True) for _ in range(2)]
    loss = torch.zeros(1, device="cuda")

    def ahead(step: int) -> Any:
        with torch.cuda.stream(side):
            batch = batches[step % 2].to("cuda", non_blocking=True)
            came = torch.cuda.Event()
            came.record(side)
        return batch, came

    def train(compute_seconds: float) -> None:
        coming = ahead(0)
        for step in range(STEPS):
            (batch, came), coming = coming, ahead(step + 1)
            torch.cuda.current_stream().wait_event(came)
            batch.record_stream(torch.cuda.current_stream())
            torch.cuda._sleep(int(compute_seconds * cycles))
            loss.cpu()
        torch.cuda.synchronize()

    rows = []
    for copy in COPIES:
        pretended_cuda.set_link(BATCH_BYTES / (copy * COMPUTE_SECONDS))
        sweep = sweep_link(lambda: train(COMPUTE_SECONDS))
        for times in FASTER:
            train(COMPUTE_SECONDS / times)
            begun = time.perf_counter()
            train(COMPUTE_SECONDS / times)
            measured = time.perf_counter() - begun
            rows.append(
                {
                    "copy": copy,
                    "times": times,
                    "estimated_ms": 1e3 * sweep.estimate(times) / STEPS,
                    "measured_ms": 1e3 * measured / STEPS,
                    "now_ms": 1e3 * sweep.seconds_with(1) / STEPS,
                    "sweep_ms": [1e3 * one / STEPS for one in sweep.seconds],
                }
            )
    return rows


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    lines = [
        "simulated devices over the same link",
        f"{'copy / compute':>15}{'faster':>8}{'now ms':>9}{'target ms':>11}{'estimated ms':>14}"
        f"{'error':>8}",
    ]
    for row in found["rows"]:
        lines.append(
            f"{row['copy']:>15g}{row['times']:>7g}x{row['now_ms']:>9.2f}{row['measured_ms']:>11.2f}"
            f"{row['estimated_ms']:>14.2f}{row['estimated_ms'] / row['measured_ms'] - 1:>8.1%}"
        )
    return "\n".join(lines)


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures over all settings."""
    off = [abs(row["estimated_ms"] / row["measured_ms"] - 1) for row in found["rows"]]
    return {
        "link_ratio_error_median": {
            "value": statistics.median(off),
            "unit": "part of the measured step time",
            "conditions": f"a SIMULATED device, {len(off)} settings: batches that take "
            f"{', '.join(map(str, COPIES))} of computing over the link, devices "
            f"{', '.join(map(str, FASTER))} times as fast; worst {max(off):.1%}",
        }
    }


if __name__ == "__main__":
    print(json.dumps(_rows()))
