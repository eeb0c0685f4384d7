"""A sink that writes each event as a line of a file."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path

    async def deliver(self, event: Any) -> None:
        await asyncio.to_thread(self._append, json.dumps({"id": event.id, "type": event.type}) + "\n")

    def _append(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line)


class _Lines:
    Options = _Options

    @asynccontextmanager
    async def open(self, options: _Options, context: Any) -> AsyncIterator[_File]:
        yield _File(options.path)


LINES = _Lines()
