"""Two strategies with rules of their own: one in rounds, one that applies each update when it arrives."""

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


FEDADAM = StrategyKind(config=OuterConfig(period=5), rule=FedAdam)
SOFTSYNC = StrategyKind(config=ServerConfig(rule="softsync", pushes="change", period=5), rule=SoftSync)
