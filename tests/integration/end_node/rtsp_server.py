"""An RTSP server of GStreamer, for Debian's own Python.

/usr/bin/python3 rtsp_server.py PORT WIDTH HEIGHT [USER PASSWORD]

It says "ready" on standard output once it listens.
"""

import sys

import gi  # type: ignore[import-not-found]  # of Debian's Python

gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer  # type: ignore[import-not-found]  # noqa: E402  # versions come first

port, width, height, *credentials = sys.argv[1:]
Gst.init(None)
server = GstRtspServer.RTSPServer()
server.set_address("127.0.0.1")
server.set_service(port)
factory = GstRtspServer.RTSPMediaFactory()
factory.set_shared(True)
factory.set_launch(
    f"( videotestsrc is-live=true pattern=ball ! video/x-raw,width={width},height={height},framerate=10/1"
    " ! x264enc tune=zerolatency speed-preset=ultrafast key-int-max=10 ! rtph264pay name=pay0 pt=96 )"
)
if credentials:
    auth = GstRtspServer.RTSPAuth()
    token = GstRtspServer.RTSPToken()
    token.set_string("media.factory.role", "user")
    auth.add_basic(GstRtspServer.RTSPAuth.make_basic(*credentials), token)
    server.set_auth(auth)
    permissions = GstRtspServer.RTSPPermissions()
    permissions.add_permission_for_role("user", "media.factory.access", True)
    permissions.add_permission_for_role("user", "media.factory.construct", True)
    factory.set_permissions(permissions)
server.get_mount_points().add_factory("/main", factory)
server.attach(None)
print("ready", flush=True)  # noqa: T201  # for the test
GLib.MainLoop().run()
