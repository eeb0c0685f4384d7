"""Settings of a node that are tables: no flag takes them, so the launcher writes them to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["TABLES", "as_toml", "tables_in"]

TABLES: Mapping[str, frozenset[str]] = {"end": frozenset({"source", "uplink", "spool", "learn"})}
"""By kind of service, the settings that are tables."""


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


def as_toml(settings: Mapping[str, Any]) -> str:
    """Write settings as a TOML file, one in a line."""
    return "".join(f"{_text(name)} = {_value(value)}\n" for name, value in settings.items())


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(each, Mapping) for each in value))


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(name)} = {_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return _text(value)
    # Numbers, times and dates are written alike.
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
