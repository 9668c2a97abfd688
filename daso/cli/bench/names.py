"""Names of what is measured: contenders whose figures are kept, and what crosses."""

__all__ = ["COMPUTE", "DDP", "OURS", "UNBOUNDED", "WIRES"]

COMPUTE = "compute only"
OURS = "DASO Auto"
DDP = "DDP, gloo"
UNBOUNDED = "unbounded"
WIRES = ("fp32", "bf16", "int8", "int4", "int2")  # of one exchange that is measured
