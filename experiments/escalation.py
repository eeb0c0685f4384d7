"""Accuracy against cost when only unsure images go up a tier: shares to edge and cloud, bytes, time, on a real fleet.

Each point is one job of 50-image tasks with the shipped networks and the shipped thresholds. For each
budget and each accuracy to keep there are two jobs: one with a fine answer for every image (`escalate_from=edge`), and
one in which a sure coarse answer is enough (`escalate_from=end`). The jobs that send all images to one tier are the
ends of the scale.

The points are compared with the results of `terrace models tune-escalation` on the images that training held out. Two
lines there do not depend on the margin: `random` sends up images at random, and `oracle` first sends up the images that
only the upper network gets right. Bytes count the pixels that left the end devices, without headers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.figure3 import busy_window, times_of
from experiments.harness import Experiment, Options, Record, Run, Table, cell, option
from experiments.plots import Figures, bound, formula, measured
from experiments.testbed import BATCH, check_fleet
from models.manifest import records_folder, weights_folder
from tierkit.client import AsyncClient, Job, JobState
from tierkit.types import Escalate, Scheme, Tier

__all__ = ["ESCALATION", "Choice", "choices"]

_BUDGETS, _ACCURACIES = (0.1, 0.25, 0.5, 0.75), (0.95, 0.97, 0.99)
_QUICK_BUDGETS, _QUICK_ACCURACIES = (0.25, 0.5), (0.99,)
_CURVE_POINTS = 100
_JOB_BUDGET_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to decide which images go up."""

    scheme: Scheme
    escalate: Escalate = Escalate.ALWAYS
    lowest: Tier | None = None
    """The lowest tier whose answer may stand, with `threshold` and `budget`."""
    aim: float | None = None
    """Share of the images, or of the upper network's accuracy."""

    def __str__(self) -> str:
        if self.aim is None:
            return {Scheme.END: "end only", Scheme.END_EDGE: "all to the edge"}.get(self.scheme, "all to the cloud")
        what = f"budget {self.aim:g}"
        if self.escalate is not Escalate.BUDGET:
            what = f"{self.aim:g} of the next tier's accuracy"
        return f"{what}, from {self.lowest}"

    @classmethod
    def of(cls, point: Mapping[str, Any]) -> Choice:
        """Choice of a job in a record."""
        lowest = point["escalate_from"]
        return cls(
            scheme=Scheme(point["scheme"]),
            escalate=Escalate(point["escalate"]),
            lowest=None if lowest is None else Tier(lowest),
            aim=point["aim"],
        )


def choices(budgets: Sequence[float], accuracies: Sequence[float]) -> list[Choice]:
    """Return the jobs that send all images to one tier, then each aim with each lowest tier."""
    aims = [(Escalate.BUDGET, aim) for aim in budgets] + [(Escalate.THRESHOLD, aim) for aim in accuracies]
    return [
        *(Choice(scheme=scheme) for scheme in (Scheme.END, Scheme.END_EDGE, Scheme.END_CLOUD)),
        *(
            Choice(scheme=Scheme.MAPPING, escalate=escalate, lowest=lowest, aim=aim)
            for lowest in (Tier.EDGE, Tier.END)
            for escalate, aim in aims
        ),
    ]


# --- measuring ------------------------------------------------------------------------------------------------------


class Chosen(Options):
    """The aims; none of both for the usual ones."""

    budget: list[float] | None = option(
        None,
        "Share of the images that may go up; may be repeated. Default: 0.1 to 0.75, quick 0.25 and 0.5.",
        min=0,
        max=1,
    )
    accuracy: list[float] | None = option(
        None,
        "Share of the upper network's accuracy to keep; may be repeated. Default: 0.95 to 0.99, quick 0.99.",
        min=0,
        max=1,
    )


