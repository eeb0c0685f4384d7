"""`terrace classify` as a process of its own: what it says while a job waits, and sources that take several jobs."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import signal
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from PIL import Image
from starlette.applications import Starlette
from starlette.routing import Route

from models.hierarchy import bundled_hierarchy
from tierkit.settings import ServiceSettings
from tierkit.testing import serve_app, wait_for


@asynccontextmanager
async def classify(scheduler, *arguments: str | Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command, with its output in pipes."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "terrace", "classify", *map(str, arguments), "--scheduler", scheduler.url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "1000"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def ended(scheduler, *arguments: str | Path) -> tuple[int | None, str, str]:
    async with classify(scheduler, *arguments) as process:
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()


async def said(process: asyncio.subprocess.Process, words: bytes) -> bool:
    """Whether it says something before it ends."""
    assert process.stderr is not None
    async for line in process.stderr:
        if words in line:
            return True
    return False


def picture(number: int) -> bytes:
    """One whose fine class, to a fake end node, is its number."""
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[0, 0, 0] = number
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def night(tmp_path: Path) -> Path:
    """Twelve pictures of two cameras."""
    for number in range(12):
        path = tmp_path / "night" / f"cam{number % 2}" / f"IMG_{number // 2:04}.PNG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
    return tmp_path / "night"


NAMES = [f"cam{camera}/IMG_{number:04}.PNG" for camera in range(2) for number in range(6)]
CLASSES = [bundled_hierarchy().parent[2 * number + camera] for camera in range(2) for number in range(6)]


def answers(out: Path) -> list[tuple[int, str, int]]:
    """Number, name and class of each image in a file of results."""
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return [(line["index"], line["name"], line["coarse"]["index"]) for line in lines]


# --- while it waits ---------------------------------------------------------------------------------------------------


async def test_why_a_job_waits_is_said_into_a_pipe(kit, scheduler, night) -> None:
    async with classify(scheduler, night, "--scheme", "end") as process:
        assert await said(process, b"waiting for an end device")
        async with kit.end(scheduler, "end-0"):
            await process.communicate()
        assert process.returncode == 0


async def test_why_images_have_no_answer_is_said(kit, scheduler, night) -> None:
    async def fails(end, task_id, upstreams, lines):
        return [{"event": "error", "task_id": task_id, "error": "the lens is foggy"}]

    async with kit.end(scheduler, "end-0", script=fails):
        code, _, err = await ended(scheduler, night, "--scheme", "end")
    assert code == 1
    assert "12 images without an answer:" in err
    assert "the lens is foggy" in err


async def test_a_certificate_for_another_host_is_the_reason(kit, settings, night, tmp_path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    cert = tmp_path / "node.pem"
    cert.touch(0o600)
    cert.write_bytes(authority.issue_cert("other.example").private_key_and_cert_chain_pem.bytes())
    app = Starlette(routes=[Route("/v1/tasks/{task_id}", kit.fake_end("end-0").answer, methods=["POST"])])
    async with (
        kit.scheduler(settings.model_copy(update={"tls_ca": tmp_path / "ca.pem"})) as scheduler,
        serve_app(app, ServiceSettings(port=0, tls_cert=cert)) as node,
    ):
        incarnation = await scheduler.register("end-0", "end", url=node.url, ms=1.0)
        beats = asyncio.create_task(scheduler.keep_alive("end-0", "end", incarnation, url=node.url))
        async with classify(scheduler, night, "--scheme", "end") as process:
            assert await said(process, b"is for another host")
        beats.cancel()


# --- what is left out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
async def test_what_is_left_out_is_counted(kit, scheduler, night, tmp_path, packed) -> None:
    (night / "notes.txt").touch()
    (night / "cam0" / "a.MOV").touch()
    (night / "cam1" / "b.mov").touch()
    source = night
    if packed:
        source = tmp_path / "night.zip"
        with zipfile.ZipFile(source, "w") as archive:
            for path in sorted(night.rglob("*.*")):
                archive.write(path, path.relative_to(night))
    async with kit.end(scheduler, "end-0"):
        code, out, err = await ended(scheduler, source, "--scheme", "end", "--json")
    assert code == 0
    assert "left out: 3 files (2 .mov, 1 .txt)" in err
    assert json.loads(out)["left_out"] == {".mov": 2, ".txt": 1}
    assert [result["name"] for result in json.loads(out)["results"]] == NAMES


async def test_labels_that_are_missing_are_counted(kit, scheduler, night, tmp_path) -> None:
    (tmp_path / "labels.csv").write_text("name,label\ncam0/IMG_0000.PNG,apple\nIMG_0001.PNG,bear\n")
    async with kit.end(scheduler, "end-0"):
        code, out, err = await ended(scheduler, night, "--scheme", "end", "--json", "--labels", tmp_path / "labels.csv")
    assert code == 0
    assert "no label for 11 of 12 pictures" in err
    assert "1 labels for pictures that are not there: IMG_0001.PNG" in err
    assert [result["true_fine"] for result in json.loads(out)["results"]] == ["apple"] + [None] * 11


# --- tables -----------------------------------------------------------------------------------------------------------


async def test_a_table_for_a_spreadsheet_computes_nothing(kit, scheduler, tmp_path) -> None:
    names = [
        "=1+1.PNG",
        "+2.PNG",
        "-3.PNG",
        "@4.PNG",
        "\t5.PNG",
        "6, ä;\n.PNG",
        "'=7.PNG",
        "8%22.PNG",
        '9".PNG',
        "a\\b.PNG",
        "\x1b.PNG",
    ]
    for name in names:
        path = tmp_path / "odd" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(picture(1))
    table, lines = tmp_path / "out.csv", tmp_path / "out.jsonl"
    async with kit.end(scheduler, "end-0"):
        assert (await ended(scheduler, tmp_path / "odd", "--scheme", "end", "--out", table, "--bom"))[0] == 0
        assert (await ended(scheduler, tmp_path / "odd", "--scheme", "end", "--out", lines))[0] == 0
        assert (await ended(scheduler, tmp_path / "odd", "--bom"))[0] == 2
    assert table.read_bytes().startswith(b"\xef\xbb\xbf")
    cells = [cell for row in csv.reader(io.StringIO(table.read_bytes().decode("utf-8-sig"))) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))]
    assert sorted(json.loads(line)["name"] for line in lines.read_text().splitlines()) == sorted(names)


# --- several jobs -----------------------------------------------------------------------------------------------------


async def test_a_source_above_the_limits_becomes_several_jobs(kit, settings, night, tmp_path) -> None:
    async with kit.scheduler(settings.model_copy(update={"max_images": 5})) as scheduler, kit.end(scheduler, "end-0"):
        for out in (tmp_path / "out.jsonl", tmp_path / "out.csv"):
            code, said, err = await ended(scheduler, night, "--scheme", "end", "--out", out)
            assert (code, "12 images in 3 jobs" in err, "12 images in 3 jobs" in said) == (0, True, True)
        jobs = (await scheduler.http.get("/v1/jobs")).json()["jobs"]
    assert [job["images"] for job in jobs] == [2, 5, 5] * 2
    assert answers(tmp_path / "out.jsonl") == list(zip(range(12), NAMES, CLASSES, strict=True))
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [(row["index"], row["name"]) for row in csv.DictReader(file)] == [
            (str(number), name) for number, name in enumerate(NAMES)
        ]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == ["out.csv", "out.jsonl"]


async def test_bytes_are_a_limit_as_well(kit, settings, night) -> None:
    limit = 8000
    async with kit.scheduler(settings.model_copy(update={"max_body_bytes": limit})) as scheduler:
        async with kit.end(scheduler, "end-0"):
            code, out, _ = await ended(scheduler, night, "--scheme", "end", "--json")
        assert code == 0
        assert [job["images"] for job in json.loads(out)["jobs"]] == [7, 5]
        big = night / "all.zip"
        big.write_bytes(bytes(2 * limit))
        code, _, err = await ended(scheduler, big)
        assert (code, "all.zip" in err, "max_body_bytes" in err, str(2 * limit) in err) == (2, True, True, True)
        big.rename(night / "huge.bmp")
        code, _, err = await ended(scheduler, night)
    assert (code, "huge.bmp" in err, "max_body_bytes" in err) == (2, True, True)


async def test_a_night_goes_on_after_a_kill(kit, settings, night, tmp_path) -> None:
    """Killed while the second of three jobs is answered, and the third sent."""
    out = tmp_path / "out.jsonl"
    arguments = (night, "--scheme", "end", "--out", out)
    seen = 0

    async def counted(end, task_id, upstreams, lines):
        nonlocal seen
        seen += 1
        if seen == 1:
            end.gate.clear()  # what follows waits
        return lines

    async with (
        kit.scheduler(settings.model_copy(update={"max_images": 5})) as scheduler,
        kit.end(scheduler, "end-0", script=counted) as end,
    ):

        async def jobs() -> list[dict[str, Any]]:
            return list(reversed((await scheduler.http.get("/v1/jobs")).json()["jobs"]))

        async with classify(scheduler, *arguments) as process:

            async def first_is_done_and_third_sent() -> bool:
                return len(await jobs()) == 3 and len(list(tmp_path.glob("out.jsonl.parts/*.jsonl"))) == 1

            await wait_for(first_is_done_and_third_sent, what="the jobs")
            process.send_signal(signal.SIGKILL)
            await process.wait()
        assert not out.exists()
        before = await jobs()
        end.gate.set()
        (night / "cam1" / "IMG_0006.PNG").write_bytes(picture(20))
        code, _, err = await ended(scheduler, *arguments)
        after = await jobs()
    assert code == 0
    assert "1 are done already" in err
    assert [job["id"] for job in after[:3]] == [job["id"] for job in before]
    assert [job["images"] for job in after] == [5, 5, 2, 1]
    names, classes = [*NAMES, "cam1/IMG_0006.PNG"], [*CLASSES, bundled_hierarchy().parent[20]]
    assert answers(out) == list(zip(range(13), names, classes, strict=True))
    assert not (tmp_path / "out.jsonl.parts").exists()


async def test_a_part_that_is_refused_costs_the_others_nothing(kit, settings, night, tmp_path) -> None:
    (night / "cam1" / "IMG_0002.PNG").write_bytes(b"none")
    out = tmp_path / "out.jsonl"
    async with kit.scheduler(settings.model_copy(update={"max_images": 5})) as scheduler, kit.end(scheduler, "end-0"):
        code, _, err = await ended(scheduler, night, "--scheme", "end", "--out", out)
        assert (code, "cam1/IMG_0002.PNG" in err, out.exists()) == (2, True, False)
        code, said, err = await ended(scheduler, night, "--scheme", "end", "--out", out, "--on-bad-input", "skip")
        assert (code, "12 images in 3 jobs, 1 damaged" in said, "5 images, completed, 1 damaged" in err) == (
            0,
            True,
            True,
        )
        jobs = (await scheduler.http.get("/v1/jobs")).json()["jobs"]
    assert [job["images"] for job in jobs] == [2, 5, 5]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["name"] for line in lines if line["error"]] == ["cam1/IMG_0002.PNG"]
    assert len(lines) == 12
