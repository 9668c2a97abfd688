"""Gradients averaged inside a node and, in synchronous phases, between nodes."""
