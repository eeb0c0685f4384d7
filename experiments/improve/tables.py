"""The lines of `terrace experiment improve`: each learns once, and is measured on pictures that had no part in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from experiments.improve.learning import Course, base_of, improve
from experiments.improve.world import AnsweredPictures, DeviceGroup, LearningWorld, device_pictures, escalated, owners
from models.data import ImageSet
from models.session import open_session, softmax
from models.training.config import TrainConfig
from tierkit.tensors import Array
from training.cheating import Cheat
from training.improve.base import written
from training.improve.blend import SHARES, best, worth
from training.improve.gate import FEWEST, Comparison, GateVerdict, compared, contradiction, judge
from training.improve.personal import FOLDS, LAYERS, HeadPictures, head_config, judged_head, trained_head
from training.improve.plan import IMPROVE, training_of
from training.units import Flat

__all__ = ["KINDS", "Lie", "Recipe", "drift_line", "personal_line", "poison_line", "teacher_line"]

Lie = Literal["wrong pictures", "flipped answers", "sign-flip", "alie"]
KINDS: tuple[Lie, ...] = ("wrong pictures", "flipped answers", "sign-flip", "alie")
_LIARS = 3
_BATCH = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The options of an improvement."""

    steps: int
    rate: float
    mirror: bool = True

    def config(self, world: LearningWorld, seed: int) -> TrainConfig:
        return training_of(world.entry, steps=self.steps, rate=self.rate, mirror=self.mirror).model_copy(
            update={"seed": seed}
        )


@dataclass(frozen=True, slots=True)
class _Trained:
    """A network part of the way, with the verdict of the gate."""

    share: float
    content: bytes
    verdict: GateVerdict
    gain: float

    @property
    def passes(self) -> bool:
        return self.verdict.passes


def _halves(answers: AnsweredPictures) -> tuple[AnsweredPictures, AnsweredPictures]:
    """Pictures to choose by, and pictures to measure on."""
    numbers = np.arange(len(answers.truth))
    return answers.take(numbers[::2]), answers.take(numbers[1::2])


def _logits(content: bytes, images: Array) -> Array:
    """The answers of a file as nodes give them, `[n, classes]`."""
    session = open_session(content, "the network of the experiment")
    (given,), (first, *_) = session.get_inputs(), session.get_outputs()
    parts = [
        session.run([first.name], {given.name: images[at : at + _BATCH]})[0] for at in range(0, len(images), _BATCH)
    ]
    return np.concatenate(parts)


def _accuracy(content: bytes, answers: AnsweredPictures) -> float:
    return float(np.mean(_logits(content, answers.images).argmax(axis=1) == answers.truth))


def _chosen(world: LearningWorld, trained: Flat, *, validation: bool = True) -> _Trained:
    """The network that the gate likes best, on the way from the present one to the trained one.

    Args:
        validation: True if the operator has labelled pictures.
    """
    own, clean = _halves(world.own)[0], _halves(world.clean)[0]
    before = [_logits(world.content, each.images) for each in (own, clean)]

    present = softmax(before[0] / world.entry.temperature)
    labels = own.above.argmax(axis=1)
    if (found := contradiction(present, labels, np.zeros(len(labels), bool))) is not None:
        reason = f"class {found.said} is contradicted: {found.contradicted} of {found.pictures} by {found.above}"
        return _Trained(0.0, world.content, GateVerdict(passes=False, reason=reason), 0.0)

    def candidate(share: float) -> _Trained:
        content = written(world.content, 0, trained, share)
        above = compared(before[0], _logits(content, own.images), own.above.argmax(axis=1))
        known: Comparison | None = None
        if validation:
            known = compared(before[1], _logits(content, clean.images), clean.truth)
        return _Trained(share, content, judge(known, above), worth(above, known))

    return best(candidate(share) for share in SHARES)


