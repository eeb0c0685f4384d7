"""`terrace sources`: where the devices of a fleet take their pictures from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer
from rich.text import Text

from terrace.console import Column, Listing, age_text, health_text, percent, print_json, screen
from terrace.options import Json, OnlySite, connected
from tierkit.client import Client, SourceRights, SourcesReport
from tierkit.errors import InvalidInput
from tierkit.wire.sources import SourceFields, SourceState

__all__ = ["app"]

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="See, share, add, pause and remove sources of pictures."
)

NodeId = Annotated[str, typer.Argument(metavar="NODE", help="Id of the node.", show_default=False)]
SourceName = Annotated[str, typer.Argument(metavar="SOURCE", help="Name of the source.", show_default=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSource:
    """Arguments and options of a new source."""

    url: Annotated[str, typer.Argument(metavar="[URL]", help="URL, folder, file or device.", show_default=False)] = ""
    kind: Annotated[
        str | None,
        typer.Option(
            help="stream, camera, folder, snapshot, push, or a kind that a package adds. Default: from the URL.",
            show_default=False,
        ),
    ] = None
    rate: Annotated[
        float | None, typer.Option(min=0.0, help="Largest number of pictures per second.", show_default=False)
    ] = None
    changed: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Skip pictures that differ by less than this share from the last one taken.",
            show_default=False,
        ),
    ] = None
    keep: Annotated[
        Literal["none", "unsure", "all"] | None,
        typer.Option(help="Pictures to keep on the device.", show_default=False),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewUsers:
    """Options of `terrace sources share`."""

    owner: Annotated[
        str | None, typer.Option(metavar="NAME", help="Make this user the owner, who may also pause and share it.")
    ] = None
    reader: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Let this user see it; may be repeated.")] = (
        None
    )

    def __post_init__(self) -> None:
        if self.owner is None and not self.reader:
            raise typer.BadParameter("name a user", param_hint="--owner or --reader")


@app.command("list")
@connected
def list_sources(
    client: Client,
    node: Annotated[
        str | None,
        typer.Argument(metavar="[NODE]", help="Ask this node for the details of its sources.", show_default=False),
    ] = None,
    site: OnlySite = None,
    json: Json = False,
) -> None:
    """List the sources of all devices, the last picture of each, and the data that waits on its device."""
    if node is not None:
        if site is not None:
            raise typer.BadParameter("it goes without NODE", param_hint="--site")
        _show_node(node, client.node_sources(node), json=json)
        return
    sources = client.sources(site=site)
    if json:
        print_json({"sources": sources})
        return
    if not sources:
        screen().print("no sources; give a device one with [bold]terrace end --source NAME=URL[/bold]")
        return
    placed = any(source.site for source in sources)
    table = Listing(
        Column(title="node"),
        Column(title="source"),
        *([Column(title="site", rank=5)] if placed else []),
        Column(title="device", rank=5),
        Column(title="state", rank=1),
        Column(title="last answer", rank=2, max_width=24),
        Column(title="sure", rank=6, right=True),
        Column(title="heard", rank=3, right=True),
        Column(title="waiting", rank=7, right=True),
        Column(title="bytes left", rank=8, right=True),
        Column(title="owner", rank=9, max_width=24),
        Column(title="readers", rank=10, max_width=24),
        Column(title="reason", rank=4, max_width=48),
    )
    for source in sources:
        answer = source.last
        left = None if source.bytes_per_day is None else max(0, source.bytes_per_day - (source.spent_bytes or 0))
        waiting = (source.waiting_answers or 0) + (source.waiting_pictures or 0)
        table.add_row(
            source.node,
            source.source,
            *([source.site or ""] if placed else []),
            health_text(source.health) if source.health else "",
            source.state,
            (answer and answer.label) or "",
            percent(answer.confidence) if answer and answer.confidence is not None else "",
            age_text(source.heard_s),
            "-" if source.waiting_answers is None else f"{waiting:,}",
            "" if left is None else f"{left:,}",
            source.owner or "",
            ", ".join(source.readers),
            source.reason,
        )
    screen().print(table, crop=False)


def _show_node(node: str, report: SourcesReport, *, json: bool) -> None:
    if json:
        print_json({"node_id": node, **report.model_dump(mode="json")})
        return
    table = Listing(
        Column(title="source"),
        Column(title="kind", rank=6),
        Column(title="state", rank=1),
        Column(title="taken", rank=4, right=True),
        Column(title="skipped", rank=7, right=True),
        Column(title="restarts", rank=5, right=True),
        Column(title="url", rank=3, max_width=40),
        Column(title="reason", rank=2, max_width=48),
    )
    for source in report.sources:
        table.add_row(*_cells(source))
    screen().print(table, crop=False)
    screen().print(Text(_waiting(node, report)), soft_wrap=True)


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
    """Stop a source from taking pictures until it is resumed."""
    client.pause_source(node, source)
    _say(node, source, "paused", json=json)


@app.command()
@connected
def resume(client: Client, node: NodeId, source: SourceName, json: Json = False) -> None:
    """Let a paused source continue."""
    client.resume_source(node, source)
    _say(node, source, "resumed", json=json)


@app.command()
@connected
def share(
    client: Client,
    node: NodeId,
    source: SourceName,
    users: NewUsers,
    json: Json = False,
) -> None:
    """Let users see a source, by the names of their tokens. The source need not have sent anything yet."""
    now = _rights(client, node, source)
    readers = dict.fromkeys((*now.readers, *(users.reader or ())))
    rights = SourceRights(owner=users.owner or now.owner, readers=tuple(readers))
    _set_rights(client, node, source, rights, json=json)


@app.command()
@connected
def unshare(
    client: Client,
    node: NodeId,
    source: SourceName,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of tokens.", show_default=False)],
    json: Json = False,
) -> None:
    """Hide a source from users, even from its owner. Operators still see it."""
    now = _rights(client, node, source)
    if strangers := [name for name in names if name not in (now.owner, *now.readers)]:
        raise InvalidInput(f"{source} on {node} is not shared with {', '.join(strangers)}")
    owner = None if now.owner in names else now.owner
    readers = tuple(name for name in now.readers if name not in names)
    _set_rights(client, node, source, SourceRights(owner=owner, readers=readers), json=json)


def _rights(client: Client, node: str, source: str) -> SourceRights:
    for each in client.sources():
        if (each.node, each.source) == (node, source):
            return SourceRights(owner=each.owner, readers=each.readers)
    return SourceRights()


def _set_rights(client: Client, node: str, source: str, wanted: SourceRights, *, json: bool) -> None:
    rights = client.set_rights(node, source, owner=wanted.owner, readers=wanted.readers)
    if json:
        print_json({"node_id": node, "source": source, **rights.model_dump()})
        return
    owned = f"owner {rights.owner}" if rights.owner else "no owner"
    read = f"readers {', '.join(rights.readers)}" if rights.readers else "no readers"
    screen().print(f"{source} on {node}: {owned}, {read}", markup=False, soft_wrap=True)


def _say(node: str, source: str, state: str, *, json: bool) -> None:
    if json:
        print_json({"node_id": node, "source": source, "state": state})
    else:
        screen().print(f"{source} on {node}: {state}", markup=False)
