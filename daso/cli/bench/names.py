"""Names in bench tables: contenders whose figures are published, and wires."""

COMPUTE = "compute only"
OURS = "DASO Auto"
DDP = "DDP, gloo"
WIRES = ("fp32", "bf16", "int8", "int4", "int2")  # of the exchange bench
