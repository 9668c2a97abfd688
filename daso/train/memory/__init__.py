"""Bigger models in the memory there is: what is saved for backward is swapped or recomputed."""
