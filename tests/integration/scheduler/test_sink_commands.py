"""Sinks of a real scheduler on the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from terrace.cli import run
from tests.receivers import Receiver, receiving
from tierkit.testing import wait_for

Command = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
async def running(settings: Any, kit: Any) -> AsyncIterator[Any]:
    async with kit.scheduler(settings.model_copy(update={"sink_allow_private": True})) as running:
        yield running


@pytest.fixture
def terrace(running: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("TERRACE_SCHEDULER", running.url)
    monkeypatch.setenv("COLUMNS", "200")

    async def call(*words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(run, words)
        return code, *capsys.readouterr()

    return call


async def test_a_sink_from_its_first_event_to_its_end(terrace: Command, running: Any, receiver: Receiver) -> None:
    code, out, _ = await terrace("sinks", "list")
    assert (code, "no sinks; add one with terrace sinks add" in out) == (0, True)
    code, out, _ = await terrace("sinks", "add", "hook", "webhook", f"url={receiver.url}", "--event", "node.*")
    assert (code, out) == (0, "hook gets events from now on; 'terrace sinks test hook' sends it one\n")
    code, out, _ = await terrace("sinks", "test", "hook")
    assert (code, out.startswith("the receiver of hook took a test event in 0.")) == (0, True)
    receiver.refused["node.joined"] = 422
    await running.register("edge-0", "edge")

    async def dead() -> bool:
        return bool(json.loads((await terrace("sinks", "dead", "hook", "--json"))[1])["letters"])

    await wait_for(dead, what="the dead letter")
    code, out, _ = await terrace("sinks", "dead", "hook")
    assert (code, "node.joined" in out, "the receiver answered 422" in out) == (0, True, True)
    code, out, _ = await terrace("sinks", "list", "--json")
    (shown,) = json.loads(out)["sinks"]
    assert (shown["name"], shown["kind"], shown["filter"]["events"]) == ("hook", "webhook", ["node.*"])
    assert "webhook" in json.loads(out)["kinds"]
    receiver.refused.clear()
    code, out, _ = await terrace("sinks", "replay", "hook")
    assert (code, out) == (0, "1 dead letters are delivered again\n")
    await wait_for(lambda: len(receiver.of_type("node.joined")) == 1, what="the replayed event")
    code, out, _ = await terrace("sinks", "pause", "hook")
    assert (code, out) == (0, "the events of hook wait; 'terrace sinks resume hook' sends them\n")
    code, out, _ = await terrace("sinks", "list")
    assert out.splitlines()[2].split()[:3] == ["hook", "webhook", "paused"]
    code, out, _ = await terrace("sinks", "resume", "hook")
    assert (code, out) == (0, "hook gets events again\n")
    code, out, _ = await terrace("sinks", "remove", "hook", "--json")
    assert (code, json.loads(out)) == (0, {"name": "hook", "removed": True})
    code, _, err = await terrace("sinks", "dead", "hook")
    assert (code, "no sink 'hook'" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["add", "hook", "webhook", "url"], "'url' is not OPTION=VALUE"),
        (["add", "hook", "webhook", "url=http://me:secret@example.org"], "must not hold a user name or password"),
        (["add", "hook", "smoke", "url=http://example.org"], "known: mqtt, webhook"),
        (["add", "Hook!", "webhook", "url=http://example.org"], "name"),
        (["add", "hook", "webhook", "url=http://a.example", "url=http://b.example"], "url is given twice"),
        (["add", "hook", "webhook"], "options: url is missing"),
        (["replay", "hook", "3"], "no sink 'hook'"),
        (["replay", "hook", str(2**63)], "should be less than or equal to"),
    ],
)
async def test_what_is_wrong_is_named(terrace: Command, words: list[str], said: str) -> None:
    code, _, err = await terrace("sinks", *words)
    assert (code, said in err.replace("\n", " ")) == (2, True), err
