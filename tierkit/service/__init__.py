"""Runtime of all four services: `serve(build, settings)` runs an application until a signal drains it."""

from tierkit.service.address import free_port, reachable_url
from tierkit.service.lifecycle import Check, Lifecycle
from tierkit.service.serve import Build, running, serve, spare_collections

__all__ = ["Build", "Check", "Lifecycle", "free_port", "reachable_url", "running", "serve", "spare_collections"]
