"""`terrace devices`: the device list of a scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, Literal

import typer
from rich.markup import escape

from terrace.console import Column, Listing, health_text, node_order, print_json, screen, tier_text
from terrace.options import Json, OnlySite, connected
from tierkit.client import Client, Device
from tierkit.errors import NotFound
from tierkit.types import Health

__all__ = ["app", "device_table"]

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="See the nodes; drain, remove, trust and forget them."
)

NodeId = Annotated[str, typer.Argument(metavar="NODE", help="Id of the node.", show_default=False)]


@app.command("list")
@connected
def list_devices(client: Client, site: OnlySite = None, json: Json = False) -> None:
    """List the nodes that the scheduler knows, with their health."""
    devices = sorted(client.devices(site=site), key=_order)
    if json:
        print_json({"devices": devices})
        return
    if not devices:
        schedulers = escape(",".join(client.urls))
        screen().print(
            f"no node has registered; start one with [bold]terrace end --scheduler {schedulers}[/bold]",
            soft_wrap=True,  # a command to copy
        )
        return
    screen().print(device_table(devices), crop=False)


def _order(device: Device) -> tuple[int, list[tuple[str, int]]]:
    return node_order(device.tier, device.node_id)


def device_table(devices: Sequence[Device]) -> Listing:
    """Return one line per node, with its site if any node has one."""
    placed = any(device.site for device in devices)
    table = Listing(
        Column(title="node"),
        *([Column(title="site", rank=3)] if placed else []),
        Column(title="tier", rank=4),
        Column(title="health", rank=1),
        Column(title="reason", rank=2, max_width=48),
        Column(title="trusted", rank=5),
        Column(title="queued", rank=6, right=True),
        Column(title="done", rank=7, right=True),
        Column(title="url", rank=3),
    )
    for device in sorted(devices, key=_order):
        table.add_row(
            tier_text(device.node_id, device.tier),
            *([device.site or ""] if placed else []),
            device.tier,
            health_text(device.health),
            device.reason,
            {True: "yes", False: "no", None: ""}[device.trusted],
            f"{device.queued_images:,}",
            f"{device.images_done:,}",
            device.url,
        )
    return table


@app.command()
@connected
def drain(client: Client, node: NodeId, json: Json = False) -> None:
    """Send a node no new tasks until it is resumed; it finishes the tasks that it has."""
    client.drain(node)
    _say(node, "draining", f"{node} gets no new tasks", json=json)


@app.command()
@connected
def resume(client: Client, node: NodeId, json: Json = False) -> None:
    """Send a drained node tasks again, or let a removed node return."""
    client.resume(node)
    _say(node, "resumed", f"{node} gets tasks again as soon as it is there", json=json)


@app.command()
@connected
def remove(client: Client, node: NodeId, json: Json = False) -> None:
    """Give a node's tasks to other nodes, and keep the node out until it is resumed."""
    client.remove(node)
    _say(node, "removed", f"{node} is out; 'terrace devices resume {node}' lets it come back", json=json)


@app.command()
@connected
def forget(
    client: Client,
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="[NODE]...", help="Ids of the nodes.", show_default=False)
    ] = None,
    dead: Annotated[bool, typer.Option("--dead", help="All dead nodes.")] = False,
    json: Json = False,
) -> None:
    """Delete dead or removed nodes from the list, with all data about them."""
    chosen = list(nodes or ())
    if dead:
        chosen += [device.node_id for device in client.devices() if device.health is Health.DEAD]
    elif not chosen:
        raise typer.BadParameter("name nodes, or say --dead")
    for node in chosen:
        with contextlib.suppress(NotFound) if dead else contextlib.nullcontext():
            client.forget(node)
    if json:
        print_json({"node_ids": chosen, "state": "forgotten"})
    else:
        screen().print(f"forgotten: {', '.join(chosen) or 'none, for none is dead'}", markup=False)


@app.command()
@connected
def trust(
    client: Client,
    node: NodeId,
    trusted: Annotated[
        Literal["yes", "no", "default"],
        typer.Argument(metavar="yes|no|default", help="default: follow the scheduler's setting `trusted`."),
    ],
    json: Json = False,
) -> None:
    """Decide whether an edge or cloud node may see pixels, from the next task on."""
    known = {
        "yes": (True, "may see pixels"),
        "no": (False, "may not see pixels"),
        "default": (None, "is as the setting says"),
    }
    value, words = known[trusted]
    client.trust(node, value)
    _say(node, f"trusted: {trusted}", f"{node} {words}", json=json)


def _say(node: str, state: str, sentence: str, *, json: bool) -> None:
    if json:
        print_json({"node_id": node, "state": state})
    else:
        screen().print(sentence, markup=False)
