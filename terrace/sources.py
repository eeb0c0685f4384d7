"""What `terrace classify` can be pointed at: paths, the bundled sample, CIFAR-100, and where the true labels are."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from models.data import read_cifar100, read_sample
from models.hierarchy import bundled_hierarchy
from tierkit.client import Images, Labels, list_images, shortened
from tierkit.errors import InvalidInput

__all__ = ["FOLDER_LABELS", "Source", "open_source"]

FOLDER_LABELS = "folders"
"""Value of `--labels` that takes the name of each image's folder as its class."""

_MOST_NAMED = 5
_DATA_SETS = ("sample", "cifar100:test", "cifar100:train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Images as the client takes them, with their labels if there are any."""

    title: str
    images: Images
    labels: Labels | None
    classes: tuple[str, ...] | None = None
    """Of a data set: what the numbers in `labels` mean."""
    by_folder: Mapping[str, Path] = field(default_factory=dict)
    """A picture for each folder whose name is a label."""

    def labels_for(self, classes: Sequence[str]) -> Labels | None:
        """The labels, unless they are numbers of other classes than these.

        Raises:
            InvalidInput: they are names of folders, some of which are no classes.
        """
        if stray := self.by_folder.keys() - set(classes):
            named = [f"{name!r} (of {shortened(str(self.by_folder[name]))})" for name in sorted(stray)]
            raise InvalidInput(
                f"--labels {FOLDER_LABELS}: the fleet has no class that is called like the folder {_few(named)}; its "
                f"classes are {_few(list(map(repr, classes)))}"
            )
        return self.labels if self.classes is None or self.classes == tuple(classes) else None


def open_source(sources: Sequence[str], *, labels: str | None, data: Path | None) -> Source:
    """Resolve the arguments of one command line.

    Args:
        sources: paths, or one name of a data set.
        labels: a file with one label per image, `folders`, or None.
        data: root of the CIFAR-100 data set.

    Raises:
        InvalidInput: the arguments contradict each other or name nothing.
        DataError: the data set is missing or damaged.
    """
    named = [source for source in sources if source in _DATA_SETS]
    if not named:
        return _files([Path(source) for source in sources], labels)
    if len(sources) > 1:
        raise InvalidInput(f"{named[0]} is a job of its own: classify it alone")
    if labels:
        raise InvalidInput(f"{named[0]} has labels already: leave out --labels")
    return _data_set(named[0], data)


def _few(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _data_set(name: str, data: Path | None) -> Source:
    if name == "sample":
        images = read_sample()
    elif data is None:
        raise InvalidInput(f"{name} is read from the CIFAR-100 data set: say where it is with --data or TERRACE_DATA")
    else:
        images = read_cifar100("test" if name == "cifar100:test" else "train", data)
    return Source(
        title=name, images=images.images, labels=images.fine, classes=bundled_hierarchy(images.hierarchy_name).fine
    )


def _files(paths: Sequence[Path], labels: str | None) -> Source:
    # A job's name has a limit; a file's has another.
    title = shortened(paths[0].name) if len(paths) == 1 else f"{len(paths)} sources"
    if labels is None:
        return Source(title=title, images=[str(path) for path in paths], labels=None)
    files = [found for path in paths for found in (list_images(path) if os.path.isdir(path) else [path])]
    if packed := [file for file in files if file.suffix.lower() in (".zip", ".npz", ".npy")]:
        raise InvalidInput(f"--labels goes with image files and folders; put the labels of {packed[0]} into an .npz")
    images = [str(file) for file in files]
    if labels == FOLDER_LABELS:
        folders: list[int | str | None] = [file.absolute().parent.name for file in files]
        by_folder = {file.absolute().parent.name: file for file in reversed(files)}
        return Source(title=title, images=images, labels=folders, by_folder=by_folder)
    return Source(title=title, images=images, labels=_read_labels(Path(labels), files))


def _read_labels(path: Path, files: Sequence[Path]) -> list[int | str | None]:
    """A JSON list, a CSV with the columns `name` and `label`, or a text file with one label per line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise InvalidInput(f"cannot read the labels in {shortened(str(path))}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"the labels in {path} are not text in UTF-8") from exc
    if path.suffix.lower() == ".csv":
        rows = list(csv.DictReader(text.splitlines()))
        if not rows or not {"name", "label"} <= rows[0].keys():
            raise InvalidInput(f"{path} needs a first line with the columns name,label")
        by_name = {row["name"]: row["label"] or None for row in rows}
        return [by_name.get(file.name, by_name.get(str(file))) for file in files]
    if path.suffix.lower() == ".json":
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise InvalidInput(f"{path} is not JSON: {exc}") from exc
        if not isinstance(found, list):
            raise InvalidInput(f"{path} must hold a JSON list with one label per image")
    else:
        found = [line.strip() or None for line in text.splitlines()]
    if len(found) != len(files):
        raise InvalidInput(f"{path} has {len(found)} labels for {len(files)} images")
    return found
