"""Scores of the workers of a run over time, and the orders of operators. Pure.

The idea comes from the volunteers' platform of 2018 (its section 6.2.2). An update far from the others lowers the score
of its worker, any other update raises it, and a worker's updates are weighted by its score.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkit.errors import Forbidden, Overloaded
from tierkit.types import STANDING_AFTER, TOLD_TO_GO, WorkerOrder, WorkerStanding
from training.trust.aggregate import pieces
from training.trust.config import TrustConfig
from training.units import Flat

__all__ = ["FIRST", "Scores", "are_valid"]

FIRST = 0.5
"""Score of a worker that nothing is known of."""
_MEMORY = 0.8
"""Share of a score that remains after an update; the rest is 1 for a valid update, else 0."""
_MOST = 10_000
"""Workers that are remembered."""
_NORMAL = 1.4826
"""Standard deviations of normal numbers in their median absolute deviation."""
_LEAST_SPREAD = 0.05
"""Smallest spread, as a fraction of a figure's median or of the centre's length. Updates closer together count as
alike.
"""

_NO_MORE: Mapping[WorkerStanding, str] = {
    "dropped": "an operator has dropped it",
    "quarantined": "its updates were refused, lay too far from those of others, or were not what its steps give",
}


@dataclass(slots=True)
class _Known:
    score: float = FIRST
    standing: WorkerStanding = "active"
    caller: str = ""


class Scores:
    """Workers by their names, so one that comes again as another process has the score that it had."""

    def __init__(self, config: TrustConfig | None) -> None:
        self._config = config
        self._known: dict[str, _Known] = {}
        self._put_out: deque[str] = deque(maxlen=_MOST)

    def score(self, worker: str) -> float:
        """Score of a worker, from 0 to 1."""
        return self._known.get(worker, _Known()).score

    def standing(self, worker: str) -> WorkerStanding:
        return self._known.get(worker, _Known()).standing

    def weight(self, worker: str) -> float:
        """Weight of its updates; 0 for a worker that is barred, or has not been trusted with work."""
        known = self._known.get(worker, _Known())
        return known.score if known.standing in ("active", "trusted") else 0.0

    def check(self, worker: str) -> None:
        """Raises Forbidden for a worker whose updates do not count any more."""
        why = _NO_MORE.get(self.standing(worker))
        if why is not None:
            raise Forbidden(f"the worker {worker!r} takes no part in this run any more: {why}; ask its operator")

    def admit(self, worker: str, caller: str = "") -> None:
        """Remember a worker that comes.

        Args:
            caller: the name of its token, or its address: the caller with the most names is the first to lose one.

        Raises:
            Forbidden: it is barred from this run.
            Overloaded: too many others are remembered, each with an operator's order.
        """
        self.check(worker)
        self._must(worker).caller = caller

    def judge(self, worker: str, valid: bool) -> None:
        """An update was like the others, or was not. Counts only where a run judges its updates."""
        if self._config is not None:
            self._count(worker, valid)

    def refused(self, worker: str) -> None:
        """An update was none, which counts in each run."""
        self._count(worker, False)

    def taken(self, worker: str) -> None:
        """Count an update that is now in the weights. If updates are not judged, it makes up for refused ones."""
        if self._config is None and self.score(worker) < FIRST:
            self._count(worker, True)
            self._known[worker].score = min(FIRST, self._known[worker].score)

    def _count(self, worker: str, valid: bool) -> None:
        known = self._of(worker)
        if known is None or known.standing in ("trusted", *TOLD_TO_GO):
            return
        known.score = _MEMORY * known.score + (1 - _MEMORY) * valid
        if known.score < (self._config or TrustConfig()).quarantine and known.standing == "active":
            self._quarantine(worker, known)

    def rechecked(self, worker: str, right: bool) -> None:
        """An update was computed again: one that is wrong is proof enough."""
        if right:
            self.judge(worker, True)
        elif (known := self._of(worker)) is not None and known.standing != "trusted":
            known.score = 0.0
            if known.standing == "active":
                self._quarantine(worker, known)

    def _quarantine(self, worker: str, known: _Known) -> None:
        known.standing = "quarantined"
        self._put_out.append(worker)

    def put_out(self) -> list[str]:
        """Workers that have been put in quarantine since the last call."""
        names = list(self._put_out)
        self._put_out.clear()
        return names

    def order(self, worker: str, order: WorkerOrder) -> None:
        """Do what an operator wants."""
        known = self._must(worker)
        former, known.standing = known.standing, STANDING_AFTER[order]
        if order == "trust":
            known.score = 1.0
        elif order == "resume" and former in ("quarantined", "dropped"):
            known.score = FIRST

    def barred(self) -> set[str]:
        """Workers that get no work, whatever they ask for."""
        return {name for name, known in self._known.items() if known.standing not in ("active", "trusted")}

    def knows(self, worker: str) -> bool:
        """True if anything was said of it."""
        return worker in self._known

    def state(self) -> dict[str, Any]:
        """The whole state, as JSON."""
        return {name: asdict(known) for name, known in self._known.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state`."""
        self._known = {name: _Known(**known) for name, known in state.items()}

    def _of(self, worker: str) -> _Known | None:
        """Return the entry of a worker, which moves to the end; None if there is no room for it."""
        known = self._known.pop(worker, None)
        if known is None:
            if not self._make_room():
                return None
            known = _Known()
        self._known[worker] = known
        return known

    def _make_room(self) -> bool:
        """Forget a worker of the caller with the most names, if possible one that loses nothing because a newcomer is
        as good. Otherwise forget any without an operator's order, since its caller has other names. Among equals,
        forget the worker heard longest ago.
        """
        if len(self._known) < _MOST:
            return True
        own = {name: known for name, known in self._known.items() if known.standing in ("active", "quarantined")}
        if not own:
            return False
        [(most, _)] = Counter(known.caller for known in own.values()).most_common(1)
        names = [name for name, known in own.items() if known.caller == most]
        harmless = (name for name in names if own[name].standing == "active" and own[name].score >= FIRST)
        del self._known[next(harmless, names[0])]
        return True

    def _must(self, worker: str) -> _Known:
        if (known := self._of(worker)) is None:
            raise Overloaded(f"operators have said something of {_MOST:,} workers in this run", retry_after_s=60.0)
        return known


