"""`daso doctor --nodes N`: how so many nodes would take a mean, and what each algorithm costs."""

from collections.abc import Sequence
from typing import Any

from daso.checks import check, positive, whole
from daso.plan.allreduce_plan import Algorithm, AllReducePlan, named_plan
from daso.plan.cost_model import LinkCosts, allreduce_cost, choose_plan

__all__ = ["costs_of", "table"]

BYTES = 2  # of a number on the wire: bf16, with which exchanges begin
MOST_NODES = 100_000
NAMED: tuple[Algorithm, ...] = ("direct", "two-level", "halving", "ring")


def costs_of(nodes: int, parameters: float) -> list[dict[str, Any]]:
    """Return what each algorithm costs a node for one exchange over 1 Gbit/s, the chosen first."""
    check("--nodes", nodes, whole(2, MOST_NODES))
    check("--parameters", parameters, positive(1e15))
    nbytes = BYTES * parameters
    rows = [_row("auto", choose_plan("auto", nodes, nbytes), nbytes)]
    return rows + [_row(name, named_plan(name, nodes), nbytes) for name in NAMED]


def _row(algorithm: str, plan: AllReducePlan, nbytes: float) -> dict[str, Any]:
    cost = allreduce_cost(plan, nbytes, LinkCosts())
    return {
        "algorithm": algorithm,
        "plan": plan.name,
        "nodes": plan.peers,
        "megabytes": nbytes / 1e6,
        "messages": cost.messages,
        "smallest_kibibytes": cost.smallest_bytes / 1024,
        "sent_megabytes": cost.sent_bytes / 1e6,
        "rounds": cost.rounds,
        "seconds": cost.seconds,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as lines for a terminal."""
    first = rows[0]
    lines = [
        f"{first['megabytes']:.1f} MB of bf16 over {first['nodes']} nodes, links of 1 Gbit/s; of "
        f"each node, predicted",
        f"{'algorithm':<11}{'plan':<26}{'messages':>9}{'KiB least':>11}{'MB sent':>9}"
        f"{'rounds':>8}{'ms':>10}",
    ]
    lines += [
        f"{row['algorithm']:<11}{row['plan']:<26}{row['messages']:>9}"
        f"{row['smallest_kibibytes']:>11.1f}{row['sent_megabytes']:>9.1f}{row['rounds']:>8}"
        f"{1e3 * row['seconds']:>10.1f}"
        for row in rows
    ]
    return "\n".join(lines)
