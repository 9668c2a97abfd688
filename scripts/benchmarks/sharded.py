"""Models that FSDP2 shards inside a node: who averages between nodes, and what a step takes."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import daso
from daso.cli.bench import train
from daso.cli.bench.baselines import Contender, Daso, Make, Plain
from daso.cli.bench.models import Case
from daso.cli.bench.rounds import over
from daso.comm.process_group import node_mesh
from daso.comm.topology import Topology

__all__ = ["ALONE", "HSDP", "OURS", "SELDOM", "SHARDED", "Plan", "figures", "measure", "table"]

ALONE = "FSDP2 in nodes alone"  # nothing crosses between nodes
HSDP = "HSDP of torch, gloo"
OURS = "FSDP2 + DASO Auto"
SELDOM = "FSDP2 + DASO Fixed(8, 4)"  # as the default once it exchanges seldom
NAMES = {OURS: "sharded_step_ratio", SELDOM: "sharded_seldom_step_ratio", HSDP: "hsdp_step_ratio"}

Plan = train.Plan


def _start(case: Case, topology: Topology, *, between: bool) -> tuple[nn.Module, Any]:
    """Return a model that is sharded over this node, and averaged by torch between nodes."""
    torch.manual_seed(0)
    model, mesh = case.build(), node_mesh(topology, "cpu")
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh if between else mesh["local"])
    fully_shard(model, mesh=mesh if between else mesh["local"])
    return model, case.optimizer(list(model.parameters()))


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield what is gathered at a time: each element of a list or sequence that has parameters."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (one for one in child if any(True for _ in one.parameters()))


def _alone(case: Case, topology: Topology) -> Contender:
    return Plain(*_start(case, topology, between=False))


def _hsdp(case: Case, topology: Topology) -> Contender:
    return Plain(*_start(case, topology, between=True))


def _ours(**keywords: Any) -> Make:
    def make(case: Case, topology: Topology) -> Contender:
        return Daso(*_start(case, topology, between=False), topology, **keywords)

    return make


SHARDED: Mapping[str, Make] = {
    ALONE: _alone,
    OURS: _ours(),
    SELDOM: _ours(policy=daso.Fixed(8, 4)),
    HSDP: _hsdp,
}


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Train with all in turn. Collective over the world; blocking."""
    return train.measure(plan, topology, SHARDED)


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines, each also over FSDP2 in nodes alone."""
    ratios = {name: statistics.median(mine) for name, mine in _over_alone(found).items()}
    head, columns, *lines = train.table(found).splitlines()
    rows = zip(lines, found["rows"], strict=True)
    return "\n".join(
        [head, f"{columns}{'x alone':>9}"]
        + [_with_ratio(line, ratios.get(row["name"])) for line, row in rows]
    )


def _with_ratio(line: str, ratio: float | None) -> str:
    numbers, said, chosen = line.partition("  skip")
    return f"{numbers}{'-' if ratio is None else f'{ratio:.3f}':>9}{said}{chosen}"


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of this link."""
    head = table(found).splitlines()[0]
    return {
        f"{NAMES[name]}_{found['plan']['link']}": {
            "value": statistics.median(ratios),
            "unit": f"ratio of step times, over {ALONE}",
            "conditions": f"{name}: {head}",
        }
        for name, ratios in _over_alone(found).items()
        if name in NAMES
    }


def _over_alone(found: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return step times over those of nodes alone in the same round.

    Not over compute only: ranks that are done with a round wait for the others on cores which those
    need, where nothing keeps them in step and there are more ranks than cores.
    """
    seconds = {
        row["name"]: [one["seconds"] for one in row["rounds"]]
        for row in found["rows"]
        if row["name"] in SHARDED
    }
    return {name: over(mine, seconds[ALONE]) for name, mine in seconds.items()}
