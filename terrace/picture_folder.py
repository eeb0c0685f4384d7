"""A folder of observations for training: one folder of pictures for each answer, and a CSV of all observations.

    FOLDER/observations.csv
    FOLDER/<label>/<node>+<source>-<sequence>.jpg

A plus sign is in no name of a node or source, so different observations have different names. A picture that is in the
folder already is not fetched again, so an interrupted command continues. A picture that the user has moved to another
folder stays there.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tierkit.errors import InvalidAnswer, InvalidInput, NotFound
from tierkit.picture_files import kind_of
from tierkit.plaintext import from_cell, spreadsheet_cell

__all__ = ["OBSERVATIONS", "FilledFolder", "PictureFolder", "folder_names"]

OBSERVATIONS = "observations.csv"
"""Name of the CSV in the folder."""

_TABLE = ".observations.csv"
_FILE = "file"
"""Column of the CSV: the picture, relative to the folder."""
_SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp"}
_STEM = re.compile(r"[a-z0-9._-]+\+[a-z0-9._-]+-\d+")

_NOT_IN_NAMES = re.compile(
    '[\x00-\x1f\x7f-\x9f/\\\\:*?"<>|\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]'
)
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
"""Names that Windows does not allow for files."""
_MOST_BYTES = 100

Fetch = Callable[[str, str, int], bytes]
"""Returns the picture of an observation by node, source and number. Raises NotFound."""


@dataclass(slots=True, kw_only=True)
class FilledFolder:
    """Counts of one command."""

    observations: int = 0
    pictures: int = 0
    """Pictures in the folder."""
    new: int = 0
    """Pictures that were fetched now."""
    moved: int = 0
    """Pictures that were moved to another label because their observation was amended."""

    @property
    def without_picture(self) -> int:
        """Observations that are only in the CSV."""
        return self.observations - self.pictures


class PictureFolder:
    """The folder. A lock admits one process at a time.

    Args:
        folder: created if missing.

    Raises:
        InvalidInput: another process uses the folder, it has a file that would be replaced, or it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = folder / _TABLE
        """File into which the caller writes the CSV of the scheduler."""
        with _writing(folder):
            folder.mkdir(exist_ok=True)
            self._check_table()
            self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(self._lock)
            raise InvalidInput(f"another command is at work in {folder}: wait for its end") from exc

    def _check_table(self) -> None:
        """Raises InvalidInput if the folder is not one of ours, and has a file that the CSV would replace."""
        table = self.folder / OBSERVATIONS
        if not table.exists() or any(_STEM.fullmatch(path.stem) for path in self.folder.glob("*/*")):
            return
        names: set[str] = set()
        with suppress(csv.Error):
            names = set(_columns(table))
        if not {_FILE, "node", "source", "sequence"} <= names:
            raise InvalidInput(f"{table} is not a table of observations: choose another folder, or move the file")

    def close(self) -> None:
        self.table.unlink(missing_ok=True)
        os.close(self._lock)

    def wanted(self) -> int:
        """Return the number of observations in the table whose picture the scheduler has."""
        return sum(_has_picture(row) for row in _rows(self.table))

    def fill(self, fetch: Fetch, *, bom: bool = False, passed: Callable[[], None] = lambda: None) -> FilledFolder:
        """Bring the pictures of the table into the folder, and write the CSV.

        Args:
            bom: begin the CSV with the mark by which spreadsheets know UTF-8.
            passed: called for each observation whose picture the scheduler has.

        Raises:
            InvalidInput: a file cannot be written. What was fetched stays.
        """
        before = self._labels_before()
        names = folder_names({*before.values(), *(_label(row) for row in _rows(self.table))} - {""})
        present = {path.stem: path for path in self.folder.glob("*/*") if _STEM.fullmatch(path.stem)}
        filled, out = FilledFolder(), self.folder / OBSERVATIONS
        partial = _partial(out)
        try:
            with _writing(out), partial.open("w", encoding="utf-8-sig" if bom else "utf-8", newline="") as file:
                writer = csv.DictWriter(file, [*_columns(self.table), _FILE])
                writer.writeheader()
                for row in _rows(self.table):
                    stem, label = _stem(row), _label(row)
                    path = present.get(stem)
                    if label and path is not None:
                        old = before.get(stem, label)
                        if old != label and path.parent.name == names[old]:
                            path = self._move(path, names[label])
                            filled.moved += 1
                    elif label and _has_picture(row):
                        path = self._fetch(fetch, row, names[label], stem)
                        filled.new += path is not None
                    if _has_picture(row):
                        passed()
                    filled.observations += 1
                    filled.pictures += path is not None
                    where = "" if path is None else spreadsheet_cell(path.relative_to(self.folder).as_posix())
                    writer.writerow({**row, _FILE: where})
            with _writing(out):
                partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)
        return filled

    def _labels_before(self) -> Mapping[str, str]:
        """Labels of the pictures when the CSV was written last, by the stem of their names."""
        labels = {}
        # The user may have changed the file, or removed it.
        with suppress(OSError, csv.Error):
            for row in _rows(self.folder / OBSERVATIONS):
                if row.get(_FILE) and (label := _label(row)):
                    labels[PurePosixPath(from_cell(row[_FILE])).stem] = label
        return labels

    def _fetch(self, fetch: Fetch, row: Mapping[str, str], name: str, stem: str) -> Path | None:
        try:
            content = fetch(row["node"], row["source"], int(row["sequence"]))
        except NotFound:
            return None  # newer pictures have taken its place
        path = self.folder / name / f"{stem}{_SUFFIXES.get(kind_of(content) or '', '.jpg')}"
        partial = _partial(self.folder / path.name)
        with _writing(path):
            try:
                partial.write_bytes(content)
                path.parent.mkdir(exist_ok=True)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        return path

    def _move(self, path: Path, name: str) -> Path:
        target = self.folder / name / path.name
        with _writing(target):
            target.parent.mkdir(exist_ok=True)
            path.replace(target)
        # Readers of such folders refuse a class without pictures.
        with suppress(OSError):
            path.parent.rmdir()
        return target


