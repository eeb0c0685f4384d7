"""The spread of files over machines: which worker copies which file from which source. No I/O; time is passed in.

In the volunteers' platform of 2018 (section 4.2) holder i sends to the machine i + 2^(k - 1) in step k, so that each
step doubles the holders. Here one rule gives the same: whenever a source is free, it takes the first machine that waits
for something that the source has. A machine that is still receiving passes on the chunks that it has, in a chain of at
most D machines. So each step makes D + 1 holders of one; with D = 1 it is the tree of 2018.

Words: the *host* has all files (the host of a training run, or a scheduler); the other machines are its *workers*. A
*source* is the host, or a worker that others can reach; a *copy* is one file on its way to one worker. Files are known
by their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

__all__ = ["DEEPEST", "HOST", "Came", "Copy", "Event", "Failed", "Got", "Left", "Passed", "Start", "Stop", "Tree"]

HOST = ""
"""The host as a source: it has everything, and is believed."""

DEEPEST = 8
"""Machines of a chain."""

_MOST_AT_ONCE = 4
"""Most concurrent copies from one source when copies take long. Further workers then take turns with them."""
_MOST_ACCUSATIONS = 2
"""Accusations that one worker may make. After that its reports about sources are ignored, and only the host sends to
it."""

_MOST_EFFECTS = 2_000
"""Most that one event leads to; the rest waits for the next one."""
_REMEMBERED = 10_000
"""Most departed workers that are remembered, so that a distrusted worker is not trusted when it returns."""


class _OfWorker(Struct, frozen=True, kw_only=True):
    worker: str


class Came(_OfWorker, frozen=True, kw_only=True):
    """A worker reports the files that it has and the segments that it must get; repeated whenever that changes."""

    serves: bool
    """True if others can reach it."""
    wanted: frozenset[int]
    """Segments that it is to have in the end."""
    holds: frozenset[int]
    """Whole files that it has, as it says."""
    group: str = ""
    """Group of the worker. Workers copy from workers of their group and from the host, which sends to each group as if
    it were the only one."""


class Got(_OfWorker, frozen=True, kw_only=True):
    """A copy is whole."""

    file: int
    bytes_per_s: float
    """Speed of the copy; fast workers are served first, because others copy from them."""


class Failed(_OfWorker, frozen=True, kw_only=True):
    """A copy could not continue: its source sent `wrong` chunks, `lacks` a file that it reported, or is `gone`."""

    reason: Literal["wrong", "lacks", "gone"]


class Left(_OfWorker, frozen=True, kw_only=True):
    """A worker has gone."""


class Passed(Struct, frozen=True):
    """Time has passed."""


Event = Came | Got | Failed | Left | Passed


class Start(_OfWorker, frozen=True, kw_only=True):
    """The worker is to copy a file from this source; what it has of it already, it keeps."""

    file: int
    source: str


class Stop(_OfWorker, frozen=True, kw_only=True):
    """The worker is to end its copy: its source is gone or not trusted any more, or it needs the file no longer."""


@dataclass(slots=True, kw_only=True)
class Copy:
    """A copy under way."""

    file: int
    source: str
    since: float


@dataclass(slots=True)
class _Worker:
    number: int
    """Number in the order in which workers came."""
    heard_at: float
    group: str
    serves: bool = False
    wanted: frozenset[int] = frozenset()
    holds: set[int] = field(default_factory=set)
    copy: Copy | None = None
    turns: int = 0
    """Number of its copies that were ended so that others could be served, since its last complete copy."""
    orphan: bool = False
    """True if its copy was cut short: then it comes first."""
    bytes_per_s: float = 0.0
    avoids: set[str] = field(default_factory=set)
    """Sources that failed it."""
    accusations: int = 0
    distrusted: bool = False
    """Not a source any more, whatever it says."""

    def says(self, event: Came) -> bool:
        """True if this is what it has said before."""
        same = (self.serves, self.wanted, self.group) == (event.serves, event.wanted, event.group)
        return same and self.holds == event.holds

    @property
    def lacks(self) -> frozenset[int]:
        return self.wanted - self.holds


class Tree:
    """All copies from one host.

    Args:
        silent_s: a worker that was not heard for this long is gone; `busy_s` is the same for a worker that is copying.
        turn_s: a source whose copies of a file all take longer takes one more, instead of the oldest if there are many.
            So a slow machine does not block others for ever.
        hurries_s: a machine that receives for longer starts no new copies meanwhile. A copy from it that takes longer
            moves to a machine with the whole file, if one is free. Default: neither.
        deepest: D, the machines of a chain. A long chain is fast, but many machines wait when one of them is lost.
    """

    def __init__(
        self,
        *,
        silent_s: float = 20.0,
        busy_s: float = 6.0,
        turn_s: Callable[[int], float] = lambda file: 30.0,
        hurries_s: float = math.inf,
        deepest: int = DEEPEST,
    ) -> None:
        self._silent_s, self._busy_s = silent_s, busy_s
        self._turn_s, self._hurries_s, self._deepest = turn_s, hurries_s, deepest
        self.collects = False
        """True if sources are found on `Passed` only, which costs less with many workers."""
        self.spares_host = False
        """True if the host comes after the workers that receive nothing."""
        self._workers: dict[str, _Worker] = {}
        self._groups: dict[str, dict[str, None]] = {}
        """Workers of each group, in the order in which they came."""
        self._sends: dict[str, dict[str, Copy]] = {HOST: {}}
        """Copies by source and worker."""
        self._remembered: dict[str, tuple[bool, int]] = {}
        """By departed worker: True if it was distrusted, and the number of its accusations."""
        self._came = 0

    # --- what is asked of it ---

    def on(self, event: Event, now: float) -> list[Start | Stop]:
        """Return the copies to start and to stop after this event. Events of unknown workers change nothing."""
        worker = None if isinstance(event, Passed) else self._workers.get(event.worker)
        groups = list(self._groups) if worker is None else [worker.group]
        if worker is not None:
            worker.heard_at = now
        effects: list[Start | Stop] = []
        match event:
            case Came() if worker is not None and worker.says(event):
                return []  # most of what a host hears
            case Came():
                effects += self._came_in(event, now)
                groups = [event.group]
            case Got() if worker is not None and worker.copy is not None and worker.copy.file == event.file:
                worker.holds.add(event.file)
                worker.bytes_per_s, worker.turns = event.bytes_per_s, 0
                self._end(event.worker)
            case Failed() if worker is not None and worker.copy is not None:
                effects += self._failed(event)
            case Left() if worker is not None:
                effects += self._lost(event.worker)
            case Passed():
                for name in [name for name, each in self._workers.items() if self._silent(each, now)]:
                    effects += self._lost(name)
        if self.collects and not isinstance(event, Passed):
            return effects
        return effects + [effect for group in groups for effect in self._assigned(group, now)]

    def copy_of(self, worker: str) -> Copy | None:
        """Return the copy that a worker receives now."""
        known = self._workers.get(worker)
        return None if known is None else known.copy

    def holds(self, worker: str) -> frozenset[int]:
        """Whole files of a worker, as it says."""
        known = self._workers.get(worker)
        return frozenset() if known is None else frozenset(known.holds)

    def trusts(self, worker: str) -> bool:
        """True if a worker may be a source."""
        known = self._workers.get(worker)
        return known is not None and not known.distrusted

    def __contains__(self, worker: str) -> bool:
        return worker in self._workers

    def __iter__(self) -> Iterator[str]:
        return iter(self._workers)

    # --- what happens ---

    def _came_in(self, event: Came, now: float) -> list[Stop]:
        worker = self._workers.get(event.worker)
        effects: list[Stop] = []
        if worker is not None and worker.group != event.group:
            effects += self._lost(event.worker)
            worker = None
        if worker is None:
            self._came += 1
            distrusted, accusations = self._remembered.pop(event.worker, (False, 0))
            worker = _Worker(self._came, now, event.group, distrusted=distrusted, accusations=accusations)
            self._workers[event.worker] = worker
            self._groups.setdefault(event.group, {})[event.worker] = None
            self._sends[event.worker] = {}
        worker.wanted, worker.holds = event.wanted, set(event.holds)
        if worker.copy is not None and worker.copy.file not in worker.lacks:
            self._end(event.worker)
            effects.append(Stop(worker=event.worker))
        if worker.serves and not event.serves:
            effects += self._orphaned(event.worker)
        worker.serves = event.serves
        return effects + self._unserved(event.worker)

    def _failed(self, event: Failed) -> list[Stop]:
        worker = self._workers[event.worker]
        assert worker.copy is not None
        source = worker.copy.source
        self._end(event.worker)
        worker.orphan = True
        accused = self._workers.get(source)
        if accused is None:
            return []
        worker.avoids.add(source)
        if event.reason == "gone" or worker.accusations >= _MOST_ACCUSATIONS:
            return []
        # Whether source or receiver lies cannot be told. So one word is enough, but each worker has few.
        worker.accusations += 1
        accused.distrusted = True
        return self._orphaned(source)

    def _silent(self, worker: _Worker, now: float) -> bool:
        return now - worker.heard_at > (self._silent_s if worker.copy is None else self._busy_s)

    def _lost(self, name: str) -> list[Stop]:
        self._end(name)
        effects = self._orphaned(name)
        worker = self._workers.pop(name)
        del self._sends[name]
        group = self._groups[worker.group]
        del group[name]
        if not group:
            del self._groups[worker.group]
        if worker.distrusted or worker.accusations:
            self._remembered[name] = worker.distrusted, worker.accusations
            if len(self._remembered) > _REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
        for each in group:
            self._workers[each].avoids.discard(name)  # one that comes again under this name gets another chance
        return effects

    def _orphaned(self, source: str, whom: Collection[str] | None = None) -> list[Stop]:
        """End these copies, or all, of a source; who was receiving them comes first in the line."""
        effects = []
        for name in list(self._sends[source] if whom is None else whom):
            self._end(name)
            self._workers[name].orphan = True
            effects.append(Stop(worker=name))
        return effects

    def _unserved(self, source: str) -> list[Stop]:
        """End the copies of a source that has their files no longer, and is not receiving them either."""
        worker = self._workers[source]
        has = worker.holds | ({worker.copy.file} if worker.copy is not None else set())
        return self._orphaned(source, [name for name, copy in self._sends[source].items() if copy.file not in has])

    def _end(self, name: str) -> None:
        worker = self._workers[name]
        if worker.copy is not None:
            del self._sends[worker.copy.source][name]
            worker.copy, worker.orphan = None, False

    # --- who gets what from whom ---

    def _assigned(self, group: str, now: float) -> list[Start | Stop]:
        members = self._groups.get(group, {})
        line = sorted(
            (name for name in members if (worker := self._workers[name]).copy is None and worker.lacks),
            key=lambda name: self._place(self._workers[name]),
        )
        effects: list[Start | Stop] = []
        begun = True
        while line and begun:
            begun = False
            for source in self._free(group, now):
                found = self._first(source, line, now)
                if found is not None:
                    name, file = found
                    if len(self._to(source, group)) >= _MOST_AT_ONCE:
                        effects += self._set_back(source, group)
                    effects += self._begun(source, name, file, now)
                    line.remove(name)
                    if len(effects) >= _MOST_EFFECTS:
                        return effects
                    begun = True  # and it can pass on what comes
        if not line and self._hurries_s < math.inf:
            effects += self._hurried(group, now)
        return effects

    def _begun(self, source: str, name: str, file: int, now: float) -> list[Start | Stop]:
        worker = self._workers[name]
        worker.copy = self._sends[source][name] = Copy(file=file, source=source, since=now)
        worker.orphan = False
        return [Start(worker=name, file=file, source=source), *self._unserved(name)]

    def _hurried(self, group: str, now: float) -> list[Start | Stop]:
        """Move copies that take long behind a slow machine to sources that are free and have the whole file."""
        slow = [
            name
            for name in self._groups.get(group, {})
            if (copy := self._workers[name].copy) is not None
            and now - copy.since >= self._hurries_s
            and copy.source != HOST
            and copy.file not in self._workers[copy.source].holds
        ]
        effects: list[Start | Stop] = []
        for source in self._free(group, now) if slow else ():
            for name in slow:
                copy = self._workers[name].copy
                assert copy is not None
                whole = source == HOST or copy.file in self._workers[source].holds
                if whole and self._may_send(source, name) and not self._to(source, group):
                    self._end(name)
                    effects += self._begun(source, name, copy.file, now)
                    slow.remove(name)
                    break
        return effects

    def _may_send(self, source: str, name: str) -> bool:
        """True if neither knows anything against the other."""
        if source == HOST:
            return True
        sender, worker = self._workers[source], self._workers[name]
        usable = sender.serves and not sender.distrusted and source not in worker.avoids
        return usable and worker.accusations < _MOST_ACCUSATIONS and name != source

    def _to(self, source: str, group: str) -> dict[str, Copy]:
        """The copies from a source to workers of a group."""
        sends = self._sends[source]
        if source != HOST:
            return sends
        return {name: copy for name, copy in sends.items() if self._workers[name].group == group}

    def _set_back(self, source: str, group: str) -> list[Stop]:
        """End the oldest copy of a source; its worker keeps what it has, and waits for another turn."""
        sends = self._to(source, group)
        name = min(sends, key=lambda each: sends[each].since)
        self._end(name)
        self._workers[name].turns += 1
        return [Stop(worker=name), *self._unserved(name)]

    def _place(self, worker: _Worker) -> tuple[int, bool, bool, float, int]:
        """Return the place in the line: first workers with the fewest turns in vain, then those whose copy was cut
        short, workers that pass files on, fast ones, and early ones."""
        return worker.turns, not worker.orphan, not worker.serves, -worker.bytes_per_s, worker.number

    def _free(self, group: str, now: float) -> list[str]:
        """Sources that may take a worker of a group: those that need not end a copy for it, the host first, then those
        that receive nothing, in the order they came."""
        workers = self._workers
        able = [name for name in self._groups.get(group, {}) if workers[name].holds or workers[name].copy is not None]
        free = [
            name
            for name in (HOST, *able)
            if all(now - copy.since >= self._turn_s(copy.file) for copy in self._to(name, group).values())
        ]

        def rank(name: str) -> int:
            if name == HOST:
                return 1
            return 3 if self._workers[name].copy is not None else 0 if self.spares_host else 2

        return sorted(free, key=lambda name: (len(self._to(name, group)) >= _MOST_AT_ONCE, rank(name)))

    def _first(self, source: str, line: list[str], now: float) -> tuple[str, int] | None:
        """The first in the line that this source can serve, and the rarest file that it lacks, so that workers have
        something to exchange; None if there is none."""
        offered: frozenset[int] | set[int] | None = None
        chain: list[str] = []
        if source != HOST:
            sender = self._workers[source]
            if not sender.serves or sender.distrusted:
                return None
            offered = set(sender.holds)
            chain = self._chain(source)
            brisk = sender.copy is not None and now - sender.copy.since < self._hurries_s
            if sender.copy is not None and brisk and len(chain) < self._deepest:
                offered.add(sender.copy.file)
            if not offered:
                return None
        for name in line:
            worker = self._workers[name]
            able = worker.lacks if offered is None else worker.lacks & offered
            if not self._may_send(source, name):
                continue
            if name in chain:  # it would wait for itself
                able = able & self._workers[source].holds
            if able:
                return name, min(able, key=lambda each: (self._copies(each), each)) if len(able) > 1 else next(
                    iter(able)
                )
        return None

    def _chain(self, name: str) -> list[str]:
        """A worker and those before it whose chunks it passes on, back to one that has the whole file."""
        chain: list[str] = []
        copy = self._workers[name].copy
        file = None if copy is None else copy.file
        while name != HOST and (copy := self._workers[name].copy) is not None and copy.file == file:
            if name in chain:
                break  # none ever waits for itself; a host must not hang if one does
            chain.append(name)
            name = copy.source
        if name == HOST or file in self._workers[name].holds:
            return chain
        return [*chain, name]  # an orphan: it has no source now, but some chunks

    def _copies(self, file: int) -> int:
        return sum(
            file in worker.holds or (worker.copy is not None and worker.copy.file == file)
            for worker in self._workers.values()
        )
