"""Markdown from records: one table per network and load, and one of what the servers cost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.peers.contenders import CONTENDERS
from experiments.peers.rows import Row
from experiments.peers.verdict import verdicts

__all__ = ["EXPERIMENT", "Record", "as_markdown", "newest_records", "rows"]

EXPERIMENT = "peers"

Record = Mapping[str, Any]


def newest_records(folder: Path) -> list[Record]:
    """The last record of each contender and network, in the order of the contenders."""
    found: dict[tuple[str, str], Record] = {}
    for path in sorted(folder.glob(f"{EXPERIMENT}-*.json")):
        record = json.loads(path.read_text())
        key = (record["config"]["contender"], record["config"]["network"])
        if key not in found or found[key]["measured_at"] <= record["measured_at"]:
            found[key] = record
    order = {contender.name: number for number, contender in enumerate(CONTENDERS)}
    return sorted(found.values(), key=lambda record: order.get(record["config"]["contender"], len(order)))


def rows(record: Record) -> list[dict[str, Any]]:
    """What `--json` prints of a server on a network."""
    config, results = record["config"], record["results"]
    return [
        {
            "network": config["network"],
            "server": config["contender"],
            "images_per_request": row["batch"],
            "concurrency": row["concurrency"],
            "images_per_s": results.get(f"{Row(**row).key}.images_per_s"),
            "of_bare": results.get(f"{Row(**row).key}.ratio_to_bare"),
        }
        for row in config["rows"]
    ]


def as_markdown(records: Sequence[Record], duels: Sequence[Record] = ()) -> str:
    """All tables. Servers without figures stand in them with the reason. Of `duels` only the targets know."""
    parts: list[str] = []
    for network in dict.fromkeys(record["config"]["network"] for record in records):
        chosen = [record for record in records if record["config"]["network"] == network]
        loads = dict.fromkeys(
            (row["batch"], row["concurrency"]) for record in chosen for row in record["config"]["rows"]
        )
        parts += [_load_table(network, Row(batch=batch, concurrency=number), chosen) for batch, number in loads]
        parts.append(_cost_table(network, chosen))
    return "\n\n".join([_targets_table(records, duels), *parts]) + "\n"


def _targets_table(records: Sequence[Record], duels: Sequence[Record]) -> str:
    found = verdicts(records, duels)
    rows = [(one.what, one.target, one.measured, "yes" if one.reached else "**no**") for one in found]
    return "### Targets\n\n" + _table(["what", "target", "measured", "reached"], rows)


def _load_table(network: str, row: Row, records: Sequence[Record]) -> str:
    def figure(record: Record, name: str) -> float | None:
        value = record["results"].get(f"{row.key}.{name}")
        return None if value is None else float(value)

    def speed(record: Record) -> float:
        return figure(record, "images_per_s") or 0.0

    def cells(record: Record) -> list[str]:
        config = record["config"]
        if speed(record) == 0.0:
            return [config["title"], f"unmeasured: {_reason(record, row)}", *[""] * 8]
        return [
            config["title"],
            _text(figure(record, "images_per_s"), ",.0f"),
            _text(figure(record, "ratio_to_bare"), ".2f"),
            _range(record["samples"].get(f"{row.key}.ratio_to_bare", [])),
            _text(figure(record, "p50_ms"), ".2f"),
            _text(figure(record, "p99_ms"), ".2f"),
            _text(figure(record, "p50_above_bare_ms"), ".2f"),
            _text(figure(record, "compute_ms"), ".2f"),
            _text(figure(record, "batch_images"), ".1f"),
            _text(figure(record, "cpu_us_per_image"), ",.0f"),
        ]

    images = "1 image" if row.batch == 1 else f"{row.batch} images"
    headings = [
        "server",
        "images/s",
        "of bare",
        "range",
        "p50 ms",
        "p99 ms",
        "p50 above bare ms",
        "model ms",
        "images/batch",
        "CPU us/image",
    ]
    ranked = sorted((record for record in records if _has(record, row)), key=speed, reverse=True)
    return f"### {network}, {images} a request, concurrency {row.concurrency}\n\n" + _table(
        headings, map(cells, ranked)
    )


def _cost_table(network: str, records: Sequence[Record]) -> str:
    def cells(record: Record) -> list[str]:
        config, results = record["config"], record["results"]
        cold, memory = results.get("cold_start_s"), results.get("peak_memory_bytes")
        return [
            config["title"],
            config["version"],
            config["protocol"],
            config["batches"],
            _text(cold, ".1f") if cold is not None else f"unmeasured: {_reason(record, None)}",
            _text(None if memory is None else memory / 2**20, ",.0f"),
            str(len(record["samples"].get("cold_start_s", []))),
            f"{record['measured_at'][:16]}Z",
        ]

    headings = ["server", "version", "spoken", "merges requests", "cold start s", "peak memory MiB", "n", "measured"]
    return f"### {network}, what they are and cost\n\n" + _table(headings, map(cells, records))


def _has(record: Record, row: Row) -> bool:
    return {"batch": row.batch, "concurrency": row.concurrency} in record["config"]["rows"]


def _reason(record: Record, row: Row | None) -> str:
    results = record["results"]
    reason = results.get("failures", {}).get(row.key) if row else None
    return str(reason or results.get("unmeasured", "no figure")).replace("|", "/").replace("\n", " ")


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else ""
