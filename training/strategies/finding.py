"""Strategies by name, or from a TOML file."""

from __future__ import annotations

from pathlib import Path

from tierkit.documents import read_document, read_toml
from tierkit.errors import BrokenExtension, InvalidInput
from tierkit.extensions import BUILT_IN, check_name, load, names
from training.strategies.config import (
    RULES_WITHOUT_HOST,
    BatchConfig,
    ExchangeConfig,
    HostedConfig,
    OuterConfig,
    ServerConfig,
    StrategyConfig,
    TournamentConfig,
)
from training.strategies.rules import GROUP, StrategyKind, added_rule

__all__ = ["HOSTED", "STRATEGIES", "find_hosted", "find_strategy"]


def find_strategy(name: str) -> StrategyConfig:
    """The strategy of this name, or in this TOML file.

    Raises:
        InvalidInput: there is no such name or family.
        SetupError: the file cannot be read or contradicts itself; the message says where.
    """
    path = Path(name)
    if path.suffix != ".toml":
        return _named(name)
    given = read_toml(path, what="strategy")
    family = given.get("family", "server")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise InvalidInput(f"the strategy {path}: family is {family!r}, known are {', '.join(_FAMILIES)}")
    rule = given.get("rule")
    if "family" not in given and isinstance(rule, str) and (right := _family_of(rule)) not in (None, family):
        raise InvalidInput(f'the strategy {path}: the rule {rule} needs family = "{right}"')
    if family == "exchange" and rule == "tournament":
        return read_document(path, TournamentConfig, what="strategy")
    found = read_document(path, _FAMILIES[family], what="strategy")
    if isinstance(found, ServerConfig | OuterConfig) and found.rule not in found.own_rules:
        try:
            added_rule(found)
        except InvalidInput as error:
            raise InvalidInput(f"the strategy {path}: {error}") from error
    return found


def find_hosted(name: str) -> HostedConfig:
    """Find the strategy of a host by its name or TOML file.

    Raises:
        InvalidInput: there is no such name or family, or it is for ranks.
        SetupError: see `find_strategy`.
    """
    found = find_strategy(name)
    if isinstance(found, ExchangeConfig):
        raise InvalidInput(
            f"the strategy {name!r} is for ranks, which exchange with each other, without a host: start them with "
            "terrace train run"
        )
    return found


def _named(name: str) -> StrategyConfig:
    try:
        check_name(GROUP, name)
    except InvalidInput as error:
        known = ", ".join(names(GROUP))
        raise InvalidInput(
            f"no strategy {name!r} here; there are {known}, or a file that ends in .toml. If a package adds it, "
            "install that package"
        ) from error
    found = load(GROUP, name)
    if isinstance(found, StrategyKind):
        if name in found.config.own_rules:
            raise BrokenExtension(f"the strategy {name!r} of a package has the name of a rule of Terrace: rename it")
        found = found.config.model_copy(update={"rule": name})
    if not isinstance(found, StrategyConfig):
        raise BrokenExtension(
            f"the strategy {name!r} of a package is {type(found).__name__}, not a configuration or a StrategyKind"
        )
    return found


def _family_of(rule: str) -> str | None:
    """Family of a rule by this name that no other family has."""
    if rule in RULES_WITHOUT_HOST or rule == "tournament":
        return "exchange"
    return "batch" if rule == "lbfgs" else None


_FAMILIES: dict[str, type[StrategyConfig]] = {
    "server": ServerConfig,
    "outer": OuterConfig,
    "batch": BatchConfig,
    "exchange": ExchangeConfig,
}

STRATEGIES: dict[str, StrategyConfig] = {name: _named(name) for name in BUILT_IN[GROUP]}
"""Terrace's own strategies by name."""
HOSTED: dict[str, HostedConfig] = {
    name: found for name, found in STRATEGIES.items() if not isinstance(found, ExchangeConfig)
}
"""The strategies of a host."""
