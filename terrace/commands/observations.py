"""`terrace observations`: what the sources of the devices have seen."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from pydantic_core import to_json

from terrace.console import Column, Listing, percent, print_json, progress_bars, screen
from terrace.options import Json, OnlySite, connected
from terrace.outputs import check_out_file, check_out_folder, format_of
from terrace.picture_folder import PictureFolder
from tierkit.client import Client, ObservationFilters, SeenPicture
from tierkit.errors import InvalidInput
from tierkit.plaintext import harmless, one_line

__all__ = ["app"]

app = typer.Typer(add_completion=False)

_LISTED = 20
_MOST_PER_PAGE = 1000
_MOST_TO_LABEL = 500
_PART = 200
"""Rows of one table; the widths of its columns are computed for each part."""
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationOptions:
    """Options of `terrace observations`: which ones, and where they go."""

    source: Annotated[str | None, typer.Option(metavar="SOURCE", help="Only this source.")] = None
    node: Annotated[str | None, typer.Option(metavar="NODE", help="Only sources of this node.")] = None
    site: OnlySite = None
    label: Annotated[
        str | None, typer.Option(metavar="CLASS", help="Only this answer; a superclass includes its classes.")
    ] = None
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Only pictures taken since then: 30m, 2h, 7d ago, or a date such as 2026-05-01T08:00."
        ),
    ] = None
    below: Annotated[
        float | None, typer.Option(min=0, max=1, metavar="SHARE", help="Only answers that are less sure than this.")
    ] = None
    amended: Annotated[bool, typer.Option("--amended", help="Only observations with a later, better answer.")] = False
    disagree: Annotated[
        bool,
        typer.Option("--disagree", help="Only pictures to label: answers differ, or were unsure. Most useful first."),
    ] = False
    limit: Annotated[int | None, typer.Option(min=1, help="How many, newest first. Default: 20.")] = None
    follow: Annotated[bool, typer.Option("--follow", help="Show new observations as they arrive, until Ctrl-C.")] = (
        False
    )
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|FOLDER/",
            help="Write all observations to a file (.jsonl or .csv), or their pictures to a folder, sorted by answer.",
        ),
    ] = None
    after: Annotated[int, typer.Option(min=0, metavar="NUMBER", help="With --out: only higher sequence numbers.")] = 0
    bom: Annotated[bool, typer.Option("--bom", help="Begin a CSV with a byte order mark, as spreadsheets want it.")] = (
        False
    )

    def __post_init__(self) -> None:
        if self.out is not None:
            if self.limit is not None or self.follow:
                raise typer.BadParameter("it goes without --limit and --follow", param_hint="--out")
            if self.into_folder:
                path = Path(self.out)
                check_out_folder(path if path.is_dir() else path.absolute().parent)
            elif Path(self.out).suffix:
                check_out_file(Path(self.out))
            else:
                raise typer.BadParameter("a file ends in .jsonl or .csv, and a folder in /", param_hint="--out")
        elif self.after:
            raise typer.BadParameter("it goes with --out", param_hint="--after")
        if self.bom and (self.out is None or (not self.into_folder and format_of(Path(self.out)) != "csv")):
            raise typer.BadParameter("it goes with --out FILE.csv or FOLDER/", param_hint="--bom")
        others = (self.label, self.since, self.below, self.out)
        if self.disagree and (self.follow or self.amended or any(each is not None for each in others)):
            raise typer.BadParameter("it goes with --source, --node, --site and --limit", param_hint="--disagree")
        if self.follow and (self.limit is not None or self.since is not None or self.amended):
            raise typer.BadParameter("it goes without --limit, --since and --amended", param_hint="--follow")

    @property
    def into_folder(self) -> bool:
        """True if `out` is a folder."""
        return self.out is not None and (self.out.endswith("/") or Path(self.out).is_dir())

    def filters(self) -> ObservationFilters:
        """Return the filters for the client."""
        return {
            "source": self.source,
            "node": self.node,
            "site": self.site,
            "label": self.label,
            "since": None if self.since is None else _time_of(self.since),
            "below": self.below,
            "amended": self.amended,
        }


def _time_of(text: str) -> datetime:
    try:
        if found := re.fullmatch(r"(\d+)([smhd])", text):
            return datetime.now(UTC) - timedelta(**{_UNITS[found[2]]: int(found[1])})
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError) as exc:
        raise typer.BadParameter(
            f"it is a time ago (30m, 2h, 7d) or a date (2026-05-01, 2026-05-01T08:00), not {text[:40]!r}",
            param_hint="--since",
        ) from exc


@app.command()
@connected
def observations(client: Client, options: ObservationOptions, json: Json = False) -> None:
    """The pictures that sources have seen and their answers, newest first; with --json one JSON object per line."""
    filters = options.filters()
    if options.out is not None and options.into_folder:
        _fill(client, Path(options.out), options, filters, json=json)
    elif options.out is not None:
        _save(client, Path(options.out), options, filters, json=json)
    elif options.follow:
        _follow(client, options, json=json)
    elif options.disagree:
        limit = options.limit or _LISTED
        _list(itertools.islice(_to_label(client, limit, options), limit), json=json)
    else:
        limit = options.limit or _LISTED
        _list(itertools.islice(_newest(client, limit, filters), limit), json=json)


def _list(seen: Iterator[SeenPicture], *, json: bool) -> None:
    if json:
        for each in seen:
            _print_line(each)
        return
    empty = True
    while part := list(itertools.islice(seen, _PART)):
        empty = False
        screen().print(_table(part), crop=False)
    if empty:
        screen().print("no observations")


def _newest(client: Client, limit: int, filters: ObservationFilters) -> Iterator[SeenPicture]:
    cursor = None
    while True:
        page = client.observation_page(limit=min(limit, _MOST_PER_PAGE), cursor=cursor, **filters)
        yield from page.observations
        if (cursor := page.next_cursor) is None:
            return


def _to_label(client: Client, limit: int, options: ObservationOptions) -> Iterator[SeenPicture]:
    cursor = None
    while True:
        page = client.picture_page(
            "disagree",
            limit=min(limit, _MOST_TO_LABEL),
            cursor=cursor,
            source=options.source,
            node=options.node,
            site=options.site,
        )
        yield from page.observations
        if (cursor := page.next_cursor) is None:
            return


def _follow(client: Client, options: ObservationOptions, *, json: bool) -> None:
    # A wrong filter, or no scheduler, is an error at once; a scheduler that goes away later may come back.
    client.observation_page(limit=1, **options.filters())
    events = client.follow_observations(
        source=options.source, node=options.node, site=options.site, label=options.label, below=options.below
    )
    with contextlib.closing(events):
        for each in events:
            if json:
                _print_line(each)
            else:
                sys.stdout.write(one_line(_line(each)) + "\n")
            sys.stdout.flush()


def _print_line(seen: SeenPicture) -> None:
    sys.stdout.write(harmless(to_json(seen).decode()) + "\n")


def _line(seen: SeenPicture) -> str:
    sure = "" if seen.confidence is None else f"  {percent(seen.confidence)}"
    remarks = "; ".join((*(["amended"] if seen.revision else []), *_remarks(seen)))
    answer = f"{seen.label or 'no answer'}{sure}"
    return f"{_taken(seen)}  {seen.node}  {seen.source}  {seen.sequence}  {answer}" + (
        f"  ({remarks})" if remarks else ""
    )


def _save(client: Client, out: Path, options: ObservationOptions, filters: ObservationFilters, *, json: bool) -> None:
    try:
        client.save_observations(out, format=format_of(out), bom=options.bom, after=options.after, **filters)
    except OSError as exc:
        raise InvalidInput(f"cannot write {out} ({exc.strerror})") from exc
    if json:
        print_json({"out": str(out)})
    else:
        screen().print(f"observations in {out}", soft_wrap=True, markup=False)


def _fill(client: Client, out: Path, options: ObservationOptions, filters: ObservationFilters, *, json: bool) -> None:
    with contextlib.closing(PictureFolder(out)) as folder, progress_bars("picture") as progress:
        _save_table(client, folder, options, filters)
        bar = progress.add_task("pictures", total=folder.wanted())
        filled = folder.fill(client.picture, bom=options.bom, passed=lambda: progress.advance(bar))
    if json:
        counts = {"pictures": filled.pictures, "new": filled.new, "moved": filled.moved}
        print_json({"out": str(out), "observations": filled.observations, **counts})
        return
    moved = f", {filled.moved:,} moved to another label" if filled.moved else ""
    missing = f"; {filled.without_picture:,} only in the CSV" if filled.without_picture else ""
    told = f"{filled.observations:,} observations, {filled.pictures:,} pictures ({filled.new:,} new{moved}){missing}"
    screen().print(f"{told}; in {out}", soft_wrap=True, markup=False)


def _save_table(
    client: Client, folder: PictureFolder, options: ObservationOptions, filters: ObservationFilters
) -> None:
    try:
        client.save_observations(folder.table, format="csv", after=options.after, **filters)
    except OSError as exc:
        raise InvalidInput(f"cannot write to {folder.folder} ({exc.strerror})") from exc


def _table(part: list[SeenPicture]) -> Listing:
    placed = any(each.site for each in part)
    table = Listing(
        Column(title="node"),
        Column(title="source"),
        *([Column(title="site", rank=5)] if placed else []),
        Column(title="number", right=True),
        Column(title="taken", rank=3),
        Column(title="answer", rank=1),
        Column(title="sure", rank=4, right=True),
        Column(title="tier", rank=5),
        Column(title="remark", rank=2, max_width=48),
    )
    for each in part:
        table.add_row(
            each.node,
            each.source,
            *([each.site or ""] if placed else []),
            str(each.sequence),
            _taken(each),
            each.label or "",
            "" if each.confidence is None else percent(each.confidence),
            each.answered_by or "",
            "; ".join(_remarks(each)),
        )
    return table


def _taken(seen: SeenPicture) -> str:
    return "" if seen.taken_at is None else seen.taken_at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _remarks(seen: SeenPicture) -> Iterator[str]:
    if seen.person is not None:
        yield f"labelled {seen.person}" + (f" by {seen.person_by}" if seen.person_by else "")
    if seen.waits:
        yield "waits for a better answer"
    coarse, fine = seen.coarse, seen.fine
    if coarse is not None and fine is not None and fine.coarse_label not in (None, coarse.label):
        yield f"the device said {coarse.label}"
    if why := seen.damaged or seen.fallback:
        yield why
    if seen.name:
        yield seen.name
