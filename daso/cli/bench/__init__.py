"""Benchmarks of daso and alternatives in the same run: `daso bench --help`.

`command` starts the ranks; there each bench is a `measure`.
"""
