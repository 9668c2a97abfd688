"""What slows parts of this machine down, each for as long as a ``with`` lasts."""
