"""Checkpoints, random states, and stop requests by signals."""
