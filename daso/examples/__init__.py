"""Short complete programs, written as a user would write them."""
