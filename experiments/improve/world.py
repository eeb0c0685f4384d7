"""Pictures, networks and answers of a fleet in this process: what its devices would keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.improve.drift import drifted, standardised
from models.data import ImageSet
from models.dataset import CIFAR100, Dataset
from models.escalation import load_tuning, margin
from models.evaluate import logits_of
from models.held_out import Unseen
from models.hierarchy import Hierarchy
from models.manifest import ModelEntry, load_manifest, records_folder, weights_folder
from models.session import load_model, softmax
from tierkit.tensors import Array
from tierkit.types import Tier

__all__ = [
    "AnsweredPictures",
    "DeviceGroup",
    "LearningWorld",
    "device_pictures",
    "drift_world",
    "escalated",
    "labelled",
    "owners",
    "stand_ins",
    "upper_judge",
]

_LEAST_CONFIDENCE = 0.7
_ORDER = 5
"""Seed of the order of the stream."""
_SURE_SHARE = 2
"""At most half of the kept pictures are sure ones, as in `models.kept.sample`."""


@dataclass(frozen=True, slots=True)
class AnsweredPictures:
    """Pictures with their right classes and the answers from above, by the classes of the end network."""

    images: Array
    """UINT8 `[n, h, w, c]`."""
    truth: Array
    """int64 `[n]`."""
    above: Array
    """Probabilities of the tier above, `[n, classes]`."""

    def take(self, chosen: Array) -> AnsweredPictures:
        return AnsweredPictures(self.images[chosen], self.truth[chosen], self.above[chosen])

    @property
    def above_accuracy(self) -> float:
        return float(np.mean(self.above.argmax(axis=1) == self.truth))


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningWorld:
    """A fleet before it learns."""

    entry: ModelEntry
    """Entry of the end network."""
    content: bytes
    """Its file."""
    hierarchy: Hierarchy
    stream: AnsweredPictures
    """Pictures that devices see, in their order."""
    own: AnsweredPictures
    """New pictures of the kind that devices see now."""
    clean: AnsweredPictures
    """The same pictures as they were before the drift."""
    local: Array
    """Probabilities of the end network for the stream, `[n, classes]`."""
    below: float
    """An answer with less margin goes up."""


def drift_world(data: Path | None, images: int) -> LearningWorld:
    """The networks that ship, and images of CIFAR-100 that none of them was trained on. Three in ten of the stream come
    before the drift.

    Args:
        images: of the test set. One half is new. The other half, and a fifth as many images that training held out, are
            the stream.

    Raises:
        DataError: the data set is missing.
    """
    manifest = load_manifest()
    hierarchy, entry, cloud = manifest.hierarchy, manifest.default_for("end"), manifest.default_for("cloud")
    dataset = Dataset.open(CIFAR100, data)
    half = images // 2
    unseen = Unseen(dataset, (entry, cloud), records_folder(weights_folder()))
    held_out = unseen.to_choose(entry)
    held_out = held_out.take(np.arange(min(len(held_out), images // 5)))
    test = dataset.read("test").take(np.arange(images))
    content = (weights_folder() / entry.file).read_bytes()
    end, above = (load_model(each, labels=hierarchy.labels(each.target)) for each in (entry, cloud))
    members = np.zeros((len(hierarchy.fine), len(hierarchy.coarse)), np.float32)
    members[np.arange(len(hierarchy.fine)), np.array(hierarchy.parent)] = 1
    assert test.coarse is not None
    assert held_out.coarse is not None

    def answered(pictures: Array, truth: Array) -> AnsweredPictures:
        fine = softmax(logits_of(above, standardised(pictures))[0] / cloud.temperature)
        return AnsweredPictures(pictures, truth, fine @ members)

    pictures = np.concatenate([np.asarray(held_out.images), test.images[:half]])
    truth = np.concatenate([held_out.coarse, test.coarse[:half]])
    order = np.random.default_rng(_ORDER).permutation(len(pictures))
    pictures, truth = pictures[order], truth[order]
    before = len(pictures) * 3 // 10
    stream = answered(np.concatenate([pictures[:before], drifted(pictures[before:])]), truth)
    new, new_truth = test.images[half:], test.coarse[half:]
    return LearningWorld(
        entry=entry,
        content=content,
        hierarchy=hierarchy,
        stream=stream,
        own=answered(drifted(new), new_truth),
        clean=answered(new, new_truth),
        local=softmax(logits_of(end, stream.images)[0] / entry.temperature),
        below=load_tuning().gate(Tier.END, Tier.CLOUD).for_accuracy(0.99).below,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Devices, their pictures, and the share that they audit."""

    devices: int = 8
    skew: float = 0.5
    """Parameter of the Dirichlet distribution by which the pictures of a class fall to devices: small for devices that
    see few classes."""
    audit_share: float = 0.3
    true_labels: bool = False
    """True for what an all-knowing tier above would teach."""


