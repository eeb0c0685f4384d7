"""Updates sent by workers that cheat. Runs on virtual time and tests of a host use them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

import numpy as np

from training.units import Computed, Flat

__all__ = ["ANSWERS_AT_ONCE", "Cheat", "Cheater", "Plot"]

Cheat = Literal["sign-flip", "noise", "stale", "free-rider", "alie", "ipm"]
"""Kinds of cheating. "sign-flip" sends the update with the opposite sign and four times its length, so that three of
ten workers reverse the mean. "noise" sends normal noise a hundred times as long. "stale" sends the first update again
and again. "free-rider" sends an update of zeros. "alie" sends the mean of the cheaters' honest updates minus some
standard deviations (A Little Is Enough, arXiv:1902.06635). "ipm" sends that mean with the opposite sign and half the
length (Inner Product Manipulation, arXiv:1903.03936).
"""

ANSWERS_AT_ONCE: tuple[Cheat, ...] = ("stale", "free-rider")
"""These need no time to compute."""

_FLIPPED, _NOISE, _MANIPULATED = np.float32(-4), 100.0, np.float32(-0.5)


@dataclass(slots=True, kw_only=True)
class Plot:
    """Knowledge shared by the cheaters of one run: only their own latest honest updates."""

    workers: int = 1
    """Number of workers in the run."""
    cheaters: int = 1
    honest: dict[int, Flat] = field(default_factory=dict)

    @property
    def deviations(self) -> np.float32:
        """The most that ALIE can stay away from the mean: the cheaters and honest workers who are even farther from it
        are the majority (the paper's z)."""
        share = (self.workers - self.workers // 2 - 1) / max(1, self.workers - self.cheaters)
        return np.float32(NormalDist().inv_cdf(min(max(share, 0.5), 0.999)))


class Cheater:
    """Turns the honest update of a worker into a false one.

    Args:
        plot: shared with the other cheaters, each of which has another seed.
    """

    def __init__(self, cheat: Cheat, seed: int, plot: Plot | None = None) -> None:
        self._cheat, self._seed = cheat, seed
        self._draw = np.random.default_rng(seed)
        self._first: Computed | None = None
        self._plot = Plot() if plot is None else plot

    def sends(self, honest: Computed) -> Computed:
        """Return the update that it sends instead of the honest one."""
        values = honest.values
        if self._cheat == "stale":
            self._first = self._first or honest
            return self._first
        if self._cheat == "free-rider":
            return dataclasses.replace(honest, values=np.zeros_like(values))
        if self._cheat == "sign-flip":
            return dataclasses.replace(honest, values=_FLIPPED * values)
        if self._cheat in ("alie", "ipm"):
            self._plot.honest[self._seed] = values
            known = np.stack(list(self._plot.honest.values()))
            mean = known.mean(axis=0)
            false = mean - self._plot.deviations * known.std(axis=0) if self._cheat == "alie" else _MANIPULATED * mean
            return dataclasses.replace(honest, values=false)
        noise = self._draw.standard_normal(len(values)).astype(np.float32)
        length = _NOISE * np.linalg.norm(values) / max(1.0, float(np.linalg.norm(noise)))
        return dataclasses.replace(honest, values=np.float32(length) * noise)
