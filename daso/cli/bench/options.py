"""Options of a bench: checks, defaults, and the place where it runs."""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, get_args

from daso.cli.bench.names import WIRES
from daso.errors import ConfigError
from daso.plan.allreduce_plan import Algorithm
from daso.predict.links import parse_rate

if TYPE_CHECKING:
    from daso.cli.bench.places import RankStarter


def links(chosen: argparse.Namespace, usual: str = "") -> list[str]:
    """Return the links of a comma-separated option."""
    from daso.cli.bench.places import HERE

    names = [word.strip() for word in (chosen.link or usual).split(",")]
    for link in names:
        if link != HERE:
            parse_rate(link)
            if chosen.hosts is None:
                raise ConfigError(
                    f"--link must be {HERE}, not {link}; hosts with links of a rate are made by "
                    f"scripts/bench, in the project's repository",
                    code="link-not-available",
                )
    return names


def at_least_one(word: str) -> int:
    """Parse a whole number of at least 1; 0 would mean that the option is absent."""
    if not (word.isdecimal() and int(word) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {word!r}")
    return int(word)


def more_than_zero(word: str) -> float:
    """Parse a number above 0; see `at_least_one`."""
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of more than 0, not {word!r}")
    return number


def settle_seconds(chosen: argparse.Namespace, usual: float) -> float:
    """Return the seconds before the first round, which may be 0."""
    if chosen.settle is None:
        return usual
    if not chosen.settle >= 0:
        raise ConfigError(
            f"--settle must be 0 or more seconds, not {chosen.settle}", code="settle-below-zero"
        )
    return float(chosen.settle)


def rounds(chosen: argparse.Namespace) -> int:
    """Return the number of rounds."""
    return chosen.rounds or (3 if chosen.quick else 7)


def named(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` for unknown contenders."""
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--only must be one of {'; '.join(known)}, not {name!r}", code="unknown-bench-part"
            )


def nodes(text: str) -> list[int]:
    """Return the numbers of nodes of a comma-separated option."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 1 for word in words):
        raise ConfigError(
            f"--nodes must be numbers from 2 up such as 2,3,4, not {text!r}",
            code="bench-nodes-invalid",
        )
    return [int(word) for word in words]


def algorithms(text: str) -> list[Algorithm]:
    """Return the algorithms of a comma-separated option."""
    known = [name for name in get_args(Algorithm) if name != "mpi"]
    names = [word.strip() for word in text.split(",")]
    if not set(names) <= set(known):
        raise ConfigError(
            f"--algorithm must be of {', '.join(known)}, by commas, not {text!r}",
            code="bench-algorithm-unknown",
        )
    return [name for name in get_args(Algorithm) if name in names]


def wires(text: str) -> list[str]:
    """Return the wires of a comma-separated option."""
    names = [word.strip() for word in text.split(",")]
    if not set(names) <= set(WIRES):
        raise ConfigError(
            f"--wire must be of {', '.join(WIRES)}, by commas, not {text!r}",
            code="bench-wire-unknown",
        )
    return [name for name in WIRES if name in names]


def rates(name: str, text: str) -> list[float]:
    """Return rates in bytes per second of a comma-separated option in GB/s; 0 means unlimited."""
    try:
        gigabytes = [float(word) for word in text.split(",")]
    except ValueError:
        gigabytes = [-1.0]
    if not all(0 <= speed < float("inf") for speed in gigabytes):
        raise ConfigError(
            f"--{name} must be GB/s such as 0,1,0.25, 0 for as it is, not {text!r}",
            code="bandwidths-not-numbers",
        )
    return [speed * 1e9 for speed in gigabytes]


def numbers(name: str, text: str) -> list[float]:
    """Return the numbers (at least 1) of a comma-separated option."""
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(1 <= value < 1e6 for value in values):
        raise ConfigError(
            f"--{name} must be numbers from 1 up such as 3,1.5, not {text!r}",
            code="slowdowns-not-numbers",
        )
    return values


def counts(name: str, text: str) -> list[int]:
    """Return the whole numbers (at least 1) of a comma-separated option."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(
            f"--{name} must be numbers such as 1,2, not {text!r}", code="bench-values-not-numbers"
        )
    return [int(word) for word in words]


def rate(link: str) -> float:
    """Return the bits per second of a link; 0 if it is unlimited."""
    from daso.cli.bench.places import HERE

    return 0.0 if link in (HERE, "none") else float(parse_rate(link) or 0)


def unequal(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the options that make links of hosts differ, if the bench has them."""
    names = ("racks", "uplink", "slow_link")
    return {name: getattr(chosen, name) for name in names if name in chosen}


def places(
    chosen: argparse.Namespace, links: Sequence[str], count: int
) -> Iterator[tuple["RankStarter", list[str]]]:
    """Yield this machine and a cluster of hosts, each with the links to measure there."""
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
