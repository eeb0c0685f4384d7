"""No byte of a picture goes to a node that is not trusted: all its sockets are recorded, for all ways of a task.

The pictures are noise, so a piece of one in a recording is no coincidence. The same search does find them where the
node is trusted.
"""

import asyncio
import contextlib
import hashlib
import io
import json
import re
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from PIL import Image
from prometheus_client import generate_latest
from starlette.applications import Starlette

from cloud_node.settings import CloudSettings
from edge_node.app import EdgeNode, create_app as edge_app
from edge_node.settings import EdgeSettings
from encryption.heads import Encoders
from encryption.loading import load_heads, load_served
from encryption.noise import job_key
from end_node.app import create_app as end_app
from end_node.node import EndNode
from end_node.settings import EndSettings
from models.data import read_sample
from models.manifest import Fit, PartFile, load_manifest, save_manifest, weights_folder
from models.pictures import Picture
from models.serving import load_models
from models.split import extract_part
from scheduler.api.app import create_app as scheduler_app
from scheduler.settings import SchedulerSettings
from tests.model_sets import encoded_set
from tierkit.client import AsyncClient, FineResults, Job
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.node import InferenceNode, node_app
from tierkit.tensors import Array
from tierkit.testing import listening, serve_app, wait_for
from tierkit.types import EncoderKind, Tier

NETWORK = "wrn-16-4"  # for upstream nodes: it is small
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
WINDOW = 8
PIECE = 16
"""Bytes of a file: in a row of 31 there is one of its pieces."""
SIDES = {"end": 32, "edge": 80, "cloud": 96}
FAST: dict[str, Any] = {"heartbeat_s": 0.1, "suspect_s": 2.0, "lease_s": 5.0, "drain_s": 2.0}


class Recorder:
    """Stands before a service and keeps all that is sent to it."""

    def __init__(self) -> None:
        self.connections: list[bytearray] = []
        self.target: tuple[str, int] | None = None
        self.known = asyncio.Event()
        self.refuses = False
        """Whether connections are closed at once."""
        self.to_hold = 0
        """The request of this number is not answered."""
        self.over = asyncio.Event()
        """Until then."""
        self.requests = 0

    @property
    def captured(self) -> bytes:
        return b"".join(self.connections)

    def point_at(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self.target = (host, int(port))
        self.known.set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.known.wait()
        assert self.target is not None
        server_reader, server_writer = await asyncio.open_connection(*self.target)
        held: list[bool] = []
        forth, back = self._forth(reader, server_writer, held), self._back(server_reader, writer, held)
        await asyncio.gather(forth, back)

    async def _forth(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: list[bool]) -> None:
        captured = bytearray()
        self.connections.append(captured)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                captured += data
                if b"POST /v2/models/" in data:
                    self.requests += 1
                    if self.refuses:
                        captured += await reader.readexactly(_body_to_come(data))
                        return
                    if self.requests == self.to_hold:
                        held.append(True)
                writer.write(data)
                await writer.drain()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: list[bool]) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                if held:
                    await self.over.wait()
                writer.write(data)
                await writer.drain()


def _body_to_come(data: bytes) -> int:
    """Bytes of a request's body that do not stand behind its headers yet."""
    headers, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)\r\ncontent-length: *([0-9]+)", headers)
    assert found is not None
    return int(found[1]) - len(body)


def noise(count: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), np.uint8)


def unpacked(captured: bytes) -> list[bytes]:
    """What stands compressed in what was captured."""
    contents = []
    at = captured.find(ZSTD_MAGIC)
    while at >= 0:
        with contextlib.suppress(zstandard.ZstdError):
            contents.append(zstandard.ZstdDecompressor().decompressobj().decompress(captured[at:]))
        at = captured.find(ZSTD_MAGIC, at + 1)
    return contents


def holds_pixels(captured: bytes, images: Array) -> bool:
    """Whether a piece of an image, by rows or by planes, stands in what was captured, plain or unpacked."""
    plain = [captured, *unpacked(captured)]
    planes = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    # Whatever 15 bytes stand in a row, 8 of them are one of these.
    pieces = np.concatenate([layout.reshape(-1).view(np.uint64) for layout in (images, planes)])
    texts = [", ".join(map(str, row)) for row in images.reshape(len(images), -1)[:, :16].tolist()]
    for content in plain:
        windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(content, np.uint8), WINDOW)
        if len(content) >= WINDOW and np.isin(np.ascontiguousarray(windows).view(np.uint64), pieces).any():
            return True
        if any(text.encode() in content or text.replace(" ", "").encode() in content for text in texts):
            return True
    return False


