"""A training step of fixed structure that runs in one piece of memory, planned in advance."""
