"""`terrace doctor` checks the installation and the fleet, and says how to repair them."""

from __future__ import annotations

from itertools import chain, groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from terrace import checks
from terrace.console import print_json, screen
from terrace.findings import Check, CheckVerdict
from terrace.options import DEFAULT_PORT, DEFAULT_URL, Credentials, Json, ModelSet, with_options

__all__ = ["app"]

app = typer.Typer(add_completion=False)

_MARKS = {CheckVerdict.OK: ("✓", "green"), CheckVerdict.NOTE: ("•", "yellow"), CheckVerdict.FAIL: ("✗", "bold red")}

_NAME_WIDTH = 18
"""Width of the longest usual name, so that the groups line up."""


@app.command()
@with_options
def doctor(
    *,
    scheduler: Annotated[
        str | None,
        typer.Option(
            envvar="TERRACE_SCHEDULER",
            metavar="URL",
            help=f"Scheduler to examine; of several, all URLs, comma-separated. Default: {DEFAULT_URL}, if it runs.",
        ),
    ] = None,
    models: ModelSet = None,
    data: Annotated[Path | None, typer.Option(envvar="TERRACE_DATA", help="Folder of the CIFAR-100 data set.")] = None,
    credentials: Credentials,
    json: Json = False,
) -> None:
    """Examine the installation, the models, the ports, the scheduler and each node; exit code 1 if anything failed."""
    with credentials.connect(scheduler or DEFAULT_URL) as client:
        fleet = list(
            checks.check_fleet(client, asked_for=scheduler is not None, models=models, tls_ca=credentials.tls_ca)
        )
    # Only a scheduler that answers is followed by findings on its nodes.
    answers = any(check.name != "scheduler" for check in fleet)
    running = answers and any(checks.listens_here(url, DEFAULT_PORT) for url in client.urls)
    found = [
        *chain(checks.check_installation(), checks.check_extensions()),
        *chain(checks.check_weights(models), checks.check_data(data)),
        *checks.check_port(DEFAULT_PORT, expect_scheduler=running),
        *fleet,
    ]
    failed = [check for check in found if check.verdict is CheckVerdict.FAIL]
    if json:
        print_json({"ok": not failed, "checks": found})
    else:
        _show(found, len(failed))
    if failed:
        raise typer.Exit(1)


def _show(found: list[Check], failed: int) -> None:
    console = screen()
    for group, members in groupby(found, key=lambda check: check.group):
        console.print(Text(group, style="bold"))
        table = Table.grid(padding=(0, 1))
        table.add_column()
        table.add_column(min_width=_NAME_WIDTH)
        table.add_column()
        for check in members:
            mark, style = _MARKS[check.verdict]
            detail = Text(check.detail)
            if check.advice:
                detail.append(f"\n→ {check.advice}", style=style)
            table.add_row(Text(mark, style=style), Text(check.name), detail)
        console.print(Padding(table, (0, 0, 1, 2), expand=False))
    if failed:
        console.print(f"[bold red]{failed} {'thing needs' if failed == 1 else 'things need'} attention[/bold red]")
    else:
        console.print("[green]all is well[/green]")