def _course(world: LearningWorld, recipe: Recipe, seed: int, cheats: dict[int, Cheat] | None = None) -> Course:
    return Course(
        own=base_of(world.entry, world.content, world.hierarchy, 0),
        config=recipe.config(world, seed),
        strategy=IMPROVE,
        cheats=cheats or {},
    )


def drift_line(world: LearningWorld, recipe: Recipe, keeping: DeviceGroup, seed: int) -> dict[str, Any]:
    """The share of the accuracy lost to drift that comes back, and the pictures that still go up."""
    kept = device_pictures(world, keeping, seed)
    improved = improve(world.content, _course(world, recipe, seed), kept)
    found = _chosen(world, improved.weights)
    own, clean = _halves(world.own)[1], _halves(world.clean)[1]
    old_own, new_own = (_accuracy(content, own) for content in (world.content, found.content))
    old_clean, new_clean = (_accuracy(content, clean) for content in (world.content, found.content))
    old_probabilities = softmax(_logits(world.content, own.images) / world.entry.temperature)
    new_probabilities = softmax(_logits(found.content, own.images) / world.entry.temperature)
    up = _share_below(old_probabilities, world.below)
    final = _final_accuracy(old_probabilities, own, up)
    return {
        "pictures": sum(len(each) for each in kept),
        "share": found.share,
        "passes": found.passes,
        "old_own": old_own,
        "new_own": new_own,
        "old_clean": old_clean,
        "new_clean": new_clean,
        "above_own": own.above_accuracy,
        "above_clean": clean.above_accuracy,
        "recovered": (new_own - old_own) / (old_clean - old_own),
        "old_up": up,
        "new_up": escalated(new_probabilities, own, final),
        "updates": improved.updates,
        "bytes_sent": improved.bytes_sent,
    }


def _share_below(probabilities: Array, below: float) -> float:
    two = np.partition(probabilities, -2, axis=1)[:, -2:]
    return float(np.mean(two[:, 1] - two[:, 0] < below))


def _final_accuracy(probabilities: Array, answers: AnsweredPictures, share: float) -> float:
    """Accuracy of the fleet if the least sure pictures go up."""
    two = np.partition(probabilities, -2, axis=1)[:, -2:]
    order = np.argsort(two[:, 1] - two[:, 0], kind="stable")[: round(share * len(probabilities))]
    said = probabilities.argmax(axis=1)
    said[order] = answers.above[order].argmax(axis=1)
    return float(np.mean(said == answers.truth))


def poison_line(world: LearningWorld, recipe: Recipe, keeping: DeviceGroup, lie: Lie, seed: int) -> dict[str, Any]:
    """Three devices lie. What the gate makes of the result, and what it is really worth."""
    kept = device_pictures(world, keeping, seed)
    liars = np.random.default_rng(seed + 2).choice(keeping.devices, _LIARS, replace=False).tolist()
    cheats: dict[int, Cheat] = {}
    for number in liars:
        if lie in ("sign-flip", "alie"):
            cheats[number] = lie
        else:
            kept[number] = _poisoned(kept[number], lie, world.stream.above.shape[1], seed)
    improved = improve(world.content, _course(world, recipe, seed, cheats), kept)
    found = _chosen(world, improved.weights)
    own, clean = _halves(world.own)[1], _halves(world.clean)[1]
    change_own, change_clean = (
        _accuracy(found.content, each) - _accuracy(world.content, each) for each in (own, clean)
    )
    return {
        "lie": lie,
        "passes": found.passes,
        "reason": found.verdict.reason,
        "share": found.share,
        "change_own": change_own,
        "change_clean": change_clean,
        "worse_released": found.passes and change_own + change_clean < 0,  # on pictures of both kinds together
        "quarantined": len(improved.quarantined),
        "caught": sum(f"device-{number}" in improved.quarantined for number in liars),
    }


def _poisoned(kept: ImageSet, lie: Lie, classes: int, seed: int) -> ImageSet:
    assert kept.fine is not None
    assert kept.coarse is not None
    draw = np.random.default_rng(seed + 3)
    if lie == "wrong pictures":
        return dataclasses.replace(kept, images=draw.permutation(kept.images))
    other = (kept.fine + 1) % classes
    return dataclasses.replace(kept, fine=other, coarse=other)


