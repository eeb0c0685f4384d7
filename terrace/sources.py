"""Sources of `terrace classify`: paths, the bundled sample, CIFAR-100; and the sources of their true labels."""

from __future__ import annotations

import csv
import io
import json
import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from models.data import read_cifar100, read_sample
from models.hierarchy import bundled_hierarchy
from tierkit.client import Labels, gather, shortened
from tierkit.errors import InvalidInput
from tierkit.plaintext import from_cell
from tierkit.tensors import Array

__all__ = ["FOLDER_LABELS", "PACKED", "Source", "open_source"]

FOLDER_LABELS = "folders"
"""Value of `--labels` that takes the name of each image's folder as its class."""

PACKED = (".zip", ".npz", ".npy")
"""Suffixes of files that hold several images."""
_MOST_NAMED = 5
_DATA_SETS = ("sample", "cifar100:test", "cifar100:train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Images in a form that the client takes, with their labels if there are any."""

    title: str
    images: Array | Mapping[str, Path | bytes]
    """Array, or files by their names in the results."""
    labels: Labels | None
    classes: tuple[str, ...] | None = None
    """Class names of a data set, in the order of the numbers in `labels`."""
    by_folder: Mapping[str, str] = field(default_factory=dict)
    """Example picture of each folder whose name is a label."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of ignored files of folders, by reason."""
    remarks: tuple[str, ...] = ()
    """Notes on labels that are missing or unused."""

    def labels_for(self, classes: Sequence[str]) -> Labels | None:
        """Return the labels for these classes, or no labels if they are numbers of other classes.

        Raises:
            InvalidInput: some labels are names of folders that are not classes.
        """
        if stray := self.by_folder.keys() - set(classes):
            named = [f"{name!r} (of {shortened(self.by_folder[name])})" for name in sorted(stray)]
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
        return _files(sources, labels)
    if len(sources) > 1:
        raise InvalidInput(f"{named[0]} needs a separate job: classify it without other sources")
    if labels:
        raise InvalidInput(f"{named[0]} has labels already: leave out --labels")
    if Path(named[0]).exists():
        raise InvalidInput(
            f"{named[0]} is a data set, and there is one of this name here: call the latter ./{named[0]}"
        )
    return _data_set(named[0], data)


def _few(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(map(shortened, names[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")


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


def _files(paths: Sequence[str], labels: str | None) -> Source:
    # A job's name has a limit; a file's has another.
    title = shortened(Path(paths[0]).name) if len(paths) == 1 else f"{len(paths)} sources"
    files = gather(paths)
    source = Source(title=title, images=files.by_name, labels=None, left_out=files.left_out)
    if labels is None:
        return source
    names = list(files.by_name)
    if packed := [name for name in names if name.lower().endswith(PACKED)]:
        raise InvalidInput(f"--labels goes with image files and folders; put the labels of {packed[0]} into an .npz")
    if labels == FOLDER_LABELS:
        if beside := [name for name, folder in zip(names, files.classes, strict=True) if folder is None]:
            raise InvalidInput(f"--labels {FOLDER_LABELS}: no folder names the class of {_few(beside)}")
        by_folder = {folder: name for folder, name in zip(files.classes, names, strict=True) if folder is not None}
        return replace(source, labels=list(files.classes), by_folder=by_folder)
    found, remarks = _read_labels(Path(labels), names)
    return replace(source, labels=found, remarks=remarks)


def _read_labels(path: Path, names: Sequence[str]) -> tuple[list[int | str | None], tuple[str, ...]]:
    """One label per picture, and remarks: from a CSV with the columns `name` and `label`, a JSON list, or a text file
    with one label per line."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as exc:
        raise InvalidInput(f"cannot read the labels in {shortened(str(path))}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"the labels in {path} are not text in UTF-8") from exc
    if path.suffix.lower() == ".csv":
        return _labels_by_name(_table(text, path), names, path)
    found: list[int | str | None]
    if path.suffix.lower() == ".json":
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise InvalidInput(f"{path} is not JSON: {exc}") from exc
        if not isinstance(found, list):
            raise InvalidInput(f"{path} must hold a JSON list with one label per image")
    else:
        found = [line.strip() or None for line in text.splitlines()]
    if len(found) != len(names):
        raise InvalidInput(f"{path} has {len(found)} labels for {len(names)} images")
    return found, ()


def _table(text: str, path: Path) -> list[tuple[str, str | None]]:
    """The names and labels of a CSV."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        if not {"name", "label"} <= set(reader.fieldnames or ()):
            raise InvalidInput(f"{path} needs a first line with the columns name,label")
        if twice := {"name", "label"} & {column for column, count in Counter(reader.fieldnames).items() if count > 1}:
            raise InvalidInput(f"{path} has two columns that are called {min(twice)}: take one of them away")
        rows = []
        for row in reader:
            if None in row:
                raise InvalidInput(f"{path}, line {reader.line_num}: more cells than the first line names")
            rows.append((row["name"] or "", row["label"] or None))
    except csv.Error as exc:
        raise InvalidInput(f"{path}, line {reader.line_num}: {exc}") from exc
    return rows


def _labels_by_name(
    rows: Sequence[tuple[str, str | None]], names: Sequence[str], path: Path
) -> tuple[list[int | str | None], tuple[str, ...]]:
    known = set(names)
    by_name: dict[str, str | None] = {}
    for name, label in rows:
        plain = name
        if name not in known:  # it may come from a table of results, or from a program that writes paths in its own way
            plain = text if (text := from_cell(name)) in known else posixpath.normpath(name.replace("\\", "/"))
        if plain in by_name:
            raise InvalidInput(f"{path} names {shortened(plain)} twice")
        by_name[plain] = label
    without = [name for name in names if by_name.get(name) is None]
    unused = [name for name in by_name if name not in known]
    if len(without) == len(names):
        example = f" such as {shortened(unused[0])}" if unused else ""
        raise InvalidInput(
            f"{path} has no label for any of the pictures: their names are {_few(names)}, and it has others{example}"
        )
    remarks = []
    if without:
        remarks.append(f"{path} has no label for {len(without)} of {len(names)} pictures: {_few(without)}")
    if unused:
        remarks.append(f"{path} has {len(unused)} labels for pictures that are not there: {_few(unused)}")
    return [by_name.get(name) for name in names], tuple(remarks)
