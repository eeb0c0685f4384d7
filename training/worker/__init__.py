"""A worker: computes what a host grants it."""
