"""The part of a run's description that workers with kept pictures need."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Self

from pydantic import Field, PositiveInt, ValidationError

from models.hierarchy import Hierarchy
from models.manifest import Digest, Fit, ModelEntry, Resample, ResizeRule
from tierkit.documents import Frozen, faults
from tierkit.errors import InvalidInput
from tierkit.wire.releases import RELEASE_REF_PATTERN

__all__ = ["MOST_BASE_BYTES", "OwnData"]

MOST_BASE_BYTES = 64 << 20
"""Bound on the file of a network that a worker takes from a host."""
_LONGEST_SIDE = 4_096


class OwnData(Frozen):
    """A release's network, from which a run starts, and how workers make training images of their pictures."""

    release: Annotated[str, Field(pattern=RELEASE_REF_PATTERN)]
    """NAME@NUMBER that the network comes from."""
    sha256: Digest
    """Digest of the network's file."""
    size_bytes: Annotated[int, Field(gt=0, le=MOST_BASE_BYTES)]
    layers: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Number of the last layers with weights that are trained; 0 for all. Only their weights travel."""
    hierarchy: dict[str, Any]
    """Classes of the release, as in its manifest."""
    height: Annotated[int, Field(ge=1, le=_LONGEST_SIDE)]
    width: Annotated[int, Field(ge=1, le=_LONGEST_SIDE)]
    resize: ResizeRule = "squash"
    resize_to: PositiveInt | None = None
    resample: Resample = "bicubic"
    """The pixels that the network takes; see `models.manifest.Fit`."""
    least_confidence: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.7
    """Workers do not learn an answer from above that has less."""

    @classmethod
    def of(cls, entry: ModelEntry, content: bytes, hierarchy: Hierarchy, **options: Any) -> Self:
        """Describe a network.

        Args:
            entry: entry of the network in the manifest of its release.
            content: its file.
            options: `release`, and the fields that have defaults.

        Raises:
            InvalidInput: the network is too large to be trained on the fleet.
        """
        try:
            return cls(
                sha256=hashlib.sha256(content).hexdigest(),
                size_bytes=len(content),
                hierarchy=hierarchy.content(),
                height=entry.input_shape[0],
                width=entry.input_shape[1],
                resize=entry.resize,
                resize_to=entry.resize_to,
                resample=entry.resample,
                **options,
            )
        except ValidationError as exc:
            raise InvalidInput(f"the network {entry.name} cannot be trained on a fleet: {faults(exc, cls)}") from exc

    @property
    def fit(self) -> Fit:
        """The pixels that the network takes."""
        return Fit(self.height, self.width, self.resize, self.resize_to, self.resample)

    @property
    def classes(self) -> Hierarchy:
        """Classes of the release.

        Raises:
            DataError: they contradict themselves.
        """
        return Hierarchy.parse(self.hierarchy, source=f"the classes of {self.release}")
