"""Whether ranks are alive, in step, and told to stop."""
