"""Measuring the gates of `models.escalation`: on held-out images to choose thresholds, on test images to check them."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from models.dataset import Dataset
from models.escalation import Gate, GateSide, Tuning, compact_json, make_gate, margin, save_tuning, unsure
from models.evaluate import logits_of
from models.folders import Labelled
from models.held_out import Unseen
from models.hierarchy import Hierarchy
from models.manifest import MANIFEST_NAME, Manifest, ModelEntry, load_manifest, save_manifest
from models.session import load_model, softmax
from tierkit.atomic import write_atomically
from tierkit.errors import DataError, InvalidInput, MissingExtra
from tierkit.tensors import Array
from tierkit.types import Tier

__all__ = [
    "Answers",
    "Side",
    "TuningOutcome",
    "TuningReport",
    "TuningTarget",
    "caution",
    "curve_rows",
    "measure_choice",
    "tune",
    "tune_weights",
    "tuned_on",
]

Answered = Literal["coarse", "fine"]
_RECORD = "escalation"
_RECORD_POINTS = 200
_ENOUGH = 200
"""Pictures to choose thresholds by: the standard error of a share is at most 3.5 points then."""
_GATES = ((Tier.EDGE, Tier.CLOUD), (Tier.END, Tier.EDGE), (Tier.END, Tier.CLOUD))


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Answers of one network to a set of images."""

    entry: ModelEntry
    probabilities: Mapping[Answered, Array]
    """`[n, classes]` by level; a coarse network has no fine ones."""
    right: Mapping[Answered, Array]
    """bool `[n]`."""


Answers = Mapping[Tier, Side]
"""Answers by tier, all to the same images."""


def _answer_all(
    manifest: Manifest,
    folder: Path,
    images: Callable[[ModelEntry], Labelled],
    *,
    provider: str,
    threads: int,
    report: Callable[[str, int, int], object],
) -> Answers:
    """Let the network that each tier serves by default answer labelled images.

    Args:
        images: returns the images in the form that a network takes.

    Raises:
        DataError: the images have no labels. As `load_model`.
    """
    sides: dict[Tier, Side] = {}
    for tier, entry in _served(manifest, provider).items():
        data = images(entry)
        if data.fine is None or data.coarse is None:
            raise DataError("thresholds are tuned on labelled images")
        truth: Mapping[Answered, Array] = {"coarse": data.coarse, "fine": data.fine}
        model = load_model(entry, folder, provider=provider, threads=threads, labels=manifest.labels(entry))
        logits, _ = logits_of(model, data.images, report=partial(_advance, report, entry.name, len(data)))
        probabilities = _levels(softmax(logits, entry.temperature), entry, manifest.hierarchy)
        right = {level: values.argmax(axis=1) == truth[level] for level, values in probabilities.items()}
        sides[tier] = Side(entry=entry, probabilities=probabilities, right=right)
    return sides


def _advance(report: Callable[[str, int, int], object], name: str, of: int, count: int) -> None:
    report(name, count, of)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTarget:
    """Target to choose thresholds for."""

    accuracy: float
    relative: bool = True
    """True if `accuracy` is a share of the upper network's own; else it is the fine accuracy to aim at."""
    budget: float = 0.5
    """Share of the images that may go up."""


def tune(answers: Answers, target: TuningTarget, *, data: str) -> Tuning:
    """Thresholds for every gate that the answers to held-out images allow.

    Args:
        data: description of these images.

    Raises:
        InvalidInput: no two tiers have a network, or the target cannot be reached; the message names the highest one
            that can.
    """
    gates = [_gate(answers[lower], answers[upper]) for lower, upper in _GATES if {lower, upper} <= set(answers)]
    if not gates:
        raise InvalidInput(
            "the model set has no two tiers with a network, so nothing goes up: 'terrace models import' enters another"
        )
    relative, top = target.accuracy, gates[0]
    if not target.relative:
        relative = target.accuracy / top.upper_accuracy
        if relative > 1:
            raise InvalidInput(
                f"{top.answers} accuracy {target.accuracy:g} cannot be reached: with every image sent up, "
                f"{top.upper.name!r} reaches {top.upper_accuracy:.4f} on the held-out images; ask for at most that"
            )
    for gate in gates:
        gate.for_accuracy(relative)
    return Tuning(data=data, relative_accuracy=relative, budget=target.budget, gates=tuple(gates))


