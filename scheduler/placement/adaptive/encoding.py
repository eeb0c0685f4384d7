"""The place where the images of a task are encoded with `encode_on=auto`: on the end device, or on an edge node.

`choose_way` decides by the equations of the paper. `EncodingTimes` keeps what answers have shown. No I/O and no clock.

An estimate is the median of the last three observations, or the last one if that is less: one slow answer is an
accident, and a quick one is worth another try. The first observation is left out, because it also opens connections and
loads the head.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated

from msgspec import Struct
from pydantic import AfterValidator, BaseModel, Field

from scheduler.core.work import AttemptFacts
from tierkit.wire.events import UpstreamAnswer
from tierkit.wire.messages import Upstream

__all__ = ["EncodingEstimate", "EncodingTimes", "Recent", "Way", "choose_way"]

TenthOfMilli = Annotated[float, AfterValidator(lambda value: round(value, 4))]

_REMEMBERED = 3
_EXPLORE = 0.02
"""Most that trying the slower way may add to the time of the tasks, as a fraction."""
_EXPLORE_TASKS = 10
"""The slower way is tried again after this many tasks at the earliest."""
_AGAIN_TASKS = 50
"""A way without an answer, or whose last one failed, is tried again after this many tasks."""
_MOST_PAIRS = 65_536
_MOST_WAYS = 16
"""Ways of a pair that are remembered; beyond it, the oldest is forgotten. The same for encoders of a node."""


class EncodingEstimate(BaseModel):
    """The measured time that a node takes to encode an image."""

    node_id: str = Field(description="Id of the node.")
    encoder: str = Field(description="Name of the encoder: NETWORK.KIND.")
    ms_per_image: TenthOfMilli = Field(description="Milliseconds per image.")
    samples: int = Field(description="Answers that told it.")


class Recent(Struct, frozen=True):
    """The last few observations of a time."""

    samples: int = 0
    last: tuple[float, ...] = ()

    def add(self, value: float) -> Recent:
        return Recent(self.samples + 1, (*self.last, value)[-_REMEMBERED:] if self.samples else ())

    @property
    def value(self) -> float | None:
        """The estimate; None before the second observation."""
        return min(median(self.last), self.last[-1]) if self.last else None


class Way(Struct, frozen=True, kw_only=True):
    """One way of a task's images to an upstream node, as far as it is known."""

    encodes: str
    """The node that encodes; "" if pixels go to an edge node that answers from them."""
    encode_s: float | None
    """Seconds of the head for the images."""
    comm_s: float | None
    """Seconds there and back, without computing."""
    skipped: int | None
    """Tasks of this pair that went another way since it was last taken; None if it is to be tried now."""
    skipped_s: float = 0.0
    """Sum of the `total_s` of those tasks."""

    @property
    def total_s(self) -> float | None:
        """t_encrypt + t_comm of Eq. 8."""
        return None if self.encode_s is None or self.comm_s is None else self.encode_s + self.comm_s


def choose_way(ways: Sequence[Way]) -> tuple[int, str]:
    """The number of the way that a task takes, and the reason.

    Eq. 7 of the paper is Overhead = t_w - t_wo: the time with encryption less that without it. Eq. 8 is Overhead =
    delta t_encrypt + delta t_comm. t_wo is the same for all ways, so the way with the least t_encrypt + t_comm has the
    least overhead.

    A way that is not measured is tried first; until its answer comes, tasks take the best known way, or else the first.
    A slower way is tried again when that adds at most `_EXPLORE` to what the tasks took since it was last taken.

    Args:
        ways: at least one; first the one with which the end device encodes.
    """
    known = {number: way.total_s for number, way in enumerate(ways) if way.total_s is not None}
    for number, way in enumerate(ways):
        if number not in known and (way.skipped is None or way.skipped >= _AGAIN_TASKS):
            return number, f"{_where(way)}: not measured yet"
    if not known:
        return 0, f"{_where(ways[0])}: no way is measured yet"
    best = min(known, key=lambda number: known[number])
    for number, total_s in known.items():
        way, extra_s = ways[number], total_s - known[best]
        if number != best and (way.skipped or 0) >= _EXPLORE_TASKS and extra_s <= _EXPLORE * way.skipped_s:
            return number, f"{_where(way)}: measured again, {extra_s:.3f} s more are expected"
    others = [f"{_cost(ways[number])} if {_where(ways[number])}" for number in known if number != best]
    return best, ", ".join([f"{_where(ways[best])}: {_cost(ways[best])}", *others])


def _where(way: Way) -> str:
    return f"encoded on {way.encodes}" if way.encodes else "not encoded"


def _cost(way: Way) -> str:
    return f"{way.encode_s:.3f} s and {way.comm_s:.3f} s on the way"


@dataclass(slots=True)
class _Tried:
    """One way of a pair, as far as it is known."""

    comm: Recent = field(default_factory=Recent)
    skipped: int | None = None
    skipped_s: float = 0.0


_Pair = tuple[str, str, int, bool]
"""End device, upstream node, size of the task by powers of two, and whether only unsure images go up."""
_Key = tuple[str, str, str]
"""Node that encodes, encoder and form; "" for pixels."""


