"""Measurements on links of a known rate, beside rivals in the same run: `daso bench --help`.

`command` starts the ranks, on hosts of their own (`hosts`); there each bench is a `measure`.
"""