def owners(world: LearningWorld, keeping: DeviceGroup, seed: int) -> Array:
    """The device that sees each picture of the stream, int64 `[n]`."""
    draw = np.random.default_rng(seed)
    shares = draw.dirichlet([keeping.skew] * keeping.devices, world.stream.above.shape[1])
    return np.array([draw.choice(keeping.devices, p=shares[label]) for label in world.stream.truth])


def device_pictures(world: LearningWorld, keeping: DeviceGroup, seed: int) -> list[ImageSet]:
    """The pictures that each device keeps, labelled by the tier above: those that went up because the local answer was
    unsure, and a few of those that were audited."""
    draw = np.random.default_rng(seed + 1)
    owner, unsure = owners(world, keeping, seed), margin(world.local) < world.below
    audited = ~unsure & (draw.random(len(unsure)) < keeping.audit_share)
    agrees = world.local.argmax(axis=1) == world.stream.above.argmax(axis=1)
    stands_for = stand_ins(world)
    kept = []
    for device in range(keeping.devices):
        hard = np.flatnonzero((owner == device) & (unsure | (audited & ~agrees)))
        sure = np.flatnonzero((owner == device) & audited & agrees)
        chosen = np.sort(np.concatenate([hard, sure[: len(hard) // (_SURE_SHARE - 1)]]))
        pictures = world.stream.take(chosen)
        if not keeping.true_labels:
            pictures = pictures.take(np.flatnonzero(pictures.above.max(axis=1) >= _LEAST_CONFIDENCE))
        labels = pictures.truth if keeping.true_labels else pictures.above.argmax(axis=1)
        kept.append(labelled(pictures.images, labels, stands_for, world.hierarchy.name))
    return kept


def labelled(images: Array, labels: Array, stands_for: Array, name: str) -> ImageSet:
    """Pictures with these classes of the end network."""
    names = tuple(map(str, range(len(images))))
    return ImageSet(images=images, fine=stands_for[labels], coarse=labels, names=names, hierarchy_name=name)


def upper_judge() -> Callable[[Array], Array]:
    """Superclasses `[n]` of UINT8 images by the cloud's network that ships."""
    manifest = load_manifest()
    cloud, parent = manifest.default_for("cloud"), np.array(manifest.hierarchy.parent)
    network = load_model(cloud, labels=manifest.hierarchy.labels(cloud.target))

    def superclasses(images: Array) -> Array:
        return np.asarray(parent[logits_of(network, standardised(images))[0].argmax(axis=1)])

    return superclasses


def stand_ins(world: LearningWorld) -> Array:
    """A class for each superclass: the end network learns nothing finer."""
    parent = world.hierarchy.parent
    if world.entry.target == "fine":
        return np.arange(len(parent))
    return np.array([parent.index(coarse) for coarse in range(len(world.hierarchy.coarse))])


def escalated(local: Array, answers: AnsweredPictures, at_least: float) -> float:
    """The smallest share of pictures that go up, the least sure first, at which the final answers are that accurate.

    Args:
        local: probabilities of the end network, `[n, classes]`.
        at_least: accuracy to reach; 1 is returned if no share does.
    """
    order = np.argsort(margin(local), kind="stable")
    right, above = local.argmax(axis=1) == answers.truth, answers.above.argmax(axis=1) == answers.truth
    gained = np.cumsum(above[order].astype(int) - right[order].astype(int))
    accuracy = (right.sum() + np.concatenate([[0], gained])) / len(right)
    enough = np.flatnonzero(accuracy >= at_least - 1e-12)
    return float(enough[0] / len(right)) if len(enough) else 1.0
