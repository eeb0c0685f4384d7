"""What Terrace's node must reach, judged from the records of a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.peers.contenders import TERRACE
from experiments.peers.rows import Row

__all__ = ["Verdict", "verdicts"]

Record = Mapping[str, Any]

_BATCHES, _LONE_BATCH = Row(batch=50, concurrency=4), Row(batch=50, concurrency=1)
_SINGLES, _LONE = Row(batch=1, concurrency=64), Row(batch=1, concurrency=1)
_LEAST_OF_BARE = {True: 0.90, False: 0.97}
"""Share of the bare loop's images/s in batches of 50, on the network that all servers serve and on a large one."""
_LEAST_OF_BEST_PEER = 1.5
_MOST_ABOVE_BARE_MS = 1.2
_MOST_LONE_MS = 1.2
_MOST_OF_BARE_TIME = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One target, what was measured, and whether that reaches it."""

    what: str
    target: str
    measured: str
    reached: bool


def verdicts(records: Sequence[Record], duels: Sequence[Record] = ()) -> list[Verdict]:
    """One verdict for each target whose figures are there.

    Other servers are compared round by round, and the median of these ratios counts: rounds lie minutes apart, in which
    the machine's speed drifts. Within a round it drifts as well, from server to server: where there is a duel with the
    best of them, whose windows take turns, that ratio counts, and the other one is told with it.

    Args:
        records: the newest of each contender and network, as `experiments.peers.table.newest_records` gives them.
        duels: likewise, of `experiments.peers.duel.newest_records`.
    """
    found: list[Verdict] = []
    for network in dict.fromkeys(record["config"]["network"] for record in records):
        chosen = [record for record in records if record["config"]["network"] == network]
        own = next((record for record in chosen if record["config"]["contender"] == TERRACE.name), None)
        if own is not None:
            peers = [record for record in chosen if record is not own]
            fought = {duel["config"]["title"]: duel for duel in duels if duel["config"]["network"] == network}
            found += [*_beside_the_bare_loop(network, own), *_beside_peers(network, own, peers, fought)]
    return found


def _beside_the_bare_loop(network: str, own: Record) -> Iterator[Verdict]:
    def results(row: Row, *names: str) -> list[float] | None:
        values = [own["results"].get(f"{row.key}.{name}") for name in names]
        return None if None in values else values

    # Single images are asked only of the network that all servers serve.
    shared = f"{_SINGLES.key}.images_per_s" in own["results"]
    if given := results(_BATCHES, "ratio_to_bare"):
        least = _LEAST_OF_BARE[shared]
        what = f"{network}, batches of 50, concurrency 4: images/s"
        yield _least(what, given[0], least, "of the bare loop")
    if shared and (given := results(_LONE_BATCH, "p50_above_bare_ms")):
        what = f"{network}, batches of 50, concurrency 1: p50 above the bare batch"
        yield _most(what, given[0], _MOST_ABOVE_BARE_MS, "ms")
    if shared and (given := results(_LONE_BATCH, "compute_ms", "bare_batch_ms")):
        what = f"{network}, batches of 50, concurrency 1: inference"
        yield _most(what, given[0] / given[1], _MOST_OF_BARE_TIME, "times the bare session's")
    if given := results(_LONE, "p50_ms"):
        yield _most(f"{network}, one image, concurrency 1: p50", given[0], _MOST_LONE_MS, "ms")


def _beside_peers(
    network: str, own: Record, peers: Sequence[Record], fought: Mapping[str, Record]
) -> Iterator[Verdict]:
    for entry in own["config"]["rows"]:
        row = Row(**entry)
        ratios = {peer["config"]["title"]: _ratio(own, peer, row) for peer in peers}
        known = {title: ratio for title, ratio in ratios.items() if ratio is not None}
        if not known:
            continue
        best = min(known, key=lambda title: known[title])
        least = _LEAST_OF_BEST_PEER if row == _SINGLES else 1.0
        images = "one image" if row.batch == 1 else f"batches of {row.batch}"
        where = f"{network}, {images}, concurrency {row.concurrency}"
        verdict = _least(f"{where}: images/s", known[best], least, f"times the best other server ({best})")
        if best in fought and (duel := fought[best]["results"].get(row.key)):
            decided = _least(verdict.what, duel["ratio"], least, f"times the best other server ({best})")
            told = f"{decided.measured} in a duel of {duel['rounds']} windows; {verdict.measured} in rounds"
            verdict = replace(decided, measured=told)
        yield verdict
        if row == _SINGLES:
            p99_ms = {peer["config"]["title"]: peer["results"].get(f"{row.key}.p99_ms") for peer in peers}
            quick = min((title for title in known if p99_ms[title]), key=lambda title: p99_ms[title])
            yield _most(f"{where}: p99", own["results"][f"{row.key}.p99_ms"], p99_ms[quick], f"ms ({quick}'s)")


def _ratio(own: Record, peer: Record, row: Row) -> float | None:
    name = f"{row.key}.images_per_s"
    pairs = zip(own["samples"].get(name, ()), peer["samples"].get(name, ()), strict=False)
    ratios = [mine / theirs for mine, theirs in pairs]
    return statistics.median(ratios) if ratios else None


def _least(what: str, value: float, bound: float, unit: str) -> Verdict:
    return Verdict(what=what, target=f"at least {bound:.2f} {unit}", measured=f"{value:.2f}", reached=value >= bound)


def _most(what: str, value: float, bound: float, unit: str) -> Verdict:
    return Verdict(what=what, target=f"at most {bound:.2f} {unit}", measured=f"{value:.2f}", reached=value <= bound)
