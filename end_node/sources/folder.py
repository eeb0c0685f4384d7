"""A folder as a source: each picture file once, when it is whole, even across restarts.

The folder is scanned at the start and every ten minutes; in between, watchfiles reports changes. Scans run in a thread,
a few hundred files at a time. Only the oldest files that wait are kept in memory, so that a folder with a million files
costs little.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import logging
import math
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path, PurePosixPath
from threading import Event, Thread
from typing import NamedTuple

from end_node.settings import SourceSettings
from end_node.sources.picture import Intake, TakenPicture
from end_node.sources.whole import is_whole
from tierkit.errors import SourceUnavailable
from tierkit.picture_files import HIDDEN, NO_PICTURE, START_BYTES, kind_of, left_out_by_name, needs_look, told
from tierkit.plaintext import one_line

__all__ = ["MAX_FILE_BYTES", "FolderSource"]

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 2**20
_STILL_S = 1.0
"""A file counts as written once its size and time have not changed for this long."""
_INCOMPLETE_S = 30.0
"""A file that does not end as its format prescribes is taken as it is after this time."""
_RESCAN_S, _RESCAN_UNWATCHED_S = 600.0, 10.0
_TICK_S = 1.0
_PART = 500
"""Files that a thread scans before the event loop gets the result."""
_MOST_WAITING = 10_000
"""Files kept in memory. Another scan finds the others."""
_MOST_TOUCHED = 1000
"""Reported changes kept in memory. With more, the folder is scanned."""
_MOST_REFUSED = 100_000
_IN_A_ROW = 100
_MOST_NAME = 500
_REPORT_MS = 200
"""Longest time for which watchfiles collects changes, and for which it waits for the first one."""

_LINK, _LINK_OUTSIDE = "link", "link that leads outside the folder"
_UNREADABLE = "folder that cannot be read"


class _Found(NamedTuple):
    """A state of a file, in the order in which files are taken."""

    mtime_ns: int
    name: str
    """Relative to the folder, with slashes."""
    size: int

    @property
    def mark(self) -> str:
        """Digest that no other file has, nor another state of this file."""
        text = f"{self.name}\0{self.size}\0{self.mtime_ns}"
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


class _Wait(NamedTuple):
    """Times of a file that waits until it is whole, on the clock of the source."""

    since: float
    look_at: float


class _Refusal(NamedTuple):
    why: str


def open_folder(settings: SourceSettings, tls_ca: Path | None) -> FolderSource:
    """The kind `folder`; see `end_node.sources.picture.SourceKind`."""
    return FolderSource(settings)


class FolderSource:
    """Reads the pictures of a folder and of the folders in it.

    Args:
        settings: their `url` is the folder.
        clock: monotonic time in seconds.
    """

    def __init__(self, settings: SourceSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = settings.name
        self._root = os.path.abspath(os.path.expanduser(settings.url))
        self._after = settings.after
        self._move_to = "" if settings.move_to is None else os.path.abspath(settings.move_to)
        self._pause_s = 1.0 / settings.rate if settings.rate else 0.0
        self._clock = clock
        self._waiting: dict[_Found, _Wait] = {}
        self._more = False
        """True if the last scan found more files than may wait."""
        self._folders = frozenset([""])
        """Relative names of all folders, with a slash at the end; "" for the folder itself."""
        self._touched: set[str] = set()
        self._rescan = True
        self._changed = asyncio.Event()
        self._refused: set[str] = set()
        self._left_out: Counter[str] = Counter()
        self._told: set[str] = set()
        self._skipped = 0
        self._next_picture = -math.inf

    async def run(self, intake: Intake, alive: Callable[[int], None]) -> None:
        """Take the files until cancelled.

        Raises:
            SourceUnavailable: the folder is not there.
            TerraceError: a picture was not taken.
        """
        identity = await asyncio.to_thread(_identity, self._root)
        scanned_at = -math.inf
        watcher = _Watcher(self._root, self._folders, self._report)
        try:
            while True:
                await watcher.ready()
                if await asyncio.to_thread(_identity, self._root) != identity:
                    raise SourceUnavailable(f"another folder has replaced {self._root}")
                if watcher.trouble:
                    self._tell(
                        f"is read every {_RESCAN_UNWATCHED_S:g} s, since it cannot be watched: {watcher.trouble}"
                    )
                interval_s = _RESCAN_UNWATCHED_S if watcher.trouble else _RESCAN_S
                exhausted = self._more and len(self._waiting) < _IN_A_ROW
                if self._rescan or exhausted or self._clock() - scanned_at >= interval_s:
                    self._rescan = self._more = False
                    scanned_at = self._clock()
                    await self._scan(intake)
                    if watcher.trouble or watcher.folders != self._folders:
                        watcher.stop()
                        watcher = _Watcher(self._root, self._folders, self._report)
                        await watcher.ready()
                        self._rescan = not watcher.trouble  # for files that came before the new watch
                        continue
                await self._look_at_touched(intake)
                self._tell_left_out()
                rest = await self._take_ready(intake)
                alive(self._skipped)
                self._skipped = 0
                if rest:
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            watcher.stop()

    def _report(self, names: Sequence[str]) -> None:
        """Note changes; none stand for unknown ones."""
        self._touched.update(names)
        if not names or len(self._touched) > _MOST_TOUCHED:
            self._touched.clear()
            self._rescan = True
        self._changed.set()

    async def _scan(self, intake: Intake) -> None:
        self._left_out.clear()
        entries = self._entries()
        while part := await asyncio.to_thread(lambda: list(islice(entries, _PART))):
            await self._note(part, intake)

    async def _look_at_touched(self, intake: Intake) -> None:
        names, self._touched = self._touched, set()
        if names:
            await self._note(await asyncio.to_thread(self._states, names), intake)

    async def _note(self, part: Sequence[_Found], intake: Intake) -> None:
        """Let the files that are new wait."""
        marks = {found.mark: found for found in part if found not in self._waiting}
        for mark in self._refused & marks.keys():
            del marks[mark]
        if not marks:
            return
        for mark in await intake.known(marks.keys()):
            found = marks.pop(mark)
            if self._after != "leave":  # the node stopped after the answer, before the file was put away
                await asyncio.to_thread(self._put_away, found)
        now = self._clock()
        self._waiting |= dict.fromkeys(marks.values(), _Wait(now, now + _STILL_S))
        if len(self._waiting) > 2 * _MOST_WAITING:
            self._more = True
            self._waiting = {found: self._waiting[found] for found in heapq.nsmallest(_MOST_WAITING, self._waiting)}

    async def _take_ready(self, intake: Intake) -> bool:
        """Take some files that are whole. Returns True if there are others."""
        now = self._clock()
        ready = heapq.nsmallest(_IN_A_ROW + 1, (found for found, wait in self._waiting.items() if wait.look_at <= now))
        for found in ready[:_IN_A_ROW]:
            wait = self._waiting[found]
            read = await asyncio.to_thread(self._read, found, now - wait.since >= _INCOMPLETE_S)
            if read == found:
                self._waiting[found] = wait._replace(look_at=now + _STILL_S)
                continue
            if isinstance(read, bytes):
                await self._take(found, read, intake)
            del self._waiting[found]
            if isinstance(read, _Refusal):
                self._refuse(found, read.why)
            elif isinstance(read, _Found):
                self._waiting.setdefault(read, _Wait(now, now + _STILL_S))
        return len(ready) > _IN_A_ROW

    async def _take(self, found: _Found, content: bytes, intake: Intake) -> None:
        if self._pause_s:
            await asyncio.sleep(self._next_picture - self._clock())
            self._next_picture = self._clock() + self._pause_s
        name = found.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")[-_MOST_NAME:]
        await intake.take(TakenPicture(content=content, taken_s=self._clock(), name=name, mark=found.mark))
        if self._after != "leave":
            await asyncio.to_thread(self._put_away, found)

    def _refuse(self, found: _Found, why: str) -> None:
        if len(self._refused) >= _MOST_REFUSED:
            self._refused.clear()
        self._refused.add(found.mark)
        self._skipped += 1
        if why == NO_PICTURE:
            self._left_out[why] += 1
        else:
            log.warning("source '%s' refuses %s: %s", self._name, one_line(found.name), why)

    def _tell_left_out(self) -> None:
        """Log each reason to leave files out once, with its count so far."""
        if new := self._left_out.keys() - self._told:
            self._told |= new
            log.info("source '%s': %s", self._name, told({reason: self._left_out[reason] for reason in new}))
        self._left_out.clear()

    def _tell(self, trouble: str) -> None:
        """Log a trouble once."""
        if trouble not in self._told:
            self._told.add(trouble)
            log.warning("source '%s' %s", self._name, trouble)

    # --- in a thread ---

    def _entries(self) -> Iterator[_Found]:
        """TakenPicture files, folder by folder.

        Raises:
            SourceUnavailable: the folder cannot be read.
        """
        folders, known = [""], {""}
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(os.path.join(self._root, folder)) as entries:
                    for entry in entries:
                        name = folder + entry.name
                        if entry.is_dir(follow_symlinks=False):
                            if left_out_by_name(PurePosixPath(entry.name)) != HIDDEN and not self._is_target(name):
                                folders.append(f"{name}/")
                                known.add(f"{name}/")
                        elif (found := self._state(name)) is not None:
                            yield found
            except OSError as exc:
                if not folder:
                    raise SourceUnavailable(f"cannot read the folder {self._root}: {exc.strerror}") from exc
                self._left_out[_UNREADABLE] += 1
        self._folders = frozenset(known)

    def _states(self, names: set[str]) -> list[_Found]:
        """TakenPicture files among the names. A folder among them leads to a scan."""
        found = []
        for name in names:
            if self._is_target(name):
                continue
            if os.path.isdir(os.path.join(self._root, name)):
                self._rescan = True
            elif (state := self._state(name)) is not None:
                found.append(state)
        return found

    def _state(self, name: str) -> _Found | None:
        """The state of a file; None if it is not one to take."""
        reason = left_out_by_name(PurePosixPath(name))
        path = os.path.join(self._root, name)
        if reason is None:
            try:
                status = os.lstat(path)
            except OSError:
                return None
            if stat.S_ISREG(status.st_mode):
                return _Found(status.st_mtime_ns, name, status.st_size)
            reason = "no regular file"
            if stat.S_ISLNK(status.st_mode):
                root = os.path.realpath(self._root)
                reason = _LINK if os.path.realpath(path).startswith(f"{root}{os.sep}") else _LINK_OUTSIDE
        self._left_out[reason] += 1
        return None

    def _is_target(self, name: str) -> bool:
        """True for the folder that files are moved to, and what is in it."""
        path = os.path.join(self._root, name)
        return bool(self._move_to) and (path == self._move_to or path.startswith(self._move_to + os.sep))

    def _read(self, found: _Found, as_it_is: bool) -> bytes | _Found | _Refusal | None:
        """The content of a file; its state, if it has changed or is not whole; None if it is gone."""
        try:
            # O_NONBLOCK: a pipe that has replaced the file must not block.
            number = os.open(os.path.join(self._root, found.name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as exc:
            return _Refusal(f"cannot read it: {exc.strerror}")
        with os.fdopen(number, "rb") as file:
            try:
                status = os.fstat(number)
                if not stat.S_ISREG(status.st_mode):
                    return None
                state = _Found(status.st_mtime_ns, found.name, status.st_size)
                if state != found:
                    return state
                if found.size > MAX_FILE_BYTES:
                    return _Refusal(f"it has {found.size:,} bytes, and at most {MAX_FILE_BYTES:,} are read")
                start = file.read(START_BYTES)
                if not (as_it_is or is_whole(file)):
                    return found
                if needs_look(PurePosixPath(found.name)) and kind_of(start) is None:
                    return _Refusal(NO_PICTURE)
                file.seek(0)
                content = file.read(MAX_FILE_BYTES + 1)
                status = os.fstat(number)
            except OSError as exc:
                return _Refusal(f"cannot read it: {exc.strerror}")
        state = _Found(status.st_mtime_ns, found.name, status.st_size)
        return content if state == found and len(content) == found.size else state

    def _put_away(self, found: _Found) -> None:
        """Delete or move a file that has been answered, unless it has changed."""
        path = os.path.join(self._root, found.name)
        try:
            status = os.lstat(path)
            if (status.st_mtime_ns, status.st_size) != (found.mtime_ns, found.size):
                return
            if self._after == "delete":
                os.unlink(path)
            else:
                target = os.path.join(self._move_to, found.name)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.replace(path, _free_name(target))
        except FileNotFoundError:
            return
        except OSError as exc:
            self._tell(f"cannot {self._after} files that have been answered: {exc.strerror}")


class _Watcher:
    """Watches folders in a thread, because setting up the watch of a large folder takes seconds.

    It does not let watchfiles find the folders below: watchfiles follows links, which may lead anywhere.

    Args:
        root: the folder.
        folders: names of it and of those below, relative to it.
        report: called on the event loop with the relative names of what has changed; with none after a fault.
    """

    def __init__(self, root: str, folders: frozenset[str], report: Callable[[Sequence[str]], None]) -> None:
        self.trouble = ""
        """Reason why changes are not noticed any more."""
        self.folders = folders
        self._root = root
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._stop = Event()
        Thread(target=self._watch, name=f"watching {root}", daemon=True).start()

    async def ready(self) -> None:
        """Return when changes are noticed, or when they will never be."""
        await self._ready.wait()

    def stop(self) -> None:
        """End the thread, without waiting for it."""
        self._stop.set()

    def _watch(self) -> None:
        from watchfiles import watch  # only a folder needs it

        logging.getLogger("watchfiles").setLevel(logging.WARNING)
        try:
            for changes in watch(
                *(os.path.join(self._root, folder) for folder in self.folders),
                recursive=False,
                watch_filter=None,
                debounce=_REPORT_MS,
                rust_timeout=_REPORT_MS,
                yield_on_timeout=True,
                stop_event=self._stop,
                raise_interrupt=False,
            ):
                names = [os.path.relpath(path, self._root) for _, path in changes]
                if names or not self._ready.is_set():
                    self._call(self._noticed, names)
        except Exception as exc:
            self._call(self._failed, str(exc))
        else:
            if not self._stop.is_set():
                self._call(self._failed, "it ended")

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _noticed(self, names: Sequence[str]) -> None:
        self._ready.set()
        if names and not self._stop.is_set():
            self._report(names)

    def _failed(self, why: str) -> None:
        self.trouble = why
        self._ready.set()
        if not self._stop.is_set():
            self._report(())


def _identity(root: str) -> tuple[int, int]:
    """Numbers that change when another folder is mounted or created at this path.

    Raises:
        SourceUnavailable: there is no folder.
    """
    try:
        status = os.stat(root)
    except OSError as exc:
        raise SourceUnavailable(f"cannot read the folder {root}: {exc.strerror}") from exc
    if not stat.S_ISDIR(status.st_mode):
        raise SourceUnavailable(f"{root} is not a folder")
    return status.st_dev, status.st_ino


def _free_name(path: str) -> str:
    """The path, with a number before its suffix if there is a file of this name."""
    if not os.path.lexists(path):
        return path
    start, suffix = os.path.splitext(path)
    return next(each for number in count(2) if not os.path.lexists(each := f"{start}-{number}{suffix}"))
