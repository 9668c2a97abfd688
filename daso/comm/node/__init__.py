"""Transports inside a node: shared memory, NCCL, sums on the host."""
