"""Cost of 1,000 answered images, by the price of the machines that serve them.

Prices of such machines are in table 1 of Mullapudi 2017, Distributed Deep Neural Networks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierkit.errors import InvalidInput
from tierkit.types import Tier

__all__ = ["ServedImages", "cost_of_1000", "parse_prices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedImages:
    """Images that a fleet answered."""

    words: str
    """Name of this fleet among the others of the record."""
    nodes: Mapping[Tier, int]
    """Machines that had a part."""
    images: int
    seconds: float


def cost_of_1000(served: ServedImages, prices: Mapping[Tier, float]) -> float:
    """Price of all machines for the time that 1,000 images take.

    Args:
        prices: of a machine an hour; 0 for tiers that are not named.
    """
    hourly = sum(count * prices.get(tier, 0.0) for tier, count in served.nodes.items())
    return hourly * served.seconds / 3600 * 1000 / served.images


def parse_prices(texts: Sequence[str]) -> dict[Tier, float]:
    """Prices of a machine an hour, from texts like `cloud=0.525`.

    Raises:
        InvalidInput: a text has another form, or a tier has two prices.
    """
    found: dict[Tier, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            tier, price = Tier(name), float(number)
        except ValueError:
            raise InvalidInput(
                f"{text!r} is not a price: write a tier and its price an hour, like cloud=0.525"
            ) from None
        if not 0 <= price < math.inf:
            raise InvalidInput(f"a price is a number of at least 0, not {number}")
        if tier in found:
            raise InvalidInput(f"the tier {tier} has two prices")
        found[tier] = price
    return found
