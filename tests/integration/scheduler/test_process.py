"""The scheduler as a process of its own: cost, SIGKILL, restart."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack

import httpx
import pytest

from tierkit.errors import SetupError
from tierkit.testing import service_process, wait_for


def command(settings, port: str = "0") -> list[str]:
    return [
        "-m",
        "terrace",
        "scheduler",
        f"--port={port}",
        f"--state={settings.state}",
        f"--models={settings.models}",
        "--n-map=1",
        "--trusted=end,edge,cloud",
        f"--heartbeat-s={settings.heartbeat_s}",
        f"--suspect-s={settings.suspect_s}",
        f"--lease-s={settings.lease_s}",
    ]


@pytest.mark.parametrize("events_before", [0, 38])
async def test_a_killed_scheduler_goes_on_and_answers_every_image_once(kit, settings, tmp_path, events_before):
    """SIGKILL after so many of the 40 events (20 tasks, coarse and fine) have been seen."""
    images = 1000
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http, AsyncExitStack() as nodes:
        async with service_process(command(settings), ready_file=tmp_path / "ready") as process:
            http.base_url = httpx.URL(process.url)
            running = kit.running(process.url, http, settings)
            ends = [await nodes.enter_async_context(kit.end(running, f"end-{k}")) for k in range(2)]
            await nodes.enter_async_context(kit.uppers(running, "edge-0", "cloud-0"))
            if events_before < 38:
                ends[1].fine_gate.clear()  # so that there is work under way, whatever the moment
            job = await running.submit(kit.images(images), labels=[k % 100 for k in range(images)])
            seen, last = [], 0
            async with http.stream("GET", f"/v1/jobs/{job['id']}/events") as response:
                async for kind, number, data in kit.read_events(response):
                    if kind != "state":
                        seen.append((kind, data))
                        last = number
                    if len(seen) >= events_before:
                        process.kill()
                        break
            await process.exit_code()
        for end in ends:
            end.fine_gate.set()
        again = command(settings, port=process.url.rpartition(":")[2])
        async with service_process(again, ready_file=tmp_path / "again") as process:
            rest = await running.events(job["id"], after=last)
            seen += [(kind, data) for kind, _, data in rest if kind != "state"]
            view, results = rest[-1][2], await running.results(job["id"])
    assert view["state"] == "completed"
    assert view["answered_coarse"] == view["answered_fine"] == images
    assert (view["fallback"], view["failed_images"]) == (0, 0)
    assert view["fine_accuracy"] == 1.0
    assert [result["index"] for result in results] == list(range(images))
    assert all(result["fine"]["index"] == result["index"] % 100 for result in results)
    # No event came twice, none was left out, although the stream broke in between.
    for stage in ("coarse", "fine"):
        indices = [result["index"] for kind, data in seen if kind == stage for result in data["results"]]
        assert sorted(indices) == list(range(images))
    assert not list((settings.state / "inputs").iterdir())


async def test_an_upload_that_a_crash_cuts_short_leaves_nothing_behind(kit, settings, tmp_path):
    body, headers = kit.tensor_body(kit.images(1000))
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        async with service_process(command(settings), ready_file=tmp_path / "ready") as process:
            http.base_url = httpx.URL(process.url)
            with socket.create_connection((http.base_url.host, http.base_url.port)) as client:
                client.sendall(f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode() + body[: len(body) // 2])

                async def under_way() -> bool:
                    return bool((await http.get("/readyz")).json()["in_flight"] == 1)

                await wait_for(under_way, what="the upload to be under way")
                process.kill()
                await process.exit_code()
        again = command(settings, port=process.url.rpartition(":")[2])
        async with service_process(again, ready_file=tmp_path / "again"):
            assert (await http.get("/v1/jobs")).json()["jobs"] == []
    assert not list((settings.state / "inputs").iterdir())
    assert {path.name.partition(".")[0] for path in settings.state.iterdir()} == {
        "inputs",
        "models",
        "networks",
        "scheduler",
    }


async def test_a_restart_does_not_compute_again_what_is_answered(kit, settings, tmp_path):
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http, AsyncExitStack() as nodes:
        async with service_process(command(settings), ready_file=tmp_path / "ready") as process:
            http.base_url = httpx.URL(process.url)
            running = kit.running(process.url, http, settings)
            end = await nodes.enter_async_context(kit.end(running, "end-0"))
            job = await running.submit(kit.images(500), scheme="end")
            assert (await running.finished(job["id"]))["state"] == "completed"
            end.gate.clear()
            second = await running.submit(kit.images(100), scheme="end", recovery="none")
            await wait_for(lambda: end.waiting == 2, what="both tasks on the device")
            process.terminate()
            assert await process.exit_code() == 0
            # A task whose attempt the scheduler itself broke off is as if it had never been sent.
            assert "attempt failed" not in process.log
        before = len(end.tasks)
        end.gate.set()
        again = command(settings, port=process.url.rpartition(":")[2])
        async with service_process(again, ready_file=tmp_path / "again") as process:
            assert (await running.finished(second["id"]))["answered_coarse"] == 100
            assert (await running.job(job["id"]))["answered_coarse"] == 500
    assert sorted(end.tasks[before:]) == [f"{second['id']}-0", f"{second['id']}-1"]


async def test_sigterm_ends_streams_and_leaves_the_jobs_for_the_next_scheduler(kit, settings, tmp_path):
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        async with service_process(command(settings), ready_file=tmp_path / "ready") as process:
            http.base_url = httpx.URL(process.url)
            running = kit.running(process.url, http, settings)
            job = await running.submit(kit.images(10))
            async with http.stream("GET", f"/v1/jobs/{job['id']}/events") as response:
                events = kit.read_events(response)
                assert (await anext(events))[0] == "state"
                process.terminate()
                assert [event async for event in events] == []
            assert await process.exit_code(timeout_s=5) == 0
        again = command(settings, port=process.url.rpartition(":")[2])
        async with service_process(again, ready_file=tmp_path / "again"):
            assert (await running.job(job["id"]))["state"] == "queued"
            assert (await running.http.delete(f"/v1/jobs/{job['id']}")).json()["state"] == "cancelled"


async def test_a_database_that_cannot_be_used_stops_the_start_with_one_sentence(settings, tmp_path):
    settings.state.mkdir(parents=True)
    (settings.state / "scheduler.db").write_bytes(b"no database " * 50)
    async with service_process(command(settings), ready_file=tmp_path / "ready", wait_ready=False) as process:
        assert await process.exit_code() == 2
    assert process.log.count("\n") == 1
    assert "scheduler.db cannot be opened for writing: file is not a database" in process.log


async def test_two_schedulers_never_share_a_state_folder(kit, scheduler, settings):
    with pytest.raises(SetupError, match="another scheduler uses the state folder"):
        async with kit.scheduler(settings):
            pass
