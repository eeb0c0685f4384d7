"""`terrace devices`: the device list of a scheduler."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from terrace.console import Column, Listing, health_text, node_order, print_json, screen, tier_text
from terrace.options import Json, connected
from tierkit.client import Client

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="See the nodes, drain them, take them off the list.")

NodeId = Annotated[str, typer.Argument(metavar="NODE", help="Id of the node.", show_default=False)]


@app.command("list")
@connected
def list_devices(client: Client, json: Json = False) -> None:
    """The nodes that the scheduler knows, and what it thinks of them."""
    devices = sorted(client.devices(), key=lambda device: node_order(device.tier, device.node_id))
    if json:
        print_json({"devices": devices})
        return
    if not devices:
        screen().print(
            f"no node has registered; start one with [bold]terrace end --scheduler {escape(client.url)}[/bold]",
            soft_wrap=True,  # a command to copy
        )
        return
    table = Listing(
        Column(title="node"),
        Column(title="tier", rank=4),
        Column(title="health", rank=1),
        Column(title="reason", rank=2, max_width=48),
        Column(title="trusted", rank=5),
        Column(title="queued", rank=6, right=True),
        Column(title="done", rank=7, right=True),
        Column(title="url", rank=3),
    )
    for device in devices:
        table.add_row(
            tier_text(device.node_id, device.tier),
            device.tier,
            health_text(device.health),
            device.reason,
            {True: "yes", False: "no", None: ""}[device.trusted],
            f"{device.queued_images:,}",
            f"{device.images_done:,}",
            device.url,
        )
    screen().print(table, crop=False)


@app.command()
@connected
def drain(client: Client, node: NodeId, json: Json = False) -> None:
    """Give a node no new tasks; what it has may finish."""
    client.drain(node)
    _say(node, "draining", f"{node} gets no new tasks", json=json)


@app.command()
@connected
def resume(client: Client, node: NodeId, json: Json = False) -> None:
    """Give a drained node tasks again."""
    client.resume(node)
    _say(node, "resumed", f"{node} gets tasks again", json=json)


@app.command()
@connected
def remove(client: Client, node: NodeId, json: Json = False) -> None:
    """Take a node off the list, its tasks go to others; it comes back when it registers again."""
    client.remove(node)
    _say(node, "removed", f"{node} is off the list", json=json)


def _say(node: str, state: str, sentence: str, *, json: bool) -> None:
    if json:
        print_json({"node_id": node, "state": state})
    else:
        screen().print(sentence, markup=False)
