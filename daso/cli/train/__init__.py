"""`daso train`: configuration, the loop, resume, the report of a run."""
