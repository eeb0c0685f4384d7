"""Checkpoints of a source that takes several jobs, so that an interrupted `terrace classify` can continue.

A folder next to the file of results holds a record of each part of the source, with its files and its job, and the
results of each finished job. Each part is submitted with an idempotency key, so an interrupted submission creates no
second job.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tierkit.client import Labels
from tierkit.errors import InvalidInput

__all__ = ["Bounds", "Fact", "PartsFolder", "SourcePart", "split"]

_FORM_BYTES = 400
"""Bytes of a multipart form for each file, in addition to its name and content."""
_RUN = "run.json"

Fact = tuple[str, int, int, int | str | None]
"""Facts about a file: its name in the results, bytes, time of its last change in nanoseconds, and label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of one upload."""

    images: int
    bytes: int


@dataclass(slots=True, kw_only=True)
class SourcePart:
    """Files of a source that become one job."""

    number: int
    facts: tuple[Fact, ...]
    job: str | None = None
    """Id of the job; None until it is submitted."""
    tries: int = 0
    """Number of earlier jobs of this part that failed."""
    unanswered: int = 0
    """Readable images without an answer."""
    damaged: int = 0
    """Images that cannot be read."""

    @property
    def labels(self) -> Labels | None:
        labels = [label for *_, label in self.facts]
        return labels if any(label is not None for label in labels) else None


def split(files: Sequence[Fact], bounds: Bounds) -> list[tuple[Fact, ...]]:
    """Split files, in order, into as few parts as the limits allow. A file above the limit gets its own part."""
    parts: list[tuple[Fact, ...]] = []
    run: list[Fact] = []
    size = 0
    for fact in files:
        name, content_bytes, _, label = fact
        taken = content_bytes + len(name.encode()) + _FORM_BYTES + len(json.dumps(label))
        if run and (size + taken > bounds.bytes or len(run) == bounds.images):
            parts.append(tuple(run))
            run, size = [], 0
        run.append(fact)
        size += taken
    if run:
        parts.append(tuple(run))
    return parts


class PartsFolder:
    """Folder with the state of all parts of one source. A lock admits one process at a time.

    Args:
        folder: created if missing.
        results: suffix of the files of results, .jsonl or .csv.
        options: policy of each job.
        may_differ: names of options that may change when an interrupted command continues.

    Raises:
        InvalidInput: the folder belongs to a command with other options, to another process, or cannot be used.
    """

    def __init__(
        self, folder: Path, *, results: str, options: Mapping[str, Any], may_differ: frozenset[str] = frozenset()
    ) -> None:
        self.folder = folder
        self._results = results
        self._options = json.dumps(options, sort_keys=True, default=str)
        kept = json.dumps({k: v for k, v in options.items() if k not in may_differ}, sort_keys=True, default=str)
        try:
            folder.mkdir(exist_ok=True)
            self._file = (folder / _RUN).open("a+")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.seek(0)
            run = json.loads(self._file.read() or "{}")
        except BlockingIOError as exc:
            self._file.close()
            raise InvalidInput(f"another command is at work in {folder}: wait for its end") from exc
        except OSError as exc:
            raise InvalidInput(f"cannot use the folder {folder}: {exc.strerror}") from exc
        except ValueError as exc:
            self._file.close()
            raise InvalidInput(f"{folder / _RUN} is damaged: remove {folder}") from exc
        if not run:
            run = {"run": secrets.token_hex(16), "options": kept}
            json.dump(run, self._file)
            self._file.flush()
        if run["options"] != kept:
            self._file.close()
            raise InvalidInput(
                f"{folder} holds answers of a command that was cut, and had other options ({run['options']}): repeat "
                "that one, or remove the folder"
            )
        self._run = run["run"]

    def close(self) -> None:
        self._file.close()

    def plan(self, facts: Sequence[Fact], bounds: Bounds) -> list[SourcePart]:
        """The parts of a source: those that there are already, as far as their files are still the same, and others for
        the rest of the files."""
        known = {fact[0]: fact for fact in facts}
        parts = []
        for path in sorted(self.folder.glob("part-*.json")):
            record = json.loads(path.read_text())
            part = SourcePart(**record | {"facts": tuple((n, b, t, label) for n, b, t, label in record["facts"])})
            if all(known.get(fact[0]) == fact for fact in part.facts):
                parts.append(part)
                for fact in part.facts:
                    del known[fact[0]]
            else:
                self.results_of(part).unlink(missing_ok=True)
                path.unlink()
        number = max((part.number for part in parts), default=0)
        rest = split([fact for fact in facts if fact[0] in known], bounds)
        return parts + [SourcePart(number=number + more, facts=run) for more, run in enumerate(rest, 1)]

    def note(self, part: SourcePart) -> None:
        """Keep what is known of a part."""
        path = self._stem(part).with_suffix(".json")
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(asdict(part)))
        partial.replace(path)

    def key(self, part: SourcePart) -> str:
        """Return the idempotency key for the submission of a part: the same after a cut."""
        content = json.dumps([self._run, self._options, part.number, part.tries, part.facts])
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    def results_of(self, part: SourcePart) -> Path:
        """Return the file that keeps the results of a finished part."""
        return self._stem(part).with_suffix(self._results)

    def is_done(self, part: SourcePart) -> bool:
        return self.results_of(part).exists()

    def merge(self, parts: Sequence[SourcePart], out: Path, *, bom: bool = False) -> None:
        """Write all results to one file, which appears when it is complete, numbered from 0; then remove the folder.

        Args:
            bom: begin with the mark by which spreadsheets know UTF-8.
        """
        partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
        try:
            with partial.open("w", encoding="utf-8-sig" if bom else "utf-8", newline="") as file:
                merge = _merge_csv if self._results == ".csv" else _merge_lines
                merge([self.results_of(part) for part in parts], file)
            partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)
        shutil.rmtree(self.folder)

    def _stem(self, part: SourcePart) -> Path:
        return self.folder / f"part-{part.number:06}"


def _merge_lines(paths: Sequence[Path], out: IO[str]) -> None:
    number = 0
    for path in paths:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                out.write(json.dumps(json.loads(line) | {"index": number}, ensure_ascii=False, separators=(",", ":")))
                out.write("\n")
                number += 1


def _merge_csv(paths: Sequence[Path], out: IO[str]) -> None:
    number, writer = 0, csv.writer(out)
    for position, path in enumerate(paths):
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            header = next(rows)
            if position == 0:
                writer.writerow(header)
            at = header.index("index")
            for row in rows:
                row[at] = str(number)
                writer.writerow(row)
                number += 1
