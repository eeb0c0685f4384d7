"""The interface of update rules: the change that updates make to the weights of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tierkit.errors import BrokenExtension, InvalidInput
from tierkit.extensions import check_name, load
from training.strategies.config import OuterConfig, ServerConfig
from training.units import Flat

__all__ = ["GROUP", "Moment", "StrategyKind", "UpdateRule", "added_rule", "applied", "named"]

GROUP = "terrace.strategies"

_PIECE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Circumstances of an update."""

    version: int
    """Number of earlier changes of the run's weights."""
    steps: int = 1
    """Steps of the workers that the update covers; in a round, the steps of its longest update."""
    rate: float = 1.0
    """Learning rate of the run at the first of these steps. In rounds, it is 1: the workers' steps have had theirs."""
    start: Flat | None = None
    """The weights that the update comes from, if the rule asks for them."""


class UpdateRule(Protocol):
    """Changes the weights of a run by an update: a gradient, or the weights before some steps less those after them.

    A class that derives from it has to write only `apply`. Everything that it remembers is in `kept`, so that a run
    that was interrupted continues as if it had not been.
    """

    keeps: int = 0
    """Vectors, as long as the weights, that it keeps between updates. They begin at 0 and are saved with the run."""
    needs_start: bool = False
    """True if it reads `Moment.start`. The host then keeps the weights of each version that workers train from. Only
    for strategies without rounds."""
    by_value: bool = False
    """True if each value depends only on its own place in the vectors. The rule then gets pieces of them, which is
    faster."""

    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        """Change the weights in place.

        Args:
            weights: FP32 `[values]`, changed in place.
            update: FP32 `[values]`; in rounds the mean of the updates. Not to be changed.
            kept: `keeps` vectors FP32 `[values]`, changed in place.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyKind:
    """An entry point of `terrace.strategies` that has a rule. One without a rule is a configuration."""

    config: ServerConfig | OuterConfig
    """The defaults of the strategy. A `ServerConfig` applies each update when it arrives, an `OuterConfig` the mean of
    the updates of a round."""
    rule: Callable[..., UpdateRule]
    """Makes the rule from the `options` of the configuration, such as a class. It raises TypeError or ValueError for
    options that it does not take."""


def added_rule(config: ServerConfig | OuterConfig) -> UpdateRule:
    """The rule of a package, which the configuration names.

    Raises:
        InvalidInput: no installed package has this rule, or the rule does not take the options.
        BrokenExtension: its package cannot be used.
    """
    try:
        check_name(GROUP, config.rule)
    except InvalidInput as error:
        own = ", ".join(config.own_rules)
        raise InvalidInput(
            f"no rule {config.rule!r} of the family {config.family} here; there are {own}. If a package adds it, "
            "install that package"
        ) from error
    found = load(GROUP, config.rule)
    if not isinstance(found, StrategyKind):
        raise InvalidInput(f"{config.rule!r} is the name of a strategy that has no rule")
    if not isinstance(config, type(found.config)):
        raise InvalidInput(f'the rule {config.rule!r} needs family = "{found.config.family}"')
    try:
        return found.rule(**config.options)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the rule {config.rule!r} does not take these options: {error}") from error
    except Exception as error:
        raise BrokenExtension(
            f"the rule {config.rule!r} of a package fails: {type(error).__name__}: {error}"
        ) from error


def applied(rule: UpdateRule, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
    """Let a rule change the weights, piece by piece if it can.

    Raises:
        BrokenExtension: the rule fails. The weights may have changed in part.
    """
    try:
        if not rule.by_value:
            rule.apply(weights, update, kept, moment)
            return
        start = moment.start
        # What a rule computes on the way stays in the processor's cache, and is three times faster.
        for first in range(0, len(update), _PIECE):
            piece = slice(first, first + _PIECE)
            here = replace(moment, start=None if start is None else start[piece])
            rule.apply(weights[piece], update[piece], [each[piece] for each in kept], here)
    except Exception as error:
        raise BrokenExtension(f"the rule {type(rule).__name__} fails: {type(error).__name__}: {error}") from error


def named(name: str, kept: Sequence[Flat]) -> dict[str, Flat]:
    """The vectors that a rule keeps, by their names in a saved run."""
    return {f"{name} {number}" if number else name: each for number, each in enumerate(kept)}