def _gate(lower: Side, upper: Side) -> Gate:
    # An end device gives coarse answers, even if its network knows more.
    fine = lower.entry.tier != "end" and "fine" in lower.right and "fine" in upper.right
    answers: Answered = "fine" if fine else "coarse"
    return make_gate(
        GateSide.of(lower.entry),
        GateSide.of(upper.entry),
        answers,
        margins=margin(lower.probabilities[answers]),
        lower_right=lower.right[answers],
        upper_right=upper.right[answers],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningOutcome:
    """Effect of a choice of thresholds on a set of images."""

    escalate: str
    """threshold | budget"""
    escalate_from: Tier
    """The lowest tier whose answer may stand."""
    images: int
    thresholds: dict[str, float]
    """Threshold of each gate, such as "edge-cloud"."""
    went_to: dict[str, float]
    """Share of the images that were sent to a tier."""
    stayed_at: dict[str, float]
    """Share of the images whose answer is that tier's."""
    fine_accuracy: float | None
    """Fine accuracy of the final answers; None if some images have only a coarse one."""
    coarse_accuracy: float
    relative_accuracy: float
    """Accuracy divided by the highest tier's: fine accuracy if all images have a fine answer, else coarse."""


def measure_choice(answers: Answers, tuning: Tuning, *, escalate: str, lowest: Tier) -> TuningOutcome:
    """Send images up a chain of tiers as the end node does (scheme `mapping`), and count what comes of it.

    Args:
        lowest: `end`: a sure coarse answer stands; `edge`: every image gets a fine answer.
    """
    chain = [tier for tier in Tier if tier in answers]
    n = len(next(iter(answers.values())).right["coarse"])
    reached = np.ones(n, dtype=bool)
    final = np.zeros(n, dtype=np.int64)
    thresholds: dict[str, float] = {}
    went_to: dict[str, float] = {}
    for lower, upper in pairwise(chain):
        if lower is not Tier.END or lowest is Tier.END:
            gate = tuning.gate(lower, upper)
            point = (
                gate.for_accuracy(tuning.relative_accuracy)
                if escalate == "threshold"
                else gate.for_budget(tuning.budget)
            )
            thresholds[f"{lower}-{upper}"] = point.below
            reached = reached & unsure(answers[lower].probabilities[gate.answers], point.below)
        final[reached] = chain.index(upper)
        went_to[str(upper)] = float(reached.mean())
    right = {
        level: np.choose(
            final, [side.right.get(level, np.zeros(n, dtype=bool)) for side in map(answers.__getitem__, chain)]
        )
        for level in ("coarse", "fine")
    }
    every_fine = all("fine" in answers[chain[index]].right for index in np.unique(final))
    top = answers[chain[-1]]
    level: Answered = "fine" if every_fine else "coarse"
    return TuningOutcome(
        escalate=escalate,
        escalate_from=lowest,
        images=n,
        thresholds=thresholds,
        went_to=went_to,
        stayed_at={str(tier): float((final == index).mean()) for index, tier in enumerate(chain)},
        fine_accuracy=float(right["fine"].mean()) if every_fine else None,
        coarse_accuracy=float(right["coarse"].mean()),
        relative_accuracy=float(right[level].mean() / top.right[level].mean()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport:
    """Thresholds that `tune_weights` chose, their measurements, and the files that it wrote."""

    tuning: Tuning
    test: tuple[TuningOutcome, ...]
    """Outcome of each way to escalate on the test images; empty if these were not measured."""
    files: tuple[Path, ...]
    plot: bool
    """True if the curves could be drawn; matplotlib (extra `plots`) is needed."""


def caution(tuning: Tuning) -> str | None:
    """Return a warning if thresholds were chosen by few pictures, else None."""
    images = min(gate.images for gate in tuning.gates)
    if images >= _ENOUGH:
        return None
    return (
        f"chosen by only {images} pictures: an accuracy by so few has a standard error of up to "
        f"{50 / images**0.5:.0f} points; take {_ENOUGH} pictures or more to choose by"
    )


def tune_weights(
    folder: Path,
    dataset: Dataset,
    records: Path,
    target: TuningTarget,
    *,
    test: bool = True,
    provider: str = "cpu",
    threads: int = 1,
    report: Callable[[str, int, int], None] = lambda what, images, of: None,
) -> TuningReport:
    """Choose thresholds for a weights folder on images that its networks have not seen, and store them there.

    Args:
        records: folder of the training records, which name the held-out images; it gets `escalation.json`, `.csv` and,
            where matplotlib is installed, `.png` with the curves.
        test: measure the thresholds on the test set, once they are chosen.
        report: is called with the current part, the number of images answered, and their total.

    Raises:
        InvalidInput, WeightsError, DataError: see `tune`, `Unseen` and `load_model`; nothing is written.
        SetupError: a file could not be written.
    """
    manifest = load_manifest(folder)
    manifest.check_hierarchy(dataset.hierarchy)
    unseen = Unseen(dataset, _served(manifest, provider).values(), records)

    def answer(images: Callable[[ModelEntry], Labelled], kind: str) -> Answers:
        def advance(name: str, count: int, of: int) -> None:
            report(f"{name}, {kind}", count, of)

        return _answer_all(manifest, folder, images, provider=provider, threads=threads, report=advance)

    on_held_out = answer(unseen.to_choose, "held out")
    said = unseen.said(len(next(iter(on_held_out.values())).right["coarse"]))
    tuning = tune(on_held_out, target, data=said)
    on_test = answer(unseen.to_judge, "test") if test else None
    outcomes = () if on_test is None else tuple(_outcomes(on_test, tuning))
    files = [save_tuning(tuning, folder), folder / MANIFEST_NAME]
    save_manifest(manifest.model_copy(update={"tuned": tuning.networks}), folder)
    rows = curve_rows(on_held_out, tuning, on_test)
    thinned = _thinned(rows)
    content = {"data": said, "test": [asdict(outcome) for outcome in outcomes], "curves": _columns(thinned)}
    files.append(records / f"{_RECORD}.json")
    write_atomically(files[-1], (compact_json(content) + "\n").encode())
    files.append(records / f"{_RECORD}.csv")
    _write_csv(thinned, files[-1])
    with suppress(MissingExtra):
        _draw(rows, tuning, records / f"{_RECORD}.png")
        files.append(records / f"{_RECORD}.png")
    return TuningReport(tuning=tuning, test=outcomes, files=tuple(files), plot=files[-1].suffix == ".png")


def tuned_on(folder: Path, images: Callable[[ModelEntry], Labelled], target: TuningTarget, *, data: str) -> Tuning:
    """Thresholds for a weights folder, chosen on labelled images that its networks have not seen. Writes nothing.

    Args:
        images: gives them in the size of a network.
        data: a description of these images.

    Raises:
        InvalidInput, WeightsError, DataError: see `tune` and `load_model`.
    """
    answers = _answer_all(
        load_manifest(folder), folder, images, provider="cpu", threads=1, report=lambda name, images, of: None
    )
    return tune(answers, target, data=data)


def _served(manifest: Manifest, provider: str) -> dict[Tier, ModelEntry]:
    """The network that each tier serves by default with this provider; tiers without one are left out."""
    tiers = [tier for tier in Tier if any(entry.tier == tier for entry in manifest.models)]
    return {tier: manifest.default_for(tier, gpu=provider == "cuda") for tier in tiers}


def _outcomes(answers: Answers, tuning: Tuning) -> Iterator[TuningOutcome]:
    for lowest in (Tier.EDGE, Tier.END):
        for escalate in ("threshold", "budget"):
            if lowest is Tier.END or {Tier.EDGE, Tier.CLOUD} <= set(answers):
                yield measure_choice(answers, tuning, escalate=escalate, lowest=lowest)


def _thinned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Enough points to draw the curves again."""
    kept: list[dict[str, Any]] = []
    for gate in dict.fromkeys(row["gate"] for row in rows):
        own = [row for row in rows if row["gate"] == gate]
        picked = np.unique(np.linspace(0, len(own) - 1, _RECORD_POINTS + 1).round().astype(int))
        kept += [own[index] for index in picked]
    return kept


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    return {
        gate: {
            key: [row[key] for row in rows if row["gate"] == gate] for key in rows[0] if key not in ("gate", "answers")
        }
        for gate in dict.fromkeys(row["gate"] for row in rows)
    }


def curve_rows(held_out: Answers, tuning: Tuning, test: Answers | None) -> list[dict[str, Any]]:
    """Accuracy against the share of images that go up, per gate: rows for CSV and plot.

    `random` sends up images of any margin, `oracle` those first that only the upper network answers rightly and
    those last that only the lower one does: no rule can be better. `test_share` and `test_accuracy` are of the test
    images at the same threshold; they were not used to choose it.
    """
    rows: list[dict[str, Any]] = []
    for gate in tuning.gates:
        lower, upper = held_out[gate.lower.tier].right[gate.answers], held_out[gate.upper.tier].right[gate.answers]
        name = f"{gate.lower.tier}-{gate.upper.tier}"
        for below, share, accuracy in zip(gate.below, gate.share, gate.accuracy, strict=True):
            row: dict[str, Any] = {"gate": name, "answers": gate.answers, "below": below, "share": share}
            row["accuracy"] = accuracy
            row["random"] = gate.lower_accuracy + share * (gate.upper_accuracy - gate.lower_accuracy)
            row["oracle"] = _oracle(lower, upper, share)
            if test is not None:
                low, high = test[gate.lower.tier], test[gate.upper.tier]
                up = unsure(low.probabilities[gate.answers], below)
                row["test_share"] = float(up.mean())
                row["test_accuracy"] = float(np.where(up, high.right[gate.answers], low.right[gate.answers]).mean())
            rows.append({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def _oracle(lower: Array, upper: Array, share: float) -> float:
    sent, gains, losses = round(share * len(lower)), int((upper & ~lower).sum()), int((lower & ~upper).sum())
    lost = max(0, sent - (len(lower) - losses))
    return (int(lower.sum()) + min(sent, gains) - lost) / len(lower)


def _write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def _draw(rows: Sequence[Mapping[str, Any]], tuning: Tuning, path: Path) -> None:
    """A PNG with a panel for each gate."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("plots", "drawing the curves") from error
    names = [f"{gate.lower.tier}-{gate.upper.tier}" for gate in tuning.gates]
    figure = Figure(figsize=(5.2 * len(tuning.gates), 4.4), layout="constrained")
    for axes, name, gate in zip(np.ravel(figure.subplots(1, len(names))), names, tuning.gates, strict=True):
        own = [row for row in rows if row["gate"] == name]
        share = [row["share"] for row in own]
        axes.plot(share, [row["oracle"] for row in own], color="tab:green", linestyle="--", label="oracle")
        axes.plot(share, [row["accuracy"] for row in own], color="tab:blue", label=f"margin, {gate.images:,} held-out")
        if "test_share" in own[0]:
            test = [row["test_share"] for row in own], [row["test_accuracy"] for row in own]
            axes.plot(*test, color="tab:blue", alpha=0.45, linestyle="-.", label="margin, test (not chosen on)")
        axes.plot(share, [row["random"] for row in own], color="tab:gray", linestyle=":", label="random")
        for point, marker, label in (
            (
                gate.for_accuracy(tuning.relative_accuracy),
                "o",
                f"target: {tuning.relative_accuracy:g} of {gate.upper.name}",
            ),
            (gate.for_budget(tuning.budget), "s", f"budget: {tuning.budget:g} of the images"),
        ):
            axes.plot([point.share], [point.accuracy], marker, color="tab:red", fillstyle="none", label=label)
        title = f"{gate.lower.tier} to {gate.upper.tier}: {gate.lower.name}, {gate.upper.name}"
        axes.set(xlabel="share of images sent up", ylabel=f"{gate.answers} accuracy", title=title, xlim=(0, 1))
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize=8, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_atomically(path, picture.getvalue())


def _levels(own: Array, entry: ModelEntry, hierarchy: Hierarchy) -> dict[Answered, Array]:
    if entry.target == "coarse":
        return {"coarse": own}
    return {"fine": own, "coarse": hierarchy.coarse_probabilities(own)}
