"""What the commands say of a job of which a part has no answer."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from terrace.cli import run
from tierkit.client import AsyncClient


async def second_task_fails(end, task_id, upstreams, lines):
    if task_id.endswith("-1"):
        return [{"event": "error", "task_id": task_id, "error": "broken"}]
    return lines


@pytest.fixture
def terrace(scheduler, monkeypatch, capsys):
    monkeypatch.setenv("TERRACE_SCHEDULER", scheduler.url)
    monkeypatch.setenv("COLUMNS", "100")

    async def call(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(run, arguments)
        return code, *capsys.readouterr()

    return call


async def test_images_without_an_answer_are_counted_and_make_the_exit_code_1_everywhere(
    kit, scheduler, terrace, tmp_path, monkeypatch
):
    images = tmp_path / "images.npy"
    np.save(images, kit.images(30))
    async with kit.end(scheduler, "end-0", script=second_task_fails):
        arguments = ("classify", str(images), "--scheme", "end", "--batch-size", "10", "--json")
        code, out, err = await terrace(*arguments, "--out", str(tmp_path / "out.jsonl"))
        job = json.loads(out)["job"]
    sentence = f"terrace: 10 of 30 images have no answer; 'terrace jobs results {job['id']}' says why."
    assert (code, job["state"], job["failed_images"]) == (1, "completed", 10)
    assert sentence in err
    code, out, err = await terrace("jobs", "wait", job["id"], "--json")
    assert (code, json.loads(out)["failed_images"]) == (1, 10)
    assert sentence in err
    code, out, err = await terrace("jobs", "wait", job["id"])
    assert (code, "10 without an answer" in out) == (1, True)
    assert sentence in err
    code, out, _ = await terrace("jobs", "show", job["id"])
    assert (code, "10 without an answer" in out) == (0, True)
    code, out, _ = await terrace("jobs", "list")
    header, _, row = (line for line in out.splitlines() if line.strip())
    assert code == 0
    assert row[: header.index("unanswered") + len("unanswered")].split()[-2:] == ["30", "10"]
    assert f"{job['created_at'][:10]} {job['created_at'][11:19]}Z" in row
    monkeypatch.setenv("COLUMNS", "50")
    code, out, _ = await terrace("jobs", "list")
    assert [line.split() for line in out.splitlines() if job["id"] in line] == [[job["id"], "completed", "10"]]
    code, out, _ = await terrace("jobs", "events", job["id"])
    assert out.splitlines()[-1] == "state     completed, 10 of 30 images without an answer"
    async with AsyncClient(scheduler.url) as client:
        states = [event.job async for event in client.events(job["id"]) if hasattr(event, "job")]
    assert (states[-1].state, states[-1].failed_images) == ("completed", 10)


async def test_one_image_without_an_answer_has_none(kit, scheduler, terrace, tmp_path):
    images = tmp_path / "images.npy"
    np.save(images, kit.images(2))
    async with kit.end(scheduler, "end-0", script=second_task_fails):
        code, out, err = await terrace("classify", str(images), "--scheme", "end", "--batch-size", "1")
    assert code == 1
    assert "1 of 2 images has no answer" in out
    assert "1 of 2 images has no answer" in err


@pytest.mark.parametrize("count", [2, 30])
async def test_why_no_upstream_node_has_answered_is_said(kit, scheduler, terrace, tmp_path, count):
    images = tmp_path / "images.npy"
    np.save(images, kit.images(count))
    async with kit.end(scheduler, "end-0"):
        for more in ((), ("--json",)):
            code, _, err = await terrace("classify", str(images), "--scheme", "end-edge", *more)
            assert code == 0
            assert f"{count} images without a finer answer: no_upstream: " in err
            assert "end-edge" in err


async def test_what_is_wrong_with_a_picture_is_said_once(kit, scheduler, terrace, tmp_path):
    np.save(tmp_path / "images.npy", kit.images(1))
    (tmp_path / "a.jpg").write_bytes(b"no picture")
    sources = [str(tmp_path / name) for name in ("images.npy", "a.jpg")]
    async with kit.end(scheduler, "end-0"):
        code, out, _ = await terrace("classify", *sources, "--scheme", "end", "--on-bad-input", "skip")
        assert (code, out.count("not a PNG")) == (0, 1)
        np.save(tmp_path / "images.npy", kit.images(30))
        code, out, _ = await terrace("classify", *sources, "--scheme", "end", "--on-bad-input", "skip")
        assert (code, out.count("not a PNG")) == (0, 1)


async def test_a_cancelled_job_counts_what_it_has_not_answered(kit, scheduler, terrace):
    job = await scheduler.submit(kit.images(30), scheme="end")
    await scheduler.http.delete(f"/v1/jobs/{job['id']}")
    assert (await scheduler.job(job["id"]))["failed_images"] == 30
    code, _, err = await terrace("jobs", "wait", job["id"])
    assert code == 1
    assert "30 of 30 images have no answer" in err


async def test_a_job_that_is_answered_in_full_says_no_word_of_it(kit, scheduler, terrace):
    async with kit.end(scheduler, "end-0"):
        job = await scheduler.submit(kit.images(30), scheme="end")
        code, out, err = await terrace("jobs", "wait", job["id"])
    assert (code, "answer;" in err, "without" in out) == (0, False, False)


async def test_the_networks_of_a_scheduler_are_listed(scheduler, terrace):
    """Those of its set, and not Terrace's own."""
    code, out, err = await terrace("models", "list", "--scheduler", scheduler.url)
    assert code == 0, err
    assert [name in out for name in ("small", "middle", "large", "wrn-16-4")] == [True, True, True, False]
    code, out, _ = await terrace("models", "list", "--scheduler", scheduler.url, "--json")
    assert [entry["name"] for entry in json.loads(out)["models"]] == ["small", "middle", "large"]
    code, _, err = await terrace("models", "list", "--scheduler", scheduler.url, "--models", "absent")
    assert (code, "--scheduler" in err) == (2, True)
