"""Arithmetic of an exchange: encode, reduce and accept, and helpers, each in one pass over memory.

Three implementations have one signature and give the same bits: `torch_kernels` (the reference and
the fallback), `native` (C, for CPUs) and `triton_kernels` (for GPUs). `choice` picks one by device.
"""
