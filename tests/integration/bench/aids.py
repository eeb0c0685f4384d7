"""A small server with an end node's task path, for the load generator."""

import asyncio
import json
from collections.abc import Sequence

METADATA = {"name": "coarse", "inputs": [{"name": "images", "datatype": "UINT8", "shape": [-1, 4, 4, 3]}]}
UNKNOWN = b'HTTP/1.1 404 Not Found\r\nContent-Length: 24\r\n\r\n{"error":"no such model"}'[:-1]


class TaskServer:
    """Answers tasks with the given events, as the protocol describes it, and knows the model `coarse`."""

    def __init__(self, events: Sequence[str] = ("coarse", "fallback")) -> None:
        self._body = b"".join(json.dumps({"event": event}).encode() + b"\n" for event in events)
        self.paths: list[str] = []

    @property
    def tasks(self) -> list[str]:
        return [path for path in self.paths if path.startswith("/v1/tasks/")]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            path = head.split()[1].decode()
            self.paths.append(path)
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
            await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
            if path not in ("/v2/models/coarse", *self.tasks):
                writer.write(UNKNOWN)
                continue
            body = self._body if path in self.tasks else json.dumps(METADATA).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for line in body.splitlines(keepends=True):
                writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
