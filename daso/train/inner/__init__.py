"""The user's optimizer: its traits, its steps, GradScaler support and step restoration."""
