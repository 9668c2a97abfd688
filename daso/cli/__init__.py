"""The `daso` command line."""
