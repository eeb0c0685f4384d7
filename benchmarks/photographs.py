"""Photographs through the end tier only, against a bare loop: decode, resize, run the same network, on as many cores.

Both sides get the same JPEG files. The bare loop is the best of three ways to use the cores: one batch at a time on all
of them, one batch on each, one photograph on each. In each round the two sides take turns, and the order of the two
alternates, because the speed of a machine drifts. Every answer of the fleet is compared with the bare loop.
"""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from benchmarks.imagenet import photographs
from experiments.harness import (
    MOST_RUNS,
    SPREAD_HEADINGS,
    Experiment,
    Options,
    Record,
    Run,
    Table,
    option,
    spread_row,
)
from experiments.record import spread
from models.manifest import Fit, load_manifest, weights_folder
from models.pictures import resized
from models.session import import_runtime, verify_file
from tierkit.client import AsyncClient
from tierkit.errors import ServiceFailed
from tierkit.fleet import MAX_NODES, TERRACE, local_plan
from tierkit.tensors import Array
from tierkit.types import JobState, Scheme, Tier

__all__ = ["PHOTOGRAPHS", "make_jpegs", "ratio_of"]

_TARGET = 0.9
"""Smallest median ratio of the fleet's speed to the bare loop's."""
_SIZE = (500, 375)
_QUALITY = 92
_BATCH = 25
_JOB_BUDGET_S = 600.0
_WARM = 2 * _BATCH
"""Photographs for both sides before the first round: sessions allocate their memory at the first batch."""


def make_jpegs(count: int, seed: int, sources: Sequence[Path]) -> list[bytes]:
    """Different JPEG files of 500 x 375 or 375 x 500 pixels and about 40 to 80 kB.

    Args:
        sources: photographs to take parts of; without any, the pictures are made of soft shapes and grain.
    """
    rng = np.random.default_rng(seed)
    originals = []
    for path in sources:
        with Image.open(path) as image:
            originals.append(image.convert("RGB"))
    return [_jpeg(originals[number % len(originals)] if originals else None, rng) for number in range(count)]


def _jpeg(original: Image.Image | None, rng: np.random.Generator) -> bytes:
    size = _SIZE if rng.random() < 0.7 else _SIZE[::-1]
    if original is None:
        few = rng.integers(0, 256, (6, 8, 3), np.uint8)
        image, grain = Image.fromarray(few).resize(size, Image.Resampling.BICUBIC), 9.0
    else:
        share = rng.uniform(0.7, 1.0)
        width, height = round(share * original.width), round(share * original.height)
        left, top = rng.integers(0, original.width - width + 1), rng.integers(0, original.height - height + 1)
        part = original.crop((int(left), int(top), int(left) + width, int(top) + height))
        image, grain = ImageOps.fit(ImageOps.mirror(part) if rng.random() < 0.5 else part, size), 3.0
    noisy = np.asarray(image) + rng.normal(0, grain, (size[1], size[0], 1))
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def _session(path: Path, threads: int) -> Any:
    """A plain ONNX Runtime session."""
    runtime = import_runtime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _bare_s(session: Any, fit: Fit, files: Sequence[bytes], workers: int, batch_size: int) -> tuple[float, Array]:
    """Seconds, and the labels of all files."""

    def one(batch: Sequence[bytes]) -> Array:
        pixels = []
        for data in batch:
            with Image.open(io.BytesIO(data)) as image:
                pixels.append(resized(image.convert("RGB"), fit))
        (logits,) = session.run(["logits"], {"images": np.stack(pixels)})
        labels: Array = logits.argmax(axis=1)
        return labels

    began = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        labels = list(pool.map(one, [files[at : at + batch_size] for at in range(0, len(files), batch_size)]))
    return time.perf_counter() - began, np.concatenate(labels)


async def _fleet_s(client: AsyncClient, folder: Path) -> tuple[float, Array]:
    """Seconds from the first byte of the upload to the end of the job, and the labels."""
    began = time.perf_counter()
    job = await client.wait(await client.submit(folder, scheme=Scheme.END), budget_s=_JOB_BUDGET_S)
    seconds = time.perf_counter() - began
    if job.state is not JobState.COMPLETED:
        raise ServiceFailed(f"the job of photographs is {job.state}: {job.reason}")
    results = [result async for result in client.results(job)]
    return seconds, np.array([-1 if result.coarse is None else result.coarse.index for result in results])


def ratio_of(point: dict[str, Any]) -> float:
    """Speed of the fleet as a share of the bare loop's."""
    bare_s: float = min(seconds for name, seconds in point.items() if name.startswith("bare_"))
    fleet_s: float = point["fleet_s"]
    return bare_s / fleet_s


class Chosen(Options):
    """Network, photographs and rounds."""

    models: Path | None = option(
        None,
        "Model set whose end network classifies them; `python -m benchmarks.imagenet` makes networks to import. "
        "Default: Terrace's own, for which no target is judged.",
        file_okay=False,
        exists=True,
    )
    photographs: int = option(1000, "JPEG files of a job.", quick=100, min=1, max=10_000)
    rounds: int = option(5, "How often both sides take their turn.", quick=2, min=1, max=MOST_RUNS)
    end: int | None = option(None, "End devices. Default: one for each core.", min=1, max=MAX_NODES)