def are_valid(updates: Sequence[tuple[Flat, Flat]], centre: tuple[Flat, Flat], *, deviation: float) -> list[bool]:
    """Return True for each update that is like the others: its values and its buffers are not further from the centre,
    and its values point as far in the centre's direction.

    Each figure of an update, a distance or the component along the centre, is compared with its median over all
    updates. The unit is the standard deviation estimated from the median absolute deviation, which a few wrong updates
    do not move. The component detects updates of zeros and updates that point elsewhere.

    Args:
        updates: values and buffers of at least three.
        centre: centre of these updates.
        deviation: number of standard deviations allowed.
    """
    values, buffers = zip(*updates, strict=True)
    near, towards = _figures(values, centre[0], deviation)
    buffers_near, _ = _figures(buffers, centre[1], deviation)
    return [bool(each) for each in near & towards & buffers_near]


def _figures(updates: Sequence[Flat], centre: Flat, deviation: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return bool `[n]` twice: True if an update is as near to the centre as the others, and if it points as far in its
    direction.
    """
    squares, along, length = np.zeros(len(updates)), np.zeros(len(updates)), 0.0
    for piece in pieces([*updates, centre]):
        squares += np.square(piece[:-1] - piece[-1]).sum(axis=1)
        along += piece[:-1] @ piece[-1]
        length += float(piece[-1] @ piece[-1])
    length = length**0.5
    distances, along = np.sqrt(squares), along / (length or 1.0)
    far = distances - np.median(distances)
    short = np.median(along) - along
    least = _LEAST_SPREAD * length
    near = far <= deviation * max(_spread(distances), _LEAST_SPREAD * float(np.median(distances)), least)
    return near, short <= deviation * max(_spread(along), least)


def _spread(figures: NDArray[np.float64]) -> float:
    return _NORMAL * float(np.median(np.abs(figures - np.median(figures))))
