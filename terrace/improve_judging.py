"""The comparison of a trained network with the present one of its release."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models.folders import Labelled
from models.manifest import Manifest, ModelEntry
from models.session import softmax
from tierkit.tensors import Array
from training.improve.base import written
from training.improve.blend import worth
from training.improve.gate import FEW, GateVerdict, compared, contradiction, judge
from training.improve.successor import ComparedOn, answers_of, answers_of_file
from training.units import Flat

__all__ = [
    "ComparedPictures",
    "TrainedNetwork",
    "TriedNetwork",
    "as_compared",
    "check_pictures",
    "contradicted",
    "tried",
    "with_answers",
]

_AT_ONCE = 256
"""Pictures that are read at once."""

Answered = tuple[ComparedOn, Array]
"""Pictures, and the logits of the present network for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPictures:
    """The pictures on which two networks are compared."""

    newest: Answered
    """Newest pictures with labels of people or answers from above."""
    labelled: Answered | None
    """Pictures that an operator gives; None without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedNetwork:
    """The present network, and the weights that its training has led to."""

    content: bytes
    """The file of the present network."""
    layers: int
    """Number of its last layers that were trained; 0 for all."""
    weights: Flat


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedNetwork:
    """A network at a share of the way from the present one to the trained one, and how it compares."""

    share: float
    content: bytes
    verdict: GateVerdict
    gain: float
    figures: dict[str, float]

    @property
    def passes(self) -> bool:
        return self.verdict.passes


def as_compared(labelled: Labelled, entry: ModelEntry) -> ComparedOn:
    """Labelled pictures with the labels of a network's target."""
    labels = labelled.fine if entry.target == "fine" else labelled.coarse
    assert labels is not None
    return ComparedOn(images=labelled.images, labels=labels)


def check_pictures(labelled: Labelled) -> None:
    """Read each picture once, so that damaged ones are refused before anything is trained.

    Raises:
        DataError: a picture is damaged.
    """
    for first in range(0, len(labelled), _AT_ONCE):
        labelled.images[first : first + _AT_ONCE]


def with_answers(judged: ComparedOn, manifest: Manifest, entry: ModelEntry, folder: Path) -> Answered:
    """Pictures with the logits of the network of an entry, whose file is in `folder`."""
    return judged, answers_of(manifest, entry, folder, judged.images)


def tried(
    manifest: Manifest, entry: ModelEntry, trained: TrainedNetwork, share: float, on: ComparedPictures
) -> TriedNetwork:
    """Compare the network at a share of the way with the present one."""
    content = written(trained.content, trained.layers, trained.weights, share)
    parts = {"above": on.newest} if on.labelled is None else {"above": on.newest, "validation": on.labelled}
    new = answers_of_file(manifest, entry, content, *(judged.images for judged, _ in parts.values()))
    found = {
        name: compared(old, logits, judged.labels)
        for (name, (judged, old)), logits in zip(parts.items(), new, strict=True)
    }
    above, validation = found["above"], found.get("validation")
    return TriedNetwork(
        share=share,
        content=content,
        verdict=judge(validation, above if above.pictures else None),
        gain=worth(above, validation),
        figures={key: value for name, each in found.items() for key, value in each.figures(name).items()},
    )


def contradicted(manifest: Manifest, entry: ModelEntry, newest: Answered) -> str | None:
    """Name the class in which the tier above and the present network contradict each other; None without one."""
    judged, logits = newest
    assert judged.by_people is not None
    found = contradiction(softmax(logits / entry.temperature), judged.labels, judged.by_people)
    if found is None:
        return None
    names = manifest.labels(entry)
    said, above = names[found.said], names[found.above]
    return (
        f"the tier above answers {above!r} for {found.contradicted} of {found.pictures} pictures that the present "
        f"network surely answers {said!r}, so one of them is wrong for this class: label {FEW} or more of these "
        "pictures (terrace observations --disagree)"
    )
