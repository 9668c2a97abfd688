"""MPICH under torchrun: its ranks become one MPI world."""
