"""The audit: every attack on every requested encoder, with the figures needed to judge its success.

All attackers own the training images and their labels; the attacked pictures are test images. The attacks differ in
what the attacker holds. `least-squares` and `optimisation` have the head's weights; the second also queries the head,
and starts from the first's result. `black-box` has no weights: it sends pictures through the head and sees the
features. `query-free` has the tail, the head's plan, and features that arrived from others, but no queries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from encryption.audit.decoder import Lessons, Trained, check_shapes, reconstruct, train_decoder
from encryption.audit.rows import Row, Subject, counts, interval_of
from encryption.audit.similarity import mean_ssim, psnr_db
from encryption.audit.surrogate import Overheard, train_surrogate
from encryption.audit.target import Target
from encryption.audit.whitebox import Arrived, Search, is_linear, least_squares, optimise
from models.data import ImageSet
from models.evaluate import logits_of
from models.manifest import EncoderEntry, Manifest, ModelEntry, PartFile
from models.session import OnnxModel, load_encoder, load_model
from models.speed import least_ms_per_image
from models.split import FEATURES, extract_part
from tierkit.errors import DataError
from tierkit.tensors import Array

__all__ = ["Audit", "Budget", "run_audit"]

_TASK = 50
_KEPT = 500
"""Most overheard features that are kept, to compare how values are spread; of the others, only the means are kept."""
_OWN_HEAD_IMAGES = 60_000
"""Shown at most to the decoder against the query-free attacker's own head: what limits that attack is the head."""

