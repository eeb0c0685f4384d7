"""Observations at the scheduler, measured: many devices, many rows, many readers."""
