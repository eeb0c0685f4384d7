"""`terrace sources`: where the devices of a fleet take their pictures from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer
from rich.text import Text

from terrace.console import Column, Listing, node_order, print_json, screen
from terrace.options import Json, connected
from tierkit.client import Client, SourcesReport
from tierkit.errors import TerraceError
from tierkit.types import Health
from tierkit.wire.sources import SourceFields, SourceState

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="See, add, pause and remove sources of pictures.")

NodeId = Annotated[str, typer.Argument(metavar="NODE", help="Id of the node.", show_default=False)]
SourceName = Annotated[str, typer.Argument(metavar="SOURCE", help="Name of the source.", show_default=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSource:
    """Arguments and options of a new source."""

    url: Annotated[str, typer.Argument(metavar="[URL]", help="URL, folder, file or device.", show_default=False)] = ""
    kind: Annotated[
        Literal["stream", "camera", "folder", "snapshot", "push"] | None,
        typer.Option(help="Kind of source. Default: by its URL.", show_default=False),
    ] = None
    rate: Annotated[float | None, typer.Option(min=0.0, help="Most pictures per second.", show_default=False)] = None
    changed: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Skip pictures that differ by less than this share.", show_default=False),
    ] = None
    keep: Annotated[
        Literal["none", "unsure", "all"] | None,
        typer.Option(help="Pictures to keep on the device.", show_default=False),
    ] = None


@app.command("list")
@connected
def list_sources(
    client: Client,
    node: Annotated[
        str | None, typer.Argument(metavar="[NODE]", help="Id of a node. Default: all.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """The sources of a device, or of all devices, and what becomes of their pictures."""
    reports, troubles = _reports(client, node)
    if json:
        found = [{"node_id": node_id, **report.model_dump(mode="json")} for node_id, report in reports.items()]
        print_json({"devices": [*found, *({"node_id": name, "error": why} for name, why in troubles.items())]})
        return
    if not reports and not troubles:
        screen().print("no device has sources; give one with [bold]terrace end --source NAME=URL[/bold]")
        return
    table = Listing(
        Column(title="node"),
        Column(title="source"),
        Column(title="kind", rank=6),
        Column(title="state", rank=1),
        Column(title="taken", rank=4, right=True),
        Column(title="skipped", rank=7, right=True),
        Column(title="restarts", rank=5, right=True),
        Column(title="url", rank=3, max_width=40),
        Column(title="reason", rank=2, max_width=48),
    )
    for node_id, report in reports.items():
        for source in report.sources:
            table.add_row(node_id, *_cells(source))
    screen().print(table, crop=False)
    for node_id, report in reports.items():
        screen().print(Text(_waiting(node_id, report)), soft_wrap=True)
    for node_id, why in troubles.items():
        screen().print(Text(f"{node_id}: {why}", style="red"), soft_wrap=True)


def _reports(client: Client, node: str | None) -> tuple[dict[str, SourcesReport], dict[str, str]]:
    """Reports by node, and why others give none."""
    if node is not None:
        return {node: client.sources(node)}, {}
    reports: dict[str, SourcesReport] = {}
    troubles: dict[str, str] = {}
    for device in sorted(client.devices(), key=lambda device: node_order(device.tier, device.node_id)):
        if not device.sources:
            continue
        if device.health in (Health.DEAD, Health.REMOVED):
            troubles[device.node_id] = f"{device.health}: {device.reason}"
            continue
        try:
            reports[device.node_id] = client.sources(device.node_id)
        except TerraceError as exc:
            troubles[device.node_id] = str(exc)
    return reports, troubles


def _cells(source: SourceState) -> list[str]:
    counts = (f"{count:,}" for count in (source.taken, source.skipped, source.restarts))
    return [source.name, source.kind, source.state, *counts, source.url, source.reason]


def _waiting(node_id: str, report: SourcesReport) -> str:
    parts = []
    if (spool := report.spool) is not None:
        parts.append(f"{spool.waiting_answers:,} answers and {spool.waiting_pictures:,} pictures wait")
        if spool.dropped_pictures or spool.lost_answers:
            parts.append(f"{spool.dropped_pictures:,} pictures dropped, {spool.lost_answers:,} answers lost")
    if (uplink := report.uplink) is not None:
        limit = f" of {uplink.bytes_per_day:,}" if uplink.bytes_per_day is not None else ""
        state = "online" if uplink.online else f"offline ({uplink.reason})" if uplink.reason else "offline"
        parts.append(f"{state}, {uplink.spent_bytes:,}{limit} bytes in 24 hours")
    return f"{node_id}: {'; '.join(parts) or 'nothing waits'}"


@app.command()
@connected
def add(
    client: Client,
    node: NodeId,
    source: SourceName,
    fields: NewSource,
    json: Json = False,
) -> None:
    """Add a source to a device whose settings allow it (remote_sources)."""
    given = SourceFields()
    if fields.kind is not None:
        given["kind"] = fields.kind
    if fields.rate is not None:
        given["rate"] = fields.rate
    if fields.changed is not None:
        given["changed"] = fields.changed
    if fields.keep is not None:
        given["keep"] = fields.keep
    client.add_source(node, source, fields.url, **given)
    _say(node, source, "added", json=json)


@app.command()
@connected
def remove(client: Client, node: NodeId, source: SourceName, json: Json = False) -> None:
    """Remove a source from a device; its observations stay."""
    client.remove_source(node, source)
    _say(node, source, "removed", json=json)


@app.command()
@connected
def pause(client: Client, node: NodeId, source: SourceName, json: Json = False) -> None:
    """Let a source take no pictures until it is resumed."""
    client.pause_source(node, source)
    _say(node, source, "paused", json=json)


@app.command()
@connected
def resume(client: Client, node: NodeId, source: SourceName, json: Json = False) -> None:
    """Let a paused source continue."""
    client.resume_source(node, source)
    _say(node, source, "resumed", json=json)


def _say(node: str, source: str, state: str, *, json: bool) -> None:
    if json:
        print_json({"node_id": node, "source": source, "state": state})
    else:
        screen().print(f"{source} on {node}: {state}", markup=False)
