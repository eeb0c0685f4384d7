"""A receiver of webhooks on a real socket, which answers as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tierkit.testing import serve_app

__all__ = ["Receiver", "receiving"]


@dataclass
class Receiver:
    """Keeps what it takes, in order."""

    url: str = ""
    status: int = 200
    refused: dict[str, int] = field(default_factory=dict)
    """Status by type of event, in place of `status`."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of its answers."""
    tries: int = 0
    bodies: list[bytes] = field(default_factory=list)
    """Of the events that it took."""
    heads: list[dict[str, str]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Answers wait for it; open unless a test closes it."""

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.bodies]

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        self.tries += 1
        await self.gate.wait()
        status = self.refused.get(json.loads(body)["type"], self.status)
        if status < 300:
            self.bodies.append(body)
            self.heads.append(dict(request.headers))
        return Response("what the receiver says", status_code=status, headers=self.headers)


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    """A receiver; its URL ends with /hook."""
    receiver = Receiver()
    async with serve_app(Starlette(routes=[Route("/hook", receiver.answer, methods=["POST"])])) as lifecycle:
        receiver.url = f"{lifecycle.url}/hook"
        try:
            yield receiver
        finally:
            receiver.gate.set()
