"""Differences between two releases, from their manifests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from models.manifest import EncoderEntry, Manifest, ModelEntry
from tierkit.client import ReleaseNow

__all__ = ["Difference", "EncoderChange", "NetworkChange", "NetworkFacts", "difference"]

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """A network on one side."""

    sha256: str
    size_bytes: int
    accuracy: float | None
    test_images: int
    """Pictures on which the accuracy was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkChange:
    """A network that only one side has, or that differs."""

    network: str
    tier: str
    change: Literal["added", "removed", "other weights", "other reading", "other facts"]
    """other reading: the same weights read pictures in another way, or have another temperature."""
    a: NetworkFacts | None
    b: NetworkFacts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderChange:
    """An encoder that only one side has, or that differs."""

    encoder: str
    change: Literal["added", "removed", "changed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All that differs between release `a` and release `b`."""

    a: str
    b: str
    networks: tuple[NetworkChange, ...]
    encoders: tuple[EncoderChange, ...]
    accuracies: str
    """A sentence; "" unless a network's accuracies were measured on different pictures."""
    thresholds: str
    """A sentence; "" if none differ, or if they differ only because their networks do."""
    classes: str
    """A sentence; "" if they are the same."""

    @property
    def none(self) -> bool:
        """True if nothing differs."""
        return not (self.networks or self.encoders or self.thresholds or self.classes)


def difference(a: ReleaseNow, before: Manifest, b: ReleaseNow, after: Manifest) -> Difference:
    """Compare two releases by their manifests, `before` for `a` and `after` for `b`."""
    networks = _networks(before.models, after.models)
    return Difference(
        a=a.release,
        b=b.release,
        networks=networks,
        accuracies=_accuracies(networks),
        encoders=_encoders(before.encoders, after.encoders),
        thresholds=_thresholds(a, b, same_manifest=before.content() == after.content()),
        classes=_classes(before, after),
    )


def _networks(before: Iterable[ModelEntry], after: Iterable[ModelEntry]) -> tuple[NetworkChange, ...]:
    old, new = ({entry.name: entry for entry in entries} for entries in (before, after))
    return tuple(
        NetworkChange(
            network=name,
            tier=(new.get(name) or old[name]).tier,
            change=_how(old.get(name), new.get(name)),
            a=_facts(old.get(name)),
            b=_facts(new.get(name)),
        )
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    )


def _facts(entry: ModelEntry | None) -> NetworkFacts | None:
    if entry is None:
        return None
    return NetworkFacts(
        sha256=entry.sha256, size_bytes=entry.size_bytes, accuracy=entry.accuracy, test_images=entry.test_images
    )


def _accuracies(networks: Iterable[NetworkChange]) -> str:
    # A manifest names no data for its figures. Those of an improved network are from the pictures of --validation.
    told = [
        f"{each.network} ({each.a.test_images:,} and {each.b.test_images:,})"
        for each in networks
        if each.a is not None and each.b is not None and _are_apart(each.a, each.b)
    ]
    return f"measured on different pictures, so they do not compare: {', '.join(told)}" if told else ""


def _are_apart(a: NetworkFacts, b: NetworkFacts) -> bool:
    return a.test_images != b.test_images and None not in (a.accuracy, b.accuracy)


def _how(
    a: ModelEntry | None, b: ModelEntry | None
) -> Literal["added", "removed", "other weights", "other reading", "other facts"]:
    if a is None:
        return "added"
    if b is None:
        return "removed"
    if a.sha256 != b.sha256:
        return "other weights"
    return "other facts" if a.reading == b.reading else "other reading"


def _encoders(before: Iterable[EncoderEntry], after: Iterable[EncoderEntry]) -> tuple[EncoderChange, ...]:
    old, new = ({encoder.name: encoder for encoder in encoders} for encoders in (before, after))
    return tuple(
        EncoderChange(encoder=name, change="changed" if name in old and name in new else _side(name in new))
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    )


def _side(new: bool) -> Literal["added", "removed"]:
    return "added" if new else "removed"


def _thresholds(a: ReleaseNow, b: ReleaseNow, *, same_manifest: bool) -> str:
    if a.thresholds != b.thresholds:
        return f"only {(a if a.thresholds else b).release} has tuned thresholds"
    # A digest covers manifest and thresholds.
    return "the tuned thresholds differ" if same_manifest and a.digest != b.digest else ""


def _classes(before: Manifest, after: Manifest) -> str:
    if before.hierarchy == after.hierarchy:
        return ""
    old, new = (set(manifest.hierarchy.fine) for manifest in (before, after))
    said = [_named(word, names) for word, names in (("added", new - old), ("removed", old - new)) if names]
    return "; ".join(said) or "the same names in another order, or with other superclasses"


def _named(word: str, names: Iterable[str]) -> str:
    every = sorted(names)
    more = ", …" if len(every) > _MOST_NAMED else ""
    return f"{len(every):,} {word}: {', '.join(every[:_MOST_NAMED])}{more}"
