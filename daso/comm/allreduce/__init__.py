"""All-reduce algorithms: direct, in levels or a ring, and what runs them."""
