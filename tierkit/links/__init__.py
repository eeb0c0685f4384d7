"""Emulated links: delay, bandwidth, jitter and loss between services, applied where their HTTP clients send.

No service knows of it: `tierkit.http.client.open_client` puts the middleware in when the setting `links` names a file.
"""

from tierkit.links.middleware import LinkMiddleware, WallClock
from tierkit.links.profile import DelayS, Links, LinkSpec, LinkTo, read_links
from tierkit.links.schedule import Fate, Fault, draw_fate, transmitted_at

__all__ = [
    "DelayS",
    "Fate",
    "Fault",
    "LinkMiddleware",
    "LinkSpec",
    "LinkTo",
    "Links",
    "WallClock",
    "draw_fate",
    "read_links",
    "transmitted_at",
]