async def _one_job(client: AsyncClient, choice: Choice, images: Any, labels: Any) -> Job:
    asked: dict[str, Any] = {}
    if choice.lowest is not None:
        name = "escalate_budget" if choice.escalate is Escalate.BUDGET else "escalate_accuracy"
        asked = {"escalate_from": choice.lowest, name: choice.aim}
    job = await client.submit(
        images,
        labels=labels,
        scheme=choice.scheme,
        escalate=choice.escalate,
        batch_size=BATCH,
        name=f"escalation {choice}",
        **asked,
    )
    return await client.wait(job, budget_s=_JOB_BUDGET_S)


def _facts(choice: Choice, job: Job, image_bytes: int) -> dict[str, Any]:
    """Facts of a job for the record."""
    sent_up = dict(job.sent_up)
    if not sent_up:  # all images of a task went to one tier
        for share in job.by_node.values():
            if share.tier is not Tier.END:
                sent_up[share.tier] = sent_up.get(share.tier, 0) + share.fine_images
    return {
        "choice": str(choice),
        "scheme": choice.scheme,
        "escalate": choice.escalate,
        "escalate_from": choice.lowest,
        "aim": choice.aim,
        "gates": [{name: gate.get(name) for name in _GATE_FIELDS} for gate in job.policy.get("gates", [])],
        "state": job.state,
        "seconds": job.elapsed_s,
        "images": job.images,
        "fallback": job.fallback,
        "sent_up": sent_up,
        "upload_bytes": image_bytes * sum(sent_up.values()),
        "fine_accuracy": job.fine_accuracy if choice.lowest is not Tier.END else None,
        "coarse_accuracy": job.coarse_accuracy if choice.scheme is Scheme.END else job.final_coarse_accuracy,
    }


_GATE_FIELDS = ("lower", "upper", "below", "share", "accuracy")


def _promised() -> dict[str, Any]:
    """The curve from edge to cloud that `terrace models tune-escalation` has kept, thinned."""
    kept = json.loads((records_folder(weights_folder()) / "escalation.json").read_text(encoding="utf-8"))
    curve = kept["curves"]["edge-cloud"]
    picked = np.unique(np.linspace(0, len(curve["share"]) - 1, _CURVE_POINTS + 1).round().astype(int))
    return {"data": kept["data"], **{name: [values[at] for at in picked] for name, values in curve.items()}}


# --- from the record ------------------------------------------------------------------------------------------------


