"""The benefit of the hierarchy: escalation compared with one network in two parts with an early exit (DDNN), and with
the cloud.

In both systems the device answers immediately with a network of the same shape, and the images that it is least sure of
go up; their share is varied. Terrace sends the image to another network, with thresholds on the margin. The network in
two parts (Teerapittayanon et al. 2017, arXiv:1709.01921) sends the output of its device's part, and measures
uncertainty as the normalised entropy of its early exit. If all images go up, both systems are only the cloud.

Terrace's curve consists of the results for the test images that `terrace models tune-escalation` has kept. Accuracies
are of superclasses, which all exits answer. The network in two parts also answers classes at both exits, and the table
shows their accuracy as well.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import Experiment, Options, Record, Run, Table, cell, option
from experiments.plots import Figures, bound, measured
from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.manifest import Manifest, load_manifest, records_folder, weights_folder
from models.session import softmax
from tierkit.errors import WeightsError
from tierkit.extras import training_extra
from tierkit.tensors import Array
from tierkit.types import Tier

__all__ = ["EARLY_EXIT", "entropy", "exit_curve"]

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of images that go up, in the table."""
_STEPS = 100
_NETWORK = "ddnn"


def entropy(probabilities: Array) -> Array:
    """Uncertainty of an answer, 0 to 1, `[n]`: the entropy of `[n, classes]` divided by the entropy of equal
    probabilities (the source, section 3.3).
    """
    p = np.clip(probabilities, 1e-12, 1)
    return np.asarray(-(p * np.log(p)).sum(axis=1) / np.log(p.shape[1]))


def exit_curve(unsure: Array, local_right: Array, upper_right: Array) -> list[float]:
    """Accuracy where the images that are least sure go up: none of them to all, in hundredths of the images.

    Args:
        unsure: `[n]`, larger where the local answer is less sure.
        local_right, upper_right: bool `[n]`, whether the answer of each exit is right.
    """
    order = np.argsort(-unsure, kind="stable")
    gained = np.concatenate([[0], np.cumsum(upper_right[order].astype(int) - local_right[order].astype(int))])
    up = np.linspace(0, len(unsure), _STEPS + 1).round().astype(int)
    return [round(float(value), 6) for value in (int(local_right.sum()) + gained[up]) / len(unsure)]


class Chosen(Options):
    """Place where the network in two parts was trained."""

    runs: Path = option(Path("runs/models"), f"Folder of training runs; it holds {_NETWORK}/.", metavar="DIRECTORY")


