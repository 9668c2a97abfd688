"""Training: torch autograd and optim on top of `daso.comm` and `daso.plan`."""
