"""Checkpoints, the random state in them, and the signals that ask for one."""
