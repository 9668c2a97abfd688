"""Measurements beside rivals in the same run: `daso bench --help`.

`command` starts the ranks; there each bench is a `measure`.
"""
