"""The objects that drive real runs, on virtual time: what a schedule costs before it is queued."""
