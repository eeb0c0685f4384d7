"""A data set of the pictures at a scheduler, with labels of people or sure answers from above.

    FOLDER/hierarchy.json
    FOLDER/labels.csv
    FOLDER/train/<class>/<node>+<source>-<number>.jpg
    FOLDER/test/<class>/<node>+<source>-<number>.jpg

The SHA-256 of a picture's content decides between `train` and `test`, so each picture is on the same side in every
export. The folder appears when it is complete.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from models.data import Split
from models.hierarchy import Hierarchy, few
from models.manifest import Fit
from models.pictures import Picture
from tierkit.atomic import alone_in
from tierkit.errors import InvalidAnswer, InvalidInput, NotFound, SetupError
from tierkit.picture_files import kind_of, left_out_by_name
from tierkit.plaintext import spreadsheet_cell
from tierkit.wire.sources import SeenPicture

__all__ = [
    "LABELS",
    "MOST_PICTURES",
    "ExportCounts",
    "Fetch",
    "LabelledFolder",
    "Said",
    "new_folder",
    "said_of",
    "side_of",
]

LABELS = "labels.csv"
MOST_PICTURES = 200_000
"""Pictures of one export. Their digests are in memory."""

Fetch = Callable[[str, str, int], bytes]
"""Returns the picture of an observation by node, source and number. Raises NotFound."""

_SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp"}
_STEM = re.compile(r"[a-z0-9._-]+\+[a-z0-9._-]+-\d+")
_MOST_NAME_BYTES = 255
_MAX_BYTES, _MAX_PIXELS = 64 * 1024**2, 64 * 1024**2
"""Limits of the readers of data sets."""
_SMALL = Fit(32, 32)
_COLUMNS = (
    *("file", "class", "said_by", "person", "person_at", "node", "source", "sequence", "taken_at", "sha256"),
    *("end_label", "end_confidence", "end_network"),
    *("upper_label", "upper_confidence", "upper_tier", "upper_node", "upper_network"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The class of a picture, and where it comes from."""

    label: str
    by: Literal["person", "answer"]


@dataclass(slots=True, kw_only=True)
class ExportCounts:
    """Counts of one export."""

    by_person: int = 0
    by_answer: int = 0
    gone: int = 0
    """Pictures that the scheduler deleted during the export."""
    damaged: int = 0
    other_classes: int = 0
    """Pictures with a label that is not a class of the release in force."""
    repeated: int = 0
    """Pictures with the content of an earlier one, which keeps its label."""
    full: bool = False
    """True if there are more pictures than `MOST_PICTURES`."""
    without_pictures: dict[Split, tuple[str, ...]] = field(default_factory=dict)
    """Classes without a picture, by split."""

    @property
    def pictures(self) -> int:
        """Pictures in the folder."""
        return self.by_person + self.by_answer


def said_of(seen: SeenPicture, least_confidence: float | None) -> Said | None:
    """The label of a person, otherwise the answer from above if it is sure; None without either.

    Args:
        least_confidence: of an answer from above that counts; None: only labels of people count.
    """
    if seen.person is not None:
        return Said(label=seen.person, by="person")
    if seen.fine is None or least_confidence is None:
        return None
    # Written so that NaN is refused as well.
    if least_confidence <= seen.fine.confidence <= 1:
        return Said(label=seen.fine.label, by="answer")
    return None


