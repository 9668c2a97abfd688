"""Messages between two ranks: for the parameter server and flows."""
