"""Cascade of networks: thresholds below which an image escalates a tier, tuned on held-out images. Pure; one file.

The confidence of a network in an answer is the *margin* of its calibrated probabilities: the largest minus the second
largest (Park et al. 2015, Big/LITTLE deep neural networks, gate their big network by it). An image whose margin is
below the threshold of a *gate* goes up a tier; the others keep their answer, which is an early exit. A gate is between
two networks and belongs to their exact weights: `escalation.json`, next to the manifest, has the sha256 of both.
"""

from __future__ import annotations

import json
import shlex
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from models.manifest import Manifest, ModelEntry, weights_folder
from tierkit.atomic import write_atomically
from tierkit.documents import Frozen, read_json
from tierkit.errors import InvalidInput, NotFound, WeightsError
from tierkit.tensors import Array
from tierkit.types import Tier

__all__ = [
    "TUNING_NAME",
    "Gate",
    "GateSide",
    "OperatingPoint",
    "Tuning",
    "compact_json",
    "load_tuning",
    "make_gate",
    "margin",
    "save_tuning",
    "unsure",
]

TUNING_NAME = "escalation.json"

_ALL = 2.0
"""A threshold that no margin reaches: every image goes up."""
_STEPS = 1000
"""Points of a stored curve, at most: the share of images that go up is set in steps of a tenth of a percent."""
_DIGITS = 6

Share = Annotated[float, Field(ge=0, le=1)]
Threshold = Annotated[float, Field(ge=0, le=_ALL)]


def margin(probabilities: Array) -> Array:
    """Largest minus second largest probability, `[n]`, of `[n, classes]`; the only class there is is sure."""
    if probabilities.shape[1] < 2:
        return np.ones(len(probabilities), dtype=probabilities.dtype)
    two = np.partition(probabilities, -2, axis=1)[:, -2:]
    return np.asarray(two[:, 1] - two[:, 0])


def unsure(probabilities: Array, below: float) -> Array:
    """Return bool `[n]`: True for the images whose margin is below the threshold, which go up a tier."""
    return np.asarray(margin(probabilities).astype(np.float64) < below)


class GateSide(Frozen):
    """One side of a gate."""

    tier: Tier
    name: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @classmethod
    def of(cls, entry: ModelEntry) -> Self:
        return cls(tier=Tier(entry.tier), name=entry.name, sha256=entry.sha256)


class OperatingPoint(Frozen):
    """A threshold, and its results on the held-out images."""

    below: Threshold
    """Images with a smaller margin go up."""
    share: Share
    """Share of the images that go up."""
    accuracy: Share
    """Accuracy of all final answers, including the answers of the upper network."""


class Gate(Frozen):
    """Gate between two networks: accuracy against the share of images that go up, as measured on held-out images."""

    lower: GateSide
    upper: GateSide
    answers: Literal["coarse", "fine"]
    """Level of the answers that the margin and the accuracies refer to; `coarse` if the lower network gives only coarse
    answers.
    """
    images: Annotated[int, Field(ge=1)]
    lower_accuracy: Share
    upper_accuracy: Share
    below: tuple[Threshold, ...] = Field(min_length=2)
    share: tuple[Share, ...]
    accuracy: tuple[Share, ...]

    @model_validator(mode="after")
    def _is_a_curve(self) -> Self:
        if not len(self.below) == len(self.share) == len(self.accuracy):
            raise ValueError("below, share and accuracy must be of one length")
        if list(self.below) != sorted(self.below) or list(self.share) != sorted(self.share) or self.share[-1] != 1:
            raise ValueError("below and share must rise, up to a share of 1")
        return self

    def point(self, index: int) -> OperatingPoint:
        return OperatingPoint(below=self.below[index], share=self.share[index], accuracy=self.accuracy[index])

    def for_accuracy(self, relative: float) -> OperatingPoint:
        """Return the operating point that sends the fewest images up and reaches `relative` times the upper network's
        accuracy.

        It is the least share from which on the held-out accuracy stays at or above the target: where the curve first
        touches it, it does so by chance.

        Raises:
            InvalidInput: the target cannot be reached; the message names the highest one that can.
        """
        target = relative * self.upper_accuracy
        # The curve is stored rounded.
        short = [index for index, accuracy in enumerate(self.accuracy) if accuracy < target - 10**-_DIGITS]
        first = short[-1] + 1 if short else 0
        if first == len(self.accuracy):
            raise InvalidInput(
                f"{relative:g} times the {self.answers} accuracy of {self.upper.name!r} ({target:.4f}) cannot be "
                f"reached: with every image sent up it is {self.upper_accuracy:.4f} on the held-out images; ask for 1 "
                "or less"
            )
        return self.point(first)

    def for_budget(self, budget: float) -> OperatingPoint:
        """Return the operating point that sends the most images up, but at most the share `budget` (0 to 1).

        On other images the share differs by chance. So the point is one standard error below the budget, and five times
        out of six the images of a large job keep to it.
        """
        limit = budget - (budget * (1 - budget) / self.images) ** 0.5
        return self.point(
            max(index for index, share in enumerate(self.share) if share <= max(0.0, limit) or index == 0)
        )


