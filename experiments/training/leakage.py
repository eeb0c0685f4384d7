"""What an update gives away: pictures read back from gradients, with clipping and noise, and what these cost."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from typing import Any

from encryption.audit.rows import interval_of
from experiments.harness import MOST_RUNS, Experiment, Options, Record, Run, Table, grouped, option
from tierkit.extras import training_extra
from training.masking import Masking

__all__ = ["LEAKAGE", "MASKINGS"]

_CLIP = 1.0
MASKINGS: tuple[Masking | None, ...] = (
    None,
    Masking(clip=_CLIP),
    *(Masking(clip=_CLIP, noise=noise) for noise in (1e-3, 1e-2, 1e-1)),
)


class Chosen(Options):
    """Whose updates, and how hard they are attacked."""

    network: list[str] = option(
        ["mnist-64-64"], "Network whose gradients are sent; may be repeated. Default: mnist-64-64."
    )
    batch: list[int] = option([1, 32], "Pictures of a gradient; may be repeated.", quick=[1, 4], min=1, max=256)
    pictures: int = option(16, "Pictures that are attacked for each line, in batches.", quick=4, min=1, max=1_000)
    steps: int = option(300, "Of a search.", quick=40, min=2, max=100_000)
    own: int = option(1, "Batches of the attacker's own, by which it chooses.", min=1, max=64)
    seeds: int = option(5, "Runs by which the cost is measured, from --seed on.", quick=1, min=1, max=MOST_RUNS)
    epochs: int = option(2, "Of each of these runs.", quick=1, min=1, max=100)
    images: int = option(60_000, "Images, to attack and to train on.", quick=6_000, min=240, max=60_000)
    data: Path | None = option(
        None, "Folder that holds mnist/ and cifar-100-python/.", envvar="TERRACE_DATA", metavar="DIRECTORY"
    )


class Leakage(Experiment):
    """What the updates of a worker give away of its pictures, with clipping and noise, and what these cost."""

    name = "update-leakage"
    options = Chosen
    ignores = frozenset({"tasks"})
    profile = None
    repeats = ("images", "pictures that were attacked")
    quick = "{pictures} pictures rather than 16, {steps} steps rather than 300, one seed rather than 5"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        with training_extra("training on the fleet", "learn"):
            from experiments.training.leaking import Victim, accuracy_with
        run.config |= chosen.model_dump(exclude={"data"})
        run.config["maskings"] = [None if each is None else each.model_dump() for each in MASKINGS]
        run.expect(len(MASKINGS) * (len(chosen.network) * len(chosen.batch) + chosen.seeds))
        seed = run.request.seed
        for network in chosen.network:
            victim = await asyncio.to_thread(Victim, network, chosen.data, seed, chosen.images)
            for size in chosen.batch:
                for masking in MASKINGS:
                    with run.step(f"{network}, batches of {size}, {_words(masking)}"):
                        for number in range(max(1, chosen.pictures // size)):

                            def found(
                                victim: Victim = victim,
                                size: int = size,
                                number: int = number,
                                masking: Masking | None = masking,
                            ) -> list[dict[str, Any]]:
                                came = victim.attack(
                                    size, number, masking, steps=chosen.steps, own=chosen.own, seed=seed
                                )
                                return [
                                    {"attack": attack, **victim.measured(taken, pictures, labels)}
                                    for attack, taken, pictures, labels in came
                                ]

                            for row in await asyncio.to_thread(found):
                                run.add(kind="attack", network=network, batch=size, **_facts(masking), **row)
        for masking in MASKINGS:
            for each in range(seed, seed + chosen.seeds):
                with run.step(f"accuracy with {_words(masking)}"):
                    accuracy = await asyncio.to_thread(
                        accuracy_with, masking, chosen.data, seed=each, epochs=chosen.epochs, images=chosen.images
                    )
                    run.add(kind="accuracy", network="mnist-64-64", seed=each, accuracy=accuracy, **_facts(masking))

    def rows(self, record: Record) -> list[dict[str, Any]]:
        """A row for each network, batch, masking and attack."""
        accuracies = {
            key: [point["accuracy"] for point in points]
            for key, points in grouped(
                [point for point in record["points"] if point["kind"] == "accuracy"], "network", "clip", "noise"
            ).items()
        }
        attacks = [point for point in record["points"] if point["kind"] == "attack"]
        rows = []
        for (network, batch, clip, noise, attack), points in grouped(
            attacks, "network", "batch", "clip", "noise", "attack"
        ).items():
            images = sum(point["images"] for point in points)

            def mean(name: str, points: Any = points, images: int = images) -> float:
                return float(sum(point[name] * point["images"] for point in points) / images)

            low, high = interval_of(mean("recognised"), images)
            accuracy = accuracies.get((network, clip, noise), [])
            rows.append(
                {
                    "network": network,
                    "batch": batch,
                    "clip": clip,
                    "noise": noise,
                    "attack": attack,
                    "images": images,
                    "ssim": mean("ssim"),
                    "recognised": mean("recognised"),
                    "recognised_low": low,
                    "recognised_high": high,
                    "recognised_originals": mean("recognised_originals"),
                    "accuracy": statistics.fmean(accuracy) if accuracy else None,
                    "accuracy_deviation": statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0,
                    "seeds": len(accuracy),
                }
            )
        return rows

    def table(self, record: Record) -> Table:
        return Table(
            headings="network | batch | masking | attack | n | SSIM | recognised, % | originals, % | accuracy, %",
            rows=[
                [
                    row["network"],
                    str(row["batch"]),
                    _words(None if row["clip"] is None else Masking(clip=row["clip"], noise=row["noise"])),
                    row["attack"],
                    str(row["images"]),
                    f"{row['ssim']:.2f}",
                    f"{100 * row['recognised']:.0f} ({100 * row['recognised_low']:.0f} to "
                    f"{100 * row['recognised_high']:.0f})",
                    f"{100 * row['recognised_originals']:.0f}",
                    "-"
                    if row["accuracy"] is None
                    else f"{100 * row['accuracy']:.2f} ± {100 * row['accuracy_deviation']:.2f}",
                ]
                for row in self.rows(record)
            ],
        )


def _facts(masking: Masking | None) -> dict[str, Any]:
    return {"clip": None, "noise": 0.0} if masking is None else masking.model_dump()


def _words(masking: Masking | None) -> str:
    if masking is None:
        return "none"
    return f"clip {masking.clip:g}" + (f", noise {masking.noise:g}" if masking.noise else "")


LEAKAGE = Leakage()