Tell = Callable[[str, int, int], None]
"""`tell(what, done, of)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Budget of the attackers, and the number of images on which their success is measured."""

    images: int
    """Test images that the learned attacks and least squares reconstruct."""
    searched_images: int
    """This many of them are also searched for by optimisation, which costs per image."""
    equations: int
    """Steps of the conjugate gradient method."""
    search: Search
    lessons: Lessons
    imitation_steps: int
    """Steps for which the query-free attacker trains its head."""
    overheard: int
    """Images of others, features of which the query-free attacker has seen."""
    test_images: int
    """Number of images on which the accuracy behind the encoder is measured; all if there are fewer."""

    @classmethod
    def standard(cls, images: int, queries: int) -> Budget:
        """A strong attacker. Each decoder is shown `queries` pictures, those that come again included."""
        return cls(
            images=images,
            searched_images=min(images, 32),
            equations=60,
            search=Search(steps=400, own_images=8),
            lessons=Lessons(images=queries, enough=0.95),
            imitation_steps=300,
            overheard=10_000,
            test_images=10_000,
        )

    @classmethod
    def quick(cls, images: int) -> Budget:
        """A minute or two; learned attacks are weaker than they could be."""
        return cls(
            images=images,
            searched_images=min(images, 16),
            equations=60,
            search=Search(steps=100, own_images=8),
            lessons=Lessons(images=15_000, enough=0.93),
            imitation_steps=50,
            overheard=500,
            test_images=1000,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Result of an audit."""

    rows: tuple[Row, ...]
    reconstructions: tuple[Array, ...]
    """Reconstructions of the first test images by row, UINT8 `[n, h, w, 3]`."""
    originals: Array


@dataclass(kw_only=True)
class _Bench:
    """State that all attacks of a run share."""

    folder: Path
    manifest: Manifest
    train: ImageSet
    test: ImageSet
    budget: Budget
    seed: int
    tell: Tell
    rows: list[Row] = field(default_factory=list)
    reconstructions: list[Array] = field(default_factory=list)
    _accuracies: dict[str, tuple[float, int]] = field(default_factory=dict)

    @cached_property
    def own(self) -> ImageSet:
        """The attacker's pictures."""
        return self.train.take(np.arange(self.budget.overheard, len(self.train)))

    @property
    def others(self) -> Array:
        """Pictures of others, never shown to the attacker."""
        return self.train.images[: self.budget.overheard]

    @property
    def attacked(self) -> Array:
        return self.test.images[: self.budget.images]

    def judge(self, network: ModelEntry) -> ModelEntry:
        """The most accurate network of fine answers that takes the same pictures and is not the one under attack, if
        there is another."""
        fine = [entry for entry in self.manifest.models if entry.target == "fine" and entry.fit == network.fit]
        others = [entry for entry in fine if entry.name != network.name]
        return max(others or fine, key=lambda entry: entry.fine_accuracy or 0.0)

    def load(self, network: ModelEntry) -> OnnxModel:
        return load_model(network, self.folder, labels=self.manifest.labels(network))

    def recognised(self, judge: OnnxModel, images: Array) -> float:
        assert self.test.fine is not None
        return float(np.mean(logits_of(judge, images)[0].argmax(axis=1) == self.test.fine[: len(images)]))

    def accuracy(self, network: ModelEntry) -> tuple[float, int]:
        """Return the accuracy of a network on pixels, and the number of test images."""
        if network.name not in self._accuracies:
            images = self.test.take(np.arange(min(self.budget.test_images, len(self.test))))
            logits, _ = logits_of(self.load(network), images.images)
            self._accuracies[network.name] = float(np.mean(logits.argmax(axis=1) == images.fine)), len(images)
        return self._accuracies[network.name]


def run_audit(
    subjects: Sequence[Subject],
    manifest: Manifest,
    folder: Path,
    train: ImageSet,
    test: ImageSet,
    budget: Budget,
    *,
    seed: int,
    tell: Tell = lambda what, done, of: None,
) -> Audit:
    """Attack each subject in every way that applies to it.

    The attacks on an encoder that is not a first convolution count only if its network's first convolution is a
    subject, too.

    Args:
        folder: weights folder.
        train: the attackers' images, labelled.
        test: labelled images; the first ones are attacked.

    Raises:
        DataError: too few images, without labels, or of a size that a network does not take; or features for which
            there is no decoder.
        NotFound: the manifest has no such encoder.
        WeightsError: a file is missing, damaged, or has an operator that the audit does not know.
    """
    if train.fine is None or test.fine is None:
        raise DataError("an audit needs labelled images")
    if len(test) < budget.images or len(train) < 2 * budget.overheard:
        raise DataError(
            f"this audit needs {budget.images} test and {2 * budget.overheard} training images, "
            f"there are {len(test)} and {len(train)}: give it more, or ask for less with --quick and --images"
        )
    for subject in subjects:
        if test.images.shape[1:] != subject.network.input_shape:
            raise DataError(
                f"{subject.network.name} takes images of {list(subject.network.input_shape)}, but the data set has "
                f"{list(test.images.shape[1:])}"
            )
        if subject.kind is not None:
            encoder = manifest.encoder(f"{subject.network.name}.{subject.kind}")
            check_shapes(encoder.feature_shape, subject.network.input_shape)
    bench = _Bench(folder=folder, manifest=manifest, train=train, test=test, budget=budget, seed=seed, tell=tell)
    for subject in subjects:
        if subject.kind is None:
            _send_pixels(bench, subject)
        else:
            _attack(bench, subject, manifest.encoder(f"{subject.network.name}.{subject.kind}"))
    rows = tuple(replace(row, counts=counts(row, bench.rows)) for row in bench.rows)
    return Audit(rows=rows, reconstructions=tuple(bench.reconstructions), originals=bench.attacked)


def _send_pixels(bench: _Bench, subject: Subject) -> None:
    network = subject.network
    bench.tell(f"{network.name}, pixels: accuracy", 0, 1)
    fine_accuracy, test_images = bench.accuracy(network)
    judge = bench.judge(network)
    recognised = bench.recognised(bench.load(judge), bench.attacked)
    low, high = interval_of(recognised, len(bench.attacked))
    bench.tell(f"{network.name}, pixels: accuracy", 1, 1)
    bench.reconstructions.append(bench.attacked)
    bench.rows.append(
        Row(
            encoder=subject.encoder,
            network=network.name,
            form=subject.form,
            attack="none",
            ssim=1.0,
            psnr_db=None,
            recognised=recognised,
            recognised_low=low,
            recognised_high=high,
            recognised_originals=recognised,
            judge=judge.name,
            fine_accuracy=fine_accuracy,
            accuracy_lost=0.0,
            test_images=test_images,
            payload_bytes=float(np.prod(bench.attacked.shape[1:])),
            device_ms_per_image=0.0,
            images=len(bench.attacked),
            effort="nothing to do",
            seconds=0.0,
        )
    )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Result of an attack."""

    attack: str
    images: Array
    effort: str


def _attack(bench: _Bench, subject: Subject, encoder: EncoderEntry) -> None:
    network = subject.network
    where = f"{subject.encoder} {network.name} {subject.form}"
    target = Target(
        encoder=encoder,
        form=subject.form,
        head=load_encoder(encoder, network, "head", bench.folder, labels=bench.manifest.labels(network)),
        head_file=_content(bench.folder, encoder.head),
        seed=bench.seed,
    )
    tail = load_encoder(encoder, network, "tail", bench.folder, labels=bench.manifest.labels(network))
    fine_accuracy, test_images = _accuracy(
        bench, target, tail, lambda done, of: bench.tell(f"{where}: accuracy", done, of)
    )
    payload_bytes, device_ms = _cost(bench, target)
    judge = bench.judge(network)
    classify = bench.load(judge)
    originals = bench.recognised(classify, bench.attacked)
    begun = time.process_time()
    for found in _attacks(bench, target, tail, lambda what, done, of: bench.tell(f"{where}: {what}", done, of)):
        seconds = time.process_time() - begun
        shown = bench.attacked[: len(found.images)]
        recognised = bench.recognised(classify, found.images)
        low, high = interval_of(recognised, len(shown))
        bench.reconstructions.append(found.images)
        bench.rows.append(
            Row(
                encoder=subject.encoder,
                network=network.name,
                form=subject.form,
                attack=found.attack,
                ssim=mean_ssim(shown, found.images),
                psnr_db=psnr_db(shown, found.images),
                recognised=recognised,
                recognised_low=low,
                recognised_high=high,
                recognised_originals=originals,
                judge=judge.name,
                fine_accuracy=fine_accuracy,
                accuracy_lost=bench.accuracy(network)[0] - fine_accuracy,
                test_images=test_images,
                payload_bytes=payload_bytes,
                device_ms_per_image=device_ms,
                images=len(shown),
                effort=found.effort,
                seconds=seconds,
            )
        )
        begun = time.process_time()


def _attacks(bench: _Bench, target: Target, tail: OnnxModel, tell: Tell) -> Iterator[_Found]:
    budget, own = bench.budget, bench.own
    shape = own.images.shape[1:]
    sent = target.send(bench.attacked)
    head = target.open_head()
    if is_linear(head, shape):
        yield _Found(
            attack="least-squares",
            images=least_squares(
                head, target, sent, budget.equations, lambda done, of: tell("least squares", done, of)
            ),
            effort=f"{budget.equations} steps of conjugate gradients",
        )
    taught = train_decoder(
        own.images, target.send, budget.lessons, bench.seed, lambda done, of: tell("black-box", done, of)
    )
    yield _Found(attack="black-box", images=reconstruct(taught.decoder, sent), effort=f"{taught.shown:,} queries")
    yield _search(bench, target, sent, taught, tell)
    yield _without_queries(bench, target, tail, sent, tell)


def _search(bench: _Bench, target: Target, sent: Array, taught: Trained, tell: Tell) -> _Found:
    search = bench.budget.search
    few = sent[: bench.budget.searched_images]
    # The decoder was not trained on the last ones.
    own = bench.own.images[-search.own_images :]

    def arrived(features: Array) -> Arrived:
        return Arrived(features=features, starts={"the decoder's picture": reconstruct(taught.decoder, features)})

    images, chosen = optimise(
        target,
        arrived(few),
        (own, arrived(target.send(own))),
        search,
        lambda done, of: tell("optimisation", done, of),
    )
    effort = f"{search.steps} steps {chosen}, as was best on {search.own_images} pictures of its own"
    return _Found(attack="optimisation", images=images, effort=effort)


def _without_queries(bench: _Bench, target: Target, tail: OnnxModel, sent: Array, tell: Tell) -> _Found:
    budget, own = bench.budget, bench.own
    overheard, means = _overhear(bench, target, tail, lambda done, of: tell("query-free: overhearing", done, of))
    surrogate = target.surrogate(bench.seed)
    train_surrogate(
        surrogate,
        target,
        own,
        Overheard(features=overheard, means=means, steps=budget.imitation_steps, seed=bench.seed),
        lambda done, of: tell("query-free: a head of its own", done, of),
    )
    lessons = replace(budget.lessons, images=min(budget.lessons.images, _OWN_HEAD_IMAGES))
    taught = train_decoder(
        own.images,
        lambda images: target.transmit(surrogate.run(images)),
        lessons,
        bench.seed,
        lambda done, of: tell("query-free: its decoder", done, of),
    )
    effort = (
        f"{budget.imitation_steps} steps for a head of its own, features of {budget.overheard:,} images of others; "
        f"{taught.shown:,} pictures for its decoder"
    )
    return _Found(attack="query-free", images=reconstruct(taught.decoder, sent), effort=effort)


def _overhear(bench: _Bench, target: Target, tail: OnnxModel, tell: Callable[[int, int], None]) -> tuple[Array, Array]:
    """Return the first features from others, FP32 `[m, c, h, w]`, and the mean of all their features for each class.

    These features have no labels. Each image counts for a class with the tail's probability, which is right on average
    if the probabilities are calibrated.
    """
    first: list[Array] = []
    sums, shares = np.zeros(()), np.zeros(())
    for start in range(0, len(bench.others), _TASK):
        sent = target.send(bench.others[start : start + _TASK])
        if start < _KEPT:
            first.append(sent)
        probabilities = tail.run({FEATURES: sent}, ["probabilities"])["probabilities"]
        sums = sums + np.tensordot(probabilities.T, sent, axes=1)
        shares = shares + probabilities.sum(axis=0)
        tell(min(start + _TASK, len(bench.others)), len(bench.others))
    means = sums / np.maximum(shares, 1e-6)[:, None, None, None]
    return np.concatenate(first), np.asarray(means, dtype=np.float32)


def _accuracy(bench: _Bench, target: Target, tail: OnnxModel, tell: Callable[[int, int], None]) -> tuple[float, int]:
    images = bench.test.take(np.arange(min(bench.budget.test_images, len(bench.test))))
    right = 0
    assert images.fine is not None
    for start in range(0, len(images), _TASK):
        batch = slice(start, start + _TASK)
        logits = tail.run({FEATURES: target.send(images.images[batch])}, ["logits"])["logits"]
        right += int((logits.argmax(axis=1) == images.fine[batch]).sum())
        tell(min(start + _TASK, len(images)), len(images))
    return right / len(images), len(images)


def _cost(bench: _Bench, target: Target) -> tuple[float, float]:
    """Bytes per image and milliseconds of the device per image, in tasks of 50."""
    tasks = [bench.attacked[start : start + _TASK] for start in range(0, len(bench.attacked), _TASK)]
    sizes = [len(target.payload(task)) for task in tasks]
    return sum(sizes) / len(bench.attacked), least_ms_per_image(target.payload, bench.attacked, _TASK)


def _content(folder: Path, part: PartFile) -> bytes:
    return extract_part((folder / part.file).read_bytes(), part.part)
