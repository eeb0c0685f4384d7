"""HTTP/1.1 as a client: what services call each other with.

    http = ServiceClient(HttpTransport(context, max_connections=64, keepalive_s=30.0), timeout=httpx.Timeout(5.0))

The transport of httpx itself passes each byte through httpcore, anyio and h11, its client looks for cookies and
redirects: several times as much CPU time as the sockets and this transport need. A scheduler on a small machine sends a
thousand requests a second. Here a request leaves no objects in a circle, where httpx leaves fifty. What users send
with (`tierkit.client`) is plain httpx.
"""

from tierkit.http1.client import ServiceClient
from tierkit.http1.transport import HttpTransport
from tierkit.http1.way import Answer, Fields, Question, Way

__all__ = ["Answer", "Fields", "HttpTransport", "Question", "ServiceClient", "Way"]
