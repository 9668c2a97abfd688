"""SLURM jobs: site profiles, batch scripts, submission, queue states."""