class EarlyExit(Experiment):
    """Escalation compared with one network in two parts with an early exit on the device."""

    name = "early-exit"
    options = Chosen
    ignores = frozenset({"quick", "seed", "tasks"})
    profile = None
    repeats = ("runs", "networks of each kind")

    async def measure(self, run: Run, chosen: Chosen) -> None:
        manifest = load_manifest()
        images = await asyncio.to_thread(lambda: run.images)
        run.expect(2)
        run.config["images"] = len(images)
        # First what may be missing.
        with run.step(f"{_NETWORK}, both exits"):
            two_parts = await asyncio.to_thread(_two_parts, chosen.runs, images, manifest.hierarchy)
        with run.step("the hierarchy that ships"):
            run.add(system="terrace", **await asyncio.to_thread(_hierarchy, manifest))
        run.add(system=_NETWORK, **two_parts)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        """A row for each share of images that go up."""
        systems = {point["system"]: point for point in record["points"]}
        rows = []
        for share in SHARES:
            row: dict[str, Any] = {"share": share}
            for name, point in systems.items():
                row[f"{name}_coarse"] = round(float(np.interp(share, point["share"], point["coarse"])), 4)
                row[f"{name}_bytes_per_image"] = round(share * point["sent_bytes"])
            if _NETWORK in systems:
                point = systems[_NETWORK]
                row[f"{_NETWORK}_fine"] = round(float(np.interp(share, point["share"], point["fine"])), 4)
            rows.append(row)
        return rows

    def table(self, record: Record) -> Table:
        return Table(
            headings="images sent up, % | Terrace, superclasses | DDNN, superclasses | DDNN, classes | "
            "Terrace, bytes per image | DDNN, bytes per image",
            rows=[
                [
                    f"{100 * row['share']:.0f}",
                    cell(row.get("terrace_coarse"), ".4f"),
                    cell(row.get(f"{_NETWORK}_coarse"), ".4f"),
                    cell(row.get(f"{_NETWORK}_fine"), ".4f"),
                    cell(row.get("terrace_bytes_per_image"), ",d"),
                    cell(row.get(f"{_NETWORK}_bytes_per_image"), ",d"),
                ]
                for row in self.rows(record)
            ],
        )

    def draw(self, record: Record, figures: Figures) -> None:
        half = min(self.rows(record), key=lambda row: abs(row["share"] - 0.5))
        (axes,) = figures.panels(
            "early-exit",
            [f"{record['config']['images']:,} test images"],
            xlabel="share of images that go up",
            ylabel="accuracy of the superclasses",
            finding=f"With {half['share']:.0%} sent up, Terrace has {half.get('terrace_coarse', math.nan):.3f} right, "
            f"DDNN {half.get(f'{_NETWORK}_coarse', math.nan):.3f}",
        )
        words = {"terrace": "Terrace, margin", _NETWORK: "DDNN, entropy"}
        for number, point in enumerate(record["points"]):
            label = words[point["system"]]
            axes.plot(point["share"], point["coarse"], label=label, **{**measured(number), "marker": ""})
            if point["system"] == "terrace":
                axes.axhline(point["coarse"][-1], label="all images to the cloud", **bound())
        axes.legend(frameon=False, loc="lower right")


def _hierarchy(manifest: Manifest) -> dict[str, Any]:
    """Device and cloud of the bundled model set."""
    kept = json.loads((records_folder(weights_folder()) / "escalation.json").read_text(encoding="utf-8"))
    curve = kept["curves"][f"{Tier.END}-{Tier.CLOUD}"]
    device, upper = manifest.default_for(Tier.END), manifest.default_for(Tier.CLOUD)
    return {
        "share": curve["test_share"],
        "coarse": curve["test_accuracy"],
        "networks": [device.name, upper.name],
        "device_parameters": device.parameters,
        "upper_parameters": upper.parameters,
        "sent_bytes": math.prod(device.input_shape),
    }


def _two_parts(runs: Path, images: ImageSet, hierarchy: Hierarchy) -> dict[str, Any]:
    """Both exits of the trained network on test images."""
    with training_extra("the network in two parts"):
        import torch

        from models.training.checkpoint import load_checkpoint
        from models.training.learner import averaged_network, predict
        from models.training.networks import EarlyExit as Network, count_parameters
    network, config, known = averaged_network(load_checkpoint(runs / _NETWORK, hierarchy))
    if not isinstance(network, Network):
        raise WeightsError(
            f"{runs / _NETWORK} holds a {config.network.kind}, not a network in two parts: name other --runs"
        )
    cpu = torch.device("cpu")
    local, upper = (predict(part, images.images, known, config, cpu) for part in (network.device, network))
    probabilities = softmax(local), softmax(upper)
    right = {
        "fine": [each.argmax(axis=1) == images.fine for each in probabilities],
        "coarse": [hierarchy.coarse_probabilities(each).argmax(axis=1) == images.coarse for each in probabilities],
    }
    device_parameters = count_parameters(network.device)
    return {
        "share": [step / _STEPS for step in range(_STEPS + 1)],
        **{level: exit_curve(entropy(probabilities[0]), *both) for level, both in right.items()},
        "networks": [config.name],
        "device_parameters": device_parameters,
        "upper_parameters": count_parameters(network) - device_parameters,
        # A byte for each value, as Terrace's encoders pack them by default.
        "sent_bytes": network.sent(torch.zeros(1, 3, *images.images.shape[1:3])).numel(),
    }


EARLY_EXIT = EarlyExit()
