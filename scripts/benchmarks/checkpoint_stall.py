"""How long a checkpoint holds training up: written at once, or beside it by a thread."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import daso
from daso.checkpoint.state import Checkpoints
from daso.cli.bench.baselines import start
from daso.cli.bench.models import CASES, loss_of
from daso.cli.bench.rounds import take_turns
from daso.comm.topology import Topology

__all__ = ["Plan", "figures", "measure", "table"]

SELDOM = daso.Fixed(8, 4)
NONE, BLOCKING, BACKGROUND = "none", "at once", "in the background"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Args:
        model: One of `CASES`.
        rounds: Of each way.
        steps: Of a round, which saves once, after the first step.
        folder: Where; a temporary folder if empty.
    """

    model: str
    rounds: int
    steps: int
    folder: str


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Train in turn without a checkpoint, and with one of each way.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    folder = Path(topology.world_comm.bcast(tempfile.mkdtemp(dir=plan.folder or None)))
    training = _Training(plan, topology, Checkpoints(folder, topology, keep=1))
    names = (NONE, BLOCKING, BACKGROUND)
    for name in names:
        training.turn(name)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for name in take_turns(names, plan.rounds):
        rounds[name].append(training.turn(name))
    file = next(folder.glob("step-*/rank-00000.pt")).stat().st_size
    training.optimizer.close()
    topology.world_comm.Barrier()
    if topology.rank == 0:
        shutil.rmtree(folder)
    return {
        "plan": {**asdict(plan), "folder": ""},
        "ranks": topology.world_size,
        "file_bytes": file,
        "rounds": rounds,
    }


class _Training:
    """A model that is trained round by round."""

    def __init__(self, plan: Plan, topology: Topology, store: Checkpoints) -> None:
        case = CASES[plan.model]
        self.model, inner = start(case)
        self.optimizer = daso.DASO(inner, module=self.model, topology=topology, policy=SELDOM)
        self._batches, self._steps = case.batches(topology.rank), plan.steps
        self._world, self._store, self._saved = topology.world_comm, store, 0

    def turn(self, name: str) -> dict[str, float]:
        """Return seconds until the steps are taken, in `save`, and until all is written."""
        self._world.Barrier()
        begun, saving = time.perf_counter(), 0.0
        for step in range(self._steps):
            self.optimizer.zero_grad()
            loss_of(self.model, *next(self._batches)).backward()
            self.optimizer.step()
            if step == 0 and name != NONE:
                saving = self._save(background=name == BACKGROUND)
        self._world.Barrier()
        steps = time.perf_counter() - begun
        self._store.wait()
        mine = {"steps": steps, "save": saving, "written": time.perf_counter() - begun}
        everyones = self._world.allgather(mine)
        return {key: max(one[key] for one in everyones) for key in mine}

    def _save(self, *, background: bool) -> float:
        """Save, and return how long that took."""
        self._saved += 1
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        before = time.perf_counter()
        self._store.save(self._saved, state, background=background)
        return time.perf_counter() - before


def _stall_seconds(found: Mapping[str, Any], name: str) -> float:
    """Return by how much longer steps take with a checkpoint, the median over rounds."""
    pairs = zip(found["rounds"][name], found["rounds"][NONE], strict=True)
    return float(statistics.median(one["steps"] - none["steps"] for one, none in pairs))


def table(found: Mapping[str, Any]) -> str:
    """Return the ways as aligned lines."""
    lines = [_conditions(found), f"{'':<20}{'stall s':>9}{'in save s':>11}{'written s':>11}"]
    for name in (BLOCKING, BACKGROUND):
        rounds = found["rounds"][name]
        saving, written = (
            statistics.median(one[key] for one in rounds) for key in ("save", "written")
        )
        stall = _stall_seconds(found, name)
        lines.append(f"{name:<20}{stall:>9.3f}{saving:>11.3f}{written:>11.3f}")
    return "\n".join(lines)


def _conditions(found: Mapping[str, Any]) -> str:
    plan = found["plan"]
    steps = statistics.median(one["steps"] for one in found["rounds"][NONE])
    return (
        f"{plan['model']}, {found['ranks']} ranks of this machine, {found['file_bytes'] / 1e6:.0f} "
        f"MB a rank, {plan['steps']} steps that take {steps:.2f} s, medians of {plan['rounds']} "
        f"alternating rounds"
    )


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figure."""
    return {
        "checkpoint_stall_ratio": {
            "value": _stall_seconds(found, BACKGROUND) / _stall_seconds(found, BLOCKING),
            "unit": "seconds that a checkpoint holds training up: in the background over at once",
            "conditions": _conditions(found),
        }
    }