@dataclass(slots=True)
class EncodingTimes:
    """Measured times of the heads by node, and of the ways between an end device and an upstream node.

    The ways of a pair are measured once a job has asked for `encode_on=auto` there, and by the answers to all jobs.
    """

    _heads: dict[str, dict[str, Recent]] = field(default_factory=dict)
    """Seconds per image, by node and encoder."""
    _pairs: dict[_Pair, dict[_Key, _Tried]] = field(default_factory=dict)

    def choose(self, end: str, images: int, entries: Sequence[Upstream], *, stepwise: bool) -> tuple[Upstream, str]:
        """The entry of the way that a task takes, and the reason; "" if there is one way.

        Args:
            entries: of one upstream node, from `Placement.ways`.
            stepwise: True if only the images of which the tier below is unsure go up.
        """
        if len(entries) == 1:
            return entries[0], ""
        tried = self._pairs.setdefault(_pair(end, entries[0].node_id, images, stepwise), {})
        if len(self._pairs) > _MOST_PAIRS:
            del self._pairs[next(iter(self._pairs))]
        ways = []
        for entry in entries:
            key = _key(end, entry)
            known = tried.setdefault(key, _Tried())
            if len(tried) > _MOST_WAYS:
                del tried[next(iter(tried))]
            ways.append(
                Way(
                    encodes=key[0],
                    encode_s=self._encode_s(key, images),
                    comm_s=known.comm.value,
                    skipped=known.skipped,
                    skipped_s=known.skipped_s,
                )
            )
        number, reason = choose_way(ways)
        return entries[number], reason

    def sent(self, facts: AttemptFacts) -> None:
        """An attempt has begun."""
        for tried, key in self._asked(facts, facts.first_asked):
            comm_s, encode_s = tried[key].comm.value, self._encode_s(key, facts.images)
            for other in tried.values():
                if other.skipped is not None and comm_s is not None and encode_s is not None:
                    other.skipped_s += comm_s + encode_s
                other.skipped = None if other.skipped is None else other.skipped + 1
            tried[key].skipped, tried[key].skipped_s = 0, 0.0

    def answered(self, facts: AttemptFacts, answer: UpstreamAnswer, most_s: float) -> None:
        """An upstream node has answered.

        Args:
            most_s: the longest time that the round trip can have taken.
        """
        entry = next((each for each in facts.upstreams if each.node_id == answer.node_id), None)
        if entry is None or answer.sent is None:
            return
        round_trip_s = min(answer.round_trip_ms / 1000, most_s)
        encode_s = 0.0
        if entry.encoding is not None:
            encode_s = min(answer.sent.encode_ms / 1000, round_trip_s)
            heads = self._heads.setdefault(_key(facts.node_id, entry)[0], {})
            name = entry.encoding.name
            heads[name] = heads.pop(name, Recent()).add(encode_s / len(answer.labels))
            if len(heads) > _MOST_WAYS:
                del heads[next(iter(heads))]
        said = answer.timing
        above_s = encode_s if said is None else encode_s + (said.queue_ms + said.compute_ms) / 1000
        for tried, key in self._asked(facts, (answer.node_id,)):
            way = tried[key]
            way.comm = way.comm.add(max(0.0, round_trip_s - above_s))
            if way.comm.value is None:
                way.skipped = None
        if answer.node_id not in facts.first_asked:
            self.failed(facts)

    def failed(self, facts: AttemptFacts) -> None:
        """The upstream node that an attempt asked first gave no answer: for a while its tasks take another way."""
        for tried, key in self._asked(facts, facts.first_asked[:1]):
            tried[key].comm = Recent()

    def forget(self, node_id: str) -> None:
        """The node has left the device list."""
        self._heads.pop(node_id, None)

    def estimates(self, nodes: Collection[str]) -> list[EncodingEstimate]:
        """The measured times of the heads of these nodes."""
        return [
            EncodingEstimate(node_id=node_id, encoder=name, ms_per_image=1000 * seconds, samples=head.samples - 1)
            for node_id, heads in sorted(self._heads.items())
            if node_id in nodes
            for name, head in sorted(heads.items())
            if (seconds := head.value) is not None
        ]

    def _encode_s(self, key: _Key, images: int) -> float | None:
        node_id, encoder, _ = key
        if not encoder:
            return 0.0
        seconds = self._heads.get(node_id, {}).get(encoder, Recent()).value
        return None if seconds is None else images * seconds

    def _asked(self, facts: AttemptFacts, names: Collection[str]) -> list[tuple[dict[_Key, _Tried], _Key]]:
        """The ways that an attempt takes to these upstream nodes, as far as their pairs are known."""
        if not self._pairs:
            return []
        found = []
        for entry in facts.upstreams:
            tried = self._pairs.get(_pair(facts.node_id, entry.node_id, facts.images, bool(facts.stages)))
            key = _key(facts.node_id, entry)
            if entry.node_id in names and tried is not None and key in tried:
                found.append((tried, key))
        return found


def _pair(end: str, upper: str, images: int, stepwise: bool) -> _Pair:
    return end, upper, images.bit_length(), stepwise


def _key(end: str, entry: Upstream) -> _Key:
    if entry.encoding is None:
        return "", "", ""
    return end if entry.relay is None else entry.relay.node_id, entry.encoding.name, entry.encoding.form
