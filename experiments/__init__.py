"""Experiments: measurements of a fleet that leave records."""
