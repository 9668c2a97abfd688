"""All-reduce algorithms: direct, multi-level or ring, and their runners."""
