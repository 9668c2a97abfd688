"""The user's optimizer, and what is known of it: how it steps, scales, and restores steps."""