def side_of(sha256: str, test_share: float) -> Split:
    """The split of a picture by the digest of its content (hexadecimal)."""
    return "test" if int(sha256[:12], 16) < test_share * 16**12 else "train"


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder next to `folder`, which takes its name on success and is removed after an error.

    Args:
        folder: missing or empty.

    Raises:
        InvalidInput: it has got files.
        SetupError: it cannot be written, or another process writes it.
    """
    folder = Path(os.path.realpath(folder))
    partial = folder.with_name(f".{folder.name}.partial")
    with alone_in(partial, otherwise=f"another command is writing {folder}: wait for its end"):
        try:
            _clear(partial)  # a killed process may have left files
            yield partial
            partial.replace(folder)
        except BaseException as exc:
            shutil.rmtree(partial, ignore_errors=True)
            if not isinstance(exc, OSError):
                raise
            if folder.is_dir() and any(folder.iterdir()):
                raise InvalidInput(f"{folder} is not empty: name a new folder") from exc
            raise SetupError(f"cannot write {folder} ({exc.strerror or exc}); nothing was written") from exc


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class LabelledFolder:
    """Writes a data set to an empty folder.

    Args:
        test_share: of the pictures that `test` gets, 0 to 1.
        least_confidence: see `said_of`.

    Raises:
        InvalidInput: a class cannot be the name of a folder.
    """

    def __init__(
        self, folder: Path, hierarchy: Hierarchy, *, test_share: float, least_confidence: float | None
    ) -> None:
        self._folder = folder
        self._hierarchy = hierarchy
        self._test_share = test_share
        self._least_confidence = least_confidence
        self._digests: set[bytes] = set()
        self._counts: Counter[tuple[Split, str]] = Counter()
        if wrong := [label for label in hierarchy.fine if not _can_be_folder(label)]:
            raise InvalidInput(f"these classes cannot be names of folders: {few(wrong)}; rename them in the hierarchy")

    def fill(
        self, pictures: Iterable[SeenPicture], fetch: Fetch, *, passed: Callable[[], None] = lambda: None
    ) -> ExportCounts:
        """Write pictures, `labels.csv` and `hierarchy.json`. Pictures without a label are left out.

        Args:
            pictures: those with labels of people come first, because the first label of a content counts.
            passed: called after each picture.

        Raises:
            InvalidAnswer: the scheduler sent a name that cannot be the name of a file.
            OSError: a file cannot be written.
        """
        done, classes = ExportCounts(), frozenset(self._hierarchy.fine)
        with (self._folder / LABELS).open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, _COLUMNS)
            table.writeheader()
            for seen in pictures:
                said = said_of(seen, self._least_confidence)
                if said is None:
                    continue
                if len(self._digests) == MOST_PICTURES:
                    done.full = True
                    break
                if said.label not in classes:
                    done.other_classes += 1
                elif row := self._add(seen, said, fetch, done):
                    table.writerow(row)
                passed()
        content = json.dumps(self._hierarchy.content(), ensure_ascii=False, indent=1)
        (self._folder / "hierarchy.json").write_text(content + "\n", encoding="utf-8")
        for split in get_args(Split):
            done.without_pictures[split] = tuple(
                label for label in self._hierarchy.fine if not self._counts[split, label]
            )
        return done

    def _add(self, seen: SeenPicture, said: Said, fetch: Fetch, done: ExportCounts) -> dict[str, Any] | None:
        """Write one picture, if it can be read; return its row."""
        stem = f"{seen.node}+{seen.source}-{seen.sequence}"
        if not _STEM.fullmatch(stem):
            raise InvalidAnswer(f"the scheduler sent an observation with the name {stem[:200]!r}")
        try:
            content = fetch(seen.node, seen.source, seen.sequence)
        except NotFound:
            done.gone += 1
            return None
        digest = hashlib.sha256(content)
        if digest.digest() in self._digests:
            done.repeated += 1
            return None
        if (suffix := _suffix(content, stem)) is None:
            done.damaged += 1
            return None
        self._digests.add(digest.digest())
        split = side_of(digest.hexdigest(), self._test_share)
        path = self._folder / split / said.label / f"{stem}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self._counts[split, said.label] += 1
        if said.by == "person":
            done.by_person += 1
        else:
            done.by_answer += 1
        return _row(seen, said, path.relative_to(self._folder).as_posix(), digest.hexdigest())


def _suffix(content: bytes, name: str) -> str | None:
    """The suffix of a picture's file; None if it cannot be read, because training refuses a folder with such a file."""
    try:
        Picture(content, name, max_bytes=_MAX_BYTES, max_pixels=_MAX_PIXELS).decode(_SMALL)
    except InvalidInput:
        return None
    return _SUFFIXES.get(kind_of(content) or "")


def _can_be_folder(label: str) -> bool:
    """True if readers of data sets find the class in a folder of this name."""
    if "/" in label or "\0" in label or len(label.encode("utf-8", "surrogatepass")) > _MOST_NAME_BYTES:
        return False
    return label.isprintable() and not label.startswith(".") and left_out_by_name(PurePosixPath(label, "x.png")) is None


def _row(seen: SeenPicture, said: Said, file: str, sha256: str) -> dict[str, Any]:
    first, better, person = seen.coarse, seen.fine, said.by == "person"
    row: dict[str, Any] = {
        "file": file,
        "class": said.label,
        "said_by": said.by,
        "person": seen.person_by if person else None,
        "person_at": _iso(seen.person_at) if person else None,
        "node": seen.node,
        "source": seen.source,
        "sequence": seen.sequence,
        "taken_at": _iso(seen.taken_at),
        "sha256": sha256,
    }
    if first is not None:
        row |= {"end_label": first.label, "end_confidence": first.confidence, "end_network": first.sha256}
    if better is not None:
        row |= {"upper_label": better.label, "upper_confidence": better.confidence, "upper_tier": better.tier.value}
        row |= {"upper_node": better.node, "upper_network": better.sha256}
    return {name: spreadsheet_cell(value) if isinstance(value, str) else value for name, value in row.items()}


def _iso(at: Any) -> str | None:
    return None if at is None else at.isoformat()
