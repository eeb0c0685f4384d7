"""Pictures that begin at the device, measured: the CIFAR-100 test images as a folder of an end node.

The node answers each picture and sends up the unsure ones, by the thresholds that were tuned on held-out images. The
table compares the accuracy of the answers that stand with the cloud network's accuracy on all images, computed in this
process. Both count superclasses, because a sure answer of the device has nothing finer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from experiments.harness import MOST_RUNS, Experiment, Options, Record, Run, Table, option
from models.data import ImageSet
from models.manifest import load_manifest
from models.session import load_model
from tierkit.client import AsyncClient
from tierkit.errors import ServiceFailed
from tierkit.fleet import TERRACE, local_plan
from tierkit.types import Tier
from tierkit.wire.sources import SeenPicture

__all__ = ["SOURCES"]

_BATCH = 100
_BUDGET_S = 3600.0
_POLL_S = 1.0
_SPOOL = "TERRACE_END_SPOOL"


class SourceOptions(Options):
    """Images, and the scheme of the scheduler."""

    images: int = option(10_000, "Test images that the folder holds.", quick=500, min=10, max=10_000)
    repeats: int = option(1, "How often it is measured.", min=1, max=MOST_RUNS)


def _write(data: ImageSet, folder: Path) -> None:
    folder.mkdir(parents=True)
    for number, pixels in enumerate(data.images):
        Image.fromarray(pixels).save(folder / f"{number:05}.png", compress_level=1)


@contextlib.contextmanager
def _spool_in(folder: Path) -> Iterator[None]:
    """Nodes that start meanwhile have their spool there."""
    before = os.environ.get(_SPOOL)
    os.environ[_SPOOL] = json.dumps({"folder": str(folder)})
    try:
        yield
    finally:
        os.environ.pop(_SPOOL)
        if before is not None:
            os.environ[_SPOOL] = before


def cloud_labels(data: ImageSet) -> np.ndarray:
    """Superclasses that the cloud's network gives the images, int64 `[n]`."""
    manifest = load_manifest()
    model = load_model(manifest.default_for(Tier.CLOUD), provider="cpu", threads=os.cpu_count() or 1)
    found = []
    for start in range(0, len(data.images), _BATCH):
        batch = {"images": data.images[start : start + _BATCH]}
        probabilities = model.run(batch, ["probabilities"])["probabilities"]
        found.append(manifest.hierarchy.coarse_probabilities(probabilities).argmax(axis=1))
    return np.concatenate(found)


def standing_label(seen: SeenPicture) -> int:
    """Number of the superclass of the answer in force; -1 without one."""
    if seen.fine is not None:
        return seen.fine.coarse_index
    return -1 if seen.coarse is None else seen.coarse.index


class Sources(Experiment):
    """The test images as a source of an end node: what stands, what it cost."""

    name = "sources"
    options = SourceOptions
    quick = "500 images"
    ignores = frozenset({"seed", "share"})
    profile = None

    async def measure(self, run: Run, chosen: SourceOptions) -> None:
        everything = await asyncio.to_thread(lambda: run.images)
        count = min(chosen.images, len(everything.images))
        data = everything.take(np.arange(count))
        run.config |= {"images": count, "scheme": "end-cloud"}
        run.expect(chosen.repeats)
        cloud = await asyncio.to_thread(cloud_labels, data)
        assert data.coarse is not None
        for repeat in range(chosen.repeats):
            folder = run.folder / f"run-{repeat}"
            pictures = folder / "pictures"
            await asyncio.to_thread(_write, data, pictures)
            scheduler = {"port": 0, "state": str(folder / "state"), "trusted": "end,edge,cloud", "scheme": "end-cloud"}
            plan = local_plan(
                {Tier.END: 1, Tier.CLOUD: 1}, scheduler=scheduler, tiers={Tier.END: {"source": f"test={pictures}"}}
            )
            with run.step("pictures"), _spool_in(folder / "spool"):
                async with (
                    run.launched(plan, folder, command=TERRACE) as fleet,
                    AsyncClient(fleet.scheduler_url) as client,
                ):
                    began = time.perf_counter()
                    seen = await self._all_settled(client, count)
                    seconds = time.perf_counter() - began
                    report = await client.node_sources("end-1")
            numbers = [int(str(each.name).removesuffix(".png")) for each in seen]
            stands = np.full(count, -1)
            stands[numbers] = [standing_label(each) for each in seen]
            upper = [each.fine for each in seen if each.fine is not None]
            run.add(
                what="pictures",
                images=count,
                observations=len(seen),
                seconds=seconds,
                standing_accuracy=float(np.mean(stands == data.coarse)),
                cloud_accuracy=float(np.mean(cloud == data.coarse)),
                sent_up=len(upper),
                body_bytes=sum(fine.sent.upload_bytes for fine in upper if fine.sent),
                wire_bytes=report.uplink.spent_bytes if report.uplink else 0,
            )

    async def _all_settled(self, client: AsyncClient, count: int) -> list[SeenPicture]:
        deadline = time.monotonic() + _BUDGET_S
        while True:
            seen = [each async for each in client.observations(source="test") if isinstance(each, SeenPicture)]
            if len(seen) >= count and not any(each.waits for each in seen):
                return seen
            if time.monotonic() > deadline:
                raise ServiceFailed(f"after {_BUDGET_S:g} s {len(seen)} of {count} pictures were answered")
            await asyncio.sleep(_POLL_S)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        """One row for each run."""
        return [
            {
                **{name: value for name, value in point.items() if name != "what"},
                "relative": point["standing_accuracy"] / point["cloud_accuracy"],
                "share_up": point["sent_up"] / point["images"],
                "body_bytes_per_image": point["body_bytes"] / point["images"],
            }
            for point in record["points"]
        ]

    def table(self, record: Record) -> Table:
        headings = "images | all-cloud | standing | relative | sent up | bytes up per image | images/s"
        return Table(
            headings=headings,
            rows=[
                [
                    f"{row['images']:,}",
                    f"{row['cloud_accuracy']:.4f}",
                    f"{row['standing_accuracy']:.4f}",
                    f"{row['relative']:.4f}",
                    f"{row['share_up']:.1%}",
                    f"{row['body_bytes_per_image']:.0f}",
                    f"{row['images'] / row['seconds']:.0f}",
                ]
                for row in self.rows(record)
            ],
        )


SOURCES = Sources()
