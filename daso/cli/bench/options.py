"""What a bench was asked for, checked, and where it runs."""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, get_args

from daso.cli.bench.names import WIRES
from daso.errors import ConfigError
from daso.plan.allreduce_plan import Algorithm
from daso.predict.link_rate import parse_rate

if TYPE_CHECKING:
    from daso.cli.bench.places import RankStarter

__all__ = [
    "algorithms",
    "at_least_one",
    "counts",
    "links",
    "measured",
    "more_than_zero",
    "named",
    "nodes",
    "numbers",
    "places",
    "rate",
    "rates",
    "rounds",
    "settle_seconds",
    "unequal",
    "wires",
]


def links(chosen: argparse.Namespace, usual: str = "") -> list[str]:
    """Return the links that were asked for, by commas."""
    from daso.cli.bench.places import HERE

    found = [word.strip() for word in (chosen.link or usual).split(",")]
    for link in found:
        if link != HERE:
            parse_rate(link)
            if chosen.hosts is None:
                raise ConfigError(
                    f"--link must be {HERE}, not {link}: hosts with links of a rate are made by "
                    f"scripts/bench, in the project's repository"
                )
    return found


def at_least_one(word: str) -> int:
    """Return the whole number that a word says: 0 would be taken for an option left out."""
    if not (word.isdecimal() and int(word) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {word!r}")
    return int(word)


def more_than_zero(word: str) -> float:
    """Return the number that a word says, as `at_least_one`."""
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of more than 0, not {word!r}")
    return number


def settle_seconds(chosen: argparse.Namespace, usual: float) -> float:
    """Return the seconds before the first round: as asked for, which may be none at all."""
    if chosen.settle is None:
        return usual
    if not chosen.settle >= 0:
        raise ConfigError(f"--settle must be 0 or more seconds, not {chosen.settle}")
    return float(chosen.settle)


def rounds(chosen: argparse.Namespace) -> int:
    """Return how many rounds were asked for."""
    return chosen.rounds or (3 if chosen.quick else 7)


def named(names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse contenders that are not known."""
    for name in names:
        if name not in known:
            raise ConfigError(f"--only must be one of {'; '.join(known)}, not {name!r}")


def nodes(text: str) -> list[int]:
    """Return the numbers of nodes that were asked for, by commas."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 1 for word in words):
        raise ConfigError(f"--nodes must be numbers from 2 up such as 2,3,4, not {text!r}")
    return [int(word) for word in words]


def algorithms(text: str) -> list[Algorithm]:
    """Return the algorithms of exchanges that were asked for, by commas."""
    known = [name for name in get_args(Algorithm) if name != "mpi"]
    found = [word.strip() for word in text.split(",")]
    if not set(found) <= set(known):
        raise ConfigError(f"--algorithm must be of {', '.join(known)}, by commas, not {text!r}")
    return [name for name in get_args(Algorithm) if name in found]


def wires(text: str) -> list[str]:
    """Return what crosses in exchanges that were asked for, by commas."""
    found = [word.strip() for word in text.split(",")]
    if not set(found) <= set(WIRES):
        raise ConfigError(f"--wire must be of {', '.join(WIRES)}, by commas, not {text!r}")
    return [name for name in WIRES if name in found]


def rates(name: str, text: str) -> list[float]:
    """Return rates in bytes per second that were asked for in GB/s, by commas; 0: as it is."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= one < float("inf") for one in found):
        raise ConfigError(f"--{name} must be GB/s such as 0,1,0.25, 0 for as it is, not {text!r}")
    return [one * 1e9 for one in found]


def numbers(name: str, text: str) -> list[float]:
    """Return numbers from 1 up that were asked for, by commas."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(1 <= one < 1e6 for one in found):
        raise ConfigError(f"--{name} must be numbers from 1 up such as 3,1.5, not {text!r}")
    return found


def counts(name: str, text: str) -> list[int]:
    """Return whole numbers from 1 up that were asked for, by commas."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--{name} must be numbers such as 1,2, not {text!r}")
    return [int(word) for word in words]


def rate(link: str) -> float:
    """Return the bits per second of a link; 0 where there is no limit."""
    from daso.cli.bench.places import HERE

    return 0.0 if link in (HERE, "none") else float(parse_rate(link) or 0)


def unequal(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return how links differ that hosts have, where the bench has options for that."""
    names = ("racks", "uplink", "slow_link")
    return {name: getattr(chosen, name) for name in names if name in chosen}


def places(
    chosen: argparse.Namespace, links: Sequence[str], count: int
) -> Iterator[tuple["RankStarter", list[str]]]:
    """Yield this machine and so many hosts, each with those of the links that it has."""
    from daso.cli.bench.places import HERE, Here

    if HERE in links:
        yield Here(), [HERE]
    rates = [link for link in links if link != HERE]
    if rates:
        with chosen.hosts(count, **unequal(chosen)) as cluster:
            yield cluster, rates


def measured(
    chosen: argparse.Namespace,
    kind: str,
    links: Sequence[str],
    sizes: Sequence[int],
    plan: Callable[[str], dict[str, Any]],
    ranks: int,
) -> Iterator[dict[str, Any]]:
    """Measure on every link with every number of nodes."""
    for place, known in places(chosen, links, max(sizes)):
        for link, nodes in product(known, sizes):
            yield place.run(kind, plan(link), link=link, nodes=nodes, ranks=ranks)