def _row(
    point: Mapping[str, Any], top: Mapping[str, Any] | None, promised: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    n = point["images"]
    to = {tier: point["sent_up"].get(tier, 0) / n for tier in (Tier.EDGE, Tier.CLOUD)}
    by_upper = {gate["upper"]: gate for gate in point["gates"]}
    # Of a chain of two thresholds the tuning promises no accuracy, and the share of the first one only.
    to_cloud = by_upper.get(Tier.CLOUD) if point["escalate_from"] == Tier.EDGE else None
    level = "coarse_accuracy" if point["fine_accuracy"] is None else "fine_accuracy"
    relative = point[level] / top[level] if top and point[level] is not None else None
    fine = point["fine_accuracy"] is not None
    return {
        "choice": str(Choice.of(point)),
        "escalate": point["escalate"],
        "escalate_from": point["escalate_from"],
        "aim": point["aim"],
        "to_edge": round(to[Tier.EDGE], 4),
        "promised_to_edge": by_upper[Tier.EDGE]["share"] if Tier.EDGE in by_upper else None,
        "to_cloud": round(to[Tier.CLOUD], 4),
        "promised_to_cloud": to_cloud["share"] if to_cloud else None,
        "upload_bytes_per_image": round(point["upload_bytes"] / n, 1),
        "seconds": point["seconds"],
        "images_per_s": round(n / point["seconds"], 1),
        "fine_accuracy": point["fine_accuracy"],
        "promised_fine_accuracy": to_cloud["accuracy"] if to_cloud else None,
        "random_fine_accuracy": _at(promised, "random", to[Tier.CLOUD]) if fine and to_cloud else None,
        "oracle_fine_accuracy": _at(promised, "oracle", to[Tier.CLOUD]) if fine and to_cloud else None,
        "coarse_accuracy": point["coarse_accuracy"],
        "relative_accuracy": None if relative is None else round(relative, 4),
        "images": n,
        "fallback": point["fallback"],
    }


def _at(curve: Mapping[str, Sequence[float]], name: str, share: float) -> float:
    """A kept curve at a share of images, between its points on a straight line."""
    return round(float(np.interp(share, curve["share"], curve[name])), 4)


def _percent(share: float, promised: float | None) -> str:
    return f"{100 * share:.1f}" + (f" ({100 * promised:.1f})" if promised is not None else "")


_KINDS = (
    (Escalate.ALWAYS, "all images to one tier", 6),
    (Escalate.BUDGET, "budget", 0),
    (Escalate.THRESHOLD, "accuracy to keep", 1),
)


def _dots(number: int) -> dict[str, Any]:
    return {**measured(number), "linestyle": "", "markersize": 6}


class Escalation(Experiment):
    """Accuracy against cost when only unsure images go up a tier."""

    name = "escalation"
    options = Chosen
    quick = "{share}, fewer points unless chosen"

    async def measure(self, run: Run, chosen_aims: Chosen) -> None:
        budgets: Sequence[float] | None = chosen_aims.budget or None
        accuracies: Sequence[float] | None = chosen_aims.accuracy or None
        if budgets is None and accuracies is None:
            quick = run.request.quick
            budgets, accuracies = (_QUICK_BUDGETS, _QUICK_ACCURACIES) if quick else (_BUDGETS, _ACCURACIES)
        chosen = choices(budgets or (), accuracies or ())
        check_fleet(run.profile)
        emulated = all(run.profile.compute_ms_per_image.of(tier) for tier in Tier)
        settings = {"window": busy_window(times_of(run.profile))} if emulated else {}
        run.config |= {"promised": await asyncio.to_thread(_promised), **settings}
        run.expect(len(chosen))
        networks = await run.networks(run.profile)
        images = await asyncio.to_thread(lambda: run.images)
        async with run.fleet(run.profile, networks, settings) as (_, client):
            for choice in chosen:
                with run.step(str(choice)):
                    job = await _one_job(client, choice, images.images, images.fine)
                if job.state is not JobState.COMPLETED or job.fallback:
                    run.note(f"{choice}: {job.state}, {job.fallback} images kept the answer below: {job.reason}")
                run.add(**_facts(choice, job, int(images.images[0].nbytes)))

    def rows(self, record: Record) -> list[dict[str, Any]]:
        top = next((point for point in record["points"] if point["scheme"] == Scheme.END_CLOUD), None)
        return [_row(point, top, record["config"]["promised"]) for point in record["points"]]

    def table(self, record: Record) -> Table:
        return Table(
            headings=(
                "which images go up | to edge, % (promised) | to cloud, % (promised) | upload, kB/image | "
                "images/s | fine accuracy (promised) | random / oracle | accuracy of superclasses | "
                "relative to all in the cloud"
            ),
            rows=[
                [
                    row["choice"],
                    _percent(row["to_edge"], row["promised_to_edge"]),
                    _percent(row["to_cloud"], row["promised_to_cloud"]),
                    f"{row['upload_bytes_per_image'] / 1000:.2f}",
                    f"{row['images_per_s']:.0f}",
                    cell(row["fine_accuracy"], ".4f")
                    + (f" ({row['promised_fine_accuracy']:.4f})" if row["promised_fine_accuracy"] is not None else ""),
                    f"{row['random_fine_accuracy']:.4f} / {row['oracle_fine_accuracy']:.4f}"
                    if row["random_fine_accuracy"] is not None
                    else "-",
                    cell(row["coarse_accuracy"], ".4f"),
                    cell(row["relative_accuracy"], ".4f"),
                ]
                for row in self.rows(record)
            ],
        )

    def draw(self, record: Record, figures: Figures) -> None:
        rows, promised = self.rows(record), record["config"]["promised"]
        (axes,) = figures.panels(
            "escalation",
            [f"a fine answer for every image; measured: {rows[0]['images']:,} images each"],
            xlabel="share of images that go to the cloud",
            ylabel="fine accuracy",
            finding=_finding(rows, "fine_accuracy", "to_cloud", "of the images in the cloud"),
        )
        axes.plot(promised["share"], promised["oracle"], label="oracle (held-out images)", **bound())
        curve = {**formula(2), "marker": ""}
        axes.plot(promised["share"], promised["accuracy"], label="margin, promised (held-out images)", **curve)
        if "test_share" in promised:
            kept = promised["test_share"], promised["test_accuracy"]
            axes.plot(*kept, label="margin, whole test set, no services", color="#009E73", linewidth=1.0)
        axes.plot(promised["share"], promised["random"], label="random", **{**formula(), "linestyle": ":"})
        for kind, label, look in _KINDS:
            shown = [row for row in rows if row["escalate"] == kind and row["fine_accuracy"] is not None]
            if shown:
                at = [row["to_cloud"] for row in shown], [row["fine_accuracy"] for row in shown]
                axes.plot(*at, label=f"{label}, measured", **_dots(look))
        axes.legend(frameon=False, loc="lower right")
        panels = figures.panels(
            "escalation-cost",
            ["bytes", "speed on this profile"],
            xlabel="upload (kB/image)",
            ylabel="accuracy of the superclasses",
            finding=_finding(rows, "coarse_accuracy", "to_edge", "of the images sent up"),
        )
        panels[1].set_xlabel("throughput (images/s)")
        for kind, label, look in _KINDS:
            for lowest in (None, Tier.EDGE, Tier.END):
                shown = [row for row in rows if (row["escalate"], row["escalate_from"]) == (kind, lowest)]
                if not shown:
                    continue
                known = [row["coarse_accuracy"] for row in shown]
                style = _dots(look) if lowest is not Tier.END else {**_dots(look), "markerfacecolor": "white"}
                text = label if lowest is None else f"{label}, from {lowest}"
                panels[0].plot([row["upload_bytes_per_image"] / 1000 for row in shown], known, label=text, **style)
                panels[1].plot([row["images_per_s"] for row in shown], known, **style)
                if lowest is None:
                    for row in shown:
                        for axes, x in zip(
                            panels, (row["upload_bytes_per_image"] / 1000, row["images_per_s"]), strict=True
                        ):
                            near = {"xytext": (4, 7), "textcoords": "offset points"}
                            axes.annotate(row["choice"], (x, row["coarse_accuracy"]), **near)
        for axes, name, unit in zip(panels, ("upload_bytes_per_image", "images_per_s"), (1000, 1), strict=True):
            most = max(row[name] for row in rows) / unit
            axes.set_xlim(-0.04 * most, 1.2 * most)
        panels[0].margins(y=0.08)  # room for the words above the highest point
        panels[0].legend(frameon=False, loc="lower right")


def _finding(rows: Sequence[Mapping[str, Any]], figure: str, share: str, words: str) -> str:
    """The best gate compared with all images in the cloud; "" if either was not measured."""
    gated = [row for row in rows if row["escalate"] != Escalate.ALWAYS and row[figure] is not None]
    whole = [
        row for row in rows if row["escalate"] == Escalate.ALWAYS and row["to_cloud"] == 1.0 and row[figure] is not None
    ]
    if not gated or not whole:
        return ""
    best = max(gated, key=lambda row: row[figure])
    return f"{best[share]:.0%} {words} give {best[figure]:.3f}; all in the cloud give {whole[0][figure]:.3f}"


ESCALATION = Escalation()