def folder_names(labels: Iterable[str]) -> dict[str, str]:
    """Return a name for the folder of each label. The names are valid on Linux, macOS and Windows, and all different,
    in upper and lower case too. A name differs from its label only if it must, and then ends in a hash of the label."""
    names = {label: _plain_name(label) for label in labels}
    same = defaultdict(list)
    for label, name in names.items():
        same[name.casefold()].append(label)
    for group in same.values():
        if len(group) > 1:
            names |= {label: _with_hash(names[label], label) for label in group}
    return names


def _plain_name(label: str) -> str:
    name = _NOT_IN_NAMES.sub("_", unicodedata.normalize("NFC", label))
    if _RESERVED.fullmatch(name) or name.casefold() == OBSERVATIONS:
        name = f"_{name}"
    name = name.strip(" .").encode()[:_MOST_BYTES].decode(errors="ignore").strip(" .") or "_"
    return name if name == label else _with_hash(name, label)


def _with_hash(name: str, label: str) -> str:
    return f"{name}-{hashlib.sha256(label.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def _columns(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return next(csv.reader(file), [])


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        yield from csv.DictReader(file, restval="")


def _partial(path: Path) -> Path:
    """Return a name for a file until it is whole. No folder of a label begins with a dot."""
    return path.with_name(f".{path.name}.part")


def _stem(row: Mapping[str, str]) -> str:
    stem = f"{row['node']}+{row['source']}-{row['sequence']}"
    if not _STEM.fullmatch(stem):
        raise InvalidAnswer(f"the scheduler sent an observation with the name {stem[:200]!r}")
    return stem


def _label(row: Mapping[str, str]) -> str:
    return from_cell(row.get("label", ""))


def _has_picture(row: Mapping[str, str]) -> bool:
    return row["picture"] == "true"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn errors of the disk into one sentence."""
    try:
        yield
    except OSError as exc:
        raise InvalidInput(f"cannot write {path} ({exc.strerror}); the same command continues") from exc
