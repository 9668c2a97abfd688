"""Step times of ways to train, rivals of other packages included."""

from typing import Any

from benchmarks.third_party import EVERYBODY
from daso.cli.bench import train
from daso.comm.topology import Topology

__all__ = ["Plan", "measure"]

Plan = train.Plan


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Train with all in turn. Collective over the world; blocking."""
    return train.measure(plan, topology, EVERYBODY)
