"""Pictures of one colour, such as `url = "colours://ff8000"`, at the rate of the source."""

import asyncio
import io
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from end_node.settings import SourceSettings
from end_node.sources.picture import Intake, TakenPicture
from tierkit.errors import InvalidInput


class ColourSource:
    def __init__(self, settings: SourceSettings, tls_ca: Path | None) -> None:
        try:
            colour = tuple(bytes.fromhex(settings.url.removeprefix("colours://")))
            image = Image.new("RGB", (64, 64), colour)
        except (ValueError, TypeError) as error:
            raise InvalidInput("the url of a source of colours is colours:// with six hexadecimal digits") from error
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        self._content = buffer.getvalue()
        self._pause_s = 1 / (settings.rate or 1.0)

    async def run(self, intake: Intake, alive: Callable[[int], None]) -> None:
        while True:
            await intake.take(TakenPicture(content=self._content))
            alive(0)
            await asyncio.sleep(self._pause_s)
