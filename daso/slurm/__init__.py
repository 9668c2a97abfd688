"""SLURM jobs: profiles of sites, batch scripts, submission, states of the queue."""