class Photographs(Experiment):
    """Photographs through the end tier against a bare loop that decodes, resizes and runs the same network."""

    name = "photographs"
    options = Chosen
    quick = "{photographs} photographs, {rounds} rounds"
    repeats = ("rounds", "rounds")
    ignores = frozenset({"tasks", "data"})
    profile = None
    one_row = True

    async def measure(self, run: Run, chosen: Chosen) -> None:
        entry = load_manifest(chosen.models).default_for(Tier.END)
        if chosen.models is None:
            run.note("Terrace's own network, which sees 32 x 32 pixels: --models SET for one that sees photographs")
        cores = os.cpu_count() or 1
        ends = chosen.end or cores
        sources = photographs()
        kind = f"parts of {len(sources)} photographs" if sources else "synthetic, as no photographs are installed"
        run.note(f"{chosen.photographs:,} JPEG files, {kind}; {entry.name} on {ends} end devices and {cores} cores")
        run.expect(1 + 2 * chosen.rounds)
        with run.step("making the photographs"):
            files = await asyncio.to_thread(make_jpegs, chosen.photographs, run.request.seed, sources)
            folder = _written(run.folder / "photographs", files)
            few = _written(run.folder / "few", files[:_WARM])
        run.config |= {
            "network": entry.name,
            "input_shape": entry.input_shape,
            "resize": entry.resize,
            "photographs": len(files),
            "sources": [path.name for path in sources],
            "file_bytes": asdict(spread([len(data) for data in files])),
            "end": ends,
            "cores": cores,
            "rounds": chosen.rounds,
            "judged": chosen.models is not None,
        }
        path = verify_file(entry, chosen.models or weights_folder())
        ways = {
            "all_cores_per_batch": (_session(path, cores), 1, _BATCH),
            "one_core_per_batch": (_session(path, 1), cores, _BATCH),
            "one_core_per_photograph": (_session(path, 1), cores, 1),
        }
        for session, workers, batch_size in ways.values():
            await asyncio.to_thread(_bare_s, session, entry.fit, files[:_WARM], workers, batch_size)
        state = run.folder / "fleet"
        state.mkdir()
        plan = local_plan(
            {Tier.END: ends},
            scheduler={"port": 0, "state": str(state / "state")},
        )
        if chosen.models is not None:
            plan = plan.with_defaults({"models": chosen.models})
        async with (
            run.launched(plan, state, command=TERRACE) as fleet,
            AsyncClient(fleet.scheduler_url, timeout_s=_JOB_BUDGET_S) as client,
        ):
            await _fleet_s(client, few)
            for number in range(chosen.rounds):
                point: dict[str, Any] = {}
                labels: dict[str, Array] = {}
                for side in ("bare", "fleet") if number % 2 else ("fleet", "bare"):
                    with run.step(f"round {number + 1}: {side}"):
                        if side == "fleet":
                            point["fleet_s"], labels[side] = await _fleet_s(client, folder)
                            continue
                        for way, (session, workers, batch_size) in ways.items():
                            arguments = session, entry.fit, files, workers, batch_size
                            point[f"bare_{way}_s"], labels[side] = await asyncio.to_thread(_bare_s, *arguments)
                run.add(**point, equal=int((labels["bare"] == labels["fleet"]).sum()))

    def rows(self, record: Record) -> list[dict[str, Any]]:
        """One row: median and range of the rounds."""
        points, photographs = record["points"], record["config"]["photographs"]
        ratios = spread([ratio_of(point) for point in points])
        # The target is for networks that see photographs: those for 32 x 32 pixels take next to no time.
        missed = record["config"].get("judged", True) and ratios.median < _TARGET
        return [
            {
                "photographs": photographs,
                "rounds": len(points),
                "fleet_per_s": asdict(spread([photographs / point["fleet_s"] for point in points])),
                "bare_per_s": asdict(spread([photographs / point["fleet_s"] / ratio_of(point) for point in points])),
                "ratio": asdict(ratios),
                "equal": sum(point["equal"] for point in points),
                "missed": [f"fleet / bare {ratios.median:.3f} < {_TARGET}"] if missed else [],
            }
        ]

    def table(self, record: Record) -> Table:
        (row,) = self.rows(record)
        figures = {
            "fleet_per_s": ("the fleet, photographs/s", ".1f"),
            "bare_per_s": ("bare, photographs/s", ".1f"),
            "ratio": ("fleet / bare", ".3f"),
        }
        return Table(
            headings=SPREAD_HEADINGS,
            rows=[
                *(spread_row(words, row[name], form) for name, (words, form) in figures.items()),
                ["answers as bare", f"{row['equal']:,} of {row['photographs'] * row['rounds']:,}", "", ""],
            ],
        )


def _written(folder: Path, files: Sequence[bytes]) -> Path:
    folder.mkdir()
    for number, data in enumerate(files):
        (folder / f"{number:05d}.jpg").write_bytes(data)
    return folder


PHOTOGRAPHS = Photographs()