class Fleet:
    def __init__(
        self, stack: AsyncExitStack, folder: Path, trusted: tuple[str, ...], weights: Path | None = None
    ) -> None:
        self.stack = stack
        self.folder = folder
        self.weights = weights
        self.settings = SchedulerSettings(
            port=0, state=folder / "state", models=weights, trusted=trusted, n_map=1, hedge=True, **FAST
        )
        self.recorders: dict[str, Recorder] = {}
        self.urls: dict[Recorder, str] = {}

    async def start(
        self,
        *,
        ends: int,
        edges: tuple[str, ...] = (),
        clouds: tuple[str, ...] = (),
        edge_network: str = NETWORK,
        cloud_network: str = NETWORK,
    ) -> None:
        settings = self.settings
        service = await self.stack.enter_async_context(
            serve_app(lambda lifecycle: scheduler_app(settings, lifecycle), settings)
        )
        self.url = service.url
        self.client = await self.stack.enter_async_context(AsyncClient(self.url))
        for number in range(ends):
            await self.serve(build_end, EndSettings(node_id=f"end-{number}", **self.common(self.url)))
        for build, kind, names in ((build_edge, EdgeSettings, edges), (build_cloud, CloudSettings, clouds)):
            for name in names:
                recorder, back = await self.recorder(), await self.recorder()
                back.point_at(self.url)
                self.recorders[name], self.recorders[f"{name} to scheduler"] = recorder, back
                tier = name.partition("-")[0]
                node = kind(
                    node_id=name,
                    advertise_url=self.urls[recorder],
                    model=(edge_network if tier == "edge" else cloud_network,),
                    only_features=tier not in settings.trusted and name not in settings.trusted,
                    **self.common(self.urls[back]),
                )
                recorder.point_at((await self.serve(build, node)).url)
        await wait_for(lambda: self.complete(ends + len(edges) + len(clouds)), what="all nodes", timeout_s=30)

    async def recorder(self) -> Recorder:
        recorder = Recorder()
        self.urls[recorder] = await self.stack.enter_async_context(listening(recorder.handle))
        return recorder

    def common(self, scheduler: str) -> dict[str, Any]:
        own = {"port": 0, "cache": self.folder / "cache", "models": self.weights, "threads": 1, "drain_s": 2.0}
        return {"scheduler": scheduler, **own}

    async def serve(self, build: Callable[[Any, Lifecycle], Any], settings: Any) -> Lifecycle:
        return await self.stack.enter_async_context(serve_app(lambda lifecycle: build(settings, lifecycle), settings))

    async def complete(self, nodes: int) -> bool:
        return sum(device.health == "alive" and bool(device.reached) for device in await self.client.devices()) == nodes

    async def run(self, images: Array | list[bytes], **policy: Any) -> Job:
        job = await self.client.submit(images, **{"batch_size": 6, **policy})
        return await self.client.wait(job, budget_s=60)

    def captured(self, name: str) -> bytes:
        return self.recorders[name].captured


async def build_end(settings: EndSettings, lifecycle: Lifecycle) -> Starlette:
    manifest = load_manifest(settings.models)
    encoders = Encoders(await load_heads(settings, manifest), settings)
    models = await load_models(settings, Tier.END, manifest)
    return end_app(EndNode(settings, models, lifecycle, manifest.hierarchy, encoders))


async def build_edge(settings: EdgeSettings, lifecycle: Lifecycle) -> Starlette:
    manifest = load_manifest(settings.models)
    encoders = Encoders(await load_heads(settings, manifest), settings)
    return edge_app(EdgeNode(settings, await load_served(settings, Tier.EDGE, manifest), lifecycle, encoders))


async def build_cloud(settings: CloudSettings, lifecycle: Lifecycle) -> Starlette:
    models = await load_served(settings, Tier.CLOUD, load_manifest(settings.models))
    return node_app(InferenceNode(settings, models, lifecycle))


@asynccontextmanager
async def running(
    folder: Path, trusted: tuple[str, ...], weights: Path | None = None, **nodes: Any
) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fleet = Fleet(stack, folder, trusted, weights)
        await fleet.start(**nodes)
        yield fleet