def teacher_line(
    world: LearningWorld, recipe: Recipe, keeping: DeviceGroup, seed: int, *, validation: bool
) -> dict[str, Any]:
    """The tier above takes each picture of one class for another."""
    classes = world.stream.above.shape[1]
    wrong, other = seed % classes, (seed + classes // 2) % classes
    lying = dataclasses.replace(
        world, stream=_confused(world.stream, wrong, other), own=_confused(world.own, wrong, other)
    )
    improved = improve(world.content, _course(world, recipe, seed), device_pictures(lying, keeping, seed))
    found = _chosen(lying, improved.weights, validation=validation)
    own, clean = _halves(world.own)[1], _halves(world.clean)[1]
    of_class = clean.take(np.flatnonzero(clean.truth == wrong))
    return {
        "validation": validation,
        "wrong_class": wrong,
        "passes": found.passes,
        "reason": found.verdict.reason,
        "share": found.share,
        "change_own": _accuracy(found.content, own) - _accuracy(world.content, own),
        "change_clean": _accuracy(found.content, clean) - _accuracy(world.content, clean),
        "change_class": _accuracy(found.content, of_class) - _accuracy(world.content, of_class),
    }


def _confused(answers: AnsweredPictures, wrong: int, other: int) -> AnsweredPictures:
    above = answers.above.copy()
    rows = answers.truth == wrong
    above[rows], above[rows, other] = 0.0, 1.0
    return AnsweredPictures(answers.images, answers.truth, above)


def personal_line(world: LearningWorld, keeping: DeviceGroup, seed: int) -> dict[str, Any]:
    """Each device trains its own last layer on its kept pictures, and uses it if cross-validation finds it better. Own
    data are new pictures of the classes that the device sees; general data are all new pictures."""
    kept = device_pictures(world, keeping, seed)
    everything = world.own
    shares = _class_shares(world, keeping, seed)
    own_before, own_after, general_before, general_after = [], [], [], []
    before = _logits(world.content, everything.images).argmax(axis=1) == everything.truth
    used = 0
    for number, images in enumerate(kept):
        content = _with_own_head(world, images, seed)
        used += content is not None
        after = before if content is None else _logits(content, everything.images).argmax(axis=1) == everything.truth
        weights = shares[number][everything.truth]
        own_before.append(float(np.average(before, weights=weights)))
        own_after.append(float(np.average(after, weights=weights)))
        general_before.append(float(before.mean()))
        general_after.append(float(after.mean()))
    means = map(_mean, (own_before, own_after, general_before, general_after))
    return dict(zip(("old_own", "new_own", "old_general", "new_general"), means, strict=True)) | {
        "devices": len(kept),
        "used": used,
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _class_shares(world: LearningWorld, keeping: DeviceGroup, seed: int) -> Array:
    """Pictures of each class that each device sees, `[devices, classes]`."""
    owner = owners(world, keeping, seed)
    counts = np.zeros((keeping.devices, world.stream.above.shape[1]))
    np.add.at(counts, (owner, world.stream.truth), 1)
    return np.asarray(counts + 1e-9)


def _with_own_head(world: LearningWorld, images: ImageSet, seed: int) -> bytes | None:
    """The network with a head of these pictures; None if cross-validation does not find it better."""
    if len(images) < FEWEST:
        return None
    own = base_of(world.entry, world.content, world.hierarchy, LAYERS)
    folds = np.random.default_rng(seed + 4).permutation(len(images)) % FOLDS
    labels = images.fine if world.entry.target == "fine" else images.coarse
    assert labels is not None

    def train(some: ImageSet) -> bytes:
        return trained_head(world.content, own, head_config(world.entry, seed=seed), some)

    head = judged_head(world.content, HeadPictures(images, labels, folds), train, _logits)
    return head.content if judge(None, head.found).passes else None
