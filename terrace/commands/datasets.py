"""`terrace datasets`: data sets for training and validation from the pictures at a scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from models.hierarchy import Hierarchy, few
from terrace.console import image_count, print_json, progress_bars, screen
from terrace.labelled_folder import MOST_PICTURES, ExportCounts, LabelledFolder, new_folder
from terrace.options import Json, OnlySite, connected
from tierkit.client import Client, SeenPicture
from tierkit.errors import DataError, InvalidAnswer, NotFound

__all__ = ["app"]

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Make data sets from the labelled pictures at a scheduler."
)

_PAGE = 200
_LEAST_CONFIDENCE = 0.7


@app.callback()
def datasets() -> None:
    """Make data sets from the labelled pictures at a scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of `terrace datasets export`: the pictures, and the splits."""

    source: Annotated[str | None, typer.Option(metavar="SOURCE", help="Only this source.")] = None
    node: Annotated[str | None, typer.Option(metavar="NODE", help="Only sources of this node.")] = None
    site: OnlySite = None
    answers: Annotated[
        bool,
        typer.Option("--answers", help="Add pictures without a label that have a sure answer from a tier above."),
    ] = False
    least_confidence: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="With --answers: least confidence of an answer that counts. Default: 0.7.",
        ),
    ] = None
    test_share: Annotated[
        float,
        typer.Option(min=0, max=1, metavar="SHARE", help="Share of the pictures for test/; the others are in train/."),
    ] = 0.2

    def __post_init__(self) -> None:
        if self.least_confidence is not None and not self.answers:
            raise typer.BadParameter("it goes with --answers", param_hint="--least-confidence")

    @property
    def least(self) -> float | None:
        """Confidence of an answer that counts; None if answers do not count."""
        if not self.answers:
            return None
        return _LEAST_CONFIDENCE if self.least_confidence is None else self.least_confidence


@app.command()
@connected
def export(
    client: Client,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder.", show_default=False)],
    options: ExportOptions,
    json: Json = False,
) -> None:
    """Write the labelled pictures to a folder that `models train`, `models import` and `train improve` read.

    The file labels.csv lists who labelled each picture, when, and the answers of the tiers.
    """
    _check(folder)
    hierarchy = _hierarchy(client)
    with new_folder(folder) as partial, progress_bars("picture") as progress:
        bar = progress.add_task("pictures", total=None)
        written = LabelledFolder(partial, hierarchy, test_share=options.test_share, least_confidence=options.least)
        done = written.fill(_pictures(client, options), client.picture, passed=lambda: progress.advance(bar))
        if not done.pictures:
            raise NotFound(f"there are no pictures to export{_left_out(done)}: label some on the page first")
    if json:
        print_json({"out": str(folder), "pictures": done.pictures, **asdict(done)})
        return
    told = f"{done.by_person:,} labelled by people, {done.by_answer:,} by answers{_left_out(done)}"
    screen().print(f"{image_count(done.pictures)} in {folder}: {told}", soft_wrap=True, markup=False)
    for warning in _warnings(done):
        screen(stderr=True).print(f"warning: {warning}", soft_wrap=True, markup=False)


def _check(folder: Path) -> None:
    """Refuse a folder that cannot be filled, before any work."""
    if folder.exists() and not folder.is_dir():
        raise typer.BadParameter(f"{folder} is a file; name a folder", param_hint="FOLDER")
    if folder.is_dir() and any(folder.iterdir()):
        raise typer.BadParameter(f"{folder} is not empty; name a new folder", param_hint="FOLDER")
    if folder.is_dir() and folder.samefile(Path.cwd()):
        raise typer.BadParameter("it is the current folder; name a new folder", param_hint="FOLDER")
    if not folder.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {folder.absolute().parent}", param_hint="FOLDER")


def _hierarchy(client: Client) -> Hierarchy:
    """The classes of the release in force."""
    try:
        return Hierarchy.parse(client.models().get("hierarchy"), source="the release in force")
    except DataError as exc:
        raise InvalidAnswer(str(exc)) from exc


def _pictures(client: Client, options: ExportOptions) -> Iterator[SeenPicture]:
    """Pictures with labels, then those with answers."""
    yield from _listed(client, "labelled", options, None)
    if options.answers:
        yield from _listed(client, "answered", options, options.least)


def _listed(
    client: Client, which: Literal["labelled", "answered"], options: ExportOptions, least: float | None
) -> Iterator[SeenPicture]:
    cursor = None
    while True:
        page = client.picture_page(
            which,
            limit=_PAGE,
            cursor=cursor,
            source=options.source,
            node=options.node,
            site=options.site,
            least=least,
        )
        yield from page.observations
        if (cursor := page.next_cursor) is None:
            return


def _left_out(done: ExportCounts) -> str:
    counts = {
        "deleted meanwhile": done.gone,
        "damaged": done.damaged,
        "of other classes": done.other_classes,
        "repeated": done.repeated,
    }
    parts = [f"{count:,} {reason}" for reason, count in counts.items() if count]
    return f" (left out: {', '.join(parts)})" if parts else ""


def _warnings(done: ExportCounts) -> Iterator[str]:
    if done.full:
        yield f"there are more than {MOST_PICTURES:,} pictures; export them by --source or --node"
    for split, classes in done.without_pictures.items():
        if classes:
            yield f"{split}/ has no pictures of {few(classes)}; 'terrace models train' needs pictures of each class"
