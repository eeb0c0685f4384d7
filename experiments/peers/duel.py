"""Terrace and one other server in short windows that take turns.

The rounds of the comparison lie a minute apart, and a shared machine drifts by several percent in that time: more than
separates two servers whose time is nearly all inference. Here both run at once on the server's core, one of them idle
while the other is asked, and windows of a second follow one another, the order turned round each time. So this suits
servers that use no processor time while nobody asks them. The bare loop has its turn in each round as well.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.bench.levels import Closed, Plan, measure
from experiments.bench.sweep import loop_factory
from experiments.peers.bare import bare_loop
from experiments.peers.comparison import Announce, Comparison
from experiments.peers.contenders import TERRACE, Contender
from experiments.peers.measuring import Cores, Serving, environment_of, serving
from experiments.peers.processes import on_core
from experiments.peers.requests import make_target, random_images
from experiments.peers.rows import Row
from experiments.record import RunRecord
from tierkit.errors import UpstreamError

__all__ = ["NAME", "as_markdown", "duel", "newest_records", "rows"]

NAME = "duel"
_WINDOW_S, _WARMUP_S, _REQUEST_S = 1.0, 0.2, 20.0

Record = Mapping[str, Any]


def duel(
    comparison: Comparison,
    rounds: int,
    *,
    cores: Cores,
    pythons: Mapping[str, Path],
    announce: Announce,
    window_s: float = _WINDOW_S,
) -> RunRecord:
    """Measure both contenders of the comparison.

    Args:
        rounds: windows of each server in each row.
        announce: told what is being done.

    Raises:
        SetupError: one of them does not start.
        UpstreamError: one of them does not answer.
    """
    samples: dict[str, list[float]] = {}
    with (
        on_core(cores.load),
        asyncio.Runner(loop_factory=loop_factory()) as runner,
        bare_loop(environment_of(comparison.network, 0), core=cores.server) as bare,
        ExitStack() as stack,
    ):
        up = {
            contender.name: stack.enter_context(
                serving(
                    contender,
                    pythons[contender.name],
                    comparison.network,
                    cores=cores,
                    runner=runner,
                    expected=comparison.expected,
                )
            )
            for contender in comparison.contenders
        }
        for row in comparison.rows:
            announce(f"{comparison.network.name}: {row.batch} images, concurrency {row.concurrency}")
            for number in range(rounds):
                bare_images_per_s = bare.measure(row.batch, window_s / 2).images_per_s
                samples.setdefault(f"{row.key}.bare_images_per_s", []).append(bare_images_per_s)
                for contender in comparison.contenders[:: 1 if number % 2 == 0 else -1]:
                    window = _window(runner, comparison, contender, up[contender.name], row, window_s)
                    for name, value in window.items():
                        samples.setdefault(f"{row.key}.{contender.name}.{name}", []).append(value)
    peer = next(contender for contender in comparison.contenders if contender is not TERRACE)
    return RunRecord(
        experiment=f"{NAME}-{peer.name}-{comparison.network.name}",
        config={
            "peer": peer.name,
            "title": peer.title,
            "network": comparison.network.name,
            "sha256": comparison.network.sha256,
            "rows": [asdict(row) for row in comparison.rows],
            "rounds": rounds,
            "window_s": window_s,
            "cores": asdict(cores),
        },
        samples=samples,
        results={row.key: summary for row in comparison.rows if (summary := _summary(samples, row, peer.name))},
        seed=0,
    )


def _window(
    runner: asyncio.Runner, comparison: Comparison, contender: Contender, server: Serving, row: Row, window_s: float
) -> dict[str, float]:
    """One window: what the server gave, and what that cost it."""
    images = random_images(row.batch, comparison.network.shape)
    target = make_target(server.origin, contender.protocol, comparison.network.name, images)
    plan = Plan(window_s=window_s, warmup_s=_WARMUP_S, timeout_s=_REQUEST_S)
    cpu_s = server.processes.cpu_s()
    level = runner.run(measure(target, Closed(row.concurrency), plan, asyncio.Event()))
    assert level is not None  # nobody sets the event that stops it
    if level.summary.errors or not level.summary.answered:
        raise UpstreamError(f"{contender.title} did not answer {row.batch} images at concurrency {row.concurrency}")
    cpu_s = server.processes.cpu_s() - cpu_s
    return {
        "images_per_s": level.summary.images_per_s,
        "cpu_us_per_image": cpu_s * 1e6 / (len(level.samples) * row.batch),
    }


def _summary(samples: Mapping[str, Sequence[float]], row: Row, peer: str) -> dict[str, float]:
    """Of the ratios within each round: the medians, and the share of rounds that Terrace won."""

    def of(name: str, figure: str) -> Sequence[float]:
        return samples.get(f"{row.key}.{name}.{figure}", ())

    pairs = list(zip(of(TERRACE.name, "images_per_s"), of(peer, "images_per_s"), strict=True))
    if not pairs:
        return {}
    costs = zip(of(peer, "cpu_us_per_image"), of(TERRACE.name, "cpu_us_per_image"), strict=True)
    bare = samples[f"{row.key}.bare_images_per_s"]
    return {
        "of_bare": statistics.median(own / alone for (own, _), alone in zip(pairs, bare, strict=True)),
        "ratio": statistics.median(own / other for own, other in pairs),
        "won": sum(own > other for own, other in pairs) / len(pairs),
        "cpu_ratio": statistics.median(other / own for other, own in costs),
        "rounds": len(pairs),
    }


# --- from the record ------------------------------------------------------------------------------------------------


def newest_records(folder: Path) -> list[Record]:
    """The last duel with each server on each network."""
    found: dict[tuple[str, str], Record] = {}
    for path in sorted(folder.glob(f"{NAME}-*.json")):
        record = json.loads(path.read_text())
        key = (record["config"]["peer"], record["config"]["network"])
        if key not in found or found[key]["measured_at"] <= record["measured_at"]:
            found[key] = record
    return list(found.values())


def rows(record: Record) -> list[dict[str, Any]]:
    """What `--json` prints of a duel."""
    config, samples = record["config"], record["samples"]
    found = []
    for entry in config["rows"]:
        row = Row(**entry)
        summary = record["results"].get(row.key)
        if summary is not None:
            own, other = (
                statistics.median(samples[f"{row.key}.{name}.images_per_s"]) for name in (TERRACE.name, config["peer"])
            )
            found.append(
                {
                    "network": config["network"],
                    "images_per_request": row.batch,
                    "concurrency": row.concurrency,
                    "other": config["peer"],
                    "images_per_s": own,
                    "other_images_per_s": other,
                    **summary,
                }
            )
    return found


def as_markdown(records: Sequence[Record]) -> str:
    """One table."""
    lines = [
        "| network | images a request | concurrency | other server | Terrace, images/s | of bare | the other, images/s "
        "| ratio | rounds won | ratio by CPU time | rounds |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in records:
        for row in rows(record):
            cells = [
                row["network"],
                str(row["images_per_request"]),
                str(row["concurrency"]),
                record["config"]["title"],
                f"{row['images_per_s']:,.0f}",
                f"{row['of_bare']:.3f}",
                f"{row['other_images_per_s']:,.0f}",
                f"{row['ratio']:.3f}",
                f"{row['won']:.0%}",
                f"{row['cpu_ratio']:.3f}",
                str(row["rounds"]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
