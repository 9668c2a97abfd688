"""Decisions: pure functions of plain values, standard library only."""
