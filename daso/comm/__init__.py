"""Mechanism over flat one-dimensional buffers; the only importer of mpi4py and cupy."""
