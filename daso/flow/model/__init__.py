"""Graphs that a user builds: nodes, edges and layers."""
