"""What ranks recorded, on one clock: recording, clock offsets, reports."""
