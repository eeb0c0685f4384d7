"""`terrace observations`: what the sources of the devices have seen."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from datetime import UTC
from typing import Annotated

import typer
from pydantic_core import to_json

from terrace.console import Column, Listing, percent, screen
from terrace.options import Json, connected
from tierkit.client import Client, SeenGap, SeenPicture
from tierkit.plaintext import harmless

__all__ = ["app"]

app = typer.Typer(add_completion=False)

_PART = 200
"""Rows of one table; the widths of its columns are computed for each part."""


@app.command()
@connected
def observations(
    client: Client,
    source: Annotated[str | None, typer.Option(metavar="SOURCE", help="Only this source.")] = None,
    node: Annotated[str | None, typer.Option(metavar="NODE", help="Only sources of this node.")] = None,
    after: Annotated[int, typer.Option(min=0, metavar="NUMBER", help="Only higher sequence numbers.")] = 0,
    json: Json = False,
) -> None:
    """The pictures that sources have seen, and their answers; with --json one JSON object per line."""
    # The reader of the output may leave early.
    with contextlib.closing(client.observations(source=source, node=node, after=after)) as seen:
        if json:
            for each in seen:
                sys.stdout.write(harmless(to_json(each).decode()) + "\n")
            return
        empty = True
        while part := list(itertools.islice(seen, _PART)):
            empty = False
            screen().print(_table(part), crop=False)
        if empty:
            screen().print("no observations")


def _table(part: list[SeenPicture | SeenGap]) -> Listing:
    table = Listing(
        Column(title="node"),
        Column(title="source"),
        Column(title="number", right=True),
        Column(title="taken", rank=3),
        Column(title="answer", rank=1),
        Column(title="sure", rank=4, right=True),
        Column(title="tier", rank=5),
        Column(title="remark", rank=2, max_width=48),
    )
    for each in part:
        if isinstance(each, SeenGap):
            numbers = f"{each.gap.first}-{each.gap.last}"
            table.add_row(each.gap.node, each.gap.source, numbers, "", "", "", "", "lost on the device")
            continue
        table.add_row(
            each.node,
            each.source,
            str(each.sequence),
            "" if each.taken_at is None else each.taken_at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
            each.label or "",
            "" if each.confidence is None else percent(each.confidence),
            each.answered_by or "",
            "; ".join(_remarks(each)),
        )
    return table


def _remarks(seen: SeenPicture) -> Iterator[str]:
    if seen.waits:
        yield "waits for a better answer"
    if why := seen.damaged or seen.fallback:
        yield why
    if seen.name:
        yield seen.name
