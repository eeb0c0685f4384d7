"""Workers without a data set of their own: they fetch segments from the host and from each other, and train on them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.training.data import TrainingData
from terrace.cli import run
from tests.integration.access.conftest import Certificates, certificates
from tests.integration.training.conftest import RunningHost, StartHost
from tierkit.access import client_context
from tierkit.copies.files import sha256_of
from tierkit.copies.serving import KEY_HEADER, piece_route
from tierkit.copies.store import Store
from tierkit.errors import NotFound, SetupError, UpstreamUnavailable
from tierkit.http.answering import install
from tierkit.testing import serve_app, service_process, wait_for
from training.data.manifest import SegmentManifest, decoded, pieces_in
from training.data.segments import of_segments
from training.host.chief import compute_as_chief
from training.host.reporting import copies_of
from training.learner import FlatLearner
from training.messages import LEASE_HEADER, DataAnswer, DataReport, GrantedLease
from training.payloads import unpack
from training.units import Flat
from training.worker.connection import HostConnection
from training.worker.copier import Copier
from training.worker.finding import at
from training.worker.node import WorkerOptions, work

pytestmark = [pytest.mark.train, pytest.mark.anyio]

__all__ = ["certificates"]  # the fixture

A = "a" * 16
SHARED = {"strategy": "sgd", "share_data": True, "workers": 3, "max_lease_wait_s": 0.5}


def options(running: RunningHost, tmp_path: Path, name: str, **given: Any) -> WorkerOptions:
    chosen = {"fetch": "own", "cache": tmp_path / "cache", "serve_data": ("127.0.0.1", 0), "threads": 1, **given}
    return WorkerOptions(find_host=at(running.url), name=name, **chosen)


async def spread(running: RunningHost) -> dict[str, dict[str, Any]]:
    """The training images of each worker, as the host knows them."""
    found = (await running.http.get("/v1/data")).raise_for_status().json()
    return {each["name"]: each for each in found["workers"]}


async def joined(running: RunningHost, name: str) -> None:
    join = {"name": name, "incarnation": A, "data_sha256": running.host.spec.data_sha256, "fetches": True}
    (await running.http.post("/v1/workers", json=join)).raise_for_status()


async def reported(running: RunningHost, name: str, **given: Any) -> dict[str, Any]:
    report = DataReport(worker=name, incarnation=A, keeps=given.pop("keeps", "own"), room=given.pop("room", 4), **given)
    answer = await running.http.post("/v1/data", content=report.model_dump_json())
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


async def test_three_workers_without_data_train_to_the_end(start_host: StartHost, tmp_path: Path) -> None:
    async with start_host(epochs=8, **SHARED) as running:
        # Nobody reaches the third one: it only receives.
        places = {"w1": ("127.0.0.1", 0), "w2": ("127.0.0.1", 0), "w3": None}
        done = await asyncio.gather(
            *(work(options(running, tmp_path, name, serve_data=place)) for name, place in places.items())
        )
        await asyncio.wait_for(running.lifecycle.wait_draining(), 30)
        found = running.host.result
    assert found is not None
    assert sum(each.updates for each in done) == found["updates"] == 40
    assert found["accuracy"] > 1 / 3
    assert all(each.copied >= 1 for each in done)


async def test_how_far_copies_are_is_told_to_the_scheduler(start_host: StartHost) -> None:
    async with start_host(**SHARED) as running:
        for name in ("a", "b"):
            await joined(running, name)
        first = await reported(running, "a", url="http://127.0.0.1:1", waits=False)
        await reported(running, "a", url="http://127.0.0.1:1", holds=(3,), share=0.5, waits=False)
        await reported(running, "b", waits=False)
        told = {each.name: copies_of(each) for each in running.host.copies()}
    assert (told["a"].segment, told["a"].source, told["a"].share) == (first["segment"], "", 0.5)
    assert (told["a"].holds, told["a"].has, told["a"].serves) == ("3", 1, True)
    assert (told["b"].source, told["b"].share, told["b"].serves) == ("a", 0.0, False)


async def test_a_worker_that_fetches_all_computes_as_one_that_has_the_data_set(
    start_host: StartHost, tmp_path: Path, shapes: Path
) -> None:
    weights = []
    local: dict[str, Any] = {"fetch": None, "dataset": str(shapes), "serve_data": None}
    for folder, given, copied in (("fetched", {"fetch": "all"}, 4), ("local", local, 0)):
        async with start_host(folder=folder, **SHARED) as running:
            done = await work(options(running, tmp_path, "w", **given))
            weights.append((await running.host.weights())[1])
        assert (done.updates, done.copied) == (10, copied)
    assert weights[0] == weights[1]


async def test_a_unit_of_segments_can_be_repeated_by_all_who_have_them(start_host: StartHost) -> None:
    async with start_host(**SHARED) as running:
        spec, manifest = running.host.spec, running.host.shared.manifest
        await joined(running, "w")
        nothing = await running.http.post("/v1/leases", params={"worker": "w", "incarnation": A})
        assert nothing.status_code == 202  # it has nothing to compute from
        await reported(running, "w", holds=(1, 2), waits=False)
        answer = await running.http.post("/v1/leases", params={"worker": "w", "incarnation": A})
        lease = GrantedLease.model_validate_json(answer.headers[LEASE_HEADER])
        assert lease.segments == (1, 2)
        weights, buffers = unpack(answer.content, values=spec.values, buffers=spec.buffers)

        async def drawn() -> TrainingData:
            contents = [await running.host.shared.read(manifest.segments[number].sha256, None) for number in (1, 2)]
            return of_segments(spec.network, [decoded(content, manifest) for content, _ in contents], manifest)

        worker, host = FlatLearner(spec.network, await drawn()), FlatLearner(spec.network, running.host.images)
        found = {"the whole": computed(host, lease, weights, buffers)}
        host.draw_from(await drawn())
        found |= {"worker": computed(worker, lease, weights, buffers), "host": computed(host, lease, weights, buffers)}
        assert found["worker"] == found["host"] != found["the whole"]


def computed(learner: FlatLearner, lease: GrantedLease, weights: Flat, buffers: Flat) -> bytes:
    learner.load(weights, buffers)
    return learner.compute(lease.unit.span, "gradient").values.tobytes()


async def test_the_host_computes_units_of_segments_again_to_the_bit(start_host: StartHost, tmp_path: Path) -> None:
    strategy = tmp_path / "trust.toml"
    strategy.write_text('family = "outer"\nperiod = 1\n[trust]\nrecheck = 1.0\ntolerance = 0.0\ndeviation = 1000.0\n')
    async with start_host(epochs=6, **{**SHARED, "strategy": str(strategy)}) as running:
        done = await asyncio.gather(*(work(options(running, tmp_path, f"w{n}")) for n in (1, 2, 3)))
    # Who had computed from other images would have been in quarantine, and told so.
    assert sum(each.updates for each in done) == 30


async def test_a_worker_that_has_been_through_its_segments_gets_the_next_one(
    start_host: StartHost, tmp_path: Path
) -> None:
    async with start_host(epochs=60, **{**SHARED, "workers": 9}) as running:
        worker = asyncio.create_task(work(options(running, tmp_path, "w")))
        seen: set[tuple[int, ...]] = set()

        async def moved() -> bool:
            seen.add(tuple((await spread(running)).get("w", {}).get("wanted", ())))
            return len(seen - {()}) >= 2

        await wait_for(moved, what="other segments")
        done = await worker
    assert done.faults == 0
    assert done.copied >= 3
    assert all(len(each) == 2 for each in seen - {()})


@asynccontextmanager
async def lying(answer: Callable[[range | None], bytes]) -> AsyncIterator[tuple[str, list[str]]]:
    """A worker that passes on what it likes; yields its URL and what it was asked for."""
    asked: list[str] = []

    async def read(sha256: str, span: range | None) -> tuple[bytes, int]:
        asked.append(sha256)
        return answer(span), 10**6

    async def allow(request: Request) -> None:
        """Everyone."""

    app = Starlette(routes=[piece_route("/v1/segments", read, allow)])
    install(app)
    async with serve_app(app) as lifecycle:
        yield lifecycle.url, asked


def zeros(span: range | None) -> bytes:
    return bytes(len(span or range(10)))


def nothing(span: range | None) -> bytes:
    raise NotFound("it was a lie")


@pytest.mark.parametrize("answer", [zeros, nothing], ids=["wrong bytes", "nothing"])
async def test_who_sends_wrong_bytes_or_lacks_what_it_claims_is_found_out(
    start_host: StartHost, tmp_path: Path, answer: Callable[[range | None], bytes]
) -> None:
    async with lying(answer) as (url, asked), start_host(epochs=8, **SHARED) as running:
        await joined(running, "liar")
        await reported(running, "liar", url=url, keeps="all", holds=(0, 1, 2, 3), waits=False)
        await joined(running, "busy")  # keeps the host busy, so that the liar is asked
        assert (await reported(running, "busy", waits=False))["source"] is None
        workers = [asyncio.create_task(work(options(running, tmp_path, f"w{n}"))) for n in (1, 2)]

        async def found_out() -> bool:
            return not (await spread(running))["liar"]["trusted"]

        await wait_for(found_out, what="the liar to be found out")
        for name in ("liar", "busy"):
            await running.http.delete(f"/v1/workers/{name}", params={"incarnation": A})
        done = await asyncio.gather(*workers)
        assert asked
    assert sum(each.updates for each in done) == 40


async def test_what_a_worker_says_of_a_copy_that_it_was_not_told_counts_for_nothing(
    start_host: StartHost, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_host(**SHARED) as running:
        await joined(running, "busy")
        await reported(running, "busy", waits=False)
        await joined(running, "source")
        await reported(running, "source", url="http://127.0.0.1:1", keeps="all", holds=(0, 1, 2, 3), waits=False)
        await joined(running, "w")
        told = await reported(running, "w", waits=False)
        assert told["source"] == "http://127.0.0.1:1"
        for segment, source in ((told["segment"], "http://127.0.0.1:2"), (0, told["source"]), (None, None)):
            await reported(running, "w", failed="wrong", failed_segment=segment, failed_source=source, waits=False)
        assert (await spread(running))["source"]["trusted"]
        assert "training.host.sharing" not in {record.name for record in caplog.records}
        await reported(
            running, "w", failed="wrong", failed_segment=told["segment"], failed_source=told["source"], waits=False
        )
        assert not (await spread(running))["source"]["trusted"]
        assert "training.host.sharing" in {record.name for record in caplog.records}


async def test_a_source_that_is_lost_in_mid_copy_is_replaced_and_what_is_there_is_kept(
    start_host: StartHost, tmp_path: Path
) -> None:
    """The source has the first chunks alone, and its connections break from then on."""
    async with start_host(epochs=8, **SHARED) as running:
        shared = running.host.shared
        number = 1
        entry = shared.manifest.segments[number]
        content, _ = await shared.read(entry.sha256, None)
        # Chunks of this tiny data set are larger than its segments: smaller ones stand for those of a large one.
        size = 1_000
        starts = range(0, len(content), size)
        chunks = tuple(sha256_of(content[start : start + size]) for start in starts)
        small = shared.manifest.model_copy(
            update={
                "chunk_bytes": size,
                "segments": tuple(
                    each.model_copy(update={"chunks": chunks}) if each == entry else each
                    for each in shared.manifest.segments
                ),
            }
        )
        store = Store(tmp_path / "store", small.files)
        fetched: list[tuple[str, int]] = []

        class Sources:
            name, incarnation = "w", A

            def __init__(self) -> None:
                self.reports: list[DataReport] = []
                self.source: str | None = "http://lost:1"

            async def data(self, report: DataReport) -> DataAnswer:
                self.reports.append(report)
                if report.failed is not None:
                    self.source = None
                segment = None if report.got is not None or report.holds else number
                return DataAnswer(key="k", wanted=(number,), segment=segment, source=self.source)

            async def chunk(self, source: str | None, sha256: str, span: range, key: str, *, budget_s: float) -> bytes:
                if source is not None and len(fetched) >= 5:
                    raise UpstreamUnavailable("it is gone")
                fetched.append((source or "host", span.start))
                return content[span.start : span.stop]

        sources = Sources()
        copier = Copier(cast(HostConnection, sources), store, lambda ask: ask(), keeps="own")
        task = asyncio.create_task(copier.run())
        await asyncio.wait_for(copier.ready(), 30)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert [report.failed for report in sources.reports if report.failed] == ["gone"]
    assert {start for _, start in fetched} == set(starts)
    assert len(fetched) <= len(starts) + 1  # one may have been on its way
    assert {source for source, _ in fetched} == {"http://lost:1", "host"}
    assert pieces_in(store, [number], small)[0].index.size == entry.images


async def test_a_worker_process_that_is_killed_in_mid_run_costs_nobody_his_data(
    start_host: StartHost, tmp_path: Path
) -> None:
    async with start_host(epochs=40, lease_s=2.0, **SHARED) as running:
        command = [
            sys.executable,
            "-P",
            "-m",
            "terrace",
            "train",
            "work",
            running.url,
            "--name",
            "w1",
            "--threads",
            "1",
        ]
        command += ["--fetch", "all", "--cache", str(tmp_path / "cache"), "--serve-data", "127.0.0.1:0"]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        try:

            async def has_some() -> bool:
                return bool((await spread(running)).get("w1", {}).get("holds"))

            await wait_for(has_some, timeout_s=60, what="the first worker's segments")
        finally:
            process.kill()
            await process.wait()
        done = await asyncio.gather(*(work(options(running, tmp_path, name, fetch="all")) for name in ("w2", "w3")))
        await asyncio.wait_for(running.host.over.wait(), 30)
    assert running.host.result is not None
    assert running.host.result["updates"] == 200
    assert [each.copied for each in done] == [4, 4]


async def test_a_disk_that_is_full_ends_the_worker_and_leaves_no_half_segment(
    start_host: StartHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, content: bytes, start: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Store.__init__, "__kwdefaults__", {"write": full})
    async with start_host(**SHARED) as running:
        with pytest.raises(SetupError, match="No space left"):
            await work(options(running, tmp_path, "w"))
        assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
        assert running.host.state == "running"


@dataclass(slots=True)
class SmallDisk:
    """Where all segments of a test lie."""

    folder: Path
    capacity: int
    """Bytes."""
    most: int = 0
    """That were there at a time."""
    refused: int = 0
    """Writes that did not fit."""

    def used(self) -> int:
        found = 0
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):  # given its name, or dropped, meanwhile
                found += path.stat().st_size if path.is_file() else 0
        return found

    def usage(self, folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=max(0, self.capacity - self.used()))

    def write(self, file: int, content: bytes, start: int) -> int:
        if self.used() + len(content) > self.capacity:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.pwrite(file, content, start)
        self.most = max(self.most, self.used())
        return written


def put_in(disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", disk.usage)
    monkeypatch.setattr(Store.__init__, "__kwdefaults__", {"write": disk.write})


@pytest.mark.parametrize(("fits", "copied"), [(1, 1), (2, 2), (3, 3)])
async def test_a_worker_on_a_small_disk_swaps_segments_only_where_the_next_one_fits(
    start_host: StartHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: int, copied: int
) -> None:
    async with start_host(epochs=60, **{**SHARED, "workers": 9}) as running:
        largest = max(entry.bytes for entry in running.host.shared.manifest.segments)
        disk = SmallDisk(tmp_path / "cache", fits * largest + largest // 2)
        put_in(disk, monkeypatch)
        done = await work(options(running, tmp_path, "w"))
    assert (done.updates, done.faults) == (300, 0)
    assert done.copied >= copied
    assert (disk.refused, disk.most // (largest // 2)) == (0, 2 * fits)


async def test_a_disk_that_is_filled_during_a_swap_leaves_the_worker_what_it_holds(
    start_host: StartHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_host(epochs=60, **{**SHARED, "workers": 9}) as running:
        largest = max(entry.bytes for entry in running.host.shared.manifest.segments)
        disk = SmallDisk(tmp_path / "cache", 2 * largest + largest // 2)
        put_in(disk, monkeypatch)
        # It says that there is more room than there is.
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
        working = asyncio.create_task(work(options(running, tmp_path, "w")))

        async def given_up() -> bool:
            known = (await spread(running)).get("w", {"holds": (), "wanted": ()})
            return disk.refused > 0 and len(known["holds"]) == 2 and known["holds"] == known["wanted"]

        await wait_for(given_up, what="the host to want what the worker holds")
        done = await working
    assert (done.updates, done.faults, done.copied, disk.refused) == (300, 0, 2, 1)
    assert "No space left" in caplog.text
    assert len([path for path in disk.folder.rglob("*") if path.is_file()]) == 2


async def test_a_worker_without_room_for_a_segment_is_told(start_host: StartHost) -> None:
    async with start_host(**SHARED) as running:
        await joined(running, "w")
        report = DataReport(worker="w", incarnation=A, keeps="own", room=0)
        answer = await running.http.post("/v1/data", content=report.model_dump_json())
        assert answer.status_code == 413


async def test_only_workers_of_the_run_get_its_images(start_host: StartHost, tmp_path: Path) -> None:
    async with start_host(epochs=400, **SHARED) as running:
        manifest = SegmentManifest.model_validate((await running.http.get("/v1/segments")).json())
        path = f"/v1/segments/{manifest.segments[0].sha256}"
        who = {"worker": "w", "incarnation": A}
        assert (await running.http.get(path, params=who)).status_code == 404  # it has not joined
        await joined(running, "w")
        whole = await running.http.get(path, params=who)
        assert (whole.status_code, sha256_of(whole.content)) == (200, manifest.segments[0].sha256)
        part = await running.http.get(path, params=who, headers={"Range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, whole.content[10:20])
        assert part.headers["Content-Range"] == f"bytes 10-19/{len(whole.content)}"
        for header in ("bytes=5-1", "bytes=-5", "bytes=0-1,3-4", "lines=1-2", f"bytes={10**9}-{10**9}"):
            assert (await running.http.get(path, params=who, headers={"Range": header})).status_code == 400
        assert (await running.http.get(f"/v1/segments/{'0' * 64}", params=who)).status_code == 404
        assert (await running.http.get(path, params={**who, "incarnation": "b" * 16})).status_code == 409
        serving = asyncio.create_task(work(options(running, tmp_path, "server", fetch="all")))

        async def serves() -> bool:
            return len((await spread(running)).get("server", {}).get("holds", ())) == 4

        await wait_for(serves, what="a worker that passes images on")
        await joined(running, "busy")  # the host sends to this one
        assert (await reported(running, "busy", waits=False))["source"] is None
        told = await reported(running, "w", waits=False)
        url, key = told["source"], told["key"]
        async with httpx.AsyncClient(base_url=url) as stranger:
            assert (await stranger.get(path)).status_code == 403
            assert (await stranger.get("/metrics")).status_code == 404
            assert (await stranger.get(path, headers={KEY_HEADER: key[:-1]})).status_code == 403
            assert (await stranger.get(path, headers={KEY_HEADER: key})).content == whole.content
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
    kept = [each for folder in ("cache", "run") for each in (tmp_path / folder).rglob("*") if each.is_file()]
    assert len(kept) > 8
    assert [each for each in kept if each.stat().st_mode & 0o077] == []


async def test_images_travel_by_tls_and_hosts_ask_for_tokens(
    start_host: StartHost, tmp_path: Path, certificates: Certificates
) -> None:
    book, tokens = tmp_path / "tokens.toml", {}
    for name in ("pi", "box"):
        out = ["--tokens", str(book), "--out", str(tmp_path / name)]
        assert run(["token", "create", "--name", name, "--role", "worker", *out]) == 0
        tokens[name] = (tmp_path / name).read_text().strip()
    async with start_host(epochs=4, tokens=book, **certificates.issue("host"), **SHARED) as running:
        shared = running.host.shared.manifest.segments[0].sha256
        async with httpx.AsyncClient(base_url=running.url, verify=client_context(certificates.ca)) as stranger:
            who = {"worker": "pi", "incarnation": A}
            assert (await stranger.get("/v1/segments")).status_code == 401
            assert (await stranger.get(f"/v1/segments/{shared}", params=who)).status_code == 401
            box = {"Authorization": f"Bearer {tokens['box']}"}  # for another name
            assert (await stranger.get(f"/v1/segments/{shared}", params=who, headers=box)).status_code == 403
        given = {"tls_ca": certificates.ca, "fetch": "all"}
        done = await asyncio.gather(
            *(
                work(
                    options(
                        running,
                        tmp_path,
                        name,
                        token=lambda name=name: tokens[name],
                        **certificates.issue(name),
                        **given,
                    )
                )
                for name in tokens
            )
        )
    assert sum(each.updates for each in done) == 20
    assert [each.copied for each in done] == [4, 4]


async def test_a_host_that_shares_nothing_says_so(start_host: StartHost, tmp_path: Path) -> None:
    async with start_host(strategy="sgd") as running:
        with pytest.raises(NotFound, match="share-data"):
            await work(options(running, tmp_path, "w"))


async def test_segments_that_are_not_the_data_set_stop_the_host(start_host: StartHost, tmp_path: Path) -> None:
    async with start_host(**SHARED):
        pass
    folder = tmp_path / "run" / "segments"
    manifest = json.loads((folder / "segments.json").read_text())
    first, second = (folder / each["sha256"] for each in manifest["segments"][:2])
    before = first.read_bytes()
    first.write_bytes(before[:-1] + bytes([1 - before[-1]]))
    with pytest.raises(SetupError, match="damaged"):
        async with start_host(**SHARED):
            pass
    first.write_bytes(before)
    manifest["segments"] = manifest["segments"][1:]
    (folder / "segments.json").write_text(json.dumps(manifest))
    with pytest.raises(SetupError, match=r"lack images|not in the order"):
        async with start_host(**SHARED):
            pass
    assert second.exists()


async def test_the_host_computes_as_worker_0(start_host: StartHost, tmp_path: Path) -> None:
    async with start_host(epochs=8, **{**SHARED, "strategy": "crowdsourced"}) as running:
        chief = asyncio.create_task(compute_as_chief(running.host, running.host.images))
        done = await work(options(running, tmp_path, "w"))
        await chief
        status = await running.host.status()
    assert status.updates == 40
    assert 0 < done.updates < 40


async def test_a_host_process_that_works_needs_no_worker(
    network: Callable[[int], Path], shapes: Path, tmp_path: Path
) -> None:
    flags = [f"--network={network(4)}", f"--dataset={shapes}", f"--folder={tmp_path / 'run'}", "--port=0"]
    command = ["-m", "terrace", "train", "host", *flags, "--strategy=crowdsourced", "--work", "--share-data"]
    async with service_process(command, ready_file=tmp_path / "ready") as host:
        assert await host.exit_code(timeout_s=200) == 0, host.log
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["updates"], result["faults"]) == (20, 0)


async def test_a_host_that_comes_back_grants_the_same_segments(start_host: StartHost) -> None:
    async with start_host(**SHARED) as running:
        await joined(running, "w")
        await reported(running, "w", holds=(1, 2), waits=False)
    async with start_host(**SHARED) as running:
        answer = await running.http.post("/v1/leases", params={"worker": "w", "incarnation": A})
        assert json.loads(answer.headers[LEASE_HEADER])["segments"] == [1, 2]
