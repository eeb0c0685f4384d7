"""`terrace sample`: some of the bundled images as files, to try everything else with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from PIL import Image

from models.data import read_sample
from models.hierarchy import bundled_hierarchy
from models.rightly import right_first
from terrace.console import image_count, screen
from tierkit.errors import DataError

__all__ = ["app"]

app = typer.Typer(add_completion=False)

_SAMPLE_IMAGES = 1000


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the pictures; made if it is missing.")],
    count: Annotated[int, typer.Option(min=1, max=_SAMPLE_IMAGES, help="Number of pictures.")] = 10,
) -> None:
    """Write images of the bundled sample as PNG files, each named by its number and its class.

    Images that all of Terrace's networks answer correctly come first; only the whole sample has the others.
    """
    if folder.exists() and not folder.is_dir():
        raise typer.BadParameter(f"{folder} is a file; name a folder", param_hint="FOLDER")
    numbers = right_first(count)
    images = read_sample().take(numbers)
    if images.fine is None:
        raise DataError("the bundled sample has no labels")
    classes = bundled_hierarchy(images.hierarchy_name).fine
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, pixels, label in zip(numbers, images.images, images.fine, strict=True):
            Image.fromarray(pixels).save(folder / f"{number:03}-{classes[label]}.png")
    except OSError as exc:
        raise DataError(f"cannot write into {folder}: {exc.strerror or exc}") from exc
    screen().print(f"{image_count(count)} in {folder}", soft_wrap=True, markup=False)
