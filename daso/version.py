"""The version, where packaging and checkpoints find it without importing anything else."""

__all__ = ["__version__"]

__version__ = "0.2.0"
