"""`terrace sites`: the places of a fleet."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from terrace.commands.devices import device_table
from terrace.console import Column, Listing, print_json, screen, site_health_text, tier_text
from terrace.options import Json, connected
from tierkit.client import Client, SiteNow
from tierkit.types import Tier

__all__ = ["app"]

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="See the sites; drain, resume and remove all nodes of one."
)

SiteName = Annotated[str, typer.Argument(metavar="SITE", help="Name of the site.", show_default=False)]


@app.command("list")
@connected
def list_sites(client: Client, json: Json = False) -> None:
    """The sites of the fleet: their health, their nodes, and where their pictures may go."""
    sites = client.sites()
    if json:
        print_json({"sites": sites})
        return
    if not sites:
        screen().print("no node names a site; give one with [bold]--site NAME[/bold]", soft_wrap=True)
        return
    screen().print(_site_table(sites), crop=False)


@app.command()
@connected
def show(client: Client, site: SiteName, json: Json = False) -> None:
    """Show one site, its figures in the mapping, and its nodes."""
    now, devices = client.site(site), client.devices(site=site)
    if json:
        print_json({"site": now, "devices": devices})
        return
    console = screen()
    line = Text.assemble((now.site, "bold"), "  ", site_health_text(now.health))
    console.print(line.append(f": {now.reason}" if now.reason else ""), soft_wrap=True)
    n_map = "-" if now.n_map is None else f"{now.n_map}"
    theta, actual = ("-" if share is None else f"{share:.2f}" for share in (now.theta_cloud, now.cloud_share))
    console.print(
        f"share {now.share}   end devices per edge node {n_map}   share of the cloud {theta} (actual {actual})   "
        f"cloud nodes for it {now.cloud_nodes:.2f}   images a second {now.images_per_s:,.1f}",
        soft_wrap=True,
    )
    console.print(device_table(devices), crop=False)


@app.command()
@connected
def drain(client: Client, site: SiteName, json: Json = False) -> None:
    """Send the nodes of a site no new tasks until it is resumed; they finish the tasks that they have."""
    _say(site, "draining", client.drain_site(site), "get no new tasks", json=json)


@app.command()
@connected
def resume(client: Client, site: SiteName, json: Json = False) -> None:
    """Send the nodes of a drained site tasks again, or let removed nodes return."""
    _say(site, "resumed", client.resume_site(site), "get tasks again as soon as they are there", json=json)


@app.command()
@connected
def remove(
    client: Client,
    site: SiteName,
    forget: Annotated[
        bool, typer.Option("--forget", help="Delete the dead or removed nodes from the list instead.")
    ] = False,
    json: Json = False,
) -> None:
    """Give the tasks of a site's nodes to other nodes, and keep these nodes out until the site is resumed."""
    nodes = client.remove_site(site, forget=forget)
    if forget:
        _say(site, "forgotten", nodes, "are off the list", json=json)
    else:
        _say(site, "removed", nodes, f"are out; 'terrace sites resume {site}' lets them come back", json=json)


def _site_table(sites: tuple[SiteNow, ...]) -> Listing:
    table = Listing(
        Column(title="site"),
        Column(title="health", rank=1),
        *(Column(title=tier, rank=4, right=True) for tier in Tier),
        Column(title="images/s", rank=5, right=True),
        Column(title="share", rank=3),
        Column(title="reason", rank=2, max_width=90),
    )
    for site in sites:
        table.add_row(
            site.site,
            site_health_text(site.health),
            *(tier_text(_alive(site, tier), tier) for tier in Tier),
            f"{site.images_per_s:,.1f}",
            site.share,
            site.reason,
        )
    return table


def _alive(site: SiteNow, tier: Tier) -> str:
    """Return the alive nodes of a tier, and their number."""
    return f"{site.alive.get(tier, 0)}/{count}" if (count := site.nodes.get(tier, 0)) else ""


def _say(site: str, state: str, nodes: tuple[str, ...], sentence: str, *, json: bool) -> None:
    if json:
        print_json({"site": site, "state": state, "nodes": nodes})
    elif nodes:
        screen().print(f"{', '.join(nodes)} {sentence}", soft_wrap=True, markup=False)
    else:
        screen().print(f"nothing changed: no node of {site} is in a state for it", soft_wrap=True, markup=False)
