"""A worker that learns from the kept pictures of a device which is too small to learn, honest or not."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.kept.page import PageEnd, SentPicture, write_page
from models.kept.sample import KeptPicture
from tests.integration.end_node.observing import observing
from tests.integration.end_node.test_kept_pictures import EDGE, GIVES, OTHER_EDGE, book
from tests.integration.training.test_own_runs import result_of, right, settings, started, worker
from tests.own_networks import SIDE, keep, kept_picture, network, own, png
from tests.shapes import SHAPES, shape_images
from tierkit.errors import (
    DataError,
    DeadlineExceeded,
    Forbidden,
    InvalidAnswer,
    NotFound,
    NotTerrace,
    TerraceError,
    Unauthenticated,
)
from tierkit.http.client import open_client
from tierkit.testing import talking
from tierkit.types import Tier
from training.improve.base import IMPROVED
from training.improve.kept import Gathering, KeptImages
from training.strategies.config import OuterConfig
from training.worker import kept_device
from training.worker.kept_device import KeptDevice, fetch_kept, reason_against

pytestmark = [pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(120)]


def kept_by(folder: Path) -> None:
    """Let a device keep pictures that `edge-1` has answered."""
    keep(folder / "spool" / "kept", {0, 1, 2}, tier=Tier.EDGE, node_id="edge-1")


async def test_an_edge_node_learns_for_a_device(tmp_path: Path) -> None:
    """The worker is the command, in a process."""
    kept_by(tmp_path)
    token = tmp_path / "edge.token"
    token.touch(mode=0o600)
    token.write_text(EDGE + "\n")
    wanted = settings(tmp_path / "run", steps=160, strategy=OuterConfig(period=8, workers=1))
    async with (
        httpx.AsyncClient(timeout=20, trust_env=False) as http,
        observing(tmp_path / "spool", http, tokens=book(tmp_path), **GIVES) as node,
        started(wanted) as running,
    ):
        command = ["train", "work", running.url, "--kept", node.url, "--kept-token-file", str(token), "--threads", "1"]
        variables = {**os.environ, "HOME": str(tmp_path / "home")}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "terrace",
            *command,
            "--json",
            env=variables,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, log = await process.communicate()
        assert process.returncode == 0, log.decode()
        await result_of(tmp_path / "run")
    assert json.loads(said)["updates"] == 20
    improved = (tmp_path / "run" / IMPROVED).read_bytes()
    assert right(improved) > max(0.9, right(network()))
    assert not (tmp_path / "home").exists(), "nothing is written"


async def test_a_worker_without_pictures_says_why(tmp_path: Path) -> None:
    kept_by(tmp_path)
    async with (
        httpx.AsyncClient(timeout=20, trust_env=False) as http,
        observing(tmp_path / "spool", http, tokens=book(tmp_path), **GIVES) as node,
        started(settings(tmp_path / "run")) as running,
    ):
        cases: list[tuple[str | None, type[TerraceError], str]] = [
            (None, Unauthenticated, "token"),
            ("terrace_" + "x" * 43, Unauthenticated, "unknown"),
            (OTHER_EDGE, DataError, "may not leave the device"),
        ]
        for token, error, words in cases:
            device = KeptDevice(url=node.url, token=None if token is None else lambda token=token: token)  # type: ignore[misc]
            with pytest.raises(error, match=words):
                await worker(running.url, "w", device)
        assert (await running.host.status()).updates == 0


def sound(count: int = 12, first: int = 1, **changes: Any) -> list[SentPicture]:
    """Pictures that can be learned from."""
    images = shape_images(SIDE, seed=0)
    assert images.fine is not None
    found = []
    for key in range(first, first + count):
        content = png(images.images[key % len(images.images)])
        found.append((key, kept_picture(key, int(images.fine[key % len(images.fine)]), content, **changes), content))
    return found


async def fetched(say: Callable[[int], tuple[int, bytes]], *, patience_s: float = 20.0) -> KeptImages:
    """What a worker gets from a device that gives these answers, by their number."""
    asked = 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        status, body = say(asked)
        asked += 1
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()

    async with talking(answer) as device, open_client() as http:
        gathering = Gathering(own(network()), "fine")
        return await fetch_kept(KeptDevice(url=device.url), gathering, http, patience_s)


def page(pictures: list[SentPicture], *, more: bool = False, withheld: int = 0) -> bytes:
    after = pictures[-1][0] if pictures else 0
    return write_page(pictures, PageEnd(after=after, more=more, withheld=withheld))


async def test_pictures_that_cannot_be_believed_are_left_out() -> None:
    good = sound(12)
    _, picture, content = good[0]
    spoiled: list[tuple[KeptPicture, bytes]] = [
        (picture, content + b"x"),
        (replace(picture, sha256="0" * 64), content),
        (replace(picture, classes="0" * 64), content),
        (replace(picture, label=77), content),
        (replace(picture, coarse_label=-1), content),
        (replace(picture, confidence=1.5), content),
        (kept_picture(1, 0, b"no picture"), b"no picture"),
        (kept_picture(1, 0, content[:40]), content[:40]),
    ]
    wrong = [(100 + number, *each) for number, each in enumerate(spoiled)]
    nan = page([(200, replace(picture, margin=math.nan), content)]).replace(b'"margin":null', b'"margin":NaN')
    pages = [page(good, more=True), page(wrong, more=True), nan]
    found = await fetched(lambda number: (200, pages[number]))
    assert found.keys == tuple(key for key, _, _ in good)
    assert found.left_out == {
        "another file than its digest says": 2,
        "other classes": 1,
        "impossible answers": 4,
        "damaged": 2,
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({}, None), ({"classes": "0" * 64}, "other classes"), ({"local_confidence": math.inf}, "impossible answers")],
)
def test_the_reason_against_the_answers_to_a_picture(changes: dict[str, Any], reason: str | None) -> None:
    ((_, picture, _),) = sound(1)
    assert reason_against(replace(picture, **changes), SHAPES) == reason


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (200, b"", InvalidAnswer),
        (200, b"<html>hello</html>\n", InvalidAnswer),
        (200, page(sound(12))[:-30], InvalidAnswer),
        (200, page(sound(12), more=True), InvalidAnswer),  # the same page again and again
        (200, page(sound(3)), DataError),
        (200, page([], withheld=200), DataError),
        (200, page(sound(12, confidence=0.1)), DataError),
        (302, b"", NotTerrace),
        (500, b"oops", NotTerrace),
        (403, b'{"error": "pictures_to"}', Forbidden),
        (404, b'{"error": "nothing kept"}', NotFound),
    ],
    ids=range(11),
)
async def test_an_answer_that_is_of_no_use(status: int, body: bytes, error: type[TerraceError]) -> None:
    with pytest.raises(error):
        await fetched(lambda _: (status, body))


async def test_a_device_that_is_busy_is_asked_again() -> None:
    found = await fetched(lambda number: (503, b'{"error": "busy"}') if number == 0 else (200, page(sound(12))))
    assert len(found.images) == 12
    with pytest.raises(DeadlineExceeded, match="busy"):
        await fetched(lambda _: (503, b'{"error": "busy"}'), patience_s=0.1)


async def test_a_million_pictures_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_device, "_MOST_PICTURES", 30)
    found = await fetched(lambda number: (200, page(sound(10, first=1 + 10 * number), more=True)))
    assert len(found.images) == 30
    monkeypatch.setattr(kept_device, "_MOST_BYTES", 1000)
    found = await fetched(lambda number: (200, page(sound(10, first=1 + 10 * number), more=True)))
    assert len(found.images) == 10


async def test_empty_pages_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_device, "_MOST_PICTURES", 30)
    with pytest.raises(DataError):
        await fetched(lambda number: (200, write_page([], PageEnd(after=number + 1, more=True))))


async def test_a_page_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_device, "MOST_PAGE_BYTES", 1 << 16)

    async def flood(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 X\r\n\r\n")
        while True:
            writer.write(b"x" * 10_000)
            await writer.drain()

    async with talking(flood) as device, open_client() as http:
        with pytest.raises(InvalidAnswer, match="MiB"):
            await fetch_kept(KeptDevice(url=device.url), Gathering(own(network()), "fine"), http, 20.0)


async def test_a_device_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_device, "_PAGE_S", 0.1)

    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with talking(silent) as device, open_client() as http:
        with pytest.raises(DeadlineExceeded, match="budget"):
            await fetch_kept(KeptDevice(url=device.url), Gathering(own(network()), "fine"), http, 0.2)


async def test_the_command_names_what_is_wrong() -> None:
    from terrace.cli import run

    for flags in (
        ["--kept", "http://device:8071?x=1"],
        ["--kept", "http://"],
        ["--kept", "folder", "--kept-token-file", "edge.token"],
        ["--kept-token-file", "edge.token"],
        ["--kept", "http://device:8071", "--fetch", "own"],
    ):
        assert run(["train", "work", "http://127.0.0.1:9", *flags]) == 2
