"""Tables 1 and 3 of the paper: what each network costs on the hardware of each tier, and what its encoder would be.

Table 1 feeds each network the images of the test set, batch by batch, with no service around it. One core represents an
end device, two cores an edge node, and a GPU the cloud. Hardware that the machine does not have is not measured.
Accuracies come from the same answers.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.harness import Experiment, Options, Record, Run, Table, cell
from experiments.plots import Figures, measured, paper
from experiments.record import spread
from experiments.testbed import BATCH
from models.data import ImageSet
from models.evaluate import score
from models.manifest import Manifest, ModelEntry, load_manifest, weights_folder
from models.session import OnnxModel, load_model
from models.split import extract_part
from tierkit.errors import MissingExtra, ProviderUnavailable, SetupError
from tierkit.types import Tier

__all__ = ["PAPER", "TABLE1", "TABLE3"]

PAPER: Mapping[str, Mapping[str, Any]] = {
    "end": {
        "network": "MobileNet",
        "ms": {"cloud": 0.25, "edge": 2.03, "end": 5.20},
        "coarse": 0.50,
        "fine": None,
        "parameters": 0.84e6,
        "bytes": 10.3e6,
        "encoder": None,
    },
    "edge": {
        "network": "ResNet-34",
        "ms": {"cloud": 0.79, "edge": 5.53, "end": 15.7},
        "coarse": 0.73,
        "fine": 0.61,
        "parameters": 21.4e6,
        "bytes": 85.7e6,
        "encoder": {"shape": [16, 16, 64], "parameters": 9472, "bytes": 50_100},
    },
    "cloud": {
        "network": "WRN-28-10",
        "ms": {"cloud": 6.99, "edge": 227.0, "end": 1170.0},
        "coarse": 0.83,
        "fine": 0.73,
        "parameters": 40.6e6,
        "bytes": 324.9e6,
        "encoder": {"shape": [32, 32, 16], "parameters": 432, "bytes": 11_900},
    },
}
"""The paper's Tables 1 and 3, by the tier that a network is made for."""

_CORES = {Tier.END: 1, Tier.EDGE: 2}


def _try_one(
    entry: ModelEntry, tier: Tier, manifest: Manifest, data: ImageSet, stopped: threading.Event
) -> dict[str, Any]:
    """Measure one network. Once it is stopped, the result is of no use."""
    facts = {
        "network": entry.name,
        "network_tier": entry.tier,
        "tier": tier,
        "parameters": entry.parameters,
        "bytes": entry.size_bytes,
        "precision": entry.precision,
    }
    try:
        model, hardware = _load(entry, tier)
    except (MissingExtra, ProviderUnavailable, SetupError) as exc:
        return {**facts, "hardware": "", "ms_per_image": [], "unmeasured": str(exc)}
    model.run({"images": data.images[:BATCH]}, ["logits"])  # the first run allocates
    parts, pace = [], []
    for start in range(0, len(data), BATCH):
        if stopped.is_set():
            return facts
        began = time.perf_counter()
        parts.append(model.run({"images": data.images[start : start + BATCH]}, ["logits"])["logits"])
        pace.append((time.perf_counter() - began) * 1000 / BATCH)
    coarse, fine, _ = score(
        np.concatenate(parts), data, manifest.hierarchy, target=entry.target, temperature=entry.temperature
    )
    return {**facts, "hardware": hardware, "ms_per_image": pace, "coarse": coarse, "fine": fine}


def _load(entry: ModelEntry, tier: Tier) -> tuple[OnnxModel, str]:
    if tier is Tier.CLOUD:
        return load_model(entry, provider="cuda"), "GPU"
    cores = _CORES[tier]
    if cores > (os.cpu_count() or 1):
        raise SetupError(f"needs {cores} cores")
    return load_model(entry, threads=cores), f"{cores} core{'s' if cores > 1 else ''}"


