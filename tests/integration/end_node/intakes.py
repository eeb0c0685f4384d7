"""An intake that keeps the pictures in memory, and sources that run into it."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from end_node.settings import SourceSettings
from end_node.sources.keeper import SourceKeeper
from end_node.sources.picture import TakenPicture
from tierkit.errors import TerraceError


class KeepingIntake:
    """Remembers the pictures, also for a source that starts again. Closed `gate`: pictures wait in it."""

    def __init__(self) -> None:
        self.pictures: list[TakenPicture] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: TerraceError | None = None

    @property
    def names(self) -> list[str]:
        return [picture.name for picture in self.pictures]

    async def take(self, picture: TakenPicture) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.pictures.append(picture)

    async def known(self, marks: Collection[str]) -> Collection[str]:
        return {picture.mark for picture in self.pictures} & set(marks)


@asynccontextmanager
async def kept(
    intake: KeepingIntake, url: object, *, tls_ca: Path | None = None, **values: object
) -> AsyncIterator[SourceKeeper]:
    """A source that runs until the end of the context."""
    settings = SourceSettings.model_validate({"name": "gate", "url": str(url), **values})
    keeper = SourceKeeper(settings, intake, tls_ca=tls_ca)
    running = asyncio.create_task(keeper.run())
    try:
        yield keeper
    finally:
        running.cancel()
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
        assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