@pytest.mark.timeout(120)
async def test_no_pixel_reaches_a_node_that_is_not_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG")
    images = noise(12, 1)
    async with running(
        tmp_path, ("end", "edge-own"), ends=2, edges=("edge-own", "edge-away"), clouds=("cloud-0",)
    ) as fleet:
        cloud = fleet.recorders["cloud-0"]
        for scheme in ("end-cloud", "end-edge", "mapping", "adaptive"):
            # Trusted nodes get features as well, so that whichever is chosen has them.
            job = await fleet.run(images, scheme=scheme, privacy="conv1" if scheme == "adaptive" else "auto")
            assert (job.answered_fine, job.fallback) == (12, 0), (scheme, job.reason)
            assert ("conv1" if scheme == "adaptive" else "bottleneck") in job.sent
        for form in ("float16", "float32"):
            job = await fleet.run(images, scheme="end-cloud", feature_form=form, privacy="conv1")
            assert (job.answered_fine, job.fallback) == (12, 0), job.reason
        # A trusted edge node encodes.
        job = await fleet.run(images, scheme="end-cloud", encode_on="edge")
        assert (job.answered_fine, set(job.sent)) == (12, {"bottleneck"})
        assert job.sent["bottleneck"].relay_bytes > images.nbytes
        # The scheduler chooses between the end devices and that edge node, and measures both first.
        job = await fleet.run(images, scheme="end-cloud", encode_on="auto", batch_size=1)
        assert (job.answered_fine, set(job.sent), job.sent["bottleneck"].tasks) == (12, {"bottleneck"}, 12)
        relayed = job.sent["bottleneck"].relay_tasks
        assert 0 < relayed < 12
        decisions = (await fleet.client.explain(job)).decisions
        assert all(" encoded on e" in each.why for each in decisions)
        on_edge = [each for each in decisions if "encoded on edge-own: " in each.why]
        assert len(on_edge) >= relayed
        assert all(each.why.endswith("by edge-own") for each in on_edge)
        for name in ("end-0", "end-1"):
            first, second = [each.why for each in decisions if (each.node, each.attempt) == (name, 1)][:2]
            assert f"encoded on {name}: not measured yet" in first
            assert "encoded on edge-own: not measured yet" in second
        async with httpx.AsyncClient(base_url=fleet.url, trust_env=False) as http:
            measured = (await http.get("/v1/mapping")).json()["encoding"]
        assert {each["node_id"] for each in measured} == {"end-0", "end-1", "edge-own"}
        assert all(each["ms_per_image"] > 0 and each["samples"] > 0 for each in measured)
        # The cloud fails: the attempts are made again, and in the end the coarse answer stands.
        cloud.refuses = True
        job = await fleet.run(images[:6], scheme="end-cloud")
        assert job.fallback == 6
        assert len((await fleet.client.attempts(job)).attempts) > 1
        failed = await fleet.run(images[:6], scheme="end-cloud", encode_on="auto", batch_size=1)
        assert failed.fallback == 6
        assert any("no way is measured yet" in each.why for each in (await fleet.client.explain(failed)).decisions)
        # The job waits for it.
        waits = await fleet.client.submit(images[:6], scheme="end-cloud", on_upstream_loss="wait")
        asked = cloud.requests
        await wait_for(lambda: cloud.requests > asked + 1, what="another try")
        cloud.refuses = False
        assert (await fleet.client.wait(waits, budget_s=60)).answered_fine == 6
        # A straggler is hedged.
        many = noise(40, 2)
        cloud.to_hold = cloud.requests + 36
        hedged = await fleet.run(many, scheme="end-cloud", batch_size=1)
        assert hedged.answered_fine == 40
        assert any(attempt.hedge for attempt in (await fleet.client.attempts(hedged)).attempts)
        cloud.over.set()
        for name in fleet.recorders:
            if not name.startswith("edge-own"):
                assert not holds_pixels(fleet.captured(name), np.concatenate([images, many])), name
        assert cloud.captured.count(ZSTD_MAGIC) > 10
        assert holds_pixels(fleet.captured("edge-own"), images)  # which is trusted
        # Nor does one stand in what the services, which all run in this process, have logged and counted.
        assert len(caplog.text) > 1000
        told = caplog.text + generate_latest().decode() + repr(await fleet.client.attempts(hedged))
        assert not holds_pixels(told.encode(), images)


