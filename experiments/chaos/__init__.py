"""Chaos: real services under load, faults at bad moments, and a count of what got lost."""
