"""`terrace top`: the nodes and jobs of a fleet as they are now, in the terminal."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from terrace.console import Column, Listing, health_text, image_count, node_order, print_json, screen, tier_text
from terrace.options import Json, OnlySite, connected
from tierkit.client import Client
from tierkit.errors import Unavailable, UpstreamTimeout
from tierkit.types import Health, SiteHealth, Tier

__all__ = ["app", "picture"]

_EVERY_S = 1.0
_MOST_JOBS = 8
_HEAD_LINES = 6
"""Lines other than nodes, jobs and sites: an empty one and two with counts."""
_TABLE_LINES = 3
_MOST_SITES = 3
"""Names of sites of one health."""
_FEWEST_NODES = 3
_REASON_WIDTH = 44


@connected
def app(client: Client, site: OnlySite = None, json: Json = False) -> None:
    """Show the nodes and jobs of a fleet as they change, until Ctrl-C. On a screen that cannot be redrawn, show them
    once."""
    fleet = client.fleet(site=site)
    console = screen()
    if json:
        print_json(fleet)
        return
    if not console.is_terminal or console.is_dumb_terminal:
        console.print(picture(fleet, client.url, height=None), crop=False)
        return
    pause = threading.Event()  # never set: Ctrl-C ends the wait
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        away = ""
        while True:
            live.update(picture(fleet, client.url, height=console.height, away=away), refresh=True)
            pause.wait(_EVERY_S)
            try:
                fleet, away = client.fleet(site=site), ""
            except (Unavailable, UpstreamTimeout) as exc:
                away = str(exc)


def picture(fleet: Mapping[str, Any], url: str, *, height: int | None, away: str = "") -> RenderableType:
    """Return a picture of a snapshot of the fleet.

    Args:
        fleet: answer of `GET /v1/fleet`.
        height: lines of the terminal; None for any number. If there are too few, unhealthy and busy nodes stay.
        away: why the snapshot is not the newest; "" if it is.
    """
    jobs = fleet["jobs"] if height is None else fleet["jobs"][:_MOST_JOBS]
    nodes = sorted(fleet["nodes"], key=_place)
    if height is not None:
        taken = _HEAD_LINES + bool(fleet.get("sites")) + _TABLE_LINES + (len(jobs) + _TABLE_LINES if jobs else 0)
        nodes = _most_telling(nodes, max(_FEWEST_NODES, height - taken))
    parts: list[RenderableType] = [_head(fleet, url, away), Text(), _nodes(nodes)]
    if len(nodes) < fleet["known"]:
        parts.append(Text(f"{len(nodes):,} of {fleet['known']:,} nodes", style="dim"))
    if jobs:
        parts += [Text(), _jobs(jobs)]
    if len(jobs) < fleet["unfinished"]:
        parts.append(Text(f"{len(jobs):,} of {fleet['unfinished']:,} unfinished jobs", style="dim"))
    return Group(*parts)


def _place(node: Mapping[str, Any]) -> tuple[Any, ...]:
    """Sorts nodes by their site; nodes without a site come last."""
    site = node.get("site")
    return site is None, node_order(Tier.END, site or ""), node_order(Tier(node["tier"]), node["node_id"])


def _most_telling(nodes: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """Choose this many nodes, in their order: first those that are not well, then the busiest."""

    def dull(number: int) -> tuple[bool, float, int]:
        node = nodes[number]
        return node["health"] == Health.ALIVE, -node["images_per_s"], number

    return [nodes[number] for number in sorted(sorted(range(len(nodes)), key=dull)[:most])]


def _head(fleet: Mapping[str, Any], url: str, away: str) -> Text:
    figures = {name: value or 0.0 for name, value in fleet["figures"].items()}
    nodes = {health: sum(node["health"] == health for node in fleet["nodes"]) for health in Health}
    told = ", ".join(f"{count:,} {health}" for health, count in nodes.items() if count) or "none has registered"
    lines = [
        Text.assemble(("terrace ", "bold"), f"{url}, scheme {fleet['scheme']}"),
        Text(f"nodes: {told}"),
        *([_sites(fleet["sites"])] if fleet.get("sites") else []),
        Text(
            f"images a second: {figures.get('first', 0):,.0f} answered first, {figures.get('finer', 0):,.0f} finer, "
            f"{figures.get('fallback', 0):,.0f} fallbacks; unfinished jobs: {fleet['unfinished']:,}"
        ),
    ]
    if away:
        lines.append(Text(f"not the newest: {away}", style="red"))
    elif fleet["doubting"]:
        lines.append(Text("no node is heard: the scheduler looks for the fault in itself first", style="yellow"))
    return Text("\n").join(lines)


def _sites(sites: Sequence[Mapping[str, Any]]) -> Text:
    """Sites by their health; names those that are not well."""
    parts = []
    for health in SiteHealth:
        names = [site["site"] for site in sites if site["health"] == health]
        more = f" and {len(names) - _MOST_SITES} more" if len(names) > _MOST_SITES else ""
        named = "" if health is SiteHealth.OK else f" ({', '.join(names[:_MOST_SITES])}{more})"
        if names:
            parts.append(f"{len(names):,} {health}{named}")
    return Text(f"sites: {', '.join(parts)}")


def _nodes(nodes: Sequence[Mapping[str, Any]]) -> Listing:
    placed = any(node.get("site") for node in nodes)
    table = Listing(
        *([Column(title="site", rank=2)] if placed else []),
        Column(title="node"),
        Column(title="health"),
        Column(title="tasks", rank=2, right=True),
        Column(title="queued", rank=4, right=True),
        Column(title="images/s", rank=1, right=True),
        Column(title="ms/image", rank=3, right=True),
        Column(title="trusted", rank=6),
        Column(title="reason", rank=1, max_width=_REASON_WIDTH),
    )
    for node in nodes:
        lately = node["ms_per_image"] if node["ms_per_image"] is not None else node["own_ms_per_image"]
        table.add_row(
            *([node.get("site") or ""] if placed else []),
            tier_text(node["node_id"], node["tier"]),
            health_text(Health(node["health"])),
            f"{node['outstanding']:,}",
            f"{node['queued_images']:,}",
            f"{node['images_per_s']:,.1f}",
            f"{lately:,.2f}",
            "yes" if node["trusted"] else "no",
            "" if node["health"] == Health.ALIVE else node["reason"],
        )
    return table


def _jobs(jobs: Sequence[Mapping[str, Any]]) -> Listing:
    owned, explained = any(job["owner"] for job in jobs), any(job["reason"] for job in jobs)
    table = Listing(
        Column(title="job"),
        Column(title="name", rank=3, max_width=24),
        *([Column(title="owner", rank=4, max_width=16)] if owned else []),
        Column(title="state", rank=1),
        Column(title="coarse", right=True),
        Column(title="fine", rank=2, right=True),
        Column(title="of", rank=1),
        *([Column(title="reason", rank=1, max_width=_REASON_WIDTH)] if explained else []),
    )
    for job in jobs:
        table.add_row(
            job["id"],
            job["name"] or "",
            *([job["owner"] or ""] if owned else []),
            job["state"],
            f"{job['answered_coarse']:,}",
            f"{job['answered_fine']:,}",
            image_count(job["images"]),
            *([job["reason"]] if explained else []),
        )
    return table
