"""Placement: which nodes serve a task after the end device. Mapping, routes, bounds, the scheme `adaptive`."""
