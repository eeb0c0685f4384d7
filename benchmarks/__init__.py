"""Benchmarks that run from a checkout: `python -m benchmarks NAME`. They are not part of the wheel."""
