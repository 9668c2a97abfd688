"""Testing tools for a training: faults injected at chosen moments."""
