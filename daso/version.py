"""The version, importable without any other module."""

__version__ = "0.2.0"
