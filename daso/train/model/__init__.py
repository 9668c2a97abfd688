"""What is trained: parameters, their gradients and memory, hooks on modules."""
