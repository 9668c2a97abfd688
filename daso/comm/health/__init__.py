"""Liveness of ranks, lost ranks and spares, and ranks that are out of step."""