@pytest.mark.timeout(120)
async def test_no_pixel_of_an_image_that_goes_up_by_itself_reaches_a_node_that_is_not_trusted(tmp_path: Path):
    # Photographs, so that some are sure and some are not; noise in their low bits, so that no two pieces are alike.
    images = read_sample().images[:24] & 0xF0 | noise(24, 6) >> 4
    async with running(
        tmp_path, ("end",), ends=1, edges=("edge-away",), clouds=("cloud-0",), edge_network="resnet-34"
    ) as fleet:
        cloud = fleet.recorders["cloud-0"]
        for policy in (
            {"scheme": "mapping", "escalate": "budget"},
            {"scheme": "mapping", "escalate": "threshold", "escalate_accuracy": 1, "escalate_from": "end"},
            {"scheme": "end-cloud", "escalate": "budget", "escalate_from": "end"},
        ):
            job = await fleet.run(images, **policy)

            assert (job.state, job.fallback, set(job.sent)) == ("completed", 0, {"conv1"}), (policy, job.reason)
            assert 0 < job.sent_up[Tier.CLOUD] < 24, (policy, job.sent_up)
        # The thresholds are those of the network itself. Where there are none, the learned encoder takes part.
        whole = await fleet.run(images, scheme="end-edge")
        assert (whole.answered_fine, set(whole.sent)) == (24, {"bottleneck"}), whole.reason
        # The cloud fails: the unsure images are sent again, and they alone.
        cloud.refuses = True
        asked = cloud.requests
        waits = await fleet.client.submit(images, on_upstream_loss="wait", **policy)
        await wait_for(lambda: cloud.requests > asked + 1, what="another try")
        cloud.refuses = False
        assert (await fleet.client.wait(waits, budget_s=30)).sent_up == job.sent_up
        for name in fleet.recorders:
            assert not holds_pixels(fleet.captured(name), images), name
        assert fleet.captured("edge-away").count(ZSTD_MAGIC) > 4


def picture_files(count: int, seed: int, side: int) -> tuple[list[bytes], list[Array]]:
    """Noise as JPEG and PNG files, and what networks that see squares of the side, or of others, see of it."""
    files = []
    for number, pixels in enumerate(np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)):
        held = io.BytesIO()
        Image.fromarray(pixels).save(held, ("JPEG", "PNG")[number % 2], **({} if number % 2 else {"quality": 95}))
        files.append(held.getvalue())
    seen = [np.stack([picture(file).decode(Fit(each, each)) for file in files]) for each in SIDES.values()]
    return files, seen


def picture(file: bytes) -> Picture:
    return Picture(file, "x", max_bytes=10**7, max_pixels=10**6)


def holds_files(captured: bytes, files: list[bytes]) -> bool:
    """Whether a piece of one of the files stands in what was captured, plain or unpacked."""
    contents = [captured, *unpacked(captured)]
    pieces = {file[at : at + PIECE] for file in files for at in range(0, len(file) - PIECE, PIECE)}
    return any(content[at : at + PIECE] in pieces for content in contents for at in range(len(content) - PIECE + 1))


@pytest.mark.timeout(120)
async def test_no_byte_of_a_file_reaches_a_node_that_is_not_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG")
    models = await asyncio.to_thread(encoded_set, tmp_path, SIDES)
    files, seen = picture_files(6, 7, SIDES["cloud"])
    nodes: dict[str, Any] = {"edge_network": "of-edge", "cloud_network": "of-cloud"}
    async with running(
        tmp_path, ("end", "edge-own"), models, ends=1, edges=("edge-own", "edge-away"), clouds=("cloud-0",), **nodes
    ) as fleet:
        cloud = fleet.recorders["cloud-0"]
        for policy in (
            {"scheme": "end-cloud"},
            {"scheme": "end-cloud", "encode_on": "edge"},
            {"scheme": "end-cloud", "encode_on": "auto", "batch_size": 1},
            {"scheme": "end-cloud", "feature_form": "float32", "privacy": "conv1"},
            {"scheme": "end-edge", "privacy": "conv1"},
            {"scheme": "adaptive", "privacy": "conv1"},
        ):
            job = await fleet.run([*files, files[0][:-900]], on_bad_input="skip", **policy)
            assert (job.answered_fine, job.fallback, set(job.sent)) == (6, 0, {"conv1"}), (policy, job.reason)
            assert [image.index for image in job.damaged] == [6]
        events = [event async for event in fleet.client.classify(files, scheme="end-cloud")]
        assert any(isinstance(event, FineResults) for event in events)
        cloud.refuses = True
        job = await fleet.run(files, scheme="end-cloud")
        assert job.fallback == 6
        assert len((await fleet.client.attempts(job)).attempts) > 1
        assert cloud.captured.count(ZSTD_MAGIC) > 4
        for name in fleet.recorders:
            if not name.startswith("edge-own"):
                assert not holds_files(fleet.captured(name), files), name
                assert not any(holds_pixels(fleet.captured(name), images) for images in seen), name
        assert holds_files(fleet.captured("edge-own"), files)  # which is trusted, and encodes
        told = caplog.text.encode() + generate_latest()
        assert not holds_files(told, files)


