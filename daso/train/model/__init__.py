"""The trained model: parameters, their gradients and memory, hooks on modules."""
