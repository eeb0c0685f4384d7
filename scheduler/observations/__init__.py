"""Observations that the sources of devices send, and how people see them."""