async def test_the_search_finds_the_pixels_that_a_trusted_node_gets(tmp_path: Path):
    images = noise(6, 3)
    async with running(tmp_path, ("end", "cloud"), ends=1, clouds=("cloud-0",)) as fleet:
        job = await fleet.run(images, scheme="end-cloud")
        assert (job.answered_fine, set(job.sent)) == (6, {"pixels"})
        captured = fleet.captured("cloud-0")
    assert holds_pixels(captured, images)
    assert not holds_pixels(captured, noise(6, 4))
    row = images[3, 7, 5:11].tobytes()
    assert holds_pixels(b"x" * 1000 + row + b"x" * 999, images)
    assert holds_pixels(b"POST" + zstandard.ZstdCompressor().compress(row) + b"rest", images)
    assert holds_pixels(json.dumps(images[0].reshape(-1).tolist()).encode(), images)


def with_noise(folder: Path) -> Path:
    """Weights whose small upper network has an encoder of the learned kind, with files of its own, few levels and
    noise. What is behind it is the first convolution."""
    bundled, manifest = weights_folder(), load_manifest()
    network, known = manifest.entry(NETWORK), manifest.encoder(f"{NETWORK}.conv1")
    networks = (manifest.default_for("end"), network)
    folder.mkdir()
    for file in (*(entry.file for entry in networks), known.head.file):
        (folder / file).symlink_to(bundled / file)
    content = extract_part((bundled / network.file).read_bytes(), "tail")
    (folder / "tail.onnx").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    encoder = known.model_copy(
        update={
            "kind": EncoderKind.BOTTLENECK,
            "tail": PartFile(file="tail.onnx", sha256=digest, size_bytes=len(content), part="whole"),
            "scale": known.scale * 255 / 7,
            "bits": 3,
            "noise": 0.5,
        }
    )
    save_manifest(manifest.model_copy(update={"models": networks, "encoders": (encoder, known)}), folder)
    return folder


async def test_all_copies_of_an_image_carry_the_same_noise(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG")
    caplog.set_level("WARNING", "aiosqlite")  # as in a service; it logs the secret when it is drawn
    images = noise(4, 5)
    weights = with_noise(tmp_path / "weights")
    async with running(
        tmp_path, ("end", "edge-own"), weights, ends=2, edges=("edge-own",), clouds=("cloud-0",)
    ) as fleet:
        cloud = fleet.recorders["cloud-0"]
        # The cloud fails, and both end devices try again and again; then it answers; then the edge node encodes.
        cloud.refuses = True
        job = await fleet.run(images, scheme="end-cloud", batch_size=1)
        assert job.fallback == 4
        assert {attempt.node for attempt in (await fleet.client.attempts(job)).attempts} == {"end-0", "end-1"}
        cloud.refuses = False
        for policy in ({}, {"encode_on": "edge"}):
            job = await fleet.run(images, scheme="end-cloud", batch_size=1, **policy)
            assert (job.answered_fine, set(job.sent)) == (4, {"bottleneck"}), job.reason
        values = int(np.prod(load_manifest(weights).encoder(f"{NETWORK}.bottleneck").feature_shape))
        sent = [content[-values:] for content in unpacked(fleet.captured("cloud-0"))]  # after the JSON that names tasks
        assert len(sent) > 12
        assert len(set(sent)) == 4
        other = await fleet.run(images[:2], scheme="end-cloud", batch_size=1)
        assert other.answered_fine == 2
        with contextlib.closing(sqlite3.connect(fleet.folder / "state" / "scheduler.db")) as database:
            contents = {content for (content,) in database.execute("SELECT input_sha256 FROM terrace_jobs")}
            query = "SELECT value FROM terrace_properties WHERE name = 'secret'"
            secret = str(database.execute(query).fetchone()[0])
        keys = [job_key(bytes.fromhex(secret), content) for content in contents]
        assert len(keys) == 2
        told = caplog.text + generate_latest().decode() + repr(await fleet.client.attempts(job))
        assert any(key.encode() in fleet.captured("edge-own") for key in keys)  # which gets the pixels as well
        for place in (fleet.captured("cloud-0"), told.encode()):
            for key in (secret, *keys):
                assert key.encode() not in place
                assert bytes.fromhex(key) not in place
