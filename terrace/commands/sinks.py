"""`terrace sinks`: receivers of events outside of Terrace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from terrace.console import Column, Listing, print_json, screen
from terrace.options import Json, connected
from tierkit.client import Client, SinkFilter, SinkNow

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Send events to other systems; see the events that they did not take.",
)

SinkName = Annotated[str, typer.Argument(metavar="SINK", help="Name of the sink.", show_default=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkToAdd:
    """Arguments and options of a new sink."""

    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="webhook, or another kind that is installed.", show_default=False)
    ]
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPTION=VALUE]...",
            help="Options of the kind, such as url=https://example.org/hook.",
            show_default=False,
        ),
    ] = None
    event: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only events of these types, such as 'job.*'; may be repeated."),
    ] = None
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only events of these sources, as NAME or NODE/NAME; may be repeated."),
    ] = None
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS", help="Only answers of these classes or superclasses; may be repeated."),
    ] = None
    confidence: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Only answers that are at least this sure.")
    ] = None

    @property
    def fields(self) -> dict[str, str]:
        """The options of the kind. Raises typer.BadParameter."""
        found: dict[str, str] = {}
        for each in self.options or ():
            name, equals, value = each.partition("=")
            if not (name and equals):
                raise typer.BadParameter(f"{name!r} is not OPTION=VALUE", param_hint="OPTION=VALUE")
            if name in found:
                raise typer.BadParameter(f"{name} is given twice", param_hint="OPTION=VALUE")
            found[name] = value
        return found

    @property
    def filter(self) -> SinkFilter:
        """The conditions on events."""
        return SinkFilter(
            events=tuple(self.event or ()),
            sources=tuple(self.source or ()),
            labels=tuple(self.label or ()),
            confidence=self.confidence,
        )


@app.command("list")
@connected
def list_sinks(client: Client, json: Json = False) -> None:
    """List all sinks, with the events that they took and the events that wait."""
    known = client.sinks()
    if json:
        print_json(known)
        return
    if not known.sinks:
        example = "terrace sinks add NAME webhook url=https://HOST/PATH"
        screen().print(f"no sinks; add one with [bold]{example}[/bold]", soft_wrap=True)
        return
    table = Listing(
        Column(title="sink"),
        Column(title="kind", rank=5),
        Column(title="state", rank=1),
        Column(title="delivered", rank=6, right=True),
        Column(title="waiting", rank=3, right=True),
        Column(title="oldest s", rank=7, right=True),
        Column(title="dead", rank=2, right=True),
        Column(title="dropped", rank=8, right=True),
        Column(title="events", rank=9, max_width=30),
        Column(title="reason", rank=4, max_width=60),
    )
    for sink in known.sinks:
        table.add_row(
            sink.name,
            sink.kind,
            sink.state,
            f"{sink.delivered:,}",
            f"{sink.waiting:,}",
            f"{sink.lag_s:,.0f}" if sink.waiting else "",
            f"{sink.dead:,}" if sink.dead else "",
            f"{sink.dropped:,}" if sink.dropped else "",
            ", ".join(sink.filter.events) or "all",
            sink.reason,
        )
    screen().print(table, crop=False)


@app.command()
@connected
def add(client: Client, sink: SinkName, new: SinkToAdd, json: Json = False) -> None:
    """Deliver events to a receiver from now on. Secrets are files on the scheduler's machine."""
    added = client.add_sink(sink, new.kind, new.fields, filter=new.filter)
    _say(added, f"{sink} gets events from now on; 'terrace sinks test {sink}' sends it one", json=json)


@app.command()
@connected
def remove(client: Client, sink: SinkName, json: Json = False) -> None:
    """Delete a sink, the events that wait for it, and its dead letters."""
    client.remove_sink(sink)
    if json:
        print_json({"name": sink, "removed": True})
    else:
        screen().print(f"{sink} is removed", markup=False)


@app.command()
@connected
def pause(client: Client, sink: SinkName, json: Json = False) -> None:
    """Hold the events of a sink until it is resumed."""
    _say(client.pause_sink(sink), f"the events of {sink} wait; 'terrace sinks resume {sink}' sends them", json=json)


@app.command()
@connected
def resume(client: Client, sink: SinkName, json: Json = False) -> None:
    """Deliver the events of a sink again, over a new connection that reads the secret files again."""
    _say(client.resume_sink(sink), f"{sink} gets events again", json=json)


@app.command("test")
@connected
def send_test(client: Client, sink: SinkName, json: Json = False) -> None:
    """Send a test event, and wait until the receiver has it."""
    tested = client.test_sink(sink)
    if json:
        print_json(tested)
    else:
        screen().print(f"the receiver of {sink} took a test event in {tested.seconds:.3f} s", markup=False)


@app.command()
@connected
def dead(
    client: Client,
    sink: SinkName,
    after: Annotated[int, typer.Option(min=0, metavar="NUMBER", help="Only higher numbers.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Largest number of dead letters to show.")] = 100,
    json: Json = False,
) -> None:
    """Show the events that the receiver refused or did not take in time."""
    page = client.dead_letters(sink, after=after, limit=limit)
    if json:
        print_json(page)
        return
    if not page.letters:
        screen().print(f"{sink} has no dead letters", markup=False)
        return
    table = Listing(
        Column(title="number", right=True),
        Column(title="type", rank=1),
        Column(title="event of", rank=4),
        Column(title="tries", rank=5, right=True),
        Column(title="replaying", rank=3),
        Column(title="reason", rank=2, max_width=80),
    )
    for letter in page.letters:
        table.add_row(
            str(letter.number),
            letter.event.type,
            f"{letter.event.timestamp.astimezone():%Y-%m-%d %H:%M:%S}",
            str(letter.attempts),
            "yes" if letter.replaying else "",
            letter.reason,
        )
    screen().print(table, crop=False)
    if page.next is not None:
        screen().print(f"more with --after {page.next}", markup=False)


@app.command()
@connected
def replay(
    client: Client,
    sink: SinkName,
    number: Annotated[
        list[int] | None,
        typer.Argument(min=1, max=2**53, metavar="[NUMBER]...", help="Numbers of events. Default: all."),
    ] = None,
    json: Json = False,
) -> None:
    """Deliver dead letters again; those that fail again stay dead letters."""
    count = client.replay(sink, number or None)
    if json:
        print_json({"count": count})
    else:
        screen().print(f"{count:,} dead letters are delivered again", markup=False)


def _say(sink: SinkNow, sentence: str, *, json: bool) -> None:
    if json:
        print_json(sink)
    else:
        screen().print(sentence, soft_wrap=True, markup=False)
