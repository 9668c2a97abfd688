"""Names of the contenders whose figures are kept."""

__all__ = ["COMPUTE", "DDP", "OURS", "UNBOUNDED"]

COMPUTE = "compute only"
OURS = "DASO Auto"
DDP = "DDP, gloo"
UNBOUNDED = "unbounded"
