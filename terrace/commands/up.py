"""`terrace up`: a fleet on this machine, or this machine's part of a larger one."""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from encryption.loading import encoders_of
from models.manifest import load_manifest
from models.source import chosen_entries
from terrace.console import screen, tier_text
from terrace.loglines import LogPainter
from terrace.options import (
    DEFAULT_PORT,
    Credentials,
    ModelSet,
    Untrusted,
    on_command_line,
    token_from,
    with_options,
)
from terrace.report import tier_networks
from terrace.stoppable import run_stoppable
from tierkit.errors import (
    CertificateError,
    DeadlineExceeded,
    Forbidden,
    ServiceFailed,
    SetupError,
    TerraceError,
    Unauthenticated,
)
from tierkit.fleet import (
    MAX_NODES,
    SCHEDULER,
    Exit,
    Fleet,
    FleetPlan,
    LaunchOptions,
    RunningService,
    chosen,
    kill_service,
    launch,
    launched_services,
    local_plan,
    read_fleet_file,
)
from tierkit.plaintext import harmless
from tierkit.types import Tier

__all__ = ["app", "trusted_tiers", "with_models", "without_pixels"]

app = typer.Typer(add_completion=False)

_JOIN_BUDGET_S = 10.0

_NOT_WITH_A_FILE = ("end", "edge", "cloud", "port", "untrusted", "n_map", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Options of `terrace up` that choose the services."""

    end: Annotated[int, typer.Option(min=0, max=MAX_NODES, help="Number of end nodes.")] = 2
    edge: Annotated[int, typer.Option(min=0, max=MAX_NODES, help="Number of edge nodes.")] = 1
    cloud: Annotated[int, typer.Option(min=0, max=MAX_NODES, help="Number of cloud nodes.")] = 1
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the scheduler; 0: any free one.")] = DEFAULT_PORT
    untrusted: Untrusted = None
    n_map: Annotated[
        int | None, typer.Option("--n-map", min=1, help="End nodes per edge node in the scheme mapping.")
    ] = None
    models: ModelSet = None
    state: Annotated[Path | None, typer.Option(help="Folder that keeps the scheduler's database.", file_okay=False)] = (
        None
    )
    fleet: Annotated[
        Path | None,
        typer.Option(help="Start the services of this fleet file (TOML) instead.", dir_okay=False, exists=True),
    ] = None
    host: Annotated[str | None, typer.Option(help="Name of this machine in the fleet file.")] = None

    def plan(self) -> FleetPlan:
        """Return the fleet to start, with the chosen model set."""
        if self.fleet is not None:
            plan = read_fleet_file(self.fleet, self.host)
        elif self.host is not None:
            raise typer.BadParameter("goes with --fleet", param_hint="--host")
        else:
            untrusted = self.untrusted or []
            plan = local_plan(
                {Tier.END: self.end, Tier.EDGE: self.edge, Tier.CLOUD: self.cloud},
                scheduler={
                    "port": self.port,
                    "trusted": trusted_tiers(untrusted),
                    "n_map": self.n_map,
                    "state": self.state,
                },
                tiers=without_pixels(untrusted),
            )
        return with_models(plan, self.models, follow=True)


@app.callback(invoke_without_command=True)
@with_options
def up(
    context: typer.Context,
    options: FleetOptions,
    credentials: Credentials,
    log_format: Annotated[Literal["text", "json"], typer.Option(help="Logs for people or for programs.")] = "text",
) -> None:
    """Run a fleet on this machine until Ctrl-C; each service is a separate process."""
    if context.invoked_subcommand is not None:
        return
    if options.fleet is not None:
        _check_alone(context)
    plan = options.plan()
    networks = None  # of a fleet file, whose text names what the nodes serve
    if options.fleet is None:
        tiers = dict.fromkeys(node.kind for node in plan.nodes)
        networks = tier_networks(load_manifest(options.models), tiers, options.untrusted or [])
    elif credentials.tls_ca is None:
        credentials = replace(credentials, tls_ca=_trusted_there(plan))
    # Services get the set by their settings; nodes that found it in the environment would not follow releases.
    os.environ.pop("TERRACE_MODELS", None)
    # The services always write JSON: it is what can be painted, and what a program wants.
    plan = plan.with_defaults({"log_format": "json"})
    try:
        finished = run_stoppable(lambda: _run(plan, networks, credentials, raw=log_format == "json"))
    except ServiceFailed as exc:
        source = "" if options.fleet is None else f"the fleet file {options.fleet}: "
        typer.echo(harmless(f"terrace up: {source}{exc}"), err=True)
        raise typer.Exit(max(1, exc.code)) from exc
    if finished is not None:
        raise typer.Exit(finished)


@app.command()
def kill(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name of a node such as end-1, scheduler, or a process id.", show_default=False
        ),
    ],
) -> None:
    """Kill a service of `terrace up` without a clean shutdown, as in a power failure."""
    service = chosen(list(launched_services()), name)
    kill_service(service)
    told = f"{service.name} is killed (pid {service.pid}); the other services go on"
    screen().print(told, soft_wrap=True, markup=False)


def _check_alone(context: typer.Context) -> None:
    """Refuse options that a fleet file replaces."""
    for name in _NOT_WITH_A_FILE:
        if on_command_line(context, name):
            raise typer.BadParameter(
                "does not go with --fleet: the file lists the services to start",
                param_hint=f"--{name.replace('_', '-')}",
            )


def _trusted_there(plan: FleetPlan) -> Path | None:
    """Return the certificates that the services of a fleet file trust; this command uses them as well."""
    if plan.scheduler_url is None or "https://" not in plan.scheduler_url:
        return None
    named = (service.settings.get("tls_ca") for service in plan.services)
    return next((Path(file).expanduser() for file in named if file), None)


def trusted_tiers(untrusted: Sequence[str]) -> list[str]:
    """Return the trusted tiers of a fleet on one machine: all but the named ones, as it belongs to one user."""
    return [tier for tier in Tier if tier not in untrusted]


def without_pixels(untrusted: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return settings of the tiers that only get features and therefore need no whole network."""
    return {tier: {"only_features": True} for tier in untrusted}


def with_models(plan: FleetPlan, models: Path | None, *, follow: bool = False) -> FleetPlan:
    """Return the plan with this model set for the services that name none, after checking that it serves each node.

    Args:
        follow: give it only to the scheduler of the plan. Nodes get their networks from there, and follow its releases.

    Raises:
        SetupError: the set cannot be read, or lacks something; the message names the command that makes it.
    """
    if models is None:
        return plan
    manifest = load_manifest(models)
    given = plan.with_defaults({"models": models})
    for node in given.nodes:
        if node.settings["models"] != str(models):
            continue  # the fleet file names another one
        names = tuple(name.strip() for name in node.settings.get("model", "").split(",") if name.strip())
        try:
            networks = chosen_entries(manifest, names, Tier(node.kind), gpu=node.settings.get("provider") == "cuda")
            encoders_of(networks, manifest, required=node.settings.get("only_features") == str(True))
        except SetupError as exc:
            fewer = f"; or start no {node.kind} node (--{node.kind} 0)"
            raise SetupError(f"{models} does not do for {node.name}: {exc}{fewer}") from exc
    if not follow or plan.scheduler is None:
        return given
    services = (new if new.kind == SCHEDULER else old for old, new in zip(plan.services, given.services, strict=True))
    return replace(plan, services=tuple(services))


async def _run(plan: FleetPlan, networks: RenderableType | None, credentials: Credentials, *, raw: bool) -> int:
    """Run the fleet until every service has ended; return exit code 1, since that is a failure."""
    console, notes = screen(), screen(stderr=True)
    # What the user said to get in here, so that the command of the greeting works as it stands.
    given = {"--token-file": credentials.token_file, "--tls-ca": credentials.tls_ca}
    access = "".join(f" {flag} {shlex.quote(str(file))}" for flag, file in given.items() if file)

    kinds = {service.name: service.kind for service in plan.services}
    painter = LogPainter(kinds)
    starting = True

    task = asyncio.current_task()
    assert task is not None

    def show_line(name: str, line: str) -> None:
        if starting and line.startswith(f"terrace {kinds[name]}: "):
            # Why a service cannot start: said once, by the error that ends the launch.
            return
        try:
            if raw:
                console.out(line, highlight=False)
            else:
                console.print(painter.paint(name, line), soft_wrap=True)
        except SystemExit:
            # Rich's way to say that our output has no reader any more (`terrace up | head`): the same as Ctrl-C.
            task.cancel()

    def show_exit(end: Exit) -> None:
        notes.print(Text(f"{end}; the other services go on", style="bold red"), soft_wrap=True)

    def show_ready(service: RunningService) -> None:
        if service.plan.kind == SCHEDULER:
            notes.print(
                Text(f"the scheduler is at {plan.scheduler_url or service.url}; nodes are joining"), soft_wrap=True
            )
            if networks is not None:
                notes.print(networks)

    if plan.scheduler is None:
        notes.print(f"nodes register with the scheduler at {plan.scheduler_url}", soft_wrap=True, markup=False)
    with tempfile.TemporaryDirectory(prefix="terrace-") as folder:
        async with (
            launch(
                plan,
                Path(folder),
                LaunchOptions(
                    on_line=show_line,
                    on_exit=show_exit,
                    on_ready=show_ready,
                    token=token_from(credentials.token_file),
                    tls_ca=credentials.tls_ca,
                ),
            ) as fleet,
            asyncio.TaskGroup() as tasks,
        ):
            starting = False
            welcome = tasks.create_task(
                _welcome(fleet, notes, access, own_token=credentials.token_file is not None), name="welcome"
            )
            while fleet.alive:
                fleet.changed.clear()
                await fleet.changed.wait()
            welcome.cancel()
    notes.print("[bold red]no service is left[/bold red]")
    return 1


async def _welcome(fleet: Fleet, notes: Console, access: str, *, own_token: bool) -> None:
    """Print the greeting when all nodes have joined, so that its reader can use the fleet at once.

    If the device list cannot be read, the greeting only says that the nodes have been started.
    """
    told, joined = "", False
    while True:
        try:
            await fleet.join(budget_s=_JOIN_BUDGET_S)
        except DeadlineExceeded:
            continue  # the nodes themselves say what they wait for
        except ServiceFailed:
            break  # a node that has ended has been told of; the others have their chance
        except (Unauthenticated, Forbidden) as exc:
            said = f" ({exc})" if own_token else ""
            if not own_token:
                access += " --token-file FILE"
            notes.print(
                "not waited for the nodes: only the token of a user opens the device list (--token-file FILE, or "
                f"TERRACE_TOKEN){said}. Each node says in its log whether the scheduler has let it in",
                soft_wrap=True,
                markup=False,
            )
            break
        except CertificateError as exc:
            notes.print(f"not waited for the nodes: {exc}", soft_wrap=True, markup=False)
            break
        except TerraceError as exc:
            if told != str(exc):
                told = str(exc)
                notes.print(Text(f"nodes cannot be seen in the device list: {exc}", style="yellow"), soft_wrap=True)
            await asyncio.sleep(_JOIN_BUDGET_S)
        else:
            joined = True
            break
    notes.print(_greeting(fleet, access, joined=joined), soft_wrap=True)


def _greeting(fleet: Fleet, access: str, *, joined: bool) -> Text:
    # The sample is of the classes of Terrace's own networks.
    what = "PICTURES" if any("models" in service.plan.settings for service in fleet.alive) else "sample"
    names = Text(", ").join(tier_text(service.name, service.plan.kind) for service in fleet.alive)
    url, *others = fleet.scheduler_url.split(",")
    if others:
        where = (
            f"\nschedulers {fleet.scheduler_url}\n           the one that leads has the API at /docs, the page at /ui"
        )
    else:
        where = f"\nscheduler  {url}   API {url}/docs\npage       {url}/ui"
    return Text.assemble(
        ("\nTerrace is up: " if joined else "\nTerrace has been started: ", "bold"),
        names,
        where,
        f"\nprocesses  {', '.join(f'{service.name} {service.process.pid}' for service in fleet.alive)}",
        f"\ntry        terrace classify {what} --scheduler {fleet.scheduler_url}{access}",
        "\nstop       Ctrl-C\n",
    )
