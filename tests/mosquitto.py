"""Debian's MQTT broker, and a subscriber that misses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiomqtt
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from tierkit.testing import wait_for

__all__ = ["MOSQUITTO", "Broker", "Message", "Subscriber", "broker", "subscriber", "write_password"]

MOSQUITTO = shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

Message = tuple[str, bytes, dict[str, str], bool]
"""Topic, payload, user properties, and whether it was retained."""


class Broker:
    """A mosquitto on a port of this machine.

    Args:
        options: lines of its configuration.
    """

    def __init__(self, folder: Path, *options: str, tls: tuple[Path, Path] | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._folder = folder
        keys = [] if tls is None else [f"certfile {tls[0]}", f"keyfile {tls[1]}"]
        lines = [
            "persistence true",
            f"persistence_location {folder}/",
            "max_queued_messages 0",
            f"listener {self.port} 127.0.0.1",
            *keys,
            *(
                options
                if any(line.startswith("allow_anonymous") for line in options)
                else ("allow_anonymous true", *options)
            ),
            *(["user root"] if os.geteuid() == 0 else []),
        ]
        (folder / "mosquitto.conf").write_text("\n".join(lines) + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    async def start(self) -> None:
        """Returns when it takes connections."""
        self._launch()
        await wait_for(self._listens, what=f"the broker at port {self.port}")

    def _launch(self) -> None:
        assert MOSQUITTO is not None
        with (self._folder / "log").open("ab") as log:
            command = [MOSQUITTO, "-c", str(self._folder / "mosquitto.conf"), "-v"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        """An orderly end: what it has for absent subscribers is on the disk."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(30)
            self._process = None


class Subscriber:
    """All messages that a client of a broker has got, also over its restarts."""

    def __init__(self, port: int, topic: str) -> None:
        self._port, self._topic = port, topic
        self.messages: list[Message] = []
        self.retained: dict[str, bytes] = {}
        """The newest payload by topic, of topics with a retained message; a cleared one is missing."""
        self.ready = asyncio.Event()

    async def run(self) -> None:
        kept = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        kept.SessionExpiryInterval = 3600
        while True:
            with contextlib.suppress(aiomqtt.MqttError):
                async with aiomqtt.Client(
                    "127.0.0.1",
                    self._port,
                    identifier=f"watch-{self._topic.replace('/', '-').replace('#', 'all')}",
                    protocol=aiomqtt.ProtocolVersion.V5,
                    clean_start=False,
                    properties=kept,
                ) as client:
                    options = SubscribeOptions(qos=1, retainAsPublished=True)
                    await client.subscribe(self._topic, options=options)
                    self.ready.set()
                    async for message in client.messages:
                        self._take(message)
            await asyncio.sleep(0.1)

    def _take(self, message: aiomqtt.Message) -> None:
        topic, payload = str(message.topic), bytes(message.payload)
        self.messages.append((topic, payload, dict(getattr(message.properties, "UserProperty", [])), message.retain))
        if message.retain and payload:
            self.retained[topic] = payload
        elif message.retain:
            self.retained.pop(topic, None)


@contextmanager
def broker(folder: Path, *options: str, tls: tuple[Path, Path] | None = None) -> Iterator[Broker]:
    """A broker that is stopped at the end; the test starts it. Skips the test if mosquitto is absent."""
    if MOSQUITTO is None:
        pytest.skip("mosquitto is not installed (Debian: apt-get install mosquitto)")
    folder.mkdir(parents=True, exist_ok=True)
    made = Broker(folder, *options, tls=tls)
    try:
        yield made
    finally:
        made.stop()


@asynccontextmanager
async def subscriber(port: int, topic: str = "#") -> AsyncIterator[Subscriber]:
    """A subscriber that has subscribed."""
    made = Subscriber(port, topic)
    running = asyncio.create_task(made.run())
    try:
        await asyncio.wait_for(made.ready.wait(), 30)
        yield made
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def write_password(path: Path, user: str, password: str) -> None:
    """Write a file of a broker with the password of a user."""
    subprocess.run(["mosquitto_passwd", "-b", "-c", str(path), user, password], check=True, capture_output=True)
