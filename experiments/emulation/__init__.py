"""Emulated machines and links: models that take a given time, and delay, bandwidth, jitter and loss between services.

    python -m experiments.emulation end --links links.toml --emulate-ms-per-image 7.41 ...

starts a service with these; the services know nothing of it.
"""

import sys

__all__ = ["EMULATED"]

EMULATED = (sys.executable, "-P", "-m", "experiments.emulation")
"""Command for `tierkit.fleet.launch` that starts a service with emulated parts."""
