"""The logs of several services on one screen: which service, what it says, how grave it is."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from terrace.console import TIER_STYLES
from tierkit.plaintext import one_line

__all__ = ["LogPainter"]

_LEVEL_STYLES = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}
_SHOWN_ELSEWHERE = {"time", "level", "logger", "message", "node_id", "request_id", "trace_id", "exception"}


class LogPainter:
    """Renders lines that services wrote in the JSON log format; any other line is shown as it is.

    Args:
        kinds: kind of each service (`scheduler`, `end`, ...) by its name.
    """

    def __init__(self, kinds: dict[str, str]) -> None:
        self._kinds = kinds
        self._width = max(map(len, kinds), default=0)

    def paint(self, name: str, line: str) -> Text:
        """One line for the screen."""
        text = Text()
        record = _record(line)
        text.append(_clock(record), style="dim")
        text.append(f" {name:<{self._width}} ", style=TIER_STYLES.get(self._kinds.get(name, ""), ""))
        if record is None:
            return text.append(line)
        text.append(one_line(str(record["message"])), style=_LEVEL_STYLES.get(str(record.get("level")), ""))
        for key, value in record.items():
            if key not in _SHOWN_ELSEWHERE:
                text.append(one_line(f" {key}={value}"), style="dim")
        if "exception" in record:
            text.append(f"\n{record['exception']}", style="dim")
        return text


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "message" in record else None


def _clock(record: dict[str, Any] | None) -> str:
    try:
        moment = datetime.fromisoformat(str((record or {})["time"])).astimezone(UTC)
    except (KeyError, ValueError):
        moment = datetime.now(UTC)
    return moment.strftime("%H:%M:%SZ")
