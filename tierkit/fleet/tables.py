"""Tables in the settings of a node, such as learn: no flag takes them, so the launcher writes them to a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["TABLES", "tables_in"]

TABLES: Mapping[str, frozenset[str]] = {"end": frozenset({"source", "uplink", "spool", "learn"})}
"""Settings that are tables, by kind of service."""


def tables_in(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a service that are tables.

    Raises:
        ValueError: there is no such table, or the service has a file with settings as well.
    """
    known = TABLES.get(kind, frozenset())
    found = {name: value for name, value in settings.items() if name in known or _is_table(value)}
    if unknown := sorted(found.keys() - known):
        has = f"its tables are {', '.join(sorted(known))}" if known else "it has no tables"
        raise ValueError(f"{kind}: {unknown[0]} is a table, and {has}")
    if found and "config" in settings:
        raise ValueError(f"{kind}: put {', '.join(sorted(found))} into the file of config, or leave config out")
    return found


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(each, Mapping) for each in value))
