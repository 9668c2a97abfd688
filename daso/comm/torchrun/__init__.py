"""Ranks that torchrun started become a world of MPI, where that is MPICH."""
