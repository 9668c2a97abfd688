"""The project's own evidence: what its figures are taken with; `scripts/bench --help`."""
