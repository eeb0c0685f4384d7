"""Observations of a real scheduler on the command line and in the client: lists, exports, pictures and rights."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from models.hierarchy import bundled_hierarchy
from terrace.cli import run
from tests.integration.scheduler.conftest import read_events
from tests.integration.scheduler.test_access import (
    ALICE,
    BOB,
    OLGA,
    PI,
    bearer,
    closed as closed,
    registration,
    tokens as tokens,
)
from tests.integration.scheduler.test_observations import Camera, camera, finer, local, picture, seen
from tierkit.client import AsyncClient, Backoff, SeenGap, SeenPicture
from tierkit.errors import NotFound
from tierkit.http.address import free_port

CLASSES = bundled_hierarchy()
COARSE, FINE = CLASSES.coarse, CLASSES.fine

Command = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def terrace(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    monkeypatch.setenv("TERRACE_SCHEDULER", scheduler.url)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")

    async def call(*words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(run, words)
        return code, *capsys.readouterr()

    return call


@pytest.fixture
async def gate(scheduler: Any, kit: Any) -> Camera:
    """Ten observations of one source and two of another, some with pictures; the later ones have higher numbers."""
    device = await camera(scheduler, kit, lease_s=600.0)
    now = time.time()
    sent = [
        seen(number, age_s=100.0 - number, taken_at=now - 3600.0 * (10 - number), local=local(number % 2, number / 20))
        for number in range(4, 14)
    ]
    sent[2] = {**sent[2], "finer": finer(7), "revision": 1, "name": "=1+1.jpg"}
    state = {"sources": [{"name": "gate", "state": "running"}], "waiting_answers": 3, "waiting_pictures": 2}
    budget = {"spent_bytes": 400, "bytes_per_day": 1000}
    gap = {"source": "gate", "first": 1, "last": 3}
    others = [seen(number, source="yard", waits=True, unsure=True) for number in (1, 2)]
    await device.send(*sent, *others, gaps=[gap], device={**state, **budget})
    for number in (4, 5, 6):
        path = f"/v1/observations/end-0/gate/{number}/picture"
        assert (await scheduler.http.put(path, content=picture(number, "JPEG"))).status_code == 204
    return device


async def test_observations_are_listed_newest_first(gate: Camera, terrace: Command) -> None:
    code, out, _ = await terrace("observations", "--source", "gate")
    assert code == 0
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [row[2] for row in rows] == [str(number) for number in range(13, 3, -1)]
    assert "=1+1.jpg" in rows[7]

    async def numbers(*words: str) -> list[int]:
        code, out, _ = await terrace("observations", "--source", "gate", "--json", *words)
        assert code == 0
        return [json.loads(line)["sequence"] for line in out.splitlines()]

    assert await numbers("--limit", "3") == [13, 12, 11]
    assert await numbers("--label", COARSE[1]) == [13, 11, 9, 7, 5]
    assert await numbers("--label", COARSE[1], "--limit", "1") == [13]
    assert await numbers("--label", FINE[7], "--node", "end-0") == [6]
    assert await numbers("--below", "0.3") == [5, 4]
    assert await numbers("--amended") == [6]
    assert await numbers("--since", "150m") == [13, 12, 11, 10, 9, 8]
    assert await numbers("--since", "7d", "--below", "0.3") == [5, 4]
    assert await numbers("--node", "end-1") == []
    code, out, _ = await terrace("observations", "--node", "end-1")
    assert (code, out) == (0, "no observations\n")
    code, out, _ = await terrace("observations", "--json", "--limit", "2000")
    assert len(out.splitlines()) == 12


async def test_programs_page_through_observations(gate: Camera) -> None:
    async with AsyncClient(gate.running.url) as client:
        found, cursor = [], None
        while True:
            page = await client.observation_page(limit=4, cursor=cursor, node="end-0")
            found += [(each.source, each.sequence) for each in page.observations]
            if (cursor := page.next_cursor) is None:
                break
        gap, *ordered = [each async for each in client.observations(source="gate")]
        assert isinstance(gap, SeenGap)
        assert (gap.gap.first, gap.gap.last) == (1, 3)
        assert [each.sequence for each in ordered if isinstance(each, SeenPicture)] == list(range(4, 14))
        assert [type(each) async for each in client.observations(below=0.3)] == [SeenPicture] * 2
        assert [each.sequence async for each in client.observations(after=12) if isinstance(each, SeenPicture)] == [13]
        assert await client.picture("end-0", "gate", 5) == picture(5, "JPEG")
        assert await client.picture("end-0", "gate", 5, size=16) != picture(5, "JPEG")
        with pytest.raises(NotFound):
            await client.picture("end-0", "gate", 9)
    assert len(found) == len(set(found)) == 12


async def test_exports_for_programs_and_spreadsheets(gate: Camera, terrace: Command, tmp_path: Path) -> None:
    code, out, _ = await terrace("observations", "--out", "seen.jsonl", "--node", "end-0")
    assert (code, out) == (0, "observations in seen.jsonl\n")
    lines = [json.loads(line) for line in (tmp_path / "out/seen.jsonl").read_text().splitlines()]
    assert [line.keys() & {"gap", "sequence"} for line in lines] == [{"gap"}, *[{"sequence"}] * 12]
    code, out, _ = await terrace("observations", "--out", "seen.csv", "--bom", "--source", "gate", "--json")
    assert (code, json.loads(out)) == (0, {"out": "seen.csv"})
    content = (tmp_path / "out/seen.csv").read_bytes()
    assert content.startswith(b"\xef\xbb\xbfnode,source,sequence,")
    rows = list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline="")))
    assert [row["sequence"] for row in rows] == [str(number) for number in range(4, 14)]
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in rows for cell in row.values())
    better = rows[2]
    assert (better["label"], better["coarse_label"], better["name"]) == (FINE[7], COARSE[0], "'=1+1.jpg")
    assert (better["sent_form"], better["sent_upload_bytes"], better["picture"]) == ("pixels", "3321", "true")
    assert (better["waits"], rows[9]["picture"], rows[9]["fine_label"]) == ("false", "false", "")
    await terrace("observations", "--out", "late.csv", "--after", "12", "--source", "gate")
    assert (tmp_path / "out/late.csv").read_bytes().startswith(b"node,")
    assert len((tmp_path / "out/late.csv").read_text().splitlines()) == 2
    assert sorted(os.listdir(tmp_path / "out")) == ["late.csv", "seen.csv", "seen.jsonl"]


async def test_pictures_go_into_a_folder_for_labelling(gate: Camera, terrace: Command, tmp_path: Path) -> None:
    code, out, _ = await terrace("observations", "--out", "found/", "--below", "0.45")
    assert code == 0
    assert out == "4 observations, 2 pictures (2 new); 2 only in the CSV; in found\n"
    assert (tmp_path / f"out/found/{COARSE[0]}/end-0+gate-4.jpg").read_bytes() == picture(4, "JPEG")
    code, out, _ = await terrace("observations", "--out", "found", "--json")
    counts = {"observations": 12, "pictures": 3, "new": 1, "moved": 0}
    assert (code, json.loads(out)) == (0, {"out": "found", **counts})
    table = io.StringIO((tmp_path / "out/found/observations.csv").read_text())
    assert [row["file"] for row in csv.DictReader(table) if row["file"]] == [
        f"{COARSE[0]}/end-0+gate-4.jpg",
        f"{COARSE[1]}/end-0+gate-5.jpg",
        f"{FINE[7]}/end-0+gate-6.jpg",
    ]
    await gate.send(seen(4, revision=1, age_s=400.0, local=local(0, 0.2), finer=finer(9)))
    code, out, _ = await terrace("observations", "--out", "found/")
    assert out == "12 observations, 3 pictures (0 new, 1 moved to another label); 9 only in the CSV; in found\n"
    assert (tmp_path / f"out/found/{FINE[9]}/end-0+gate-4.jpg").exists()


async def test_new_observations_are_followed(gate: Camera) -> None:
    async with (
        AsyncClient(gate.running.url) as client,
        aclosing(client.follow_observations(source="gate", label=COARSE[3])) as followed,
    ):
        first, number = asyncio.ensure_future(anext(followed)), 13
        while not first.done():
            number += 2
            other = seen(number, source="yard", local=local(3))
            await gate.send(seen(number - 1, local=local(2)), seen(number, local=local(3)), other)
        shown = await first
        assert (shown.source, shown.label) == ("gate", COARSE[3])
        for later in range(shown.sequence + 2, number + 1, 2):
            assert (await anext(followed)).sequence == later
        await gate.send(seen(number, revision=1, local=local(3), waits=True))
        amended = await anext(followed)
        assert (amended.sequence, amended.revision, amended.waits) == (number, 1, True)


@pytest.mark.parametrize("options", [[], ["--json"]])
async def test_the_command_follows_until_ctrl_c(gate: Camera, options: list[str]) -> None:
    words = ["observations", "--follow", "--source", "gate", "--scheduler", gate.running.url, *options]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "terrace", *words),
        stdout=asyncio.subprocess.PIPE,
        # It is ignored where the tests run in the background of a script.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    line, number = asyncio.ensure_future(process.stdout.readline()), 13
    while not line.done():
        number += 1
        await gate.send(seen(number, local=local(3, 0.5), name="\x1b[2J.jpg"))
    shown = (await line).decode()
    if options:
        assert json.loads(shown)["label"] == COARSE[3]
    else:
        assert f"  end-0  gate  {int(shown.split()[4])}  {COARSE[3]}  50.0 %  (\\u001b[2J.jpg)\n" in shown
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 130


async def test_nothing_is_missed_while_the_scheduler_restarts(kit: Any, settings: Any) -> None:
    at_one_port = settings.model_copy(update={"port": free_port()})
    patience = Backoff(first_s=0.01, cap_s=0.05)
    numbers: list[int] = []
    number = 0
    async with (
        AsyncClient(f"http://127.0.0.1:{at_one_port.port}", backoff=patience) as client,
        aclosing(client.follow_observations()) as followed,
    ):
        for _ in range(3):
            following = asyncio.ensure_future(anext(followed))
            async with kit.scheduler(at_one_port) as running:
                device = await camera(running, kit, lease_s=600.0)
                # The reader may be late: what comes before its first connection is not for it.
                while not following.done() or number < 3:
                    number += 1
                    await device.send(seen(number))
                numbers.append((await following).sequence)
                while numbers[-1] < number:
                    numbers.append((await anext(followed)).sequence)
    assert numbers == list(range(numbers[0], number + 1))


@pytest.mark.parametrize("out", ["seen.csv", "seen.jsonl", "found/"])
async def test_a_full_disk_leaves_no_half_export(gate: Camera, tmp_path: Path, out: str) -> None:
    await gate.send(*[seen(number) for number in range(14, 514)])
    (tmp_path / "out").mkdir()
    words = f"{sys.executable} -m terrace observations --out {out} --scheduler {gate.running.url}"
    # The kernel refuses files of more than 50 KiB, as a full disk does.
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", f"ulimit -f 50; exec {words}"), cwd=tmp_path / "out", stderr=asyncio.subprocess.PIPE
    )
    _, error = await process.communicate()
    assert (process.returncode, b"cannot write" in error, b"Traceback" in error) == (1, True, False), error
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []


async def test_a_reader_can_resume_before_the_first_observation(gate: Camera) -> None:
    http, path = gate.running.http, "/v1/observations/events"
    async with http.stream("GET", path) as reply, aclosing(read_events(reply)) as events:
        kind, number, _ = await anext(events)
    assert kind == "begin"
    await gate.send(seen(14))
    async with (
        http.stream("GET", path, headers={"Last-Event-ID": str(number)}) as reply,
        aclosing(read_events(reply)) as events,
    ):
        assert (await anext(events))[:2] == ("begin", number)
        kind, _, shown = await anext(events)
    assert (kind, shown["sequence"]) == ("observation", 14)


async def test_wrong_options_are_explained(scheduler: Any, terrace: Command, tmp_path: Path) -> None:
    for words, sentence in (
        (("--since", "yesterday"), "it is a time ago (30m, 2h, 7d) or a date"),
        (("--since", "9999999999d"), "it is a time ago"),
        (("--below", "1.5"), "less than or equal to 1"),
        (("--label", "fishes"), "no class or superclass is called 'fishes'"),
        (("--follow", "--label", "fishes"), "no class or superclass is called 'fishes'"),
        (("--out", "x"), "a file ends in .jsonl or .csv, and a folder in /"),
        (("--out", "x.txt"), "the name of the file must end in .jsonl or .csv"),
        (("--out", "no/such/"), "there is no folder"),
        (("--out", "x.csv", "--limit", "3"), "it goes without --limit and --follow"),
        (("--out", "x.jsonl", "--bom"), "it goes with --out FILE.csv or FOLDER/"),
        (("--after", "3"), "it goes with --out"),
        (("--follow", "--amended"), "it goes without --limit, --since and --amended"),
    ):
        code, out, error = await terrace("observations", *words)
        assert (code, out, sentence in error) == (2, "", True), error
    assert os.listdir(tmp_path / "out") == []
    url = f"http://127.0.0.1:{free_port()}"
    for option in ("--follow", "--json", "--out=x.csv", "--out=found/"):
        code, out, error = await terrace("observations", option, "--scheduler", url)
        assert (code, out, f"no scheduler answers at {url}" in error) == (1, "", True), error


async def test_all_sources_are_listed(gate: Camera, terrace: Command) -> None:
    code, out, _ = await terrace("sources", "list")
    assert code == 0
    header, _, first, second = out.splitlines()
    for words in ("end-0", "gate", "running", "alive", COARSE[1], "65.0 %", "600"):
        assert words in first
    assert "yard" in second
    assert {"waiting", "bytes left", "owner"} <= {title.strip() for title in header.split("  ")}
    code, out, _ = await terrace("sources", "list", "--json")
    (known, _) = json.loads(out)["sources"]
    assert (known["node"], known["source"], known["last"]["sequence"], known["last_picture"]) == (
        "end-0",
        "gate",
        13,
        6,
    )
    assert (known["waiting_answers"], known["waiting_pictures"], known["bytes_per_day"]) == (3, 2, 1000)


async def test_sources_are_shared_and_unshared(terrace: Command, scheduler: Any) -> None:
    code, out, _ = await terrace("sources", "share", "pi-1", "gate", "--owner", "anna")
    assert (code, out) == (0, "gate on pi-1: owner anna, no readers\n")
    # It has sent nothing yet, and is listed all the same.
    code, out, _ = await terrace("sources", "list")
    assert "pi-1" in out
    code, out, _ = await terrace("sources", "share", "pi-1", "gate", "--reader", "ben", "--reader", "carla", "--json")
    rights = {"owner": "anna", "readers": ["ben", "carla"]}
    assert (code, json.loads(out)) == (0, {"node_id": "pi-1", "source": "gate", **rights})
    code, out, _ = await terrace("sources", "unshare", "pi-1", "gate", "ben", "anna")
    assert (code, out) == (0, "gate on pi-1: no owner, readers carla\n")
    code, _, error = await terrace("sources", "unshare", "pi-1", "gate", "ben")
    assert (code, "gate on pi-1 is not shared with ben" in error) == (2, True)
    code, _, error = await terrace("sources", "share", "pi-1", "gate")
    assert (code, "name a user" in error) == (2, True)
    await terrace("sources", "unshare", "pi-1", "gate", "carla")
    assert (await terrace("sources", "list"))[1].startswith("no sources")


async def test_users_see_what_is_shared_with_them(
    closed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = registration("pi", spool="5" * 16)
    assert (await closed.http.post("/v1/devices", json=place, headers=bearer(PI))).status_code == 200
    sent = [seen(1), seen(1, source="yard")]
    batch = {"node_id": "pi", "incarnation": place["incarnation"], "spool": "a" * 16, "observations": sent}
    assert (await closed.http.post("/v1/observations", json=batch, headers=bearer(PI))).status_code == 200
    monkeypatch.chdir(tmp_path)

    async def call(token: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setenv("TERRACE_TOKEN", token)
        code = await asyncio.to_thread(run, [*words, "--scheduler", closed.url])
        return code, *capsys.readouterr()

    async def sees(token: str) -> list[str]:
        _, out, _ = await call(token, "observations", "--json")
        _, listed, _ = await call(token, "sources", "list", "--json")
        assert (await call(token, "observations", "--out", "all.jsonl"))[0] == 0
        exported = [json.loads(line)["source"] for line in (tmp_path / "all.jsonl").read_text().splitlines()]
        found = sorted(json.loads(line)["source"] for line in out.splitlines())
        assert found == exported == [source["source"] for source in json.loads(listed)["sources"]]
        return found

    assert (await sees(OLGA), await sees(ALICE), await sees(BOB)) == (["gate", "yard"], [], [])
    assert (await call(ALICE, "sources", "share", "pi", "gate", "--owner", "alice"))[0] != 0
    assert (await call(OLGA, "sources", "share", "pi", "gate", "--owner", "alice"))[0] == 0
    assert (await sees(ALICE), await sees(BOB)) == (["gate"], [])
    # An owner shares with others, and gives nothing away that is not theirs.
    assert (await call(ALICE, "sources", "share", "pi", "gate", "--reader", "bob"))[0] == 0
    code, _, error = await call(ALICE, "sources", "share", "pi", "gate", "--owner", "bob")
    assert (code, "only operators change the owner" in error) == (1, True)
    code, _, error = await call(BOB, "sources", "share", "pi", "gate", "--reader", "eve")
    assert (code, "only operators and the owner" in error) == (1, True)
    assert (await sees(BOB)) == ["gate"]
    code, _, error = await call(BOB, "sources", "pause", "pi", "gate")
    assert (code, "only operators and the owner" in error) == (1, True)
    assert (await call(ALICE, "sources", "unshare", "pi", "gate", "bob"))[0] == 0
    assert (await sees(BOB), await sees(ALICE)) == ([], ["gate"])
