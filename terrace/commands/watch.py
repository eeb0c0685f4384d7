"""`terrace watch`: the pictures of a camera, a stream or a folder, answered on this machine, without any service."""

from __future__ import annotations

import asyncio
import contextlib
import json as jsons
import logging
import re
import select
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from pydantic import ValidationError

from end_node.settings import SourceSettings
from end_node.sources.choosing import Opened, open_source_of
from end_node.sources.keeper import SourceKeeper
from end_node.sources.picture import TakenPicture
from models.manifest import load_manifest
from models.pictures import decoder
from models.session import OnnxModel, load_model
from models.source import chosen_entries
from terrace.console import percent, screen
from terrace.options import Json, ModelSet, with_options
from terrace.stoppable import run_stoppable
from tierkit.documents import faults
from tierkit.errors import InvalidInput, SourceUnavailable
from tierkit.plaintext import one_line, without_passwords
from tierkit.types import Tier

__all__ = ["app"]

app = typer.Typer(add_completion=False)

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_LABEL = "label="
_UNREAD_S = 0.5
"""Seconds between two checks of the output."""


class _Until(NamedTuple):
    """End of a command: a number of answers, a time, or an answer."""

    answers: int | None = None
    seconds: float | None = None
    label: str | None = None


def _read_until(text: str) -> _Until:
    if text.startswith(_LABEL) and text != _LABEL:
        return _Until(label=text.removeprefix(_LABEL))
    found = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)([smh])", text)
    if found is None or not float(found[1] or found[2]):
        raise typer.BadParameter(f"it is a number (20), a time (30s, 5m, 2h) or label=NAME, not {text[:40]!r}")
    if found[1]:
        return _Until(answers=int(found[1]))
    return _Until(seconds=float(found[2]) * _SECONDS[found[3]])


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Options of `terrace watch`: the pictures to take, and the network that answers them."""

    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=1000, help="Largest number of pictures per second. Default: 1, and no limit for folders."
        ),
    ] = None
    changed: Annotated[
        float,
        typer.Option(min=0, max=1, help="Skip a picture that differs by less than this share from the last one taken."),
    ] = 0.0
    until: Annotated[
        str | None,
        typer.Option(
            metavar="END",
            help="End after this many answers (20), after this time (30s, 5m, 2h), or at the first answer of "
            "a class (label=fish). Default: at Ctrl-C, or at the end of a video file.",
        ),
    ] = None
    models: ModelSet = None
    model: Annotated[str | None, typer.Option(help="Network to use. Default: the end network of the set.")] = None


@app.command()
@with_options
def watch(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder, a video file, a camera such as /dev/video0, or a URL: rtsp://, or http:// of a stream or of"
            " a picture that changes. Streams, videos and cameras need the extra 'video'.",
            show_default=False,
        ),
    ],
    options: WatchOptions,
    json: Json = False,
) -> None:
    """Classify the pictures of a source on this machine, and print one line for each. No service is needed."""
    end = _Until() if options.until is None else _read_until(options.until)
    manifest = load_manifest(options.models)
    (entry,) = chosen_entries(manifest, () if options.model is None else (options.model,), Tier.END)
    labels = manifest.labels(entry)
    if end.label is not None and end.label not in labels:
        raise typer.BadParameter(f"{entry.name} has no class {end.label!r}", param_hint="--until")
    network = load_model(entry, options.models, labels=labels, decode=decoder(entry.fit))
    try:
        settings = SourceSettings(name="watch", url=source, rate=options.rate, changed=options.changed)
    except ValidationError as exc:
        raise InvalidInput(faults(exc, SourceSettings)) from exc
    _show_news()
    run_stoppable(lambda: _watch(settings, network, end, json=json))


async def _watch(settings: SourceSettings, network: OnnxModel, end: _Until, *, json: bool) -> None:
    answering = _Answering(network, end, json=json)
    attempts = 0

    async def opened(settings: SourceSettings, tls_ca: Path | None) -> Opened:
        nonlocal attempts
        attempts += 1
        if attempts > 1 and not keeper.status.taken:
            # A camera that has worked may come back. One that has not is probably a wrong URL.
            answering.fail(InvalidInput(without_passwords(f"{settings.url}: {keeper.status.reason}")))
        return await open_source_of(settings, tls_ca)

    try:
        await open_source_of(settings, None)
    except SourceUnavailable as exc:
        raise InvalidInput(without_passwords(str(exc))) from exc
    keeper = SourceKeeper(settings, answering, opened=opened)
    reading = asyncio.create_task(keeper.run())
    unread = asyncio.create_task(_until_unread())
    try:
        async with asyncio.timeout(end.seconds):
            await asyncio.wait([reading, answering.over, unread], return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        return
    finally:
        reading.cancel()
        unread.cancel()
        await asyncio.gather(reading, unread, return_exceptions=True)
    if answering.over.done():
        answering.over.result()
    elif unread.done() and not unread.cancelled():
        unread.result()


async def _until_unread() -> None:
    """Raise BrokenPipeError when the program that reads standard output has ended. A write would only notice that at
    the next picture."""
    poll = select.poll()
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a test's buffer; closed from the start
        poll.register(sys.stdout.fileno(), 0)
    while True:
        if poll.poll(0):
            raise BrokenPipeError
        await asyncio.sleep(_UNREAD_S)


class _Answering:
    """Intake that answers pictures with a network in this process, and prints the answers.

    Args:
        network: answers the pictures.
        end: the last answer to print.
        json: print JSON.
    """

    def __init__(self, network: OnnxModel, end: _Until, *, json: bool) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done after the last answer, or when something fails."""
        self._network = network
        self._labels = network.labels["probabilities"]
        self._end = end
        self._json = json
        self._marks: set[str] = set()
        self._answers = 0

    def fail(self, error: Exception) -> None:
        """End with an error."""
        if not self.over.done():
            self.over.set_exception(error)

    async def known(self, marks: Collection[str]) -> Collection[str]:
        return self._marks & set(marks)

    async def take(self, picture: TakenPicture) -> None:
        """Answer one picture, and print the answer."""
        if self.over.done():
            await asyncio.Event().wait()
        seen_at = time.time() - (time.monotonic() - picture.taken_s)
        label, confidence, error = await asyncio.to_thread(self._answer, picture.content)
        self._answers += 1
        if picture.mark:
            self._marks.add(picture.mark)
        try:
            self._print(datetime.fromtimestamp(seen_at).astimezone(), picture.name, label, confidence, error)
        except OSError as exc:
            self.fail(exc)
        if not self.over.done() and (
            self._answers == self._end.answers or (label is not None and label == self._end.label)
        ):
            self.over.set_result(None)

    def _answer(self, content: bytes) -> tuple[str | None, float, str]:
        """Class and confidence; without a class, why the picture cannot be read."""
        (images,) = self._network.inputs
        assert images.decode is not None
        try:
            row = images.decode(content, threading.Event())
        except InvalidInput as exc:
            return None, 0.0, str(exc)
        (probabilities,) = self._network.run({images.name: row[None]}, ["probabilities"])["probabilities"]
        best = int(probabilities.argmax())
        return self._labels[best], float(probabilities[best]), ""

    def _print(self, at: datetime, name: str, label: str | None, confidence: float, error: str) -> None:
        if self._json:
            answer = {"label": label, "confidence": round(confidence, 4)} if label is not None else {"error": error}
            facts = {"number": self._answers, "at": at.isoformat(timespec="milliseconds"), "name": name or None}
            network = {"model": self._network.name, "sha256": self._network.sha256}
            typer.echo(jsons.dumps({**facts, **answer, **network}, ensure_ascii=False))
            return
        said = f"{label}  {percent(confidence)}" if label is not None else one_line(error)
        typer.echo(f"{at:%H:%M:%S}  {one_line(name) or self._answers}  {said}")


def _show_news() -> None:
    """Print what the source reports on standard error."""

    class News(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = without_passwords(record.getMessage()).replace("source 'watch': ", "").replace("source 'watch' ", "")
            screen(stderr=True).print(one_line(text), style="yellow", soft_wrap=True, markup=False)

    logger = logging.getLogger("end_node.sources")
    logger.handlers = [News(logging.INFO)]
    logger.setLevel(logging.INFO)
    logger.propagate = False
