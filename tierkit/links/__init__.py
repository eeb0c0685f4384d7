"""Emulated links: delay, bandwidth, jitter and loss between services, applied where their HTTP clients send.

    client = ServiceClient(LinkTransport(read_links(path), HttpTransport(...)), timeout=httpx.Timeout(5.0))

No service knows of it: `tierkit.http.client.open_client` puts the transport in when the setting `links` names a file.
"""

from tierkit.links.profile import DelayS, Links, LinkSpec, LinkTo, read_links
from tierkit.links.schedule import Fate, Fault, draw_fate, transmitted_at
from tierkit.links.transport import LinkTransport, WallClock

__all__ = [
    "DelayS",
    "Fate",
    "Fault",
    "LinkSpec",
    "LinkTo",
    "LinkTransport",
    "Links",
    "WallClock",
    "draw_fate",
    "read_links",
    "transmitted_at",
]
