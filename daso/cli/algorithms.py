"""`daso doctor --nodes N`: the all-reduce plan and cost of each algorithm for N nodes."""

from collections.abc import Sequence
from typing import Any

from daso.checks import check, positive, whole
from daso.errors import ConfigError
from daso.plan.allreduce_plan import Algorithm, AllReducePlan, named_plan
from daso.plan.cost_model import LinkCosts, allreduce_cost, choose_plan
from daso.predict.links import FASTEST_PREDICTED, parse_rate

BYTES = 2  # per number on the wire: bf16, the first wire of exchanges
MOST_NODES = 100_000
DEFAULT_RATE = 10**9  # bits per second of `LinkCosts`' default link
NAMED: tuple[Algorithm, ...] = ("direct", "two-level", "halving", "ring")


def costs_of(nodes: int, parameters: float, link: str = "1gbit") -> list[dict[str, Any]]:
    """Return the cost per node of one exchange for each algorithm, the chosen one first."""
    check("--nodes", nodes, whole(2, MOST_NODES))
    check("--parameters", parameters, positive(1e15))
    rate = parse_rate(link, FASTEST_PREDICTED)
    if rate is None:
        raise ConfigError(
            f"--link must be a rate such as 10gbit, not {link!r}", code="link-without-rate"
        )
    nbytes = BYTES * parameters
    costs = LinkCosts(byte_seconds=LinkCosts().byte_seconds * DEFAULT_RATE / rate)
    plans = {"auto": choose_plan("auto", nodes, nbytes, costs)}
    plans |= {name: named_plan(name, nodes) for name in NAMED}
    return [_row(name, plan, nbytes, costs) | {"link": link} for name, plan in plans.items()]


def _row(algorithm: str, plan: AllReducePlan, nbytes: float, costs: LinkCosts) -> dict[str, Any]:
    cost = allreduce_cost(plan, nbytes, costs)
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
        f"{first['megabytes']:.1f} MB of bf16 over {first['nodes']} nodes, links of "
        f"{first['link']}; of each node, predicted",
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
