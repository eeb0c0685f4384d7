"""What an upload may cost."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from scheduler.settings import SchedulerSettings

__all__ = ["IngestLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestLimits:
    """The fields of the same names in `SchedulerSettings`."""

    max_images: int
    max_pixels: int
    max_file_bytes: int
    max_inflated_bytes: int
    max_body_bytes: int

    @classmethod
    def of(cls, settings: SchedulerSettings) -> Self:
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})
