"""How things look in the terminal: one place for colours, numbers and tables."""

from __future__ import annotations

import re
import sys
from typing import Any

from pydantic_core import to_json
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierkit.types import Health, Tier

__all__ = [
    "TIER_STYLES",
    "health_text",
    "milliseconds",
    "node_order",
    "percent",
    "plain_table",
    "print_json",
    "screen",
    "tier_text",
]

TIER_STYLES: dict[str, str] = {
    "scheduler": "bold",
    Tier.END: "cyan",
    Tier.EDGE: "green",
    Tier.CLOUD: "magenta",
}

_HEALTH_STYLES = {Health.ALIVE: "green", Health.SUSPECT: "yellow", Health.DEAD: "red", Health.DRAINING: "yellow"}


def screen(*, stderr: bool = False) -> Console:
    """The terminal: standard output for results, standard error for what goes on meanwhile."""
    return Console(stderr=stderr, highlight=False)


def print_json(value: Any) -> None:
    """One JSON document on standard output, as a program reads it."""
    sys.stdout.write(to_json(value, indent=2).decode() + "\n")


def plain_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table with quiet headings and no frame; the columns named in `right` hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def tier_text(text: str, tier: str) -> Text:
    """Text in the colour of its tier."""
    return Text(text, style=TIER_STYLES.get(tier, ""))


def node_order(tier: Tier, node_id: str) -> tuple[int, list[tuple[str, int]]]:
    """Sorts nodes as people count them: from the end up, and end-2 before end-10."""
    parts = re.findall(r"(\D*)(\d*)", node_id)
    return list(Tier).index(tier), [(text, int(number or 0)) for text, number in parts]


def health_text(health: Health) -> Text:
    """The failure detector's opinion, coloured."""
    return Text(health, style=_HEALTH_STYLES[health])


def percent(share: float | None) -> str:
    """0.4567 as "45.7 %", None as "-"."""
    return "-" if share is None else f"{100 * share:.1f} %"


def milliseconds(value: float | None) -> str:
    """A latency with as many digits as a reader can use, None as "-"."""
    if value is None:
        return "-"
    return f"{value:.1f} ms" if value < 100 else f"{value:,.0f} ms"