class Table1(Experiment):
    """Inference time of each network on the hardware of each tier, accuracy and size."""

    name = "table1"
    repeats = ("runs", f"batches of {BATCH} images")
    quick = "{share}"
    ignores = frozenset({"seed"})
    profile = None

    async def measure(self, run: Run, chosen: Options) -> None:
        manifest = load_manifest()
        data = await asyncio.to_thread(lambda: run.images)
        turns = [(entry, tier) for entry in manifest.models for tier in Tier]
        run.expect(len(turns))
        stopped = threading.Event()
        try:
            for entry, tier in turns:
                with run.step(f"{entry.name} as on the tier {tier}"):
                    point = await asyncio.to_thread(_try_one, entry, tier, manifest, data, stopped)
                run.add(**point)
        finally:
            stopped.set()  # a thread goes on when nobody waits for it any more, and the process waits for the thread

    def rows(self, record: Record) -> list[dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        for point in record["points"]:
            row = rows.setdefault(
                point["network"],
                {
                    "network": point["network"],
                    "made_for": point["network_tier"],
                    "coarse_accuracy": None,
                    "fine_accuracy": None,
                    "parameters": point["parameters"],
                    "bytes": point["bytes"],
                    "ms_per_image": {},
                    "min_ms_per_image": {},
                    "runs": {},
                },
            )
            if point["ms_per_image"]:
                times = spread(point["ms_per_image"])
                row["ms_per_image"][point["tier"]] = round(times.mean, 4)
                row["min_ms_per_image"][point["tier"]] = round(times.minimum, 4)
                row["runs"][point["tier"]] = times.n
                row["coarse_accuracy"], row["fine_accuracy"] = point["coarse"], point["fine"]
            else:
                row["ms_per_image"][point["tier"]] = None
        return list(rows.values())

    def table(self, record: Record) -> Table:
        rows = []
        for row in self.rows(record):
            theirs = PAPER.get(row["made_for"])
            speeds = row["ms_per_image"]
            rows.append(
                [
                    row["network"],
                    *("unmeasured" if speeds.get(tier) is None else f"{speeds[tier]:.3f}" for tier in Tier),
                    cell(row["coarse_accuracy"], ".3f"),
                    cell(row["fine_accuracy"], ".3f"),
                    f"{row['parameters'] / 1e6:.2f}",
                    f"{row['bytes'] / 1e6:.1f}",
                ]
            )
            if theirs is not None:
                rows.append(
                    [
                        f"{theirs['network']} (paper)",
                        *(f"{theirs['ms'][tier]:g}" for tier in Tier),
                        cell(theirs["coarse"], ".3f"),
                        cell(theirs["fine"], ".3f"),
                        f"{theirs['parameters'] / 1e6:.2f}",
                        f"{theirs['bytes'] / 1e6:.1f}",
                    ]
                )
        return Table(
            headings=(
                "network | end: 1 core, ms/image | edge: 2 cores | cloud: GPU | 20 classes | 100 classes | "
                "M parameters | MB"
            ),
            rows=rows,
        )

    def draw(self, record: Record, figures: Figures) -> None:
        (axes,) = figures.panels(
            "table1",
            [f"batches of {BATCH}; mean of {record['config']['tasks']}"],
            xlabel="hardware of the tier",
            ylabel="inference time (ms/image)",
            finding=_finding(self.rows(record)),
        )
        for number, row in enumerate(self.rows(record)):
            shown = [tier for tier in Tier if row["ms_per_image"].get(tier) is not None]
            axes.plot(
                [list(Tier).index(tier) for tier in shown],
                [row["ms_per_image"][tier] for tier in shown],
                label=row["network"],
                **measured(number),
            )
            if (theirs := PAPER.get(row["made_for"])) is not None:
                times = [theirs["ms"][tier] for tier in Tier]
                axes.plot(range(len(Tier)), times, label=f"{theirs['network']}, paper", **paper(number))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks(range(len(Tier)), ["end (1 core)", "edge (2 cores; paper: 4)", "cloud (GPU)"])
        axes.legend(frameon=False)


def _finding(rows: Sequence[Mapping[str, Any]]) -> str:
    for row in rows:
        ms = row["ms_per_image"].get(Tier.END)
        if row["made_for"] == Tier.END and ms:
            return (
                f"{row['network']} is {PAPER[Tier.END]['ms'][Tier.END] / ms:.0f} times as fast as the paper's network"
            )
    return ""


TABLE1 = Table1()


# --- table 3 --------------------------------------------------------------------------------------------------------


def _encoder_cells(facts: Mapping[str, Any]) -> list[str]:
    return ["x".join(map(str, facts["shape"])), f"{facts['parameters']:,}", f"{facts['bytes'] / 1000:.1f}"]


class Table3(Experiment):
    """Output, parameters and size of the encoders."""

    name = "table3"
    repeats = ("", "readings of the files")
    ignores = frozenset({"quick", "seed", "tasks", "data"})
    profile = None

    async def measure(self, run: Run, chosen: Options) -> None:
        with run.step("reading the networks"):
            for entry in load_manifest().models:
                if entry.tier == "end":
                    continue  # what goes up to an end device's network is the image itself
                whole = (weights_folder() / entry.file).read_bytes()
                (channels, height, width), parameters = entry.cut
                run.add(
                    network=entry.name,
                    network_tier=entry.tier,
                    shape=[height, width, channels],
                    parameters=parameters,
                    bytes=len(extract_part(whole, "head")),
                    precision=entry.precision,
                )
        run.note("the size is that of the ONNX file of the first convolution alone, in the precision that ships")

    def rows(self, record: Record) -> list[dict[str, Any]]:
        return [
            {**point, "paper": (PAPER.get(point["network_tier"]) or {}).get("encoder")} for point in record["points"]
        ]

    def table(self, record: Record) -> Table:
        rows = []
        for row in self.rows(record):
            rows.append([row["network"], *_encoder_cells(row)])
            if row["paper"] is not None:
                rows.append([f"{PAPER[row['network_tier']]['network']} (paper)", *_encoder_cells(row["paper"])])
        return Table(headings="network | output | parameters | kB", rows=rows)


TABLE3 = Table3()
