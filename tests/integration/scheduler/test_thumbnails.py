"""The pictures of an unfinished job in small, from a job of pixels and from one of files."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from models.pictures import decode as pictures
from scheduler.settings import SchedulerSettings
from tierkit.testing import wait_for

ORIENTATION = 0x0112


@pytest.fixture
async def keeper(kit: Any, settings: SchedulerSettings, weights: Path, tmp_path: Path) -> AsyncIterator[Any]:
    """A scheduler whose networks see different sizes, so that it keeps files."""
    manifest = json.loads((weights / "manifest.json").read_text())
    for side, model in zip((32, 80, 96), manifest["models"], strict=True):
        model["input_shape"] = [side, side, 3]
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    async with kit.scheduler(settings.model_copy(update={"models": folder})) as running:
        yield running


def encoded(width: int, height: int, form: str = "PNG", **options: Any) -> bytes:
    """Red on the left, blue on the right."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2, 0] = 255
    pixels[:, width // 2 :, 2] = 255
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def turned() -> bytes:
    """Lies on its side: its left is the top."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return encoded(400, 200, "JPEG", exif=exif.tobytes())


async def submitted(running: Any, *contents: bytes, **fields: str) -> str:
    files = [("images", (f"{number}.png", content)) for number, content in enumerate(contents)]
    answer = await running.http.post("/v1/jobs", files=files, data=fields)
    assert answer.status_code == 202, answer.text
    return f"/v1/jobs/{answer.json()['id']}"


async def picture(running: Any, path: str, **query: Any) -> tuple[httpx.Response, Image.Image]:
    answer = await running.http.get(path, params=query)
    assert answer.status_code == 200, answer.text
    image = Image.open(io.BytesIO(answer.content))
    assert image.get_format_mimetype() == answer.headers["content-type"]
    return answer, image.convert("RGB")


async def test_a_job_of_pixels(scheduler: Any, kit: Any) -> None:
    images = kit.images(3)
    job = f"/v1/jobs/{(await scheduler.submit(images))['id']}"
    for index in range(3):
        answer, image = await picture(scheduler, f"{job}/images/{index}")
        assert answer.headers["content-type"] == "image/png"
        assert np.array_equal(np.asarray(image), images[index])
    assert (await picture(scheduler, f"{job}/images/0", size=16))[1].size == (16, 16)
    for name, value in (
        ("x-content-type-options", "nosniff"),
        ("content-disposition", "inline"),
        ("cache-control", "private, max-age=3600"),
        ("content-security-policy", "default-src 'none'"),
    ):
        assert answer.headers[name] == value


async def test_a_job_of_files(keeper: Any) -> None:
    job = await submitted(keeper, encoded(400, 200), turned(), encoded(20, 10, "GIF"), encoded(3000, 2))
    answer, image = await picture(keeper, f"{job}/images/0")
    assert (answer.headers["content-type"], image.size) == ("image/jpeg", (96, 48))
    left, right = image.getpixel((10, 24)), image.getpixel((85, 24))
    assert left[0] > 200 > 50 > left[2]  # type: ignore[index]
    assert right[2] > 200 > 50 > right[0]  # type: ignore[index]
    _, upright = await picture(keeper, f"{job}/images/1", size=512)
    assert upright.size == (200, 400)
    assert upright.getpixel((100, 20))[0] > 200  # type: ignore[index]
    assert (await picture(keeper, f"{job}/images/2"))[1].size == (20, 10)
    assert (await picture(keeper, f"{job}/images/3", size=16))[1].size == (16, 1)


@pytest.mark.parametrize("query", ["size=15", "size=513", "size=x", "width=96"])
async def test_wrong_sizes(query: str, scheduler: Any, kit: Any) -> None:
    job = (await scheduler.submit(kit.images(1)))["id"]
    assert (await scheduler.http.get(f"/v1/jobs/{job}/images/0?{query}")).status_code == 400


async def refused(running: Any, path: str) -> str:
    answer = await running.http.get(path)
    assert answer.status_code == 404, answer.text
    return str(answer.json()["error"])


async def test_what_is_not_there(scheduler: Any, kit: Any) -> None:
    job = f"/v1/jobs/{(await scheduler.submit(kit.images(3)))['id']}"
    assert "has 3 images" in await refused(scheduler, f"{job}/images/3")
    assert "nothing" in await refused(scheduler, "/v1/jobs/nothing/images/0")
    for index in ("-1", "x", "1e3", "9" * 30):
        assert (await scheduler.http.get(f"{job}/images/{index}")).status_code == 400
    assert (await scheduler.http.delete(job)).status_code == 200
    assert "has ended, and its pictures are gone" in await refused(scheduler, f"{job}/images/0")


async def test_the_image_of_a_page_that_is_not_there_is_no_error(scheduler: Any, kit: Any) -> None:
    job = f"/v1/jobs/{(await scheduler.submit(kit.images(1)))['id']}"
    for_page = {"Sec-Fetch-Dest": "image"}
    assert (await scheduler.http.get(f"{job}/images/0", headers=for_page)).status_code == 200
    assert (await scheduler.http.delete(job)).status_code == 200
    answer = await scheduler.http.get(f"{job}/images/0", headers=for_page)
    assert (answer.status_code, answer.content) == (204, b"")
    assert "has ended" in await refused(scheduler, f"{job}/images/0")


async def skips(running: Any) -> None:
    job = await submitted(running, encoded(32, 32), b"none", on_bad_input="skip")
    assert (await running.http.get(f"{job}/images/0")).status_code == 200
    assert "image 1 cannot be read: not a PNG" in await refused(running, f"{job}/images/1")


async def test_a_job_of_pixels_says_what_was_wrong_with_a_picture(scheduler: Any) -> None:
    await skips(scheduler)


async def test_a_job_of_files_says_what_was_wrong_with_a_picture(keeper: Any) -> None:
    await skips(keeper)


async def test_of_files_only_the_head_was_read_when_they_came(keeper: Any) -> None:
    job = await submitted(keeper, encoded(64, 64)[:-40])
    assert "image 0 cannot be read: damaged or truncated" in await refused(keeper, f"{job}/images/0")


async def test_pictures_are_there_until_the_last_one_is_answered(scheduler: Any, kit: Any) -> None:
    async with kit.end(scheduler, "end-0") as end:
        end.gate.clear()
        job = (await scheduler.submit(kit.images(2), scheme="end", batch_size=1))["id"]

        async def waits() -> bool:
            return bool(end.waiting)

        await wait_for(waits, what="a task to be under way")
        assert (await scheduler.http.get(f"/v1/jobs/{job}/images/1")).status_code == 200
        end.gate.set()
        await scheduler.finished(job)
        assert "has ended" in await refused(scheduler, f"/v1/jobs/{job}/images/1")


async def test_pictures_of_an_unfinished_job_survive_the_scheduler(kit: Any, settings: SchedulerSettings) -> None:
    async with kit.scheduler(settings) as running:
        job = (await running.submit(kit.images(2)))["id"]
    async with kit.scheduler(settings) as running:
        _, image = await picture(running, f"/v1/jobs/{job}/images/1")
        assert image.getpixel((0, 0)) == (1, 0, 0)


async def test_a_picture_that_takes_too_long_is_given_up(keeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await submitted(keeper, encoded(64, 64), encoded(64, 64))
    assert (await keeper.http.get(f"{job}/images/0")).status_code == 200
    monkeypatch.setattr(pictures, "_HEAD_S", -1.0)
    assert "cannot be read: takes more than" in await refused(keeper, f"{job}/images/1")
