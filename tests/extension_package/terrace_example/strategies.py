"""Strategies with rules: one in rounds, one that applies each update when it arrives, and one that fails."""

from collections.abc import Sequence

import numpy as np

from training.strategies.config import OuterConfig, ServerConfig
from training.strategies.rules import Moment, StrategyKind, UpdateRule
from training.units import Flat


class FedAdam(UpdateRule):
    """Adam on the mean change of a round (Reddi et al. 2021, arXiv:2003.00295)."""

    keeps = 2
    by_value = True

    def __init__(self, rate: float = 0.01, first: float = 0.9, second: float = 0.99, least: float = 0.001) -> None:
        if not 0 <= first < 1 or not 0 <= second < 1:
            raise ValueError("first and second must be from 0 to below 1")
        self._rate, self._least = np.float32(rate), np.float32(least)
        self._first, self._second = np.float32(first), np.float32(second)

    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        mean, square = kept
        mean += (1 - self._first) * (update - mean)
        square += (1 - self._second) * (update * update - square)
        weights -= self._rate * mean / (np.sqrt(square) + self._least)


class SoftSync(UpdateRule):
    """A worker's weights count less the more versions they are behind (Xie et al. 2019, arXiv:1903.03934)."""

    needs_start = True

    def __init__(self, share: float = 0.5) -> None:
        self._share = np.float32(share)

    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        assert moment.start is not None
        weights += self._share * (moment.start - update - weights)


class Brittle(UpdateRule):
    """Fails at its third update."""

    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        if moment.version == 2:
            raise RuntimeError("the third update is too much")
        weights -= np.float32(moment.rate) * update


FEDADAM = StrategyKind(config=OuterConfig(period=5), rule=FedAdam)
SOFTSYNC = StrategyKind(config=ServerConfig(rule="softsync", pushes="change", period=5), rule=SoftSync)
BRITTLE = StrategyKind(config=ServerConfig(rule="brittle"), rule=Brittle)
