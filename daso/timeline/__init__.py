"""Recordings of all ranks on one clock: recording, clock offsets, reports."""
