"""What a worker that cheats sends: for runs on virtual time, and for tests of a host."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from training.units import Computed

__all__ = ["ANSWERS_AT_ONCE", "Cheat", "Cheater"]

Cheat = Literal["sign-flip", "noise", "stale", "free-rider"]
"""Its update with the opposite sign and four times as long, so that three of ten turn the mean around; normal noise, a
hundred times as long; the first update that it has computed, again and again; an update of nothing."""

ANSWERS_AT_ONCE: tuple[Cheat, ...] = ("stale", "free-rider")
"""These need no time to compute."""

_FLIPPED, _NOISE = np.float32(-4), 100.0


class Cheater:
    """Makes an honest update into what this worker sends."""

    def __init__(self, cheat: Cheat, seed: int) -> None:
        self._cheat = cheat
        self._draw = np.random.default_rng(seed)
        self._first: Computed | None = None

    def sends(self, honest: Computed) -> Computed:
        """What it sends in place of this."""
        values = honest.values
        if self._cheat == "stale":
            self._first = self._first or honest
            return self._first
        if self._cheat == "free-rider":
            return dataclasses.replace(honest, values=np.zeros_like(values))
        if self._cheat == "sign-flip":
            return dataclasses.replace(honest, values=_FLIPPED * values)
        noise = self._draw.standard_normal(len(values)).astype(np.float32)
        length = _NOISE * np.linalg.norm(values) / max(1.0, float(np.linalg.norm(noise)))
        return dataclasses.replace(honest, values=np.float32(length) * noise)
