"""Words of bench tables: contenders whose figures are published, wires, sizes of nodes."""

from collections.abc import Sequence

COMPUTE = "compute only"
OURS = "DASO Auto"
DDP = "DDP, gloo"
WIRES = ("fp32", "bf16", "int8", "int4", "int2")  # of the exchange bench


def size_of_nodes(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks of the nodes in words: ``2 nodes of 1 rank``."""
    nodes = "1 node" if len(ranks) == 1 else f"{len(ranks)} nodes"
    sizes = ranks[:1] if len(set(ranks)) == 1 else ranks
    numbers = ", ".join(map(str, sizes[:-1])) + " and " if len(sizes) > 1 else ""
    return f"{nodes} of {numbers}{sizes[-1]} {'rank' if list(sizes) == [1] else 'ranks'}"