class Tuning(Frozen):
    """All gates, and the operating point of jobs that do not name one."""

    format: Literal[1] = 1
    data: str
    """Description of the images that the gates were measured on."""
    relative_accuracy: Annotated[float, Field(gt=0, le=1)]
    """Share of the upper network's accuracy that `escalate=threshold` must reach."""
    budget: Annotated[float, Field(gt=0, le=1)]
    """Share of the images that `escalate=budget` may send up."""
    gates: tuple[Gate, ...] = Field(min_length=1)

    @property
    def networks(self) -> tuple[str, ...]:
        """Names of the networks between which the gates are."""
        return tuple(dict.fromkeys(side.name for gate in self.gates for side in (gate.lower, gate.upper)))

    @cached_property
    def _by_tiers(self) -> dict[tuple[Tier, Tier], Gate]:
        return {(gate.lower.tier, gate.upper.tier): gate for gate in self.gates}

    def gate(self, lower: Tier, upper: Tier) -> Gate:
        """The gate between two tiers.

        Raises:
            NotFound: it was not tuned.
        """
        gate = self._by_tiers.get((lower, upper))
        if gate is None:
            known = ", ".join(f"{low} to {high}" for low, high in self._by_tiers)
            raise NotFound(f"no tuned threshold from {lower} to {upper}; there is: {known}")
        return gate

    def check(self, manifest: Manifest) -> None:
        """Refuse thresholds of other weights.

        Raises:
            WeightsError: a gate's network is not in the manifest, or with another sha256.
        """
        for network in (side for gate in self.gates for side in (gate.lower, gate.upper)):
            have = next((entry.sha256 for entry in manifest.models if entry.name == network.name), None)
            if have != network.sha256:
                there = f"the manifest's have {have[:12]}..." if have else "the manifest has no such network"
                raise WeightsError(
                    f"{TUNING_NAME} was tuned for other weights of {network.name!r} (sha256 {network.sha256[:12]}..., "
                    f"{there}): run '{_command()}' again"
                )


def make_gate(
    lower: GateSide,
    upper: GateSide,
    answers: Literal["coarse", "fine"],
    *,
    margins: Array,
    lower_right: Array,
    upper_right: Array,
) -> Gate:
    """The gate between two networks from their answers to the same held-out images.

    Args:
        margins: `[n]`, of the lower network.
        lower_right, upper_right: bool `[n]`, whether each network's answer is right.
    """
    n = len(margins)
    order = np.argsort(margins, kind="stable")
    ascending = margins[order].astype(np.float64)
    gained = np.concatenate([[0], np.cumsum(upper_right[order].astype(np.int64) - lower_right[order])])
    picked = np.unique(np.linspace(0, n, _STEPS + 1).round().astype(np.int64))
    # The threshold is the margin of the first image that stays; of images with equal margins all stay.
    staying = picked[(picked > 0) & (picked < n)]
    below = np.unique([0.0, *ascending[staying].round(_DIGITS), _ALL])
    up = np.searchsorted(ascending, below, side="left")
    accuracy = (int(lower_right.sum()) + gained[up]) / n
    return Gate(
        lower=lower,
        upper=upper,
        answers=answers,
        images=n,
        lower_accuracy=float(lower_right.mean()),
        upper_accuracy=float(upper_right.mean()),
        below=tuple(below.tolist()),
        share=tuple((up / n).round(_DIGITS).tolist()),
        accuracy=tuple(accuracy.round(_DIGITS).tolist()),
    )


def load_tuning(folder: Path | None = None) -> Tuning:
    """Read `escalation.json` of a weights folder, by default the bundled one.

    Raises:
        NotFound: nothing was tuned there.
        WeightsError: the file is damaged or does not fit; the message says why.
    """
    path = (folder or weights_folder()) / TUNING_NAME
    if not path.exists():
        raise NotFound(
            f"there is no {path}: '{_command(path.parent)}' makes it, from labelled pictures in folders by class"
        )
    return read_json(path, Tuning, what="file of thresholds", error=WeightsError)


def save_tuning(tuning: Tuning, folder: Path) -> Path:
    """Write `escalation.json` into a weights folder, replacing the old one atomically; returns its path.

    Raises:
        SetupError: it could not be written; the old one is whole.
    """
    path = folder / TUNING_NAME
    write_atomically(path, (compact_json(tuning.model_dump(mode="json")) + "\n").encode())
    return path


def _command(folder: Path | None = None) -> str:
    """Return the command that chooses thresholds for a model set."""
    models = "SET" if folder is None else shlex.quote(str(folder))
    return f"terrace models tune-escalation --models {models} --out {models} --dataset PICTURES"


def compact_json(content: Any) -> str:
    """Indented JSON with each list of numbers on one line: the curves are long."""
    curves: list[str] = []

    def stand_in(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: stand_in(item) for key, item in value.items()}
        if isinstance(value, list) and value and all(isinstance(item, float) for item in value):
            curves.append(json.dumps(value))
            return f"<{len(curves) - 1}>"
        return [stand_in(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(stand_in(content), indent=1)
    for number, curve in enumerate(curves):
        text = text.replace(f'"<{number}>"', curve)
    return text
